"""MLLA (MILA): a hierarchical network with Mamba's block around linear attention.

Han et al., "Demystify Mamba in Vision: A Linear Attention Perspective", NeurIPS 2024, arXiv 2405.16605, and its
published code (MIT). The paper's last version calls the network MILA; the published files keep MLLA. The published
classifier takes squares of one size. For other sizes the results are those of the authors' code for detectors and
segmenters, which agrees with the classifier where that runs.
"""
from functools import partial
from typing import Annotated, Any, Dict, Sequence

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm2d, Mlp, calculate_drop_path_rates
from timm.models import generate_default_cfgs, register_model, register_notrace_function
from torch import Tensor, nn

from .blocks import ConvNorm, DepthwiseConv, ProjectionHead, check_image
from .hierarchical import STRIDES, HierarchicalBackbone, Stage
from .mixers.linear import LinearMixer, grid_table
from .options import Flag, ImageSize, InChans, NumClasses, Rate, checked, each_stage, integer, number, one_of
from .timm_interface import TimmInterface, build_model, image_cfg, init_linear, published_cfgs
from .weights import mlla_keys

__all__ = ['MLLA']

ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': dict(
        dims=(64, 128, 256, 512),
        depths=(2, 4, 8, 4),
        num_heads=(2, 4, 8, 16),
        drop_path_rate=0.2,
    ),
    'small': dict(
        dims=(64, 128, 256, 512),
        depths=(3, 6, 21, 6),
        num_heads=(2, 4, 8, 16),
        drop_path_rate=0.3,
    ),
    'base': dict(
        dims=(96, 192, 384, 768),
        depths=(3, 6, 21, 6),
        num_heads=(3, 6, 12, 24),
        drop_path_rate=0.5,
    ),
    'test': dict(
        dims=(16, 32, 48, 64),
        depths=(1, 1, 2, 1),
        num_heads=(2, 2, 3, 4),
        mlp_ratio=2,
    ),
}


_relu = partial(nn.ReLU, inplace=True)


@register_notrace_function
def pad_to_multiple(x: Tensor, factor: int) -> Tensor:
    """Pad (B, C, H, W) with zeros at the bottom and at the right to multiples of a number."""
    height, width = (-side % factor for side in x.shape[2:])
    return F.pad(x, (0, width, 0, height)) if height or width else x


class ResidualStem(nn.Module):
    """Convolutions down to stride 4: (B, in_chans, H, W) -> (B, dim, ceil(H/4), ceil(W/4)), channels-last in memory."""

    def __init__(self, in_chans: int, dim: int, device=None, dtype=None):
        super().__init__()
        width, options = dim // 2, dict(bias=False, device=device, dtype=dtype)
        self.in_chans = in_chans
        self.conv1 = ConvNorm(in_chans, width, stride=2, act_layer=_relu, **options)
        self.conv2 = nn.Sequential(
            ConvNorm(width, width, act_layer=_relu, **options), ConvNorm(width, width, **options))
        self.conv3 = nn.Sequential(
            ConvNorm(width, 4 * dim, stride=2, act_layer=_relu, **options), ConvNorm(4 * dim, dim, 1, **options))

    def forward(self, x: Tensor) -> Tensor:
        x = pad_to_multiple(check_image(x, self.in_chans), 4).contiguous(memory_format=torch.channels_last)
        x = self.conv1(x)
        return self.conv3(x + self.conv2(x))


class Downsample(nn.Module):
    """Inverted bottleneck of stride 2: (B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2)).

    An odd map is padded before the first convolution, so that its border holds ReLU(bias) for the second one.
    """

    def __init__(self, in_chs: int, out_chs: int, device=None, dtype=None):
        super().__init__()
        dd, width = {'device': device, 'dtype': dtype}, 4 * out_chs
        self.conv1 = nn.Conv2d(in_chs, width, 1, **dd)
        self.conv2 = nn.Conv2d(width, width, 3, 2, 1, groups=width, **dd)
        self.conv3 = ConvNorm(width, out_chs, 1, **dd)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(pad_to_multiple(x, 2)), inplace=True)
        return self.conv3(F.relu(self.conv2(x), inplace=True))


class MLLABlock(nn.Module):
    """Block on tokens (B, H, W, C): x + mixer(LN(x)) and x + MLP(LN(x)), with x + DWConv3x3(x) before each."""

    def __init__(
            self,
            dim: int,
            num_heads: int,
            mlp_ratio: float,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.pos1 = DepthwiseConv(dim, 3, residual=True, **dd)
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.mixer = LinearMixer(dim, num_heads, **dd)
        self.pos2 = DepthwiseConv(dim, 3, residual=True, **dd)
        self.norm2 = nn.LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), **dd)
        self.drop_path1, self.drop_path2 = (DropPath(drop_path) if drop_path else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pos1(x)
        x = x + self.drop_path1(self.mixer(self.norm1(x)))
        x = self.pos2(x)
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class NormHead(ProjectionHead):
    """LayerNorm of every token, mean over tokens, classifier: (B, C, H, W) -> (B, classes)."""

    def __init__(self, dim: int, num_classes: int, global_pool: str, drop_rate: float, device=None, dtype=None):
        super().__init__(dim, None, num_classes, global_pool, drop_rate, device, dtype)
        self.norm = LayerNorm2d(dim, eps=1e-5, device=device, dtype=dtype)


class MLLA(TimmInterface):
    """Backbone with Mamba-like linear attention.

    Args:
        dims: number of channels of each stage, multiples of 4. The published networks double it from stage to stage.
        depths: number of blocks of each stage.
        num_heads: number of heads of each stage.
        mlp_ratio: width of the MLPs, as a multiple of `dims`.
        output_norms: add a LayerNorm to the output of each stage, for dense prediction;
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
            dims: Annotated[Sequence[int], each_stage(integer(8, 8192))],
            depths: Annotated[Sequence[int], each_stage(integer(1, 256))],
            num_heads: Annotated[Sequence[int], each_stage(integer(1, 1024))],
            mlp_ratio: Annotated[float, number(0.125, 64)] = 4.,
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
        self.num_features = self.head_hidden_size = dims[-1]
        self.stem = ResidualStem(in_chans, dims[0], **dd)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stages = nn.Sequential(*(
            Stage(
                Downsample(dims[i - 1], dim, **dd) if i else nn.Identity(),
                [MLLABlock(dim, num_heads[i], mlp_ratio, rate, **dd) for rate in rates[i]],
            )
            for i, dim in enumerate(dims)
        ))
        self.feature_info = [
            dict(num_chs=dim, reduction=stride, module=f'stages.{i}')
            for i, (dim, stride) in enumerate(zip(dims, STRIDES))
        ]
        self.output_norms = nn.ModuleList(nn.LayerNorm(dim, **dd) for dim in dims) if output_norms else None
        self.head = NormHead(dims[-1], num_classes, global_pool, drop_rate, **dd)
        self.apply(init_linear)

    group_matcher = HierarchicalBackbone.group_matcher

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of published weights. Keys that have this model's names are kept.

        Output norms that this model does not have are dropped. The loader checks all other keys.

        Raises:
            WeightsError: the file's rotary embedding differs from the one that this package computes.
        """
        return {key: value for key, value in mlla_keys.to_our_keys(weights, grid_table).items()
                if self.output_norms is not None or not key.startswith('output_norms.')}

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return mlla_keys.to_published_keys(weights, grid_table)


_cfg = partial(image_cfg, paper_ids='arXiv:2405.16605', license='mit')
default_cfgs = generate_default_cfgs(published_cfgs({
    **{f'mlla_{size}': _cfg() for size in ARCHS if size != 'test'},
    'test_mlla': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
}))


@register_model
def mlla_tiny(pretrained: bool = False, **kwargs: Any) -> MLLA:
    """MLLA-T: 24.4 M parameters, 4.1 GMACs at 224."""
    return build_model(MLLA, 'mlla_tiny', pretrained, {**ARCHS['tiny'], **kwargs})


@register_model
def mlla_small(pretrained: bool = False, **kwargs: Any) -> MLLA:
    """MLLA-S: 43.0 M parameters, 7.2 GMACs at 224."""
    return build_model(MLLA, 'mlla_small', pretrained, {**ARCHS['small'], **kwargs})


@register_model
def mlla_base(pretrained: bool = False, **kwargs: Any) -> MLLA:
    """MLLA-B: 96.0 M parameters, 16.1 GMACs at 224."""
    return build_model(MLLA, 'mlla_base', pretrained, {**ARCHS['base'], **kwargs})


@register_model
def test_mlla(pretrained: bool = False, **kwargs: Any) -> MLLA:
    """A small MLLA with a few hundred thousand parameters, for tests and demonstrations."""
    return build_model(MLLA, 'test_mlla', pretrained, {**ARCHS['test'], **kwargs})
