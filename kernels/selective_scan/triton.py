"""Triton kernels of the selective scan. A program goes along one path of one image with BLOCK_D channels, and holds
their states, a tile (N, BLOCK_D), in registers. It loads tokens from where they lie, so that no tensor is flipped
or transposed, and computes steps and decays from what it loads. All arithmetic is float32.

The outputs of paths are stored apart and added by `torch.sum`: no atomic operation. The forward kernel stores the
states before every SPACING tokens. The backward kernel takes these from the last to the first. It computes the states
of the tokens behind again, and keeps them in a workspace of its own. Then it goes back through these tokens with
G_t, the gradient of h_t:

    G_{t-1} = o_t * G_t + c_{t-1} dy_{t-1}',   dx = G' b,   db = G x,   dc = h dy,   dlog o = G * o * h_{t-1}

for x = step u.
"""
from typing import Dict, List, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.numerics import STEP_LOG_MIN
from ..common.tiles import LOG2E, softplus
from ..eos_scan.chunks import SPACING
from ..eos_scan.memory_tiles import load_vector, outer
from .grid_paths import token_rows

SIZES = ('height', 'width', 'channels', 'states', 'parts', 'paths', 'columns_first', 'backwards')
STRIDES = ('u_b', 'u_t', 'delta_b', 'delta_t', 'delta_p', 'b_b', 'b_t', 'b_p', 'c_b', 'c_t', 'c_p')
# Numbers of a tile of more than 16 columns, and its columns, at most.
TILE, LARGEST_COLUMNS = 256, 64
# Programs of a backward kernel and numbers of their workspace at most.
RESIDENT, WORKSPACE = 2112, 1 << 25
LEAST = tl.constexpr(STEP_LOG_MIN * 1.4426950408889634)


@triton.jit
def _place(n, height, width, columns_first, backwards):
    """Return where in the grid the n-th token of a path lies."""
    n = tl.where(backwards > 0, height * width - 1 - n, n)
    return tl.where(columns_first > 0, n % height * width + n // height, n).to(tl.int64)


@triton.jit
def _sigmoid(x):
    t = tl.exp2(-tl.abs(x) * LOG2E)
    return tl.where(x > 0, 1.0, t) / (1 + t)


@triton.jit(do_not_specialize=(*SIZES, *STRIDES))
def _selective_scan_fwd_kernel(
        u, delta, a, b, c, skip, bias, y, states_kept, u_b, u_t, delta_b, delta_t, delta_p, b_b, b_t, b_p, c_b, c_t,
        c_p, height, width, channels, states, parts, paths, columns_first, backwards,
        BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SPACING: tl.constexpr, SAVE: tl.constexpr):
    """y: (B, P, T, D), dense. states_kept: (B, P, chunks, N, D)."""
    run, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    batch, path = run // paths, run % paths
    k, d = tl.arange(0, BLOCK_K), part * BLOCK_D + tl.arange(0, BLOCK_D)
    row, column = k < states, d < channels
    cell, exists = k[:, None] * channels + d[None, :], row[:, None] & column[None, :]
    u += batch * u_b
    delta += batch * delta_b + path * delta_p
    b += batch * b_b + path * b_p
    c += batch * c_b + path * c_p
    y += run * height * width * channels
    down, back = (columns_first >> path) & 1, (backwards >> path) & 1
    rates = load_vector(a + path * states * channels, cell, exists) * LOG2E
    start, factor = load_vector(bias + path * channels, d, column), load_vector(skip + path * channels, d, column)
    memory = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    length = height * width
    chunks = tl.cdiv(length, SPACING)
    for chunk in range(0, chunks):
        if SAVE:
            tl.store(states_kept + (run * chunks + chunk) * states * channels + cell, memory, mask=exists)
        for n in range(chunk * SPACING, tl.minimum(chunk * SPACING + SPACING, length)):
            t = _place(n, height, width, down, back)
            x = load_vector(u + t * u_t, d, column)
            step = softplus(load_vector(delta + t * delta_t, d, column) + start)
            decay = tl.exp2(tl.maximum(step[None, :] * rates, LEAST))
            memory = decay * memory + outer(load_vector(b + t * b_t, k, row), step * x)
            out = tl.sum(load_vector(c + t * c_t, k, row)[:, None] * memory, 0) + factor * x
            tl.store(y + t * channels + d, out.to(y.dtype.element_ty), mask=column)


@triton.jit(do_not_specialize=(*SIZES, *STRIDES, 'dy_b', 'dy_t', 'count'))
def _selective_scan_bwd_kernel(
        dy, u, delta, a, b, c, skip, bias, states_kept, workspace, du, ddelta, da, db, dc, dskip, dbias, dy_b, dy_t,
        u_b, u_t, delta_b, delta_t, delta_p, b_b, b_t, b_p, c_b, c_t, c_p, count,
        height, width, channels, states, parts, paths, columns_first, backwards,
        BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SPACING: tl.constexpr):
    """Compute all gradients of BLOCK_D channels of every path that a program works on, `count` in all.

    du, ddelta: (B, P, T, D). da: (B, P, N, D). db, dc: (parts, B, P, T, N). dskip, dbias: (B, P, D).
    workspace: (programs, SPACING, BLOCK_K, BLOCK_D)."""
    k, tile_d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    place_of = k[:, None] * BLOCK_D + tile_d[None, :]
    workspace += tl.program_id(0).to(tl.int64) * SPACING * BLOCK_K * BLOCK_D
    row, length = k < states, height * width
    chunks = tl.cdiv(length, SPACING)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        run, part = (index // parts).to(tl.int64), index % parts
        batch, path = run // paths, run % paths
        d = part * BLOCK_D + tile_d
        column = d < channels
        cell, exists = k[:, None] * channels + d[None, :], row[:, None] & column[None, :]
        lead_u, lead_delta, lead_dy = batch * u_b, batch * delta_b + path * delta_p, batch * dy_b
        lead_b, lead_c = batch * b_b + path * b_p, batch * c_b + path * c_p
        columns, rows = run * length * channels + d, (part * (count // parts) + run) * length * states + k
        down, back = (columns_first >> path) & 1, (backwards >> path) & 1
        rates = load_vector(a + path * states * channels, cell, exists)
        start, factor = load_vector(bias + path * channels, d, column), load_vector(skip + path * channels, d, column)
        grad = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        sum_a, sum_skip, sum_bias = grad, tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
        for chunk in range(0, chunks):
            first = (chunks - 1 - chunk) * SPACING
            size = tl.minimum(SPACING, length - first)
            memory = tl.load(states_kept + (run * chunks + chunks - 1 - chunk) * states * channels + cell, mask=exists,
                             other=0.0)
            tl.debug_barrier()                           # all threads have read what the last chunk wrote
            for n in range(0, size):
                tl.store(workspace + n * (BLOCK_K * BLOCK_D) + place_of, memory)
                t = _place(first + n, height, width, down, back)
                x = load_vector(u + lead_u + t * u_t, d, column)
                step = softplus(load_vector(delta + lead_delta + t * delta_t, d, column) + start)
                decay = tl.exp2(tl.maximum(step[None, :] * rates * LOG2E, LEAST))
                memory = decay * memory + outer(load_vector(b + lead_b + t * b_t, k, row), step * x)
            tl.debug_barrier()                           # other threads may read the memories than wrote them
            for n in range(0, size):
                t = _place(first + size - 1 - n, height, width, down, back)
                before = tl.load(workspace + (size - 1 - n) * (BLOCK_K * BLOCK_D) + place_of)
                x, out = load_vector(u + lead_u + t * u_t, d, column), load_vector(dy + lead_dy + t * dy_t, d, column)
                raw = load_vector(delta + lead_delta + t * delta_t, d, column) + start
                step = softplus(raw)
                log = step[None, :] * rates * LOG2E
                kept = tl.exp2(tl.maximum(log, LEAST)) * before
                key = load_vector(b + lead_b + t * b_t, k, row)[:, None]
                memory = kept + key * (step * x)[None, :]
                tl.store(dc + t * states + rows, tl.sum(memory * out[None, :], 1), mask=row)
                grad += outer(load_vector(c + lead_c + t * c_t, k, row), out)
                tl.store(db + t * states + rows, tl.sum(grad * (step * x)[None, :], 1), mask=row)
                dx = tl.sum(grad * key, 0)
                dlog = tl.where(log < LEAST, 0.0, grad * kept)
                sum_a += dlog * step[None, :]
                draw = (tl.sum(dlog * rates, 0) + dx * x) * _sigmoid(raw)
                tl.store(du + t * channels + columns, dx * step + factor * out, mask=column)
                tl.store(ddelta + t * channels + columns, draw, mask=column)
                sum_skip += out * x
                sum_bias += draw
                grad *= tl.exp2(tl.maximum(log, LEAST))
        tl.store(da + run * states * channels + cell, sum_a, mask=exists)
        tl.store(dskip + run * channels + d, sum_skip, mask=column)
        tl.store(dbias + run * channels + d, sum_bias, mask=column)


def _arguments(kernel: str, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor
               ) -> Tuple[List[Tensor], List[int], List[int], Dict[str, int]]:
    """Return the tensors that both kernels load, their strides, the sizes but for the masks of paths, and constants."""
    (u, *of_u, _), (delta, *of_delta), (b, *of_b), (c, *of_c) = (token_rows(x) for x in (u, delta, b, c))
    launch.check_grid(u, delta, b, c)
    paths, channels, states = a.shape
    block_k = 1 << (states - 1).bit_length()
    block_d = min(LARGEST_COLUMNS, max(16, TILE // block_k), launch.padded_power_of_two(channels))
    sizes = [*u.shape[1:], states, launch.cdiv(channels, block_d), paths]
    constants = {'BLOCK_K': block_k, 'BLOCK_D': block_d, 'SPACING': SPACING,
                 **launch.options(kernel, u.dtype, block_d, max(16, block_k))}
    dense = [x.float().contiguous() for x in (a.mT, skip, bias)]
    return [u, delta, dense[0], b, c, *dense[1:]], [*of_u, *of_delta, *of_b, *of_c], sizes, constants


def forward(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor, columns_first: int,
            backwards: int, save: bool) -> Tuple[Tensor, Tensor]:
    """Return the output and, with `save`, the states before every SPACING tokens: (B, P, chunks, N, D)."""
    tensors, strides, sizes, constants = _arguments('selective_scan_fwd', u, delta, a, b, c, skip, bias)
    batch, (height, width, channels, states, parts, paths) = u.shape[0], sizes
    chunks = launch.cdiv(height * width, SPACING)
    y = u.new_empty((batch, paths, height, width, channels), dtype=torch.float32 if paths > 1 else u.dtype)
    kept = u.new_empty((batch, paths, chunks, states, channels) if save else 0, dtype=torch.float32)
    _selective_scan_fwd_kernel[launch.programs(batch * paths * parts)](
        *tensors, y, kept, *strides, *sizes, columns_first, backwards, SAVE=save, **constants)
    return (y[:, 0] if paths == 1 else y.sum(1).to(u.dtype)), kept


def backward(dy: Tensor, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor,
             kept: Tensor, columns_first: int, backwards: int) -> Tuple[Tensor, ...]:
    """Return the gradients of the seven tensors."""
    tensors, strides, sizes, constants = _arguments('selective_scan_bwd', u, delta, a, b, c, skip, bias)
    batch, (height, width, channels, states, parts, paths) = u.shape[0], sizes
    (dy, dy_batch, dy_token, _), count = token_rows(dy), batch * paths * parts
    tile = SPACING * constants['BLOCK_K'] * constants['BLOCK_D']
    programs = min(launch.programs(count)[0], RESIDENT, WORKSPACE // tile)

    def empty(*shape: int) -> Tensor:
        return u.new_empty(shape, dtype=torch.float32)

    du, ddelta = (empty(batch, paths, height, width, channels) for _ in range(2))
    db, dc = (empty(parts, batch, paths, height, width, states) for _ in range(2))
    da, dskip, dbias = empty(batch, paths, states, channels), *(empty(batch, paths, channels) for _ in range(2))
    _selective_scan_bwd_kernel[(programs,)](
        dy, *tensors, kept, empty(programs * tile), du, ddelta, da, db, dc, dskip, dbias, dy_batch, dy_token,
        *strides, count, *sizes, columns_first, backwards, **constants)

    def by_token(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1, 4)
    grads = (du.sum(1), by_token(ddelta), da.sum(0).mT, by_token(db.sum(0)), by_token(dc.sum(0)), dskip.sum(0),
             dbias.sum(0))
    return tuple(grad.to(x.dtype).contiguous() for grad, x in zip(grads, (u, delta, a, b, c, skip, bias)))
