"""Triton kernels of one axis of the polyline scan (PPMA, Algorithm 1), y[j] = sum_l exp(-|S[j] - S[l]|) x[l].

With alpha[t] = exp(step[t]) the scan is two first-order recurrences, one in each direction:

    f[t] = x[t] + alpha[t] f[t-1],    g[t] = x[t] + alpha[t+1] g[t+1],    y = f + g - x.

Kernels multiply decays and never sum their logs, so steps of any size are exact. The mask is symmetric, so the gradient
of x is the same scan of dy. With f', g' the recurrences of dy,

    d step[t] = sum_d (f[t] - x[t]) g'[t] + (f'[t] - dy[t]) g[t].

A line of up to LONGEST tokens is one tile, which is read and written once. Longer lines are read twice: a sweep against
the axis stores the states g at the ends of tiles, and a sweep along the axis computes the rest.
"""
from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch

LONGEST = 512
TILE_ELEMENTS = 2048


@triton.jit
def _compose(decay1, x1, decay2, x2):
    """Compose two maps s -> decay * s + x."""
    return decay1 * decay2, x1 * decay2 + x2


@triton.jit
def _recurrence(x, decay, state, REVERSE: tl.constexpr):
    """Compute s[t] = x[t] + decay[t] s[t-1] (or s[t+1]) in a tile (BLOCK, BLOCK_D); `state` (BLOCK_D,) precedes it."""
    decays, states = tl.associative_scan((decay, x), 0, _compose, reverse=REVERSE)
    return states + decays * state[None, :]


@triton.jit
def _load(pointer, t, stride, length, d, DIM: tl.constexpr):
    """Load tokens t of a line, (len(t), len(d)) in float32, and zeros beyond its end."""
    x = tl.load(pointer + t[:, None] * stride + d[None, :], mask=(t < length)[:, None] & (d < DIM)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _load_decay(steps, t, stride, length, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load alpha[t] for 0 < t < length and 0 elsewhere, broadcast to all channels: (BLOCK, BLOCK_D)."""
    alpha = tl.exp(tl.load(steps + t * stride, mask=(t > 0) & (t < length), other=-float('inf')))
    return tl.broadcast_to(alpha[:, None], (BLOCK, BLOCK_D))


@triton.jit
def _row(x, index, BLOCK: tl.constexpr):
    """Return row `index` of a tile: (BLOCK_D,)."""
    return tl.sum(tl.where((tl.arange(0, BLOCK) == index)[:, None], x, 0.0), 0)


@triton.jit
def _sweep_against(x, steps, states, x_t, step_t, length, tiles, d, DIM: tl.constexpr, BLOCK: tl.constexpr,
                   BLOCK_D: tl.constexpr):
    """Store g of the first token of tile n in states[n] (BLOCK_D,), for n = tiles - 1 down to 1."""
    state = tl.zeros((BLOCK_D,), tl.float32)
    for step in range(1, tiles):
        n = tiles - step
        t = n * BLOCK + tl.arange(0, BLOCK)
        g = _recurrence(_load(x, t, x_t, length, d, DIM),
                        _load_decay(steps, t + 1, step_t, length, BLOCK, BLOCK_D), state, True)
        state = _row(g, 0, BLOCK)
        tl.store(states + n * BLOCK_D + tl.arange(0, BLOCK_D), state)


@triton.jit
def _behind(states, n, tiles, BLOCK_D: tl.constexpr):
    """Load the state that enters tile n from its end: g of the first token of tile n + 1, or zero for the last."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(states + (n + 1) * BLOCK_D + d, mask=(d >= 0) & (n + 1 < tiles), other=0.0)


@triton.jit
def _polyline_scan_fwd_kernel(x, steps, y, states, length, inner, DIM: tl.constexpr, BLOCK: tl.constexpr,
                              BLOCK_D: tl.constexpr):
    """Scan BLOCK_D channels of one line per program. x, y: (outer, L, inner, DIM); steps: (outer, L, inner)."""
    parts: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    line = (tl.program_id(0) // parts).to(tl.int64)
    d = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    first = line // inner * length * inner + line % inner
    x += first * DIM
    y += first * DIM
    steps += first
    tiles = tl.cdiv(length, BLOCK)
    states += tl.program_id(0).to(tl.int64) * tiles * BLOCK_D
    if tiles > 1:
        _sweep_against(x, steps, states, inner * DIM, inner, length, tiles, d, DIM, BLOCK, BLOCK_D)
        tl.debug_barrier()                       # other threads read the states than wrote them
    before = tl.zeros((BLOCK_D,), tl.float32)
    for n in range(0, tiles):
        t = n * BLOCK + tl.arange(0, BLOCK)
        tile = _load(x, t, inner * DIM, length, d, DIM)
        f = _recurrence(tile, _load_decay(steps, t, inner, length, BLOCK, BLOCK_D), before, False)
        g = _recurrence(tile, _load_decay(steps, t + 1, inner, length, BLOCK, BLOCK_D),
                        _behind(states, n, tiles, BLOCK_D), True)
        before = _row(f, BLOCK - 1, BLOCK)
        tl.store(y + t[:, None] * (inner * DIM) + d[None, :], (f + g - tile).to(y.dtype.element_ty),
                 mask=(t < length)[:, None] & (d < DIM)[None, :])


@triton.jit
def _polyline_scan_bwd_kernel(x, steps, dy, dx, dsteps, states, states_dy, lines, length, inner, DIM: tl.constexpr,
                              BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute dx and dsteps as the forward kernel does y, from x and dy. dsteps: (channel parts, outer, L, inner)."""
    parts: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    line = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    first = line // inner * length * inner + line % inner
    x += first * DIM
    dy += first * DIM
    dx += first * DIM
    steps += first
    dsteps += part.to(tl.int64) * lines * length + first
    tiles = tl.cdiv(length, BLOCK)
    states += tl.program_id(0).to(tl.int64) * tiles * BLOCK_D
    states_dy += tl.program_id(0).to(tl.int64) * tiles * BLOCK_D
    if tiles > 1:
        _sweep_against(x, steps, states, inner * DIM, inner, length, tiles, d, DIM, BLOCK, BLOCK_D)
        _sweep_against(dy, steps, states_dy, inner * DIM, inner, length, tiles, d, DIM, BLOCK, BLOCK_D)
        tl.debug_barrier()
    before = tl.zeros((BLOCK_D,), tl.float32)
    before_dy = tl.zeros((BLOCK_D,), tl.float32)
    for n in range(0, tiles):
        t = n * BLOCK + tl.arange(0, BLOCK)
        into = _load_decay(steps, t, inner, length, BLOCK, BLOCK_D)
        onward = _load_decay(steps, t + 1, inner, length, BLOCK, BLOCK_D)
        tile = _load(x, t, inner * DIM, length, d, DIM)
        tile_dy = _load(dy, t, inner * DIM, length, d, DIM)
        f = _recurrence(tile, into, before, False)
        g_dy = _recurrence(tile_dy, onward, _behind(states_dy, n, tiles, BLOCK_D), True)
        dstep = tl.sum((f - tile) * g_dy, 1)
        before = _row(f, BLOCK - 1, BLOCK)
        f_dy = _recurrence(tile_dy, into, before_dy, False)
        g = _recurrence(tile, onward, _behind(states, n, tiles, BLOCK_D), True)
        dstep += tl.sum((f_dy - tile_dy) * g, 1)
        before_dy = _row(f_dy, BLOCK - 1, BLOCK)
        tl.store(dx + t[:, None] * (inner * DIM) + d[None, :], (f_dy + g_dy - tile_dy).to(dx.dtype.element_ty),
                 mask=(t < length)[:, None] & (d < DIM)[None, :])
        tl.store(dsteps + t * inner, dstep, mask=t < length)


class _Lines:
    """Launch of a pass along dimension `dim` of a dense x (..., D)."""

    def __init__(self, x: Tensor, dim: int, elements: int):
        self.length, channels = x.shape[dim], x.shape[-1]
        self.inner = x.shape[dim + 1:-1].numel()
        self.lines = x.shape[:dim].numel() * self.inner
        launch.check_line(self.length, self.inner * channels)
        self.block = min(LONGEST, max(16, triton.next_power_of_2(self.length)))
        block_d = min(triton.next_power_of_2(channels), max(8, elements // self.block))
        self.parts = triton.cdiv(channels, block_d)
        self.programs = launch.programs(self.lines * self.parts)
        self.tiles = triton.cdiv(self.length, self.block)
        self.constants = {'DIM': channels, 'BLOCK': self.block, 'BLOCK_D': block_d}

    def states(self, x: Tensor) -> Tensor:
        """Return memory for the states between tiles, empty for one tile."""
        count = self.programs[0] * self.tiles * self.constants['BLOCK_D'] if self.tiles > 1 else 0
        return x.new_empty(count, dtype=torch.float32)


def forward(x: Tensor, steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the scan of x (..., D) along `dim` in `dtype`; steps: float32, the shape of x without D."""
    x, steps = x.contiguous(), steps.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    axis = _Lines(x, dim, TILE_ELEMENTS)
    _polyline_scan_fwd_kernel[axis.programs](x, steps, y, axis.states(x), axis.length, axis.inner, **axis.constants,
                                             **launch.options('polyline_scan_fwd', x.dtype, axis.block))
    return y


def backward(grad: Tensor, x: Tensor, steps: Tensor, dim: int) -> Tuple[Tensor, Tensor]:
    """Return the gradients of x and steps."""
    x, grad, steps = x.contiguous(), grad.contiguous(), steps.contiguous()
    axis, dx = _Lines(x, dim, TILE_ELEMENTS // 2), torch.empty_like(x)
    dsteps = steps.new_empty(axis.parts, *steps.shape)
    _polyline_scan_bwd_kernel[axis.programs](
        x, steps, grad, dx, dsteps, axis.states(x), axis.states(x), axis.lines, axis.length, axis.inner,
        **axis.constants, **launch.options('polyline_scan_bwd', x.dtype, axis.block))
    return dx, dsteps.sum(0)
