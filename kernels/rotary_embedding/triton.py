"""Triton kernel of rotary embedding: a rotation of q and k by the angles of a table, in float32, in one pass.

    y[2m] = cos a[n, m] x[2m] - sin a[n, m] x[2m+1],    y[2m+1] = sin a[n, m] x[2m] + cos a[n, m] x[2m+1]

The gradient is the rotation by the negative angles, by the same kernel.
"""
from typing import Tuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch

BLOCK_N, BLOCK_C, WARPS = 16, 64, 4


@triton.jit
def _rotate(x, cos, sin, N: tl.constexpr, C: tl.constexpr):
    """Rotate the pairs of x (N, C) by angles whose cosines and sines are (N, C / 2)."""
    first, second = tl.split(tl.reshape(x.to(tl.float32), (N, C // 2, 2)))
    return tl.reshape(tl.join(first * cos - second * sin, first * sin + second * cos), (N, C))


@triton.jit(do_not_specialize=['tokens', 'heads'])
def _rotary_embedding_fwd_kernel(
        q, k, table, q_out, k_out, scale, tokens, heads, q_b, q_h, q_n, k_b, k_h, k_n, DIM: tl.constexpr,
        INVERSE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rotate BLOCK_C channels, of one or several heads, of BLOCK_N tokens per program. table: (tokens, DIM / 2, 2)."""
    channels = heads * DIM
    blocks_c, blocks_n = tl.cdiv(channels, BLOCK_C), tl.cdiv(tokens, BLOCK_N)
    c = tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.program_id(0) // blocks_c % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = (tl.program_id(0) // blocks_c // blocks_n).to(tl.int64)
    mask = (n < tokens)[:, None] & (c < channels)[None, :]
    head, d, line = (c // DIM).to(tl.int64), c % DIM, n.to(tl.int64)[:, None]
    factors = tl.load(table + line * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin = tl.split(tl.reshape(factors, (BLOCK_N, BLOCK_C // 2, 2)))
    if INVERSE:
        sin = -sin
    out = (batch * tokens + line) * channels + c[None, :]
    x = tl.load(q + batch * q_b + line * q_n + (head * q_h + d)[None, :], mask=mask, other=0.0)
    tl.store(q_out + out, _rotate(x, cos, sin, BLOCK_N, BLOCK_C).to(q_out.dtype.element_ty), mask=mask)
    x = tl.load(k + batch * k_b + line * k_n + (head * k_h + d)[None, :], mask=mask, other=0.0)
    tl.store(k_out + out, (_rotate(x, cos, sin, BLOCK_N, BLOCK_C) * scale).to(k_out.dtype.element_ty), mask=mask)


def forward(q: Tensor, k: Tensor, table: Tensor, scale: float, inverse: bool) -> Tuple[Tensor, Tensor]:
    """Return rotated q and k, (B, heads, N, D) each, stored as (B, N, heads, D)."""
    q, k = launch.unit_stride(q), launch.unit_stride(k)
    batch, heads, tokens, dim = q.shape
    q_out, k_out = launch.token_order(q), launch.token_order(k)
    programs = batch * launch.cdiv(tokens, BLOCK_N) * launch.cdiv(heads * dim, BLOCK_C)
    _rotary_embedding_fwd_kernel[launch.programs(programs)](
        q, k, table, q_out, k_out, scale, tokens, heads, *q.stride()[:3], *k.stride()[:3], DIM=dim, INVERSE=inverse,
        BLOCK_N=BLOCK_N, BLOCK_C=BLOCK_C, num_warps=WARPS)
    return q_out, k_out
