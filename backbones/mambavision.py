"""MambaVision: convolutions at strides 4 and 8, selective scans and attention in windows at strides 16 and 32.

Hatamizadeh & Kautz, "MambaVision: A Hybrid Mamba-Transformer Vision Backbone", CVPR 2025, arXiv 2407.08083. The code
here was written from a description of the published network. The authors' weights are under CC-BY-NC-SA-4.0, which
forbids commercial use; this package does not contain them.
"""
from functools import partial
from typing import Annotated, Any, Dict, Optional, Sequence, Set

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerScale, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from ._timm import checkpoint_seq
from .blocks import ConvNorm, ProjectionHead, check_image, forward_in_parts
from .hierarchical import STRIDES, HierarchicalBackbone
from .mixers.window import MambaVisionMixer, WindowAttention
from .options import Flag, ImageSize, InChans, NumClasses, Rate, checked, each_stage, integer, number, one_of, or_none
from .timm_interface import TimmInterface, build_model, image_cfg, init_linear, published_cfgs
from .weights import mambavision_keys

__all__ = ['MambaVision']

_TINY = dict(dim=80, in_dim=32, depths=(1, 3, 8, 4), num_heads=(8, 16), drop_path_rate=0.2)
_LARGE = dict(dim=196, depths=(3, 3, 10, 5), num_heads=(16, 32), layer_scale=1e-5, drop_path_rate=0.3)
_LARGE3 = dict(_LARGE, dim=256, depths=(3, 3, 20, 10), drop_path_rate=0.5)
# The published networks, and a small one for tests.
ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': _TINY,
    'tiny2': dict(_TINY, depths=(1, 3, 11, 4)),
    'small': dict(dim=96, depths=(3, 3, 7, 5), num_heads=(8, 16), drop_path_rate=0.2),
    'base': dict(dim=128, depths=(3, 3, 10, 5), num_heads=(8, 16), layer_scale=1e-5, drop_path_rate=0.3),
    'large': _LARGE,
    'large2': dict(_LARGE, depths=(3, 3, 12, 5)),
    'large2_512': dict(_LARGE, depths=(3, 3, 12, 5), window_size=(32, 16)),
    'large3_256': dict(_LARGE3, window_size=(16, 8)),
    'large3_512': dict(_LARGE3, window_size=(32, 16)),
    'test': dict(dim=12, in_dim=8, depths=(1, 1, 3, 2), num_heads=(2, 4), window_size=(4, 2)),
}


class Stem(nn.Module):
    """Two 3x3 convolutions down to stride 4: (B, in_chans, H, W) -> (B, dim, ceil(H/4), ceil(W/4))."""

    def __init__(self, in_chans: int, in_dim: int, dim: int, device=None, dtype=None):
        super().__init__()
        self.in_chans = in_chans
        options = dict(
            stride=2, bias=False, act_layer=partial(nn.ReLU, inplace=True), eps=1e-4, device=device, dtype=dtype)
        self.conv1 = ConvNorm(in_chans, in_dim, **options)
        self.conv2 = ConvNorm(in_dim, dim, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = check_image(x, self.in_chans).contiguous(memory_format=torch.channels_last)
        return self.conv2(self.conv1(x))


class ConvBlock(nn.Module):
    """x + norm(conv(GELU(norm(conv x)))) on maps (B, C, H, W), with the tanh form of GELU."""

    def __init__(self, dim: int, drop_path: float = 0., device=None, dtype=None):
        super().__init__()
        self.conv1 = ConvNorm(dim, dim, act_layer=partial(nn.GELU, 'tanh'), device=device, dtype=dtype)
        self.conv2 = ConvNorm(dim, dim, device=device, dtype=dtype)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.conv2(self.conv1(x)))


class WindowBlock(nn.Module):
    """x + mixer(LN(x)), then x + MLP(LN(x)), on the tokens of windows (B, L, C)."""

    def __init__(
            self,
            dim: int,
            mixer: nn.Module,
            mlp_ratio: float = 4.,
            drop_path: float = 0.,
            init_values: Optional[float] = None,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm1, self.norm2 = nn.LayerNorm(dim, **dd), nn.LayerNorm(dim, **dd)
        self.mixer = mixer
        self.mlp = Mlp(dim, int(dim * mlp_ratio), **dd)
        self.ls1, self.ls2 = (nn.Identity() if init_values is None else LayerScale(dim, init_values, **dd)
                              for _ in range(2))
        self.drop_path1, self.drop_path2 = (DropPath(drop_path) if drop_path else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.mixer(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ConvStage(nn.Module):
    """Downsampling, then blocks on maps: (B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2))."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.downsample(x))

    def run(self, x: Tensor) -> Tensor:
        """Apply the blocks."""
        if self.grad_checkpointing:
            return checkpoint_seq(self.blocks, x)
        return forward_in_parts(self.blocks, self.blocks, x)


class WindowStage(ConvStage):
    """Downsampling, then blocks on windows of size x size tokens: (B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2)).

    The map is padded with zeros at the right and at the bottom before the first block, and cropped after the last one.
    In between, padding is not masked, as in the published network, so that the size is a part of the weights.
    """

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module], size: int):
        super().__init__(downsample, blocks)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x, s = self.downsample(x).permute(0, 2, 3, 1), self.size
        batch, height, width, dim = x.shape
        x = F.pad(x, (0, 0, 0, -width % s, 0, -height % s))
        rows, columns = x.shape[1] // s, x.shape[2] // s
        # At most four dimensions, which is what runtimes of phones take.
        x = x.reshape(batch * rows, s, columns, s * dim).transpose(1, 2).reshape(batch * rows * columns, s * s, dim)
        x = self.run(x)
        x = x.reshape(batch * rows, columns, s, s * dim).transpose(1, 2).reshape(batch, rows * s, columns * s, dim)
        return x[:, :height, :width].permute(0, 3, 1, 2)


class MambaVision(TimmInterface):
    """MambaVision: a stem at stride 4, two stages of convolutions, two of windows, and a classifier.

    The first half of the blocks of stages 3 and 4 has selective scans, the second half attention; of an odd number of
    blocks, the middle one has a scan.

    Args:
        dim: number of channels of the first stage; the next ones have 2, 4 and 8 times as many.
        in_dim: number of channels at stride 2.
        depths: number of blocks of each stage.
        num_heads: number of heads of stages 3 and 4.
        window_size: height and width of the windows of stages 3 and 4, in tokens. Weights are trained with one size,
            and give other results with another one: it does not follow the size of the image.
        mlp_ratio: width of the feed-forward layers, as a multiple of the channels.
        layer_scale: initial value of LayerScale in stages 3 and 4; None for no LayerScale.
        output_norms: add a LayerNorm (eps 1e-5) to the output of each stage, for dense prediction;
            `forward_intermediates(norm=True)` applies it.
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
            dim: Annotated[int, integer(4, 4096)] = 96,
            in_dim: Annotated[int, integer(1, 4096)] = 64,
            depths: Annotated[Sequence[int], each_stage(integer(1, 256))] = (3, 3, 7, 5),
            num_heads: Annotated[Sequence[int], each_stage(integer(1, 1024), 2)] = (8, 16),
            window_size: Annotated[Sequence[int], each_stage(integer(1, 1024), 2)] = (14, 7),
            mlp_ratio: Annotated[float, number(0.125, 64)] = 4.,
            layer_scale: Annotated[Optional[float], or_none(number(0, 10))] = None,
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
        dims = [dim * 2 ** i for i in range(4)]
        for chs, heads in zip(dims[2:], num_heads):
            if chs % heads:
                raise ValueError(f'the channels of stages 3 and 4, {dims[2:]}, must be multiples of num_heads, got '
                                 f'{num_heads}')
        self.stem = Stem(in_chans, in_dim, dim, **dd)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        for i, (chs, depth) in enumerate(zip(dims, depths)):
            downsample = nn.Conv2d(chs // 2, chs, 3, 2, 1, bias=False, **dd) if i else nn.Identity()
            if i < 2:
                stages.append(ConvStage(downsample, [ConvBlock(chs, rate, **dd) for rate in rates[i]]))
                continue
            blocks = [
                WindowBlock(
                    chs,
                    mixer=MambaVisionMixer(chs, **dd) if 2 * j < depth else WindowAttention(
                        chs, num_heads[i - 2], **dd),
                    mlp_ratio=mlp_ratio,
                    drop_path=rate,
                    init_values=layer_scale,
                    **dd,
                )
                for j, rate in enumerate(rates[i])
            ]
            stages.append(WindowStage(downsample, blocks, window_size[i - 2]))
        self.stages = nn.Sequential(*stages)
        self.feature_info = [
            dict(num_chs=chs, reduction=stride, module=f'stages.{i}')
            for i, (chs, stride) in enumerate(zip(dims, STRIDES))
        ]
        self.output_norms = nn.ModuleList(nn.LayerNorm(chs, **dd) for chs in dims) if output_norms else None
        self.num_features = self.head_hidden_size = dims[-1]
        self.head = ProjectionHead(dims[-1], None, num_classes, global_pool, drop_rate, **dd)
        self.head.norm = nn.BatchNorm2d(dims[-1], **dd)
        self.apply(init_linear)

    group_matcher = HierarchicalBackbone.group_matcher

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters without weight decay, apart from biases and norms: not A_log, as published."""
        return {name for name, _ in self.named_parameters() if name.endswith(('.D', '.dt_bias'))}

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of published weights. Keys that have this model's names are kept.

        Output norms that this model does not have are dropped. The loader checks all other keys.
        """
        renamed = mambavision_keys.to_our_keys(weights)
        return {key: value for key, value in renamed.items()
                if self.output_norms is not None or not key.startswith('output_norms.')}

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return mambavision_keys.to_published_keys(weights)


_cfg = partial(image_cfg, crop_pct=1.0, paper_ids='arXiv:2407.08083', license='cc-by-nc-sa-4.0')
_SIDES = {'large2_512': 512, 'large3_256': 256, 'large3_512': 512}
default_cfgs = generate_default_cfgs(published_cfgs({
    **{f'mambavision_{size}': _cfg(input_size=(3, side, side), pool_size=(side // 32,) * 2)
       for size, side in ((size, _SIDES.get(size, 224)) for size in ARCHS if size != 'test')},
    'test_mambavision': _cfg(input_size=(3, 64, 64), pool_size=(2, 2)),
}))


@register_model
def mambavision_tiny(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-T: 31.8 M parameters, 4.5 GMACs at 224."""
    return build_model(MambaVision, 'mambavision_tiny', pretrained, {**ARCHS['tiny'], **kwargs})


@register_model
def mambavision_tiny2(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-T2: 35.1 M parameters, 5.1 GMACs at 224."""
    return build_model(MambaVision, 'mambavision_tiny2', pretrained, {**ARCHS['tiny2'], **kwargs})


@register_model
def mambavision_small(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-S: 50.1 M parameters, 7.5 GMACs at 224."""
    return build_model(MambaVision, 'mambavision_small', pretrained, {**ARCHS['small'], **kwargs})


@register_model
def mambavision_base(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-B: 97.7 M parameters, 15.0 GMACs at 224."""
    return build_model(MambaVision, 'mambavision_base', pretrained, {**ARCHS['base'], **kwargs})


@register_model
def mambavision_large(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-L: 228.0 M parameters, 34.8 GMACs at 224."""
    return build_model(MambaVision, 'mambavision_large', pretrained, {**ARCHS['large'], **kwargs})


@register_model
def mambavision_large2(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-L2: 241.6 M parameters, 37.5 GMACs at 224."""
    return build_model(MambaVision, 'mambavision_large2', pretrained, {**ARCHS['large2'], **kwargs})


@register_model
def mambavision_large2_512(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-L2 with windows for 512 x 512: 241.6 M parameters."""
    return build_model(MambaVision, 'mambavision_large2_512', pretrained, {**ARCHS['large2_512'], **kwargs})


@register_model
def mambavision_large3_256(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-L3 with windows for 256 x 256: 739.6 M parameters."""
    return build_model(MambaVision, 'mambavision_large3_256', pretrained, {**ARCHS['large3_256'], **kwargs})


@register_model
def mambavision_large3_512(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """MambaVision-L3 with windows for 512 x 512: 739.6 M parameters."""
    return build_model(MambaVision, 'mambavision_large3_512', pretrained, {**ARCHS['large3_512'], **kwargs})


@register_model
def test_mambavision(pretrained: bool = False, **kwargs: Any) -> MambaVision:
    """A small MambaVision with a few hundred thousand parameters, for tests and demonstrations."""
    return build_model(MambaVision, 'test_mambavision', pretrained, {**ARCHS['test'], **kwargs})
