"""Call the native depthwise convolution."""
from struct import Struct
from typing import Optional

import torch
from torch import Tensor

from ..common.launch import dense_like
from ..native import DONE, function

SIDES = (1, 3, 5, 7)
# `struct Convolution` of native.cpp.
_ARGUMENTS = Struct('5Q5q3q3q5q')


def forward(x: Tensor, weight: Tensor, bias: Tensor, add: Optional[Tensor], gelu: bool, residual: bool
            ) -> Optional[Tensor]:
    """Return the convolution (see `depthwise_conv`), or None where memory ended or a window is of another size."""
    if weight.shape[-1] not in SIDES:
        return None
    x, weight, bias = _dense_channels(x), weight.contiguous(), bias.contiguous()
    add = None if add is None else _dense_channels(add)
    y = dense_like(x)
    arguments = _ARGUMENTS.pack(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(), 0 if add is None else add.data_ptr(), y.data_ptr(),
        *x.shape, weight.shape[-1], *x.stride()[:3], *(0, 0, 0) if add is None else add.stride()[:3],
        x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16, gelu, residual, torch.get_num_threads())
    return y if function('depthwise_conv')(arguments) == DONE else None


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
