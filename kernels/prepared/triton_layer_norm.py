"""Triton kernel of the layer norm of a sum: a program takes whole tokens. With means over the C channels,

    s = x + add,    y = (s - mean s) / sqrt(mean (s - mean s)^2 + eps) weight + bias

PyTorch's kernel takes a block of threads for each token, which leaves most of them idle for 64 to 512 channels: the
norms of a network take eight times as long as reading and writing its tokens.
"""
from typing import Optional, Tuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch

# Numbers of a program, unless one token has more.
BLOCK, WARPS = 2048, 4


@triton.jit(do_not_specialize=['tokens'])
def _layer_norm_fwd_kernel(
        x, add, weight, bias, ahead, y, total, tokens, eps, DIM: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr):
    """Normalize BLOCK_N tokens per program."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    owned = c < DIM
    places = n[:, None] * DIM + c[None, :]
    mask = (n < tokens)[:, None] & owned[None, :]
    s = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    if add is not None:
        s += tl.load(add + places, mask=mask, other=0.0).to(tl.float32)
        later = s
        if ahead is not None:
            later += tl.load(ahead + c, mask=owned, other=0.0).to(tl.float32)[None, :]
        tl.store(total + places, later.to(total.dtype.element_ty), mask=mask)
    centered = tl.where(mask, s - (tl.sum(s, 1) / DIM)[:, None], 0.0)
    result = centered * tl.rsqrt(tl.sum(centered * centered, 1) / DIM + eps)[:, None]
    if weight is not None:
        result *= tl.load(weight + c, mask=owned, other=0.0).to(tl.float32)[None, :]
        result += tl.load(bias + c, mask=owned, other=0.0).to(tl.float32)[None, :]
    tl.store(y + places, result.to(y.dtype.element_ty), mask=mask)


def forward(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
            add: Optional[Tensor] = None, ahead: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """Return the norm of the sum and, with `add`, the sum plus `ahead`."""
    x, weight, bias, add, ahead = (None if z is None else z.contiguous() for z in (x, weight, bias, add, ahead))
    y, total = x.new_empty(x.shape), x.new_empty(x.shape if add is not None else 0)
    dim = x.shape[-1]
    block_c = launch.padded_power_of_two(dim)
    block_n = max(1, BLOCK // block_c)
    tokens = x.numel() // max(1, dim)
    if tokens:
        _layer_norm_fwd_kernel[launch.programs(launch.cdiv(tokens, block_n))](
            x, add, weight, bias, ahead, y, total, tokens, eps, DIM=dim, BLOCK_C=block_c, BLOCK_N=block_n,
            num_warps=WARPS)
    return y, total
