"""Layers of MobileViTv2: stem, inverted residual, transformer layer, the block around it, and stage."""
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import ConvMlp, DropPath, is_exportable, make_divisible
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..kernels.common.patches import fold_patches, unfold_patches
from ..kernels.common.tracing import exporting
from ._timm import checkpoint_seq
from .blocks import check_image
from .mixers import LinformerSelfAttention, MultiHeadSelfAttention, SeparableSelfAttention
from .mixers.separable import check_source

PATCH = (2, 2)


def _separable(dim: int, num_latent_tokens: int, sampling: str, tokens: Tuple[int, int], **dd: Any) -> nn.Module:
    return SeparableSelfAttention(dim, num_latent_tokens, PATCH[0], sampling, **dd)


def _multi_head(dim: int, num_latent_tokens: int, sampling: str, tokens: Tuple[int, int], **dd: Any) -> nn.Module:
    return MultiHeadSelfAttention(dim, **dd)


def _linformer(dim: int, num_latent_tokens: int, sampling: str, tokens: Tuple[int, int], **dd: Any) -> nn.Module:
    return LinformerSelfAttention(dim, tokens, **dd)


# Builders of the attention units, by the value of the option `attention`. All of them take the same arguments.
ATTENTIONS: Dict[str, Callable[..., nn.Module]] = {
    'separable': _separable,
    'mha': _multi_head,
    'linformer': _linformer,
}


class ConvNormAct(nn.Module):
    """Convolution without bias, BatchNorm and, with `act`, SiLU: (B, C, H, W) -> (B, C', H/stride, W/stride)."""

    def __init__(
            self,
            in_chs: int,
            out_chs: int,
            kernel_size: int = 1,
            stride: int = 1,
            dilation: int = 1,
            groups: int = 1,
            act: bool = True,
            device=None,
            dtype=None,
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            in_chs,
            out_chs,
            kernel_size,
            stride,
            padding=kernel_size // 2 * dilation,
            dilation=dilation,
            groups=groups,
            bias=False,
            device=device,
            dtype=dtype,
        )
        self.bn = nn.BatchNorm2d(out_chs, device=device, dtype=dtype)
        self.act = nn.SiLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: 1 x 1 to twice the channels, depthwise 3 x 3, linear 1 x 1.

    The block adds its input if the shapes match.
    """

    def __init__(
            self,
            in_chs: int,
            out_chs: int,
            stride: int = 1,
            dilation: int = 1,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.residual = stride == 1 and in_chs == out_chs
        middle = make_divisible(2 * in_chs)
        self.conv1_1x1 = ConvNormAct(in_chs, middle, **dd)
        self.conv2_kxk = ConvNormAct(middle, middle, 3, stride, dilation, groups=middle, **dd)
        self.conv3_1x1 = ConvNormAct(middle, out_chs, act=False, **dd)
        self.drop_path = DropPath(drop_path) if drop_path and self.residual else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop_path(self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x))))
        return x + y if self.residual else y


class TransformerLayer(nn.Module):
    """Transformer layer: x + attention(norm(x)), then x + FFN(norm(x)).

    The norms are over all channels and tokens of an image.
    """

    def __init__(
            self,
            dim: int,
            attention: nn.Module,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm1 = nn.GroupNorm(1, dim, **dd)
        self.attn = attention
        self.norm2 = nn.GroupNorm(1, dim, **dd)
        self.mlp = ConvMlp(dim, 2 * dim, act_layer=partial(nn.SiLU, inplace=True), **dd)
        self.drop_path1, self.drop_path2 = (DropPath(drop_path) if drop_path else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, source: Optional[Tensor] = None, grouped: bool = False) -> Tensor:
        """Map (B, C, H, W) to the same shape.

        `source` and `grouped` are arguments of the attention. As in the authors' code, the source of cross-attention is
        not normalized.
        """
        x = x + self.drop_path1(self.attn(self.norm1(x), source, grouped))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


def to_even_size(x: Tensor) -> Tensor:
    """Resize (B, C, H, W) to the next even height and width, as the authors' code does."""
    height, width = (n + -n % p for n, p in zip(x.shape[2:], PATCH))
    if (height, width) == tuple(x.shape[2:]):
        return x
    return F.interpolate(x, size=(height, width), mode='bilinear', align_corners=True)


@register_notrace_module
class MobileViTv2Block(nn.Module):
    """Depthwise 3 x 3, linear map to the layers' width, transformer layers, norm, linear map back.

    The output has the shape of the input (B, C, H, W). Odd sides grow by one, as in the authors' code, unless
    `exact_size` is set.
    """

    def __init__(
            self,
            chs: int,
            dim: int,
            attentions: Tuple[nn.Module, ...],
            dilation: int = 1,
            drop_path: float = 0.,
            sampling: str = 'pixel',
            exact_size: bool = False,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.conv_kxk = ConvNormAct(chs, chs, 3, dilation=dilation, groups=chs, **dd)
        self.conv_1x1 = nn.Conv2d(chs, dim, 1, bias=False, **dd)
        self.transformer = nn.Sequential(*(TransformerLayer(dim, unit, drop_path, **dd) for unit in attentions))
        self.norm = nn.GroupNorm(1, dim, **dd)
        self.conv_proj = ConvNormAct(dim, chs, act=False, **dd)
        self.sampling, self.exact_size = sampling, exact_size
        self.exportable = is_exportable()

    def forward_tokens(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        """Return the tokens (B, dim, H, W) after the last norm.

        Args:
            x: feature map (B, C, H, W).
            source: tokens (B, dim, H', W') of another image, such as the previous frame. Every layer takes its context
                from them (cross-attention).
        """
        x = self.conv_1x1(self.conv_kxk(x if self.exact_size else to_even_size(x)))
        separable = isinstance(self.transformer[0].attn, SeparableSelfAttention)
        rows, columns = x.shape[2:]
        context = x if source is None else check_source(x, source)
        if isinstance(self.transformer[0].attn, LinformerSelfAttention):
            self.transformer[0].attn.check_grid(*(-(-n // p) for n, p in zip(context.shape[2:], PATCH)))
        # Exporters and the other attention units need a row of tokens for each group.
        even = not any(n % p for y in (x, context) for n, p in zip(y.shape[2:], PATCH))
        grouped = not separable or even and (self.exportable or exporting())
        if grouped:
            x = fold_patches(x, PATCH, self.sampling)
            source = None if source is None else fold_patches(source, PATCH, self.sampling)
        for layer in self.transformer:
            x = layer(x, source, grouped)
        x = self.norm(x)
        return unfold_patches(x, PATCH, self.sampling, rows, columns) if grouped else x

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        return self.conv_proj(self.forward_tokens(x, source))


@contextmanager
def as_maps(model: nn.Module) -> Iterator[None]:
    """Let MobileViTv2's blocks pass maps to their layers, although an exportable model groups their tokens."""
    blocks = [(block, block.exportable) for block in model.modules() if isinstance(block, MobileViTv2Block)]
    try:
        for block, _ in blocks:
            block.exportable = False
        yield
    finally:
        for block, exportable in blocks:
            block.exportable = exportable


class Stage(nn.Sequential):
    """Sequence of blocks. On a CPU, a large batch runs through them a few images at a time."""

    grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.grad_checkpointing and not torch.jit.is_tracing():
            return checkpoint_seq(self, x)
        return super().forward(x)


class Stem(ConvNormAct):
    """3 x 3 convolution of stride 2: (B, in_chans, H, W) -> (B, C, ceil(H/2), ceil(W/2)), channels-last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = check_image(x, self.conv.in_channels)
        if not torch.compiler.is_exporting():              # runtimes choose their own layout
            x = x.contiguous(memory_format=torch.channels_last)
        return super().forward(x)
