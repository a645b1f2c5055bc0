"""VMamba: a hierarchical vision backbone with selective scans along rows and columns.

Liu et al., "VMamba: Visual State Space Model", NeurIPS 2024, arXiv 2401.10166, and its published code (MIT). There are
two networks: VMamba, and `vanilla`, the first version, whose blocks have no feed-forward layer.
"""
from collections import OrderedDict
from functools import partial
from typing import Annotated, Any, Dict, Sequence, Set

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm2d, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from .blocks import ProjectionHead, check_image
from .hierarchical import STRIDES, HierarchicalBackbone, Stage
from .mixers.ss2d import SS2D
from .options import Flag, ImageSize, InChans, NumClasses, Rate, checked, each_stage, integer, number, one_of
from .timm_interface import TimmInterface, build_model, image_cfg, init_linear, published_cfgs
from .weights import vmamba_keys

__all__ = ['VMamba']

_SMALL, _LARGE = (96, 192, 384, 768), (128, 256, 512, 1024)
# The published networks: s is ssm_ratio, l the number of blocks of the third stage.
ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny_s1l8': dict(dims=_SMALL, depths=(2, 2, 8, 2), ssm_ratio=1, drop_path_rate=0.2),
    'tiny_s2l5': dict(dims=_SMALL, depths=(2, 2, 5, 2), ssm_ratio=2, drop_path_rate=0.2),
    'small_s2l15': dict(dims=_SMALL, depths=(2, 2, 15, 2), ssm_ratio=2, drop_path_rate=0.3),
    'small_s1l20': dict(dims=_SMALL, depths=(2, 2, 20, 2), ssm_ratio=1, drop_path_rate=0.3),
    'base_s2l15': dict(dims=_LARGE, depths=(2, 2, 15, 2), ssm_ratio=2, drop_path_rate=0.6),
    'base_s1l20': dict(dims=_LARGE, depths=(2, 2, 20, 2), ssm_ratio=1, drop_path_rate=0.5),
    'vanilla_tiny': dict(dims=_SMALL, depths=(2, 2, 9, 2), ssm_ratio=2, vanilla=True, drop_path_rate=0.2),
    'vanilla_small': dict(dims=_SMALL, depths=(2, 2, 27, 2), ssm_ratio=2, vanilla=True, drop_path_rate=0.3),
    'vanilla_base': dict(dims=_LARGE, depths=(2, 2, 27, 2), ssm_ratio=2, vanilla=True, drop_path_rate=0.6),
    'test': dict(dims=(16, 32, 64, 128), depths=(1, 1, 2, 1), ssm_ratio=1),
}
_norm = partial(LayerNorm2d, eps=1e-5)


class Stem(nn.Module):
    """Convolutions down to stride 4, each with a norm: (B, in_chans, H, W) -> (B, dim, ceil(H/4), ceil(W/4)).

    That of `vanilla` is one convolution, which leaves out the last rows and columns of sides that 4 does not divide.
    """

    def __init__(self, in_chans: int, dim: int, vanilla: bool, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        width = dim if vanilla else dim // 2
        self.conv1 = nn.Conv2d(in_chans, width, *((4, 4) if vanilla else (3, 2, 1)), **dd)
        self.norm1 = _norm(width, **dd)
        self.conv2 = None if vanilla else nn.Conv2d(width, dim, 3, 2, 1, **dd)
        self.norm2 = None if vanilla else _norm(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        # All layers after this one work on channels-last memory, where tokens (B, H, W, C) are a view of images.
        x = check_image(x, self.conv1.in_channels).contiguous(memory_format=torch.channels_last)
        x = self.norm1(self.conv1(x))
        return x if self.conv2 is None else self.norm2(self.conv2(F.gelu(x)))


class PatchMerging(nn.Module):
    """Downsampling of `vanilla`: the channels of 2 x 2 tokens, norm and linear layer; odd sides get a line of zeros.

    (B, C, H, W) -> (B, dim, ceil(H/2), ceil(W/2)).
    """

    def __init__(self, in_chs: int, dim: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm = nn.LayerNorm(4 * in_chs, **dd)
        self.reduction = nn.Linear(4 * in_chs, dim, bias=False, **dd)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)).permute(0, 2, 3, 1)
        x = torch.cat([x[:, row::2, column::2] for column in range(2) for row in range(2)], -1)
        return self.reduction(self.norm(x)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Block on tokens (B, H, W, C): x + SS2D(LN(x)), then, if there is an MLP, x + MLP(LN(x))."""

    def __init__(self, dim: int, ssm_ratio: float, vanilla: bool, drop_path: float, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.mixer = SS2D(dim, ssm_ratio, states=16 if vanilla else 1, gated=vanilla, **dd)
        self.norm2 = None if vanilla else nn.LayerNorm(dim, **dd)
        self.mlp = None if vanilla else Mlp(dim, 4 * dim, **dd)
        self.drop_path1, self.drop_path2 = ((DropPath(drop_path) if drop_path else nn.Identity()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.mixer(self.norm1(x)))
        return x if self.mlp is None else x + self.drop_path2(self.mlp(self.norm2(x)))


class VMamba(TimmInterface):
    """Backbone with 2D selective scans (SS2D).

    Args:
        dims: number of channels of each stage.
        depths: number of blocks of each stage.
        ssm_ratio: number of channels of a scan, as a multiple of the stage's `dims`.
        vanilla: build the first version: 16 states of a channel instead of one, gated mixers, no MLP, patches of 4 x 4
            pixels in the stem, and 2 x 2 tokens joined between stages.
        output_norms: add a LayerNorm to the output of each stage, for dense prediction; `forward_intermediates(
            norm=True)` applies it.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of input channels.
        global_pool: 'avg', or '' without a classifier.
        drop_rate: dropout rate before the classifier.
        drop_path_rate: rate of stochastic depth, which rises linearly from 0 in the first block to this in the last.
        img_size: checked and otherwise ignored, because any size of at least 32 x 32 works; timm passes it.
        output_stride: 32.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    @checked
    def __init__(
            self,
            dims: Annotated[Sequence[int], each_stage(integer(8, 8192))],
            depths: Annotated[Sequence[int], each_stage(integer(1, 256))],
            ssm_ratio: Annotated[float, number(0.125, 64)] = 1.,
            vanilla: Flag = False,
            output_norms: Flag = False,
            num_classes: NumClasses = 1000,
            in_chans: InChans = 3,
            global_pool: Annotated[str, one_of('avg', '')] = 'avg',
            drop_rate: Rate = 0.,
            drop_path_rate: Rate = 0.,
            img_size: ImageSize = None,
            output_stride: Annotated[int, one_of(STRIDES[-1])] = STRIDES[-1],
            device=None,
            dtype=None,
    ):
        super().__init__(num_classes, in_chans)
        dd = {'device': device, 'dtype': dtype}
        self.stem = Stem(in_chans, dims[0], vanilla, **dd)
        stages, rates = [], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        for i, dim in enumerate(dims):
            downsample: nn.Module = nn.Identity()
            if i and vanilla:
                downsample = PatchMerging(dims[i - 1], dim, **dd)
            elif i:
                downsample = nn.Sequential(OrderedDict(
                    conv=nn.Conv2d(dims[i - 1], dim, 3, 2, 1, **dd), norm=_norm(dim, **dd)))
            stages.append(Stage(downsample, [Block(dim, ssm_ratio, vanilla, rate, **dd) for rate in rates[i]]))
        self.stages = nn.Sequential(*stages)
        self.feature_info = [
            dict(num_chs=dim, reduction=stride, module=f'stages.{i}')
            for i, (dim, stride) in enumerate(zip(dims, STRIDES))
        ]
        self.num_features = self.head_hidden_size = dims[-1]
        self.output_norms = nn.ModuleList(nn.LayerNorm(dim, **dd) for dim in dims) if output_norms else None
        self.head = ProjectionHead(dims[-1], None, num_classes, global_pool, drop_rate, **dd)
        self.head.norm = _norm(dims[-1], **dd)
        for name, module in self.named_modules():
            if not name.endswith('x_proj'):                  # uniform, as PyTorch's linear layers
                init_linear(module)

    group_matcher = HierarchicalBackbone.group_matcher

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters without weight decay, apart from biases and norms: D. As published, A_log has one."""
        return {name for name, _ in self.named_parameters() if name.endswith('.D')}

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of published weights. Keys that have this model's names are kept.

        Output norms that this model does not have are dropped. The loader checks all other keys.

        Raises:
            WeightsError: the weights are of another variant, such as one with another `ssm_ratio`.
        """
        renamed = vmamba_keys.to_our_keys(weights)
        vmamba_keys.check_network(renamed, self.state_dict(), len(self.stages), ARCHS)
        return {key: value for key, value in renamed.items()
                if self.output_norms is not None or not key.startswith('output_norms.')}

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return vmamba_keys.to_published_keys(weights)


_cfg = partial(image_cfg, first_conv='stem.conv1', license='mit', paper_ids='arXiv:2401.10166')
default_cfgs = generate_default_cfgs(published_cfgs({
    **{f'vmamba_{size}': _cfg() for size in ARCHS if size != 'test'},
    'test_vmamba': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
}))


@register_model
def vmamba_tiny_s1l8(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-T of the paper: 30.2 M parameters, 4.9 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_tiny_s1l8', pretrained, {**ARCHS['tiny_s1l8'], **kwargs})


@register_model
def vmamba_tiny_s2l5(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-T with wider scans and fewer blocks: 30.7 M parameters, 4.9 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_tiny_s2l5', pretrained, {**ARCHS['tiny_s2l5'], **kwargs})


@register_model
def vmamba_small_s2l15(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-S of the paper: 50.1 M parameters, 8.7 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_small_s2l15', pretrained, {**ARCHS['small_s2l15'], **kwargs})


@register_model
def vmamba_small_s1l20(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-S with narrower scans and more blocks: 49.0 M parameters, 8.6 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_small_s1l20', pretrained, {**ARCHS['small_s1l20'], **kwargs})


@register_model
def vmamba_base_s2l15(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-B of the paper: 88.6 M parameters, 15.4 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_base_s2l15', pretrained, {**ARCHS['base_s2l15'], **kwargs})


@register_model
def vmamba_base_s1l20(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-B with narrower scans and more blocks: 86.6 M parameters, 15.2 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_base_s1l20', pretrained, {**ARCHS['base_s1l20'], **kwargs})


@register_model
def vmamba_vanilla_tiny(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-T of the first version: 22.9 M parameters, 5.6 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_vanilla_tiny', pretrained, {**ARCHS['vanilla_tiny'], **kwargs})


@register_model
def vmamba_vanilla_small(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-S of the first version: 44.4 M parameters, 11.2 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_vanilla_small', pretrained, {**ARCHS['vanilla_small'], **kwargs})


@register_model
def vmamba_vanilla_base(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """VMamba-B of the first version: 76.3 M parameters, 18.0 GMACs at 224, as its authors count them."""
    return build_model(VMamba, 'vmamba_vanilla_base', pretrained, {**ARCHS['vanilla_base'], **kwargs})


@register_model
def test_vmamba(pretrained: bool = False, **kwargs: Any) -> VMamba:
    """A small VMamba with a few hundred thousand parameters, for tests and demonstrations."""
    return build_model(VMamba, 'test_vmamba', pretrained, {**ARCHS['test'], **kwargs})
