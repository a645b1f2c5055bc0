"""Triton kernels of decay attention (PPMA, section 3.4), on all lines of a grid at once:

    additive:        y[j] = sum_l softmax_l(q[j] k[l]' + D[j, l]) v[l]
    multiplicative:  y[j] = sum_l softmax_l(q[j] k[l]') exp(D[j, l]) v[l],       D[j, l] = -|S[j] - S[l]|

A line is a row or a column of the grid. Kernels find its tokens by strides, so they read columns without a copy. A line
of at most one tile (64 tokens; fewer for wide heads) is computed whole by one program, which adds up the step logs
itself: one product, one softmax, one product. Longer lines run tile by tile with a running softmax, on sums that are
made once. `triton_backward.py` has the gradients.

The kernels can apply one set of weights to two tensors of values, and take the mean with an earlier result: criss-cross
attention needs both.
"""
from typing import Any, Dict, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.numerics import STEP_LOG_MIN, rounded_sums
from ..common.tiles import INF, LOG2E, dot, load_tokens, store_tokens

# Arguments that change with the size of the grid, or between the launches of criss-cross attention. Triton would
# compile a kernel again where one is 1 or divisible by 16. The strides of q, k and v stay specialized: loads of several
# channels at once depend on them.
SIZES = ('heads', 'lines', 'length', 'token_line', 'token_j', 's_b', 's_h', 's_line', 's_j', 'mean', 'second', 'add')
LEAST_STEP = tl.constexpr(STEP_LOG_MIN)


@triton.jit
def place(heads, lines, blocks):
    """Return batch, line, head and tile of a program. Programs of the heads of a line, which lie side by side in
    memory, follow each other."""
    program = tl.program_id(0) // blocks
    return ((program // heads // lines).to(tl.int64), (program // heads % lines).to(tl.int64),
            (program % heads).to(tl.int64), tl.program_id(0) % blocks)


@triton.jit
def load_line(pointer, index, stride, limit, other):
    return tl.load(pointer + index * stride, mask=index < limit, other=other)


@triton.jit
def load_steps(steps, j, stride, length):
    """Load the step logs of a line; 0 for its first token, which no step leads to, and for tokens beyond the line."""
    return tl.load(steps + j * stride, mask=(j > 0) & (j < length), other=0.0).to(tl.float64)


@triton.jit
def line_sums(steps):
    """Return the cumulative sums of the step logs, added in float64 and rounded once."""
    steps = tl.where(steps > 0.0, 0.0, tl.where(steps < LEAST_STEP, LEAST_STEP, steps))
    return tl.cumsum(steps, 0).to(tl.float32)


@triton.jit
def line_exponentials(query, key, sums, j, length, MULTIPLICATIVE: tl.constexpr, PRECISION: tl.constexpr):
    """Return exponentials of the logits of a whole line (j, l), 1 for the largest of a query, and those times the mask.

    The two are the same if the mask is a part of the logits."""
    # An infinite sum gives keys beyond the line a log mask of -inf.
    distance = tl.abs(sums[:, None] - tl.where(j < length, sums, INF)[None, :])
    logits = dot(query, tl.trans(key), PRECISION)
    if MULTIPLICATIVE:
        logits = tl.where((j < length)[None, :], logits, -INF)
    else:
        logits -= distance
    p = tl.exp2(logits * LOG2E - (tl.max(logits, 1) * LOG2E)[:, None])
    return p, p * tl.exp2(distance * -LOG2E) if MULTIPLICATIVE else p


@triton.jit
def _store_result(out, earlier, offset, index, stride, length, y, mean, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store y or, if `mean`, its mean with the earlier result (if there is one) at the same place."""
    if earlier is not None:
        if mean:
            y = 0.5 * (y + load_tokens(earlier + offset, index, stride, length, DIM, BLOCK_D, False).to(tl.float32))
    store_tokens(out + offset, index, stride, length, y, DIM, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def _decay_attention_fwd_line_kernel(
        q, k, v, steps, out, v_2, out_2, earlier, mean, heads, lines, length, token_line, token_j,
        s_b, s_h, s_line, s_j, q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j, v_b, v_h, v_line, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, SECOND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute y for one whole line per program; if SECOND, also y_2 from v_2 with the same weights."""
    batch, line, head, _ = place(heads, lines, 1)
    j = tl.arange(0, BLOCK)
    query = load_tokens(q + batch * q_b + head * q_h + line * q_line, j, q_j, length, DIM, BLOCK_D, UPCAST)
    key = load_tokens(k + batch * k_b + head * k_h + line * k_line, j, k_j, length, DIM, BLOCK_D, UPCAST)
    value = load_tokens(v + batch * v_b + head * v_h + line * v_line, j, v_j, length, DIM_V, BLOCK_V, UPCAST)
    sums = line_sums(load_steps(steps + batch * s_b + head * s_h + line * s_line, j, s_j, length))
    p, weights = line_exponentials(query, key, sums, j, length, MULTIPLICATIVE, PRECISION)
    share = 1.0 / tl.sum(p, 1)[:, None]
    weights = weights.to(value.dtype)
    first = ((batch * lines * length + line * token_line) * heads + head) * DIM_V
    stride = token_j * heads * DIM_V
    _store_result(out, earlier, first, j, stride, length, dot(weights, value, PRECISION) * share, mean, DIM_V, BLOCK_V)
    if SECOND:
        value = load_tokens(v_2 + first, j, stride, length, DIM_V, BLOCK_V, UPCAST)
        store_tokens(out_2 + first, j, stride, length, dot(weights, value, PRECISION) * share, DIM_V, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def _decay_attention_fwd_kernel(
        q, k, v, sums, lse, out, v_2, out_2, earlier, mean, second, heads, lines, length, token_line, token_j,
        s_b, s_h, s_line, s_j, q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j, v_b, v_h, v_line, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, SECOND: tl.constexpr, SAVE: tl.constexpr,
        UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the same for one tile of queries of a long line per program, over all keys of the line.

    y_2 is only computed if `second` is 1: a launch without v_2 may pass any tensors in place of v_2 and out_2."""
    batch, line, head, block = place(heads, lines, tl.cdiv(length, BLOCK))
    j = block * BLOCK + tl.arange(0, BLOCK)
    at_line = batch * s_b + head * s_h + line * s_line
    sums += at_line
    k += batch * k_b + head * k_h + line * k_line
    v += batch * v_b + head * v_h + line * v_line
    first = ((batch * lines * length + line * token_line) * heads + head) * DIM_V
    stride = token_j * heads * DIM_V
    query = load_tokens(q + batch * q_b + head * q_h + line * q_line, j, q_j, length, DIM, BLOCK_D, UPCAST)
    sums_j = load_line(sums, j, s_j, length, 0.0)
    top = tl.full((BLOCK,), -INF, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    y = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    y_2 = y
    for start in range(0, length, BLOCK):
        l = start + tl.arange(0, BLOCK)
        key = load_tokens(k, l, k_j, length, DIM, BLOCK_D, UPCAST)
        value = load_tokens(v, l, v_j, length, DIM_V, BLOCK_V, UPCAST)
        distance = tl.abs(sums_j[:, None] - load_line(sums, l, s_j, length, INF)[None, :])
        logits = dot(query, tl.trans(key), PRECISION)
        if MULTIPLICATIVE:
            logits = tl.where((l < length)[None, :], logits, -INF)
        else:
            logits -= distance
        new_top = tl.maximum(top, tl.max(logits, 1) * LOG2E)
        scale = tl.exp2(top - new_top)
        p = tl.exp2(logits * LOG2E - new_top[:, None])
        top, total = new_top, total * scale + tl.sum(p, 1)
        weights = p * tl.exp2(distance * -LOG2E) if MULTIPLICATIVE else p
        weights = weights.to(value.dtype)
        y = y * scale[:, None] + dot(weights, value, PRECISION)
        if SECOND:
            # The load is masked instead of conditional, because loads inside of conditions are not pipelined.
            value = load_tokens(v_2 + first, l, stride, length * second, DIM_V, BLOCK_V, UPCAST)
            if second:
                y_2 = y_2 * scale[:, None] + dot(weights, value, PRECISION)
    share = 1.0 / total[:, None]
    _store_result(out, earlier, first, j, stride, length, y * share, mean, DIM_V, BLOCK_V)
    if SECOND:
        store_tokens(out_2 + first, j, stride, length * second, y_2 * share, DIM_V, BLOCK_V)
    if SAVE:
        tl.store(lse + at_line + j * s_j, top + tl.log2(total), mask=j < length)


class Lines:
    """The lines of a grid along one axis, and what their launches share: tile, strides, sums and constants.

    Args:
        q, k: (B, heads, H, W, D); any strides.
        steps: step logs along the axis, (B, heads, H, W); any strides.
        dim_v: channels of the values.
        axis: 'row' or 'column'.
        save: keep the log-sum-exps of long lines for the backward pass.
        statistics: those of the forward pass, in the backward pass.

    Attributes:
        whole: whether a line fits a tile. Kernels then make the sums.
        statistics: sums and log2-sum-exps of long lines, (2, B, heads, H, W) in float32; empty for whole lines, or if
            nothing is saved.
    """

    def __init__(self, q: Tensor, k: Tensor, steps: Tensor, dim_v: int, axis: str, mask_mode: str, *,
                 save: bool = False, statistics: Optional[Tensor] = None):
        batch, heads, height, width, dim = q.shape
        self.down = down = axis == 'column'
        lines, length = (width, height) if down else (height, width)
        self.q, self.k, self.steps = launch.unit_stride(q), launch.unit_stride(k), steps
        launch.check_line(length, *(x.stride(2 if down else 3) for x in (self.q, self.k, steps)),
                          (width if down else 1) * heads * max(dim, dim_v))
        self.whole = launch.fits_tile('decay_attention', q.dtype, length, dim, dim_v)
        long = f"decay_attention_long_{'fwd' if statistics is None else 'bwd'}"
        self.side = (launch.padded_power_of_two(length) if self.whole
                     else launch.largest_tile(long, q.dtype, dim, dim_v))
        self.programs = launch.programs(batch * heads * lines * launch.cdiv(length, self.side))
        self.sums, self.lse, self.statistics = self._sums(save, statistics)
        self.sizes = (heads, lines, length, *((1, width) if down else (width, 1)), *launch.strides(self.sums, down))
        self.strides = (*launch.strides(self.q, down), *launch.strides(self.k, down))
        self.constants = {'DIM': dim, 'DIM_V': dim_v, 'BLOCK_D': launch.padded_power_of_two(dim),
                          'BLOCK_V': launch.padded_power_of_two(dim_v), 'BLOCK': self.side,
                          'MULTIPLICATIVE': mask_mode == 'multiplicative', **launch.numerics(q.dtype)}

    def _sums(self, save: bool, statistics: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor], Tensor]:
        """Return what kernels read as sums, where they find or leave log-sum-exps, and the statistics."""
        empty = self.steps.new_empty(0, dtype=torch.float32)
        if self.whole:
            return self.steps, None, empty
        if statistics is None:
            sums = rounded_sums(self.steps, -2 if self.down else -1)
            if not save:
                return sums, None, empty
            statistics = torch.stack([sums, torch.empty_like(sums)])
        return statistics[0], statistics[1], statistics

    def options(self, kernel: str) -> Dict[str, Any]:
        """Return constants and launch options of a kernel."""
        constants = self.constants
        channels = max(constants['BLOCK_D'], constants['BLOCK_V'])
        return {**constants, **launch.options(kernel, self.q.dtype, self.side, channels)}

    def apply(self, v: Tensor, v_2: Optional[Tensor] = None, earlier: Optional[Tensor] = None, share: bool = False
              ) -> Tuple[Tensor, Optional[Tensor]]:
        """Return P v and, if v_2 is there, P v_2, for the weights P of all lines.

        Args:
            v: (B, heads, H, W, dim_v).
            v_2, earlier: of the same shape, in the memory order of `launch.token_major`.
            earlier: return the mean of P v and this tensor instead of P v.
            share: compile one kernel for launches with and without `earlier`, and for long lines also for those with
                and without v_2. It costs whole lines registers to carry a second product that they do not compute.
        """
        v = launch.unit_stride(v)
        launch.check_line(self.sizes[2], v.stride(2 if self.down else 3))
        out, out_2 = launch.token_major(v.shape, v), None if v_2 is None else launch.token_major(v.shape, v)
        strides = (*self.sizes, *self.strides, *launch.strides(v, self.down))
        mean, second = int(earlier is not None), int(v_2 is not None)
        # Tensors that the launch does not read stand for those that another launch of the kernel has.
        if share and not (self.whole and second):
            earlier = v if earlier is None else earlier
        if self.whole:
            _decay_attention_fwd_line_kernel[self.programs](
                self.q, self.k, v, self.sums, out, v_2, out_2, earlier, mean, *strides, SECOND=bool(second),
                **self.options('decay_attention_fwd_line'))
            return out, out_2
        others = (v, out) if share and not second else (v_2, out_2)
        _decay_attention_fwd_kernel[self.programs](
            self.q, self.k, v, self.sums, self.lse, out, *others, earlier, mean, second, *strides,
            SECOND=others[0] is not None, SAVE=self.lse is not None, **self.options('decay_attention_fwd'))
        return out, out_2


def forward(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, axis: str, mask_mode: str,
            save: bool) -> Tuple[Tensor, Tensor]:
    """Return the output and the statistics that the backward pass needs (see `Lines`)."""
    lines = Lines(q, k, steps, v.shape[-1], axis, mask_mode, save=save)
    return lines.apply(v)[0], lines.statistics
