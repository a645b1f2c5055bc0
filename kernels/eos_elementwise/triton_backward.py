"""Gradients of the elementwise recurrence in Triton, for oscillations of rank one. With the matrices of a tile

    A[t, j] = sum_k s_t[k] c[t, j, k] e_j[k],    B[t, j] = sum_d dy_t[d] d[t, j, d] i_j[d],

of which `triton.py` makes A, the gradients are products of one matrix with the tokens of one axis of the memory:

    rows:       ds_t = sum_j B[t, j] c[t, j] * e_j,     de_j = sum_t B[t, j] c[t, j] * s_t
    columns:    (y_t = sum_j A[t, j] d[t, j] * i_j),    di_j = sum_t A[t, j] d[t, j] * dy_t

so one kernel, launched for either axis, computes all of them. It calls s or dy its queries q, and e or i its keys k.
A step log of the axis decays every pair of tokens around it: what queries behind it read and keys before it added. Its
gradient is the sum of q dq over the former or, which is the same, of k dk over the latter. For each size of blocks, and
for memories that enter and leave a chunk, the kernel adds up whichever of them lies between the token and the boundary.
No term is subtracted, so a step of -80 has the gradient of a weight of e^-80 and not a difference of large numbers.
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import dot
from ..eos_scan.memory_tiles import broadcast_strides, strides
from ..eos_scan.problem import DIRECTIONS
from .triton import (
    Tiles,
    block_decays,
    block_of,
    block_pairs,
    chunk_decay,
    diagonal,
    entry,
    exp2,
    expanded,
    load_memory,
    load_sums,
    load_tile,
    memories,
    memory_like,
    place,
    scaled,
    store_tile,
    through_memory,
    tiles,
    token_matrix,
)

SIZES = ('lines', 'chunks', 'heads', 'length', 'q_b', 'q_h', 'k_b', 'k_h', 'log_b', 'log_h', 'other_q_b', 'other_q_h',
         'other_k_b', 'other_k_h', 'other_log_b', 'other_log_h')


@triton.jit
def _sum_between(first, last, terms, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return the sums of terms[x] over tokens x from first[u] to last[u], as a product with a mask.

    Nothing cancels, so half types need no more bits than bfloat16 has, but they need its range."""
    x = tl.arange(0, terms.shape[0])[None, :]
    chosen = (x >= first[:, None]) & (x <= last[:, None])
    if HALF:
        y = tl.dot(chosen.to(tl.bfloat16), terms.to(tl.bfloat16))
    else:
        y = tl.dot(chosen.to(tl.float32), terms, input_precision=PRECISION)
    return y


@triton.jit
def _steps_in_blocks(read, added, h, DIRECTION: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Add up q dq (read) and k dk (added) between each token and the boundary of its pair of blocks of h tokens.

    They are of pairs of tokens on both sides of it."""
    u = tl.arange(0, read.shape[0])
    second, start, end = (u & h) != 0, u & -h, u | (h - 1)
    if DIRECTION == 'forward':
        y = _sum_between(tl.where(second, u, start), tl.where(second, end, u - 1), read + added, HALF, PRECISION)
    elif DIRECTION == 'reverse':
        y = _sum_between(tl.where(second, u + 1, start), tl.where(second, end, u), read + added, HALF, PRECISION)
    else:
        y = _sum_between(tl.where(second, u, start), tl.where(second, end, u), read, HALF, PRECISION)
        y += _sum_between(tl.where(second, u + 1, start), tl.where(second, end, u - 1), added, HALF, PRECISION)
    return y


@triton.jit
def _steps_of_chunk(read, added, through, REVERSE: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Add up what tokens read of the memory that enters, what they add to the one that leaves, and what passes."""
    u = tl.arange(0, read.shape[0])
    start, end = u * 0, u * 0 + read.shape[0] - 1
    if REVERSE:
        y = _sum_between(start, u, read, HALF, PRECISION) + _sum_between(u + 1, end, added, HALF, PRECISION)
    else:
        y = _sum_between(u, end, read, HALF, PRECISION) + _sum_between(start, u - 1, added, HALF, PRECISION)
    return y + through[None, :]


@triton.jit
def _passing(log, memory, adjoint, at_log, log_x, inside, entry_at, exit_at, x_stride, c, c_stride, DIM_X: tl.constexpr,
             DIM_C: tl.constexpr, BLOCK_X: tl.constexpr, EXACT: tl.constexpr):
    """Sum, over the other axis x, the memory that enters a chunk and passes it times the gradient where it leaves."""
    y = tl.zeros((c.shape[0],), tl.float32)
    for start in range(0, DIM_X, BLOCK_X):
        x = start + tl.arange(0, BLOCK_X)
        product = load_memory(memory, entry_at, x, x_stride, c, c_stride, DIM_X, DIM_C)
        product *= load_memory(adjoint, exit_at, x, x_stride, c, c_stride, DIM_X, DIM_C)
        if log is not None:
            sums, _ = load_sums(log, at_log, log_x, x, inside, DIM_X, EXACT)
            product *= exp2(tl.min(sums, 0))[:, None]
        y += tl.sum(product, 0)
    return y


@triton.jit
def _carried(other_q, other_k, other_log, log, memory, adjoint, at_other_q, at_other_k, at_other_log, other_log_c, sums,
             step, inside, tile, lines, chunks, x_stride, c, c_stride, DIM_X: tl.constexpr, DIM_C: tl.constexpr,
             BLOCK_X: tl.constexpr, DIRECTION: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr,
             UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradients of queries and keys by way of the memories that enter and leave a chunk, and what passes."""
    entry_at = entry(tile, lines, chunks, DIRECTION, REVERSE)
    exit_at = entry_at - 1 if REVERSE else entry_at + 1
    dq = through_memory(other_q, other_log, memory, at_other_q, at_other_log, other_log_c, inside, entry_at, x_stride,
                        c, c_stride, DIM_X, DIM_C, BLOCK_X, True, REVERSE, EXACT, UPCAST, PRECISION)
    dk = through_memory(other_k, other_log, adjoint, at_other_k, at_other_log, other_log_c, inside, exit_at, x_stride,
                        c, c_stride, DIM_X, DIM_C, BLOCK_X, False, REVERSE, EXACT, UPCAST, PRECISION)
    through = tl.zeros((c.shape[0],), tl.float32)
    if log is not None:
        dq *= chunk_decay(sums, step, True, REVERSE)
        dk *= chunk_decay(sums, step, False, REVERSE)
        through = exp2(tl.min(sums, 0)) * _passing(
            other_log, memory, adjoint, at_other_log, other_log_c, inside, entry_at, exit_at, x_stride, c, c_stride,
            DIM_X, DIM_C, BLOCK_X, EXACT)
    return dq, dk, through


@triton.jit
def _within_tile(p, query, key, sums, step, BLOCK: tl.constexpr, LEVELS: tl.constexpr, DIRECTION: tl.constexpr,
                 HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return dq, dk and the gradient of the steps by way of the matrix p of a tile, for each size of blocks in turn."""
    own = tl.sum(tl.where(diagonal(BLOCK), p, 0.0), 1)[:, None]
    dq, dk = own * key.to(tl.float32), own * query.to(tl.float32)
    dsteps = tl.zeros(dq.shape, tl.float32)
    for level in range(0, LEVELS):
        decay_q, decay_k = block_decays(sums, step, 1 << level, DIRECTION)
        part = tl.where(block_pairs(level, BLOCK, DIRECTION), p, 0.0).to(key.dtype)
        new_q = decay_q * dot(part, scaled(key, decay_k), PRECISION)
        new_k = decay_k * dot(tl.trans(part), scaled(query, decay_q), PRECISION)
        dq += new_q
        dk += new_k
        dsteps += _steps_in_blocks(query.to(tl.float32) * new_q, key.to(tl.float32) * new_k, 1 << level, DIRECTION,
                                   HALF, PRECISION)
    return dq, dk, dsteps


@triton.jit(do_not_specialize=SIZES)
def _eos_elementwise_bwd_kernel(
        q, k, log, other_q, other_k, other_log, memory, adjoint, dq, dk, dlog, lines, chunks, heads, length,
        q_b, q_h, q_t, k_b, k_h, k_t, log_b, log_h, log_t, log_c, other_q_b, other_q_h, other_q_t, other_k_b, other_k_h,
        other_k_t, other_log_b, other_log_h, other_log_t, other_log_c, DIM: tl.constexpr, OTHER: tl.constexpr,
        BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
        DIRECTION: tl.constexpr, CARRY: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, UPCAST: tl.constexpr,
        PRECISION: tl.constexpr):
    """Compute dq (unless None), dk (both stored as (B, T, H, DIM)) and dlog (B, H, T, DIM) for one block of channels
    of one tile per program.

    COLUMNS: the axis is that of the memory's columns. memory, adjoint: (directions, lines, chunks + 1, K, D)."""
    # A program for each block, and no loop: the compiler would keep masks in registers that it can make again.
    parts: tl.constexpr = (DIM + BLOCK_C - 1) // BLOCK_C
    tile = tl.program_id(0) // parts
    batch, head, token, row, inside = place(tile, lines, chunks, heads, length, BLOCK, LEVELS)
    at_q, at_k = batch * q_b + head * q_h + token * q_t, batch * k_b + head * k_h + token * k_t
    at_log = batch * log_b + head * log_h + token * log_t
    at_other_q = batch * other_q_b + head * other_q_h + token * other_q_t
    at_other_k = batch * other_k_b + head * other_k_h + token * other_k_t
    at_other_log = batch * other_log_b + head * other_log_h + token * other_log_t
    p = token_matrix(other_q, other_k, other_log, at_other_q, at_other_k, at_other_log, other_log_c, inside, OTHER,
                     BLOCK_X, BLOCK, LEVELS, DIRECTION, EXACT, UPCAST, PRECISION)
    c_stride: tl.constexpr = 1 if COLUMNS else OTHER
    x_stride: tl.constexpr = DIM if COLUMNS else 1
    at_out = ((batch * length + token) * heads + head) * DIM
    c = tl.program_id(0) % parts * BLOCK_C + tl.arange(0, BLOCK_C)
    query, key = load_tile(q, at_q, c, inside, DIM, UPCAST), load_tile(k, at_k, c, inside, DIM, UPCAST)
    sums, step, steps = None, None, None
    if log is None:
        grad_q, grad_k = dot(p, key, PRECISION), dot(tl.trans(p), query, PRECISION)
    else:
        sums, step = load_sums(log, at_log, log_c, c, inside, DIM, EXACT)
        grad_q, grad_k, steps = _within_tile(p, query, key, sums, step, BLOCK, LEVELS, DIRECTION, HALF, PRECISION)
    if CARRY:
        for reverse in tl.static_range(2):
            if DIRECTION == 'both' or (DIRECTION == 'reverse') == reverse:
                new_q, new_k, through = _carried(
                    other_q, other_k, other_log, log, memory, adjoint, at_other_q, at_other_k, at_other_log,
                    other_log_c, sums, step, inside, tile, lines, chunks, x_stride, c, c_stride, OTHER, DIM, BLOCK_X,
                    DIRECTION, reverse == 1, EXACT, UPCAST, PRECISION)
                grad_q += new_q
                grad_k += new_k
                if log is not None:
                    steps += _steps_of_chunk(query.to(tl.float32) * new_q, key.to(tl.float32) * new_k, through,
                                             reverse == 1, HALF, PRECISION)
    if dq is not None:
        store_tile(dq, at_out, c, inside, grad_q, DIM)
    store_tile(dk, at_out, c, inside, grad_k, DIM)
    if log is not None:
        store_tile(dlog, row * DIM, c, inside, steps, DIM)


def _axis(q: Tensor, k: Tensor, log: Optional[Tensor], other_q: Tensor, other_k: Tensor, other_log: Optional[Tensor],
          memory: Optional[Tensor], adjoint: Optional[Tensor], dq: Optional[Tensor], tile: Tiles,
          direction: str, columns: bool) -> Tuple[Tensor, Optional[Tensor]]:
    """Write the gradient of q to dq, unless it is None, and return those of k and of step logs (B, H, T, c)."""
    dim, other = q.shape[3], other_q.shape[3]
    # The sums of steps and their gradients leave registers for half as many channels. Of the other axis, two blocks of
    # 16 take fewer registers than one of 32 outside a loop; tiles of half types are so large that all blocks are of 16.
    block_c = block_of(q) if log is None else 16
    narrow = other_log is not None or log is not None and (q.itemsize == 2 or other <= 32)
    block_x = 16 if narrow else block_of(other_q)
    dk, dlog = launch.token_order(k), None if log is None else k.new_empty(k.shape, dtype=torch.float32)
    _eos_elementwise_bwd_kernel[launch.programs(tile.programs[0] * launch.cdiv(dim, block_c))](
        q, k, log, other_q, other_k, other_log, memory, adjoint, dq, dk, dlog, *tile.sizes, *strides(q, k),
        *broadcast_strides(log, 4), *strides(other_q, other_k), *broadcast_strides(other_log, 4),
        DIM=dim, OTHER=other, BLOCK_C=block_c, BLOCK_X=block_x, COLUMNS=columns, LEVELS=tile.levels,
        DIRECTION=direction, CARRY=memory is not None, HALF=q.itemsize == 2 and not launch.interpreted(),
        **tile.constants, **launch.options('eos_elementwise_bwd', q.dtype, tile.block, max(block_c, block_x)))
    return dk, dlog


def backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor],
             log_d: Optional[Tensor], state: Optional[Tensor], states: Tensor, direction: str, chunk: int
             ) -> Tuple[Tensor, ...]:
    """Return what the portable function of this name does, the first three gradients in the dtype of i."""
    dy, i, e, s = (launch.unit_stride(x) for x in (dy, i, e, s))
    logs = expanded(log_k, e), expanded(log_d, i)
    launch.check_grid(dy, first=2)                                           # the forward pass has checked the others
    memory, adjoint = None, None
    tile = tiles(i, chunk, states.numel() > 0)
    empty = i.new_empty(0, dtype=torch.float32)
    dstate = empty
    if states.numel():
        names = DIRECTIONS[direction]
        memory, adjoint = states, memory_like(i, e, len(names), tile)
        for n, reverse in enumerate(names):
            memories(dy, s, *logs, dfinal, tile, True, reverse, adjoint[n])
        if state is not None:
            dstate = adjoint[0, :, :, -1 if direction == 'reverse' else 0].clone()
    ds = launch.token_order(s)
    de, dlog_k = _axis(s, e, logs[0], dy, i, logs[1], memory, adjoint, ds, tile, direction, False)
    di, dlog_d = _axis(dy, i, logs[1], s, e, logs[0], memory, adjoint, None, tile, direction, True)
    dlogs = (empty.clone() if dlog is None else dlog.sum_to_size(log.shape)
             for dlog, log in ((dlog_k, log_k), (dlog_d, log_d)))
    return di, de, ds, *dlogs, dstate
