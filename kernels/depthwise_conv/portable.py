"""Depthwise convolution by PyTorch's own, for any device and for exporters.

The residual is an increment of 1 at the center of the window, which saves a pass over the data.
"""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor, add: Optional[Tensor], gelu: bool,
                   residual: bool) -> Tensor:
    h, padding = F.gelu(x) if gelu else x, weight.shape[-1] // 2
    if residual:
        weight = weight + F.pad(torch.ones_like(weight[:, :, :1, :1]), [padding] * 4)
    if weight.dtype != x.dtype:
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    y = F.conv2d(h.permute(0, 3, 1, 2), weight, bias, padding=padding, groups=weight.shape[0]).permute(0, 2, 3, 1)
    return y if add is None else y + add
