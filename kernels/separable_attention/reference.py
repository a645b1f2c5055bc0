"""Separable attention by its definition in float64, group by group; tests compare all backends with it."""
from itertools import product
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE
from ..common.patches import Patch, group_slices


def separable_attention(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
                        key_bias: Optional[Tensor], patch: Patch, sampling: str) -> Tensor:
    query, keys, values = (x.to(REFERENCE_DTYPE) for x in (query, key, value))
    if key_weight is not None:
        keys = F.linear(keys, key_weight.to(REFERENCE_DTYPE),
                        None if key_bias is None else key_bias.to(REFERENCE_DTYPE))
    (key_rows, key_columns), (rows, columns) = (
        [group_slices(x.shape[axis], patch[axis - 1], sampling) for axis in (1, 2)] for x in (key, value))
    grid = torch.zeros_like(values)
    for i, j in product(range(len(rows)), range(len(columns))):
        queries, group = (x[:, key_rows[i], key_columns[j]].flatten(1, 2) for x in (query, keys))     # (B, n, L or D)
        context = (queries.softmax(1).transpose(1, 2) @ group).mean(1)                                 # (B, D)
        here = torch.zeros_like(values)
        here[:, rows[i], columns[j]] = 1
        grid = grid + here * values.relu() * context[:, None, None]
    return grid.to(value.dtype)
