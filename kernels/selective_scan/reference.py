"""The selective scan by its definition in float64, token by token; tests compare all backends with it."""
from typing import Optional, Sequence

import torch
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE
from .grid_paths import PATHS


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Optional[Tensor],
                   bias: Optional[Tensor], paths: Sequence[str]) -> Tensor:
    dtype = u.dtype
    u, delta, a, b, c = (x.to(REFERENCE_DTYPE) for x in (u, delta, a, b, c))
    if bias is not None:
        delta = delta + bias
    delta = torch.logaddexp(delta, torch.zeros_like(delta))                              # softplus
    batch, height, width, channels = u.shape
    total = torch.zeros_like(u)
    for p, path in enumerate(paths):
        columns_first, reverse = PATHS[path]
        places = [(row, column) for row in range(height) for column in range(width)]
        if columns_first:
            places.sort(key=lambda place: place[::-1])
        h, outputs = u.new_zeros(batch, channels, a.shape[2]), {}
        for row, column in reversed(places) if reverse else places:
            x, step = u[:, row, column], delta[:, row, column, p]
            h = (step[..., None] * a[p]).exp() * h + (step * x)[..., None] * b[:, row, column, p, None]
            y = (h * c[:, row, column, p, None]).sum(-1)
            outputs[row, column] = y if skip is None else y + skip[p] * x
        total = total + torch.stack([outputs[place] for place in sorted(outputs)], 1).view(u.shape)
    return total.to(dtype)
