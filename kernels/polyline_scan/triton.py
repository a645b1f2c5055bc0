"""Triton kernels of one axis of the polyline scan (PPMA, Algorithm 1), y[j] = sum_l exp(-|S[j] - S[l]|) x[l].

With alpha[t] = exp(step[t]) the scan is two first-order recurrences, one in each direction:

    f[t] = x[t] + alpha[t] f[t-1],    g[t] = x[t] + alpha[t+1] g[t+1],    y = f + g - x.

Within a tile of tokens the kernels multiply x by the matrix exp(-|S[j] - S[l]|): by its part below the diagonal for
f - x, by the rest for g. The mask is symmetric, so the gradient of x is the same scan of dy. With f', g' the
recurrences of dy,

    d step[t] = sum_d (f[t] - x[t]) g'[t] + (f'[t] - dy[t]) g[t],

which are sums of products without cancellation between distant tokens.

A short line is one tile, which is read and written once. Longer lines are read twice: a sweep against the axis stores
the states g at the starts of tiles, and a sweep along the axis computes the rest.

Accuracy. Sums of steps are float64, from the start of a tile. `_decays` rounds them to float32. A sum is at most 64
steps of 80 nats, 7387 in units of log 2, so the rounding changes a weight by a factor of at most 1 + 3.4e-4. That is
less than one rounding to float16 or bfloat16, but small steps behind a few of -80 would lose digits of float32. If
input and output are float32, EXACT adds the difference of the rounding errors. What remains is the rounding of the gap
itself, a factor of 1 + 2^-24 |gap| on a weight of 2^-|gap|, which is at most 3.2e-8 of x[l]. So steps of any size are
exact in one form, and no other is chosen for large ones.
On NVIDIA GPUs a product is a sum of TF32 products, of 11 leading bits and of the next 11 bits, which leaves out at most
3 * 2^-20 of a product. Elsewhere products are float32.
"""
from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import LOG2E

# Tokens of the longest line that is one tile, at most and by kernel and target, and of the tiles of longer lines, whose
# programs hold more. The backward kernel keeps its matrices in registers, except where warp groups multiply.
LONGEST = 64
LONGEST_BY_TARGET = {'polyline_scan_fwd': {'default': 64}, 'polyline_scan_bwd': {'default': 32, 'cuda:90': 64}}
TILE_OF_LONG_LINES = {'polyline_scan_fwd': 32, 'polyline_scan_bwd': 16}
# Channels of a program's block at most, by kernel, for (one tile of 64, other single tiles, several tiles).
WIDEST = {'polyline_scan_fwd': {2: (64, 64, 64), 4: (64, 64, 64)},
          'polyline_scan_bwd': {2: (64, 64, 32), 4: (32, 64, 32)}}


@triton.jit
def _split(x):
    """Return the leading bits of float32 numbers, which TF32 holds, and the rest."""
    leading = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return leading, x - leading


@triton.jit
def _product(matrix, x, TF32: tl.constexpr):
    """Multiply a float32 matrix and x of any dtype to nearly float32 accuracy. Half types fit TF32."""
    if not TF32:
        y = tl.dot(matrix, x.to(tl.float32), input_precision='ieee')
    else:
        leading, rest = _split(matrix)
        if x.dtype == tl.float32:
            x_leading, x_rest = _split(x)
            y = tl.dot(leading, x_rest, input_precision='tf32')
            y = tl.dot(rest, x_leading, y, input_precision='tf32')
            y = tl.dot(leading, x_leading, y, input_precision='tf32')
        else:
            y = tl.dot(rest, x.to(tl.float32), input_precision='tf32')
            y = tl.dot(leading, x.to(tl.float32), y, input_precision='tf32')
    return y


@triton.jit
def _program(length, inner, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the first token of a program's line, in tokens of all lines, its block of channels, and the channels."""
    parts: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    line, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    outer = (line.to(tl.uint32) // inner.to(tl.uint32)).to(tl.int32)     # unsigned divisions are shorter
    first = outer.to(tl.int64) * length * inner + (line - outer * inner)
    return first, part, part * BLOCK_D + tl.arange(0, BLOCK_D)


@triton.jit
def _load(pointer, t, stride, length, d, DIM: tl.constexpr):
    """Load tokens t of a line, (len(t), len(d)), and zeros beyond its end."""
    return tl.load(pointer + t[:, None] * stride + d[None, :], mask=(t < length)[:, None] & (d < DIM)[None, :],
                   other=0.0)


@triton.jit
def _store(pointer, t, stride, length, d, x, DIM: tl.constexpr):
    tl.store(pointer + t[:, None] * stride + d[None, :], x.to(pointer.dtype.element_ty),
             mask=(t < length)[:, None] & (d < DIM)[None, :])


@triton.jit
def _sums(steps, t, stride, length):
    """Sum the step logs of tokens t, in units of log 2: (len(t),) in float64. No step leads to the first token."""
    step = tl.load(steps + t * stride, mask=(t > 0) & (t < length), other=0.0)
    return tl.cumsum(step.to(tl.float64) * LOG2E, 0)


@triton.jit
def _decays(sums, EXACT: tl.constexpr):
    """Compute exp(-|S[j] - S[l]|) of a tile from its sums S (BLOCK,): (BLOCK, BLOCK)."""
    rounded = sums.to(tl.float32)
    gap = rounded[:, None] - rounded[None, :]
    if EXACT:
        error = (sums - rounded.to(tl.float64)).to(tl.float32)
        gap += error[:, None] - error[None, :]
    return tl.exp2(tl.abs(gap) * -1.0)               # unlike a negation, this product becomes part of the exponential


@triton.jit
def _next_step(steps, n, stride, length, BLOCK: tl.constexpr):
    """Load the step into tile n + 1, in units of log 2, in float64; 0 beyond the end."""
    t = (n + 1) * BLOCK
    return tl.load(steps + t * stride, mask=t < length, other=0.0).to(tl.float64) * LOG2E


@triton.jit
def _to_state(x, decay):
    """Sum the tokens of a tile x (BLOCK, BLOCK_D) with their decays (BLOCK,) to a token: (BLOCK_D,)."""
    return tl.sum(x.to(tl.float32) * decay[:, None], 0)


@triton.jit
def _exp2(x):
    return tl.exp2(x.to(tl.float32))


@triton.jit
def _sweep_against(x, steps, states, x_t, step_t, length, tiles, d, DIM: tl.constexpr, BLOCK: tl.constexpr,
                   BLOCK_D: tl.constexpr):
    """Store g of the first token of tile n in states[n] (BLOCK_D,), for n = tiles - 1 down to 1."""
    state = tl.zeros((BLOCK_D,), tl.float32)
    for step in range(1, tiles):
        n = tiles - step
        t = n * BLOCK + tl.arange(0, BLOCK)
        sums = _sums(steps, t, step_t, length)
        first, last = tl.max(sums, 0), tl.min(sums, 0)                       # sums decrease
        onward = _exp2(last - first + _next_step(steps, n, step_t, length, BLOCK))
        state = _to_state(_load(x, t, x_t, length, d, DIM), _exp2(sums - first)) + onward * state
        tl.store(states + n * BLOCK_D + tl.arange(0, BLOCK_D), state)


@triton.jit
def _behind(states, n, tiles, BLOCK_D: tl.constexpr):
    """Load g of the first token of tile n + 1, or zero for the last tile: (BLOCK_D,)."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(states + (n + 1) * BLOCK_D + d, mask=(d >= 0) & (n + 1 < tiles), other=0.0)


@triton.jit(do_not_specialize=['length', 'inner'])
def _polyline_scan_fwd_kernel(x, steps, y, states, length, inner, DIM: tl.constexpr, BLOCK: tl.constexpr,
                              BLOCK_D: tl.constexpr, ONE_TILE: tl.constexpr, EXACT: tl.constexpr, TF32: tl.constexpr):
    """Scan BLOCK_D channels of one line per program. x, y: (outer, L, inner, DIM); steps: (outer, L, inner)."""
    first, _, d = _program(length, inner, DIM, BLOCK_D)
    x += first * DIM
    y += first * DIM
    steps += first
    if ONE_TILE:
        t = tl.arange(0, BLOCK)
        tile = _load(x, t, inner * DIM, length, d, DIM)
        decays = _decays(_sums(steps, t, inner, length), EXACT)
        _store(y, t, inner * DIM, length, d, _product(decays, tile, TF32), DIM)
    else:
        tiles = tl.cdiv(length, BLOCK)
        states += tl.program_id(0).to(tl.int64) * tiles * BLOCK_D
        _sweep_against(x, steps, states, inner * DIM, inner, length, tiles, d, DIM, BLOCK, BLOCK_D)
        tl.debug_barrier()                       # other threads read the states than wrote them
        before = tl.zeros((BLOCK_D,), tl.float32)
        for n in range(0, tiles):
            t = n * BLOCK + tl.arange(0, BLOCK)
            tile = _load(x, t, inner * DIM, length, d, DIM)
            sums = _sums(steps, t, inner, length)
            last = tl.min(sums, 0)
            result = _product(_decays(sums, EXACT), tile, TF32)
            result += _exp2(sums)[:, None] * before[None, :]
            leaving = _exp2(last - sums + _next_step(steps, n, inner, length, BLOCK))
            result += leaving[:, None] * _behind(states, n, tiles, BLOCK_D)[None, :]
            before = _to_state(tile, _exp2(last - sums)) + _exp2(last) * before
            _store(y, t, inner * DIM, length, d, result, DIM)


@triton.jit
def _recurrences(x, decays, TF32: tl.constexpr):
    """Compute f - x and g of a tile x (BLOCK, BLOCK_D) without the states around it."""
    j = tl.arange(0, decays.shape[0])
    earlier = j[:, None] > j[None, :]
    return (_product(tl.where(earlier, decays, 0.0), x, TF32), _product(tl.where(earlier, 0.0, decays), x, TF32))


@triton.jit(do_not_specialize=['lines', 'length', 'inner'])
def _polyline_scan_bwd_kernel(x, steps, dy, dx, dsteps, states, states_dy, lines, length, inner, DIM: tl.constexpr,
                              BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ONE_TILE: tl.constexpr, EXACT: tl.constexpr,
                              TF32: tl.constexpr):
    """Compute dx and dsteps as the forward kernel does y, from x and dy. dsteps: (channel parts, outer, L, inner)."""
    first, part, d = _program(length, inner, DIM, BLOCK_D)
    x += first * DIM
    dy += first * DIM
    dx += first * DIM
    steps += first
    dsteps += part.to(tl.int64) * lines * length + first
    if ONE_TILE:
        t = tl.arange(0, BLOCK)
        tile, tile_dy = _load(x, t, inner * DIM, length, d, DIM), _load(dy, t, inner * DIM, length, d, DIM)
        decays = _decays(_sums(steps, t, inner, length), EXACT)
        f, g = _recurrences(tile, decays, TF32)
        f_dy, g_dy = _recurrences(tile_dy, decays, TF32)
        _store(dx, t, inner * DIM, length, d, f_dy + g_dy, DIM)
        tl.store(dsteps + t * inner, tl.sum(f * g_dy + f_dy * g, 1), mask=t < length)
    else:
        tiles = tl.cdiv(length, BLOCK)
        states += tl.program_id(0).to(tl.int64) * tiles * BLOCK_D
        states_dy += tl.program_id(0).to(tl.int64) * tiles * BLOCK_D
        _sweep_against(x, steps, states, inner * DIM, inner, length, tiles, d, DIM, BLOCK, BLOCK_D)
        _sweep_against(dy, steps, states_dy, inner * DIM, inner, length, tiles, d, DIM, BLOCK, BLOCK_D)
        tl.debug_barrier()
        before = tl.zeros((BLOCK_D,), tl.float32)
        before_dy = tl.zeros((BLOCK_D,), tl.float32)
        for n in range(0, tiles):
            t = n * BLOCK + tl.arange(0, BLOCK)
            tile, tile_dy = _load(x, t, inner * DIM, length, d, DIM), _load(dy, t, inner * DIM, length, d, DIM)
            sums = _sums(steps, t, inner, length)
            last = tl.min(sums, 0)
            decays = _decays(sums, EXACT)
            entering, rest = _exp2(sums), _exp2(last - sums)
            leaving = _exp2(last - sums + _next_step(steps, n, inner, length, BLOCK))
            f, g = _recurrences(tile, decays, TF32)
            f_dy, g_dy = _recurrences(tile_dy, decays, TF32)
            f += entering[:, None] * before[None, :]
            g += leaving[:, None] * _behind(states, n, tiles, BLOCK_D)[None, :]
            f_dy += entering[:, None] * before_dy[None, :]
            g_dy += leaving[:, None] * _behind(states_dy, n, tiles, BLOCK_D)[None, :]
            before = _to_state(tile, rest) + _exp2(last) * before
            before_dy = _to_state(tile_dy, rest) + _exp2(last) * before_dy
            _store(dx, t, inner * DIM, length, d, f_dy + g_dy, DIM)
            tl.store(dsteps + t * inner, tl.sum(f * g_dy + f_dy * g, 1), mask=t < length)


class _Lines:
    """Launch of a kernel along dimension `dim` of a dense x (..., D); `other`: dtype of the result or its gradient."""

    def __init__(self, kernel: str, x: Tensor, dim: int, other: torch.dtype):
        self.length, channels = x.shape[dim], x.shape[-1]
        self.inner = x.shape[dim + 1:-1].numel()
        self.lines = x.shape[:dim].numel() * self.inner
        launch.check_line(self.length, self.inner * channels)
        backend, arch = launch.target()
        longest = LONGEST_BY_TARGET[kernel]
        longest = min(LONGEST, longest.get(f'{backend}:{arch}', longest['default']))
        one_tile = self.length <= longest
        block = launch.padded_power_of_two(self.length) if one_tile else min(longest, TILE_OF_LONG_LINES[kernel])
        smaller = min(x.dtype, other, key=lambda dtype: dtype.itemsize)
        size = smaller.itemsize
        block_d = min(WIDEST[kernel][size][0 if block == 64 else 2 - one_tile], launch.padded_power_of_two(channels))
        self.parts = launch.cdiv(channels, block_d)
        self.programs = launch.programs(self.lines * self.parts)
        self.tiles = launch.cdiv(self.length, block)
        self.constants = {'DIM': channels, 'BLOCK': block, 'BLOCK_D': block_d, 'ONE_TILE': one_tile,
                          'EXACT': size == 4, 'TF32': backend == 'cuda' and int(arch) >= 80,
                          **launch.options(kernel, smaller, block, block_d)}

    def states(self, x: Tensor) -> Tensor:
        """Return memory for the states between tiles, empty for one tile."""
        count = self.programs[0] * self.tiles * self.constants['BLOCK_D'] if self.tiles > 1 else 0
        return x.new_empty(count, dtype=torch.float32)


def forward(x: Tensor, steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the scan of x (..., D) along `dim` in `dtype`; steps: float32, the shape of x without D."""
    x, steps = x.contiguous(), steps.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    axis = _Lines('polyline_scan_fwd', x, dim, dtype)
    _polyline_scan_fwd_kernel[axis.programs](x, steps, y, axis.states(x), axis.length, axis.inner, **axis.constants)
    return y


def backward(grad: Tensor, x: Tensor, steps: Tensor, dim: int) -> Tuple[Tensor, Tensor]:
    """Return the gradients of x and steps."""
    x, grad, steps = x.contiguous(), grad.contiguous(), steps.contiguous()
    axis, dx = _Lines('polyline_scan_bwd', x, dim, grad.dtype), torch.empty_like(x)
    dsteps = steps.new_empty(axis.parts, *steps.shape)
    _polyline_scan_bwd_kernel[axis.programs](
        x, steps, grad, dx, dsteps, axis.states(x), axis.states(x), axis.lines, axis.length, axis.inner,
        **axis.constants)
    return dx, dsteps.sum(0)
