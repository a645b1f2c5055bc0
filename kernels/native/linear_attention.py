"""Native linear attention with rotated queries and keys, for prepared MLLA networks."""
from struct import Struct
from typing import Any, Sequence

import torch
from torch import Tensor

from ..common.declare import node
from . import DONE, function

_ARGUMENTS = Struct('4Q5qd')                             # `struct LinearAttention` of native_linear_attention.cpp


def _run(qk, v, table, num_heads, eps):
    qk, v = qk.contiguous(), v.contiguous()
    batch, height, width, dim = v.shape
    y = torch.empty_like(v)
    arguments = _ARGUMENTS.pack(
        qk.data_ptr(), v.data_ptr(), table.data_ptr(), y.data_ptr(), batch, height * width, dim, num_heads,
        torch.get_num_threads(), eps)
    if function('linear_attention')(arguments) != DONE:
        raise MemoryError('no memory for the sums of linear attention')
    return y


def _flops(qk: Any, v: Sequence[int], table: Any, num_heads: int, eps: float) -> int:
    return 4 * torch.Size(v).numel() * v[3] // num_heads


@node('linear_attention_native_fwd', _run, _flops)
def linear_attention(qk: Tensor, v: Tensor, table: Tensor, num_heads: int, eps: float) -> Tensor:
    """Return y of `LinearMixer`, without LePE. All tensors are float32, without gradients.

    Args:
        qk: queries and keys before ELU, (B, H, W, 2 C).
        v: (B, H, W, C); an even number of channels for each head.
        table: cosines and sines of the tokens' angles, (H * W, C / 2, 2).
        num_heads: number of heads, which are contiguous slices of C.
        eps: added to the mean of the weights.
    """
    return torch.empty_like(v, memory_format=torch.contiguous_format)
