"""Depthwise convolution by its definition in float64, one place of the window at a time; tests compare with it."""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE


def depthwise_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], add: Optional[Tensor], gelu: bool,
                   residual: bool) -> Tensor:
    bias = weight.new_zeros(()) if bias is None else bias
    h, weight, y = (tensor.to(REFERENCE_DTYPE) for tensor in (x, weight, bias))
    if gelu:
        h = 0.5 * h * (1 + torch.erf(h / 2 ** 0.5))
    height, width = x.shape[1:3]
    side = weight.shape[-1]
    padded = F.pad(h, (0, 0, *(side // 2,) * 4))
    for m in range(side):
        for n in range(side):
            y = y + weight[:, 0, m, n] * padded[:, m:m + height, n:n + width]
    if residual:
        y = y + h
    if add is not None:
        y = y + add.to(REFERENCE_DTYPE)
    return y.to(x.dtype)
