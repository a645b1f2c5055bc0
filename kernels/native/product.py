"""A native product of tokens with a matrix, for prepared networks: norm, activation and sum are in the same pass."""
from struct import Struct
from typing import Any, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.declare import node
from . import DONE, function

# `struct Product` and `enum Activation` of native_product.cpp, and the channels whose weights lie side by side.
_ARGUMENTS, PANEL, ACTIVATIONS = Struct('8Q7qd'), 16, ('none', 'silu', 'gelu')


def packed_weight(weight: Tensor) -> Tensor:
    """Return a matrix (D, C) as (panels, C, 16): the product reads the weights of 16 channels of y together."""
    return F.pad(weight, (0, 0, 0, -len(weight) % PANEL)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def packed_bias(bias: Tensor) -> Tensor:
    return F.pad(bias, (0, -len(bias) % PANEL))


def _run(x, weight, bias, channels, act='none', act_before=False, norm_weight=None, norm_bias=None, eps=1e-5,
         residual=None):
    batch, height, width, dim = x.shape
    x = x.contiguous()
    y = x.new_empty((batch, height, width, channels))
    statistics = x.new_empty((0 if norm_weight is None else batch, 2))
    if residual is not None:
        residual = residual.contiguous()
    arguments = _ARGUMENTS.pack(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(), 0 if norm_weight is None else norm_weight.data_ptr(),
        0 if norm_bias is None else norm_bias.data_ptr(), 0 if residual is None else residual.data_ptr(),
        y.data_ptr(), statistics.data_ptr(), batch, height * width, dim, channels, act_before,
        ACTIVATIONS.index(act), torch.get_num_threads(), eps)
    if function('product')(arguments) != DONE:
        raise MemoryError('no memory for a tile of a product')
    return y, statistics


def _flops(x: Sequence[int], weight: Any, bias: Any, channels: int, *_: Any) -> int:
    return 2 * torch.Size(x).numel() * channels


@node('product_native_fwd', _run, _flops)
def product(x: Tensor, weight: Tensor, bias: Tensor, channels: int, act: str = 'none', act_before: bool = False,
            norm_weight: Optional[Tensor] = None, norm_bias: Optional[Tensor] = None, eps: float = 1e-5,
            residual: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """Return y = residual + act(f(x) weight' + bias), and the mean and 1 / deviation (B, 2) of images if f normalizes.

    f is GroupNorm with one group, SiLU or nothing. All tensors are float32, without
    gradients.

    Args:
        x: (B, H, W, C).
        weight, bias: of a map to D channels, packed.
        channels: D.
        act: one of `ACTIVATIONS`.
        act_before: whether f is SiLU.
        norm_weight, norm_bias, eps: of GroupNorm; (C,) each.
        residual: (B, H, W, D), or None.
    """
    return x.new_empty(*x.shape[:3], channels), x.new_empty(0 if norm_weight is None else x.shape[0], 2)
