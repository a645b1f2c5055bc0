"""The time loop for many lines with memories of a few numbers each, as HGRN, S5 and RWKV-4 have, on a CPU.

Products of chunks make a matrix for each line, and here that costs more than the recurrence itself. All arrays have the
lines as their last dimension, (T, K, D, lines), so that a step of the loop is one operation on contiguous memory."""
from itertools import product
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..common.launch import token_order
from ..common.numerics import compute_dtype, ranges
from .problem import DIRECTIONS

# Elements of the memories of all tokens, for the lines that are computed at a time.
BLOCK_ELEMENTS = 1 << 18

Empty = Optional[Tensor]
Part = Tuple[slice, slice]                                                   # of the batch and of the heads


class Lines(NamedTuple):
    """Arguments of n lines: i (T, 1, D, n), e and s (T, K, 1, n), o (T, K, D, n), where T, K and D may be 1, and the
    memory before the first token (K, D, n)."""

    i: Tensor
    e: Tensor
    s: Tensor
    o: Tensor
    state: Empty


def _own(x: Tensor, part: Part) -> Tensor:
    """Return the part of x (B, H, ...) or (1, H, ...), where 1 stands for the whole batch."""
    return x[:, part[1]] if x.shape[0] == 1 else x[part]


def _last(x: Empty, part: Part, axis: int, dtype: torch.dtype) -> Empty:
    """Return a part of x (B, H, T, c) or (1, H, T, c) as (T, K, D, lines), with c at `axis`."""
    if x is None:
        return None
    x = _own(x, part).to(dtype).expand(part[0].stop - part[0].start, -1, -1, -1)
    return x.permute(2, 3, 0, 1).flatten(2).contiguous().unsqueeze(3 - axis)


def _first(x: Tensor, part: Part) -> Tensor:
    """Return (T, c, lines) as (b, h, T, c), or a memory (K, D, lines) as (b, h, K, D)."""
    return x.unflatten(2, (-1, part[1].stop - part[1].start)).permute(2, 3, 0, 1)


def _memory(state: Empty, part: Part, dtype: torch.dtype) -> Empty:
    """Return a part of the memories (B, H, K, D) as (K, D, lines)."""
    return None if state is None else state[part].to(dtype).permute(2, 3, 0, 1).flatten(2).contiguous()


def _parts(i: Tensor, keys: int) -> Iterator[Part]:
    batch, heads, length, dim = i.shape
    lines = BLOCK_ELEMENTS // (length * keys * dim)
    return product(ranges(batch, lines // heads), ranges(heads, lines))


def _lines(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty) -> Iterator[Tuple[Part, Lines]]:
    """Yield parts of the batch and of the heads with their arguments."""
    dtype = compute_dtype(i.dtype)
    for part in _parts(i, e.shape[3]):
        x, steps_d = (_last(t, part, 2, dtype) for t in (i, log_d))
        key, query, steps_k = (_last(t, part, 1, dtype) for t in (e, s, log_k))
        logs = [log for log in (steps_k, steps_d) if log is not None]
        o = sum(logs[1:], logs[0]).exp() if logs else x.new_ones(1, 1, 1, x.shape[3])
        yield part, Lines(x, key, query, o, _memory(state, part, dtype))


def _order(length: int, reverse: bool) -> range:
    return range(length - 1, -1, -1) if reverse else range(length)


def _run(added: Tensor, o: Tensor, state: Empty, order: range) -> None:
    """Replace what each token adds, (T, K, D, n), by m[t] = o[t] m[t-1] + added[t], in an order of tokens."""
    for t in order:
        if state is not None:
            torch.addcmul(added[t], o[t if len(o) > 1 else 0], state, out=added[t])
        state = added[t]


def forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty, direction: str, last: bool
            ) -> Tuple[Tensor, Tensor]:
    """Compute the output and, if `last`, the last memory. Arguments are those of a `RealProblem` of rank one."""
    length = i.shape[2]
    y = token_order(i)
    final = i.new_empty((*i.shape[:2], e.shape[3], i.shape[3]) if last else 0, dtype=compute_dtype(i.dtype))
    for part, line in _lines(i, e, s, log_k, log_d, state):
        total = None
        for n, reverse in enumerate(DIRECTIONS[direction]):
            memory = line.e * line.i
            own = (line.s * memory).sum(1) if n else None                    # counted in the first direction
            order = _order(length, reverse)
            _run(memory, line.o, line.state, order)
            out = (line.s * memory).sum(1)
            total = out if total is None else total.add_(out).sub_(own)
            if last:
                final[part] = _first(memory[order[-1]], part)
        y[part] = _first(total, part)
    return y, final


def backward(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty,
             direction: str) -> Tuple[Tensor, ...]:
    """Return the gradients of i, e, s, log_k, log_d and state, in float32 or float64; empty for those not given."""
    dtype, length = compute_dtype(i.dtype), i.shape[2]
    grads = [i.new_empty(x.shape, dtype=dtype) for x in (i, e, s)]
    dlogs = [i.new_zeros(0 if log is None else log.shape, dtype=dtype) for log in (log_k, log_d)]
    dstate = i.new_zeros(0 if state is None else state.shape, dtype=dtype)
    for part, line in _lines(i, e, s, log_k, log_d, state):
        grad = _last(dy, part, 2, dtype)
        found: List[Tensor] = []
        steps = None
        for n, reverse in enumerate(DIRECTIONS[direction]):
            *new, dlog, entering = _direction(line, grad, _memory(dfinal, part, dtype), _order(length, reverse), n > 0)
            found = [old.add_(x) for old, x in zip(found, new)] or new
            steps = dlog if steps is None else steps.add_(dlog)
            if state is not None:
                dstate[part] += _first(entering, part)
        for into, x in zip(grads, found):
            _own(into, part).copy_(_first(x, part))
        for into, axis in zip(dlogs, (2, 1)):
            if into.numel():
                into = _own(into, part)
                into += _first(steps.sum(axis), part).sum_to_size(into.shape)
    return (*grads, *dlogs, dstate)


def _direction(line: Lines, dy: Tensor, dfinal: Empty, order: range, again: bool) -> List[Tensor]:
    """Return the gradients of i, e, s (T, c, n), of the step logs (T, K, D, n), and of the memory that enters.

    again: whether the term of a token itself was counted in another direction."""
    memory = line.e * line.i
    _run(memory, line.o, line.state, order)
    # o_t m_{t-1}. As the difference of m_t and what t adds, it would lose digits where o is small.
    before = memory.roll(order.step, 0)
    before[order[0]] = 0 if line.state is None else line.state
    before *= line.o
    ds = ((before if again else memory) * dy).sum(2)
    shrink = line.s * dy
    flow, adjoint = shrink.clone(), dfinal                                   # G_t; o_{t+1} G_{t+1}
    for t in reversed(order):
        if adjoint is not None:
            flow[t].add_(adjoint)
        adjoint = flow[t] * line.o[t if len(line.o) > 1 else 0]
    into = flow - shrink if again else flow
    return [(into * line.e).sum(1), (into * line.i).sum(2), ds, before.mul_(flow), adjoint]
