"""Triton kernels of the recurrence with a diagonal oscillation plus a matrix of rank one, as a loop over tokens:

    w_t = m_{t-1}' a_t,   m_t = exp(gk_t) * m_{t-1} + b_t w_t' + e_t i_t',   y_t = m_t' s_t

A program holds a tile of the memory, all K rows and BLOCK_D columns, in registers. Columns do not depend on each other.
Two directions are different programs; the second one leaves out the term of a token itself, which counts once. All
arithmetic is float32.

The forward kernel stores w for the backward pass, and no memory. With G_t the gradient of m_t, one kernel goes back
through the tokens and needs no memory either,

    r_t = G_t' b_t,   G_{t-1} = exp(gk_t) * G_t + a_t r_t' + s_{t-1} dy_{t-1}',   di = G' e,   de = G i,   db = G w,

and another one goes through the memories again, ds = m dy and da = m_{t-1} r. The gradient of a step is

    dgk_t = exp(gk_t) * sum_d G_t m_{t-1} = dgk_{t+1} + a_{t+1} da_{t+1} + s_t ds_t - b_t db_t - e_t de_t

in the order of the direction. The last kernel adds these terms within chunks of CHUNK tokens. Behind a chunk, the sum
is known from G and m, so no rounding error passes from one chunk to another. The same kernel adds up the sums over
columns, which the others store for each tile: no atomic operation.
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..eos_scan.memory_tiles import (
    SIZES,
    Lines,
    broadcast_strides,
    dense,
    load_vector,
    outer,
    place,
    strides,
    total,
)

STRIDES = tuple(f'{name}_{axis}' for name in ('i', 'e', 's', 'a', 'b', 'gk') for axis in 'bht') + ('gk_k',)
# Tokens whose terms are added up to gradients of steps, and rows of these chunks that a program takes.
CHUNK, SUM_ROWS = 64, 16
# Columns of a tile of the backward kernels at most: wider ones spill in float32.
COLUMNS = 16


@triton.jit(do_not_specialize=(*SIZES, *STRIDES))
def _eos_matmul_fwd_kernel(
        i, e, s, a, b, gk, state, y, read, final,
        i_b, i_h, i_t, e_b, e_h, e_t, s_b, s_h, s_t, a_b, a_h, a_t, b_b, b_h, b_t, gk_b, gk_h, gk_t, gk_k,
        lines, heads, length, keys, dim, parts, backwards, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
        DECAY: tl.constexpr, STATE: tl.constexpr, SAVE: tl.constexpr, LAST: tl.constexpr):
    """Run along one line with BLOCK_D columns of the memory per program. y and read, which is w: (directions, B, H, T,
    D), dense."""
    number, line, batch, head, part, reverse = place(tl.program_id(0), lines, heads, parts, backwards)
    k, d = tl.arange(0, BLOCK_K), part * BLOCK_D + tl.arange(0, BLOCK_D)
    row, column = k < keys, d < dim
    cell, exists = line * keys * dim + k[:, None] * dim + d[None, :], row[:, None] & column[None, :]
    i += batch * i_b + head * i_h
    e += batch * e_b + head * e_h
    s += batch * s_b + head * s_h
    a += batch * a_b + head * a_h
    b += batch * b_b + head * b_h
    if DECAY:
        gk += batch * gk_b + head * gk_h
    y += (number * lines + line) * length * dim
    read += (number * lines + line) * length * dim
    own = (number == 0).to(tl.float32)
    memory = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    if STATE:
        memory = tl.load(state + cell, mask=exists, other=0.0)
    for n in range(0, length):
        t = tl.where(reverse > 0, length - 1 - n, n).to(tl.int64)
        w = tl.sum(load_vector(a + t * a_t, k, row)[:, None] * memory, 0)
        if SAVE:
            tl.store(read + t * dim + d, w, mask=column)
        if DECAY:
            memory *= tl.exp(load_vector(gk + t * gk_t, k * gk_k, row))[:, None]
        memory += outer(load_vector(b + t * b_t, k, row), w)
        added = outer(load_vector(e + t * e_t, k, row), load_vector(i + t * i_t, d, column))
        out = tl.sum(load_vector(s + t * s_t, k, row)[:, None] * (memory + own * added), 0)
        tl.store(y + t * dim + d, out.to(y.dtype.element_ty), mask=column)
        memory += added
    if LAST:
        tl.store(final + cell, memory, mask=exists)


@triton.jit(do_not_specialize=(*SIZES, *STRIDES, 'dy_b', 'dy_h', 'dy_t', 'chunks'))
def _eos_matmul_bwd_gradient_kernel(
        dy, dfinal, i, e, s, a, b, gk, read, di, back, de, db, carries, dstate, dy_b, dy_h, dy_t,
        i_b, i_h, i_t, e_b, e_h, e_t, s_b, s_h, s_t, a_b, a_h, a_t, b_b, b_h, b_t, gk_b, gk_h, gk_t, gk_k,
        chunks, lines, heads, length, keys, dim, parts, backwards, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
        CHUNK: tl.constexpr, DECAY: tl.constexpr, STATE: tl.constexpr, LAST: tl.constexpr, CARRY: tl.constexpr):
    """Go back along one line with BLOCK_D columns of the gradient of the memory per program.

    di and back, which is r: (directions, B, H, T, D). de, db: (directions * parts, B, H, T, K). carries: the gradient
    behind each chunk, (directions, B, H, chunks, K, D), if CARRY. All float32, dense."""
    number, line, batch, head, part, reverse = place(tl.program_id(0), lines, heads, parts, backwards)
    k, d = tl.arange(0, BLOCK_K), part * BLOCK_D + tl.arange(0, BLOCK_D)
    row, column = k < keys, d < dim
    cell, exists = k[:, None] * dim + d[None, :], row[:, None] & column[None, :]
    dy += batch * dy_b + head * dy_h
    i += batch * i_b + head * i_h
    e += batch * e_b + head * e_h
    s += batch * s_b + head * s_h
    a += batch * a_b + head * a_h
    b += batch * b_b + head * b_h
    if DECAY:
        gk += batch * gk_b + head * gk_h
    run = number * lines + line
    columns, rows = run * length * dim + d, ((number * parts + part) * lines + line) * length * keys + k
    own = (number == 0).to(tl.float32)
    grad = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    if LAST:
        grad = tl.load(dfinal + line * keys * dim + cell, mask=exists, other=0.0)
    for c in range(0, chunks):
        chunk = tl.where(reverse > 0, c, chunks - 1 - c)
        start, stop = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length)
        if CARRY:
            tl.store(carries + (run * chunks + chunk) * keys * dim + cell, grad, mask=exists)
        for n in range(0, stop - start):
            t = tl.where(reverse > 0, start + n, stop - 1 - n).to(tl.int64)
            shrunk = outer(load_vector(s + t * s_t, k, row), load_vector(dy + t * dy_t, d, column))
            into = grad + own * shrunk
            tl.store(di + t * dim + columns, tl.sum(into * load_vector(e + t * e_t, k, row)[:, None], 0), mask=column)
            tl.store(de + t * keys + rows, tl.sum(into * load_vector(i + t * i_t, d, column)[None, :], 1), mask=row)
            grad += shrunk
            r = tl.sum(grad * load_vector(b + t * b_t, k, row)[:, None], 0)
            tl.store(back + t * dim + columns, r, mask=column)
            w = load_vector(read + t * dim, columns, column)
            tl.store(db + t * keys + rows, tl.sum(grad * w[None, :], 1), mask=row)
            if DECAY:
                grad *= tl.exp(load_vector(gk + t * gk_t, k * gk_k, row))[:, None]
            grad += outer(load_vector(a + t * a_t, k, row), r)
    if STATE:
        tl.store(dstate + line * keys * dim + cell, grad, mask=exists)


@triton.jit(do_not_specialize=(*SIZES, *STRIDES, 'dy_b', 'dy_h', 'dy_t', 'chunks'))
def _eos_matmul_bwd_memory_kernel(
        dy, i, e, b, gk, state, read, back, carries, ds, da, seeds, dy_b, dy_h, dy_t,
        i_b, i_h, i_t, e_b, e_h, e_t, b_b, b_h, b_t, gk_b, gk_h, gk_t, gk_k,
        chunks, lines, heads, length, keys, dim, parts, backwards, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
        CHUNK: tl.constexpr, DECAY: tl.constexpr, STATE: tl.constexpr, CARRY: tl.constexpr):
    """Run along one line as the forward kernel does. ds, da: (directions * parts, B, H, T, K). seeds: sum_d G m behind
    each chunk, (directions * parts, B, H, chunks, K), if CARRY."""
    number, line, batch, head, part, reverse = place(tl.program_id(0), lines, heads, parts, backwards)
    k, d = tl.arange(0, BLOCK_K), part * BLOCK_D + tl.arange(0, BLOCK_D)
    row, column = k < keys, d < dim
    cell, exists = k[:, None] * dim + d[None, :], row[:, None] & column[None, :]
    dy += batch * dy_b + head * dy_h
    i += batch * i_b + head * i_h
    e += batch * e_b + head * e_h
    b += batch * b_b + head * b_h
    if DECAY:
        gk += batch * gk_b + head * gk_h
    run, share = number * lines + line, (number * parts + part) * lines + line
    columns, rows = run * length * dim + d, share * length * keys + k
    own = (number == 0).to(tl.float32)
    memory = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    if STATE:
        memory = tl.load(state + line * keys * dim + cell, mask=exists, other=0.0)
    for c in range(0, chunks):
        chunk = tl.where(reverse > 0, chunks - 1 - c, c)
        start, stop = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length)
        for n in range(0, stop - start):
            t = tl.where(reverse > 0, stop - 1 - n, start + n).to(tl.int64)
            r = load_vector(back + t * dim, columns, column)
            tl.store(da + t * keys + rows, tl.sum(memory * r[None, :], 1), mask=row)
            if DECAY:
                memory *= tl.exp(load_vector(gk + t * gk_t, k * gk_k, row))[:, None]
            memory += outer(load_vector(b + t * b_t, k, row), load_vector(read + t * dim, columns, column))
            added = outer(load_vector(e + t * e_t, k, row), load_vector(i + t * i_t, d, column))
            out = load_vector(dy + t * dy_t, d, column)
            tl.store(ds + t * keys + rows, tl.sum((memory + own * added) * out[None, :], 1), mask=row)
            memory += added
        if CARRY:
            grad = tl.load(carries + (run * chunks + chunk) * keys * dim + cell, mask=exists, other=0.0)
            tl.store(seeds + (share * chunks + chunk) * keys + k, tl.sum(grad * memory, 1), mask=row)


@triton.jit
def _sum_parts(pointer, parts, stride, mask):
    """Add up the sums over the columns of each tile."""
    result = tl.load(pointer, mask=mask, other=0.0)
    for part in range(1, parts):
        result += tl.load(pointer + part * stride, mask=mask, other=0.0)
    return result


@triton.jit(do_not_specialize=(*SIZES, *STRIDES, 'chunks'))
def _eos_matmul_bwd_sum_kernel(
        e, s, a, b, parts_e, parts_s, parts_a, parts_b, seeds, de, ds, da, db, dgk,
        e_b, e_h, e_t, s_b, s_h, s_t, a_b, a_h, a_t, b_b, b_h, b_t,
        chunks, lines, heads, length, keys, parts, backwards, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
        DIRECTIONS: tl.constexpr, DECAY: tl.constexpr, CARRY: tl.constexpr):
    """Add up BLOCK_K rows of one chunk per program. parts_*: (directions * parts, B, H, T, K); de, ds, da, db, dgk:
    (B, H, T, K), dense."""
    blocks = tl.cdiv(keys, BLOCK_K)
    chunk, line = tl.program_id(0) // blocks % chunks, (tl.program_id(0) // (blocks * chunks)).to(tl.int64)
    batch, head = line // heads, line % heads
    t, k = chunk * BLOCK + tl.arange(0, BLOCK).to(tl.int64), tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    row, mask = k < keys, (t < length)[:, None] & (k < keys)[None, :]
    here, stride = (line * length + t[:, None]) * keys + k[None, :], (lines * length).to(tl.int64) * keys
    expand = load_vector(e + batch * e_b + head * e_h, t[:, None] * e_t + k[None, :], mask)
    shrink = load_vector(s + batch * s_b + head * s_h, t[:, None] * s_t + k[None, :], mask)
    one = load_vector(a + batch * a_b + head * a_h, t[:, None] * a_t + k[None, :], mask)
    other = load_vector(b + batch * b_b + head * b_h, t[:, None] * b_t + k[None, :], mask)
    sum_e = tl.zeros((BLOCK, BLOCK_K), tl.float32)
    sum_s, sum_a, sum_b, sum_k = sum_e, sum_e, sum_e, sum_e
    for number in tl.static_range(DIRECTIONS):
        first = number * parts * stride + here
        part_e = _sum_parts(parts_e + first, parts, stride, mask)
        part_s = _sum_parts(parts_s + first, parts, stride, mask)
        part_a = _sum_parts(parts_a + first, parts, stride, mask)
        part_b = _sum_parts(parts_b + first, parts, stride, mask)
        sum_e += part_e
        sum_s += part_s
        sum_a += part_a
        sum_b += part_b
        if DECAY:
            from_a = one * part_a
            terms = shrink * part_s - other * part_b - expand * part_e + from_a
            sums = tl.cumsum(terms, 0)                                       # of this token and those before it
            sums = tl.where(backwards + number > 0, sums, tl.sum(terms, 0)[None, :] - sums + terms)
            if CARRY:
                behind = ((number * parts * lines + line) * chunks + chunk) * keys + k
                sums += _sum_parts(seeds + behind, parts, (lines * chunks).to(tl.int64) * keys, row)[None, :]
            sum_k += sums - from_a
    tl.store(de + here, sum_e.to(de.dtype.element_ty), mask=mask)
    tl.store(ds + here, sum_s.to(ds.dtype.element_ty), mask=mask)
    tl.store(da + here, sum_a.to(da.dtype.element_ty), mask=mask)
    tl.store(db + here, sum_b.to(db.dtype.element_ty), mask=mask)
    if DECAY:
        tl.store(dgk + here, sum_k, mask=mask)


def forward(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor], state: Optional[Tensor],
            direction: str, save: bool, last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output, w (directions, B, H, T, D) if `save`, and the last memory if `last`.

    gk: clamped step logs (B, H, T, K), where B, T and K may be 1, or None."""
    i, e, s, a, b = map(launch.unit_stride, (i, e, s, a, b))
    run = Lines('eos_matmul_fwd', i, e.shape[3], direction)
    y = run.columns(i, torch.float32 if run.directions > 1 else i.dtype)
    read = run.columns(i) if save else i.new_empty(0, dtype=torch.float32)
    final = i.new_empty((*i.shape[:2], e.shape[3], i.shape[3]) if last else 0, dtype=torch.float32)
    _eos_matmul_fwd_kernel[run.programs](
        i, e, s, a, b, gk, dense(state), y, read, final, *strides(i, e, s, a, b), *broadcast_strides(gk, 4),
        *run.sizes, DECAY=gk is not None, STATE=state is not None, SAVE=save, LAST=last, **run.constants)
    return total(y).to(i.dtype), read, final


def backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor,
             gk: Optional[Tensor], state: Optional[Tensor], read: Tensor, direction: str) -> Tuple[Tensor, ...]:
    """Return the gradients of i, e, s, a, b, gk and state; empty for those not given."""
    dy, i, e, s, a, b = map(launch.unit_stride, (dy, i, e, s, a, b))
    batch, heads, length, keys = e.shape
    run, chunks = Lines('eos_matmul_bwd', i, keys, direction, COLUMNS), launch.cdiv(length, CHUNK)
    options = {'DECAY': gk is not None, 'CARRY': gk is not None and (chunks > 1 or dfinal is not None)}
    di, back, (de, db, ds, da) = run.columns(i), run.columns(i), (run.rows(i) for _ in range(4))
    dstate = i.new_empty(0 if state is None else state.shape, dtype=torch.float32)
    carries = di.new_empty((run.directions, batch, heads, chunks, keys, run.dim) if options['CARRY'] else 0)
    seeds = di.new_empty((run.directions * run.parts, batch, heads, chunks, keys) if options['CARRY'] else 0)
    _eos_matmul_bwd_gradient_kernel[run.programs](
        dy, dense(dfinal), i, e, s, a, b, gk, read, di, back, de, db, carries, dstate, *strides(dy, i, e, s, a, b),
        *broadcast_strides(gk, 4), chunks, *run.sizes, CHUNK=CHUNK, STATE=state is not None, LAST=dfinal is not None,
        **options, **run.constants)
    _eos_matmul_bwd_memory_kernel[run.programs](
        dy, i, e, b, gk, dense(state), read, back, carries, ds, da, seeds, *strides(dy, i, e, b),
        *broadcast_strides(gk, 4), chunks, *run.sizes, CHUNK=CHUNK, STATE=state is not None, **options, **run.constants)
    sums = [launch.dense_like(x) for x in (e, s, a, b)]
    dgk = di.new_empty(0 if gk is None else e.shape)
    _eos_matmul_bwd_sum_kernel[launch.programs(run.lines * chunks * launch.cdiv(keys, SUM_ROWS))](
        e, s, a, b, de, ds, da, db, seeds, *sums, dgk, *strides(e, s, a, b), chunks, run.lines, heads, length, keys,
        run.parts, run.sizes[-1], BLOCK=CHUNK, BLOCK_K=SUM_ROWS, DIRECTIONS=run.directions, **options,
        **launch.options('eos_matmul_bwd_sum', e.dtype, CHUNK, SUM_ROWS))
    return (total(di), *sums, dgk if gk is None else dgk.sum_to_size(gk.shape), dstate)
