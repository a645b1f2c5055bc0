"""Both recurrences for exporters: dense decays within chunks, tensors of rank 4 at most, and no loop that depends on
values. Chunks and lines are unrolled by their static sizes.

A decay between two tokens is a difference of two sums of step logs. In float32 a difference of large sums loses the
digits of small steps, so each step is split: its coarse part is a multiple of 1 / PARTS, and sums of these are exact.
Only the coarse parts make dense decays. The sums of the fine parts are small, and their exponentials multiply the
vectors of the tokens."""
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import STEP_LOG_MIN, compute_dtype
from .generator import generated_logs
from .problem import RealProblem

SINGLE_CHUNK = 64
# The sums of a chunk of 128 tokens are exact in float32 (128 * 80 * PARTS < 2^24), and fine ones are at most 2.
PARTS = 32
# Lines of more than SHORT tokens are joined in blocks.
BLOCK, SHORT = 16, 32


class Sums(NamedTuple):
    """Logarithms of decays from a chunk's entry or to its exit, (G, C, c), in two parts to add."""

    coarse: Tensor
    fine: Tensor

    def exp(self) -> Tensor:
        return (self.coarse + self.fine).exp()

    def query(self, x: Tensor) -> Tensor:
        """Return vectors of tokens to multiply by the coarse decays to these tokens."""
        return x * self.fine.exp()

    def key(self, x: Tensor) -> Tensor:
        """Return vectors of tokens to multiply by the coarse decays from these tokens."""
        return x * (-self.fine).exp()


class Logs(NamedTuple):
    """Sums of the step logs of a chunk: up to each token with its own step and without it, behind it, and of all."""

    upto: Sums
    before: Sums
    behind: Sums
    total: Sums


def _lines(x: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """Return (B, H, T, c), where B and T may be 1, as (B H, T, c)."""
    return None if x is None else x.expand(*like.shape[:3], x.shape[-1]).flatten(0, 1)


def _logs(steps: Tensor, reverse: bool) -> Logs:
    """Add up the step logs of a chunk, (G, C, c), from its entry."""
    coarse = (steps * PARTS).round() / PARTS
    own = Sums(coarse, steps - coarse)
    upto = Sums(*(x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1) for x in own))
    total = Sums(*(x.sum(1, keepdim=True) for x in own))
    before, behind = (Sums(*(x - y for x, y in zip(*pair))) for pair in ((upto, own), (total, upto)))
    return Logs(upto, before, behind, total)


def _decays(rows: Sums, columns: Sums, reverse: bool, diagonal: bool = True) -> Tensor:
    """Return the coarse decays exp(rows[t] - columns[j]) of a chunk, zero beyond the triangle: (G, C, C, c)."""
    rows, columns = rows.coarse, columns.coarse
    size = rows.shape[1]
    inside = torch.ones(size, size, dtype=torch.bool, device=rows.device)
    inside = inside.triu(0 if diagonal else 1) if reverse else inside.tril(0 if diagonal else -1)
    logs = rows.unsqueeze(2) - columns.unsqueeze(1)
    return logs.clamp(max=0).exp() * inside[:, :, None].to(logs.dtype)


def _matrix(x: Tensor, y: Tensor, decay: Tensor) -> Tensor:
    """Return A[t, j] = sum_c x[t, c] decay[t, j, c] y[j, c], (G, C, C)."""
    if decay.shape[-1] == 1:
        return (x @ _transposed(y)) * decay.squeeze(-1)
    return (x.unsqueeze(2) * decay * y.unsqueeze(1)).sum(-1)


def _chunks(length: int, chunk: int, reverse: bool):
    size = length if length <= SINGLE_CHUNK else chunk
    starts = range(0, length, size)
    return [slice(n, min(n + size, length)) for n in (reversed(starts) if reverse else starts)]


def _transposed(x: Tensor) -> Tensor:
    """Return the transposes of matrices (G, m, n). ncnn has no layer for `.mT`."""
    return x.transpose(1, 2)


def _part(x: Tensor, part: slice) -> Tensor:
    """Return tokens of (G, T, c). A slice of all tokens would be an operator without a layer in ncnn."""
    return x if (part.start, part.stop) == (0, x.shape[1]) else x[:, part]


def _joined(outputs: list, reverse: bool) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1] if reverse else outputs, 1)


def rank_one(problem: RealProblem, reverse: bool, chunk: int) -> Tuple[Tensor, Tensor]:
    """Compute y (B, H, T, D) and the last memory (B, H, K, D) chunk by chunk."""
    i, dtype = problem.i, compute_dtype(problem.i.dtype)
    x, e, s = (y.to(dtype).flatten(0, 1) for y in problem[:3])
    zero = x.new_zeros(1, 1, 1, 1)
    steps = [_lines(zero if log is None else log, i) for log in (problem.log_k, problem.log_d)]
    state = x.new_zeros(x.shape[0], e.shape[2], x.shape[2]) if problem.state is None else (
        problem.state.to(dtype).flatten(0, 1))
    outputs = []
    for part in _chunks(i.shape[2], chunk, reverse):
        value, key, query = (_part(y, part) for y in (x, e, s))
        rows, columns = (_logs(_part(log, part), reverse) for log in steps)
        decay = _decays(rows.upto, rows.upto, reverse)
        y = _matrix(rows.upto.query(query), rows.upto.key(key), decay)
        if problem.log_d is None:
            y = y @ value
        else:
            decay = _decays(columns.upto, columns.upto, reverse)
            y = columns.upto.query((y.unsqueeze(-1) * decay * columns.upto.key(value).unsqueeze(1)).sum(2))
        outputs.append(y + ((query * rows.upto.exp()) @ state) * columns.upto.exp())
        state = _transposed(rows.total.exp()) * state * columns.total.exp() + (
            _transposed(key * rows.behind.exp()) @ (value * columns.behind.exp()))
    return _joined(outputs, reverse).unflatten(0, i.shape[:2]), state.unflatten(0, i.shape[:2])


def _doubled(o: Tensor, memory: Tensor) -> Tuple[Tensor, Tensor]:
    """Return products of the decays up to each token and the memories, (G, T, K, D) each.

    The lines that end at a token are joined with the lines before them, of 1, 2, 4, ... tokens."""
    length, step = memory.shape[1], 1
    while step < length:
        # Before the first token nothing is added and nothing decays.
        before, decay = (F.pad(y[:, :-step], (0, 0, 0, 0, step, 0), value=v) for y, v in ((memory, 0.0), (o, 1.0)))
        memory, o = memory + o * before, o * decay
        step *= 2
    return o, memory


def _memories(o: Tensor, memory: Tensor) -> Tensor:
    """Return the memories of lines (G, T, K, D): first within blocks, then what enters each block."""
    lines, length, *sizes = memory.shape
    if length <= SHORT:
        return _doubled(o, memory)[1]
    o, memory = (F.pad(y, (0, 0, 0, 0, 0, -length % BLOCK)).reshape(-1, BLOCK, *sizes) for y in (o, memory))
    o, memory = _doubled(o, memory)
    count = -(-length // BLOCK)
    ends = _memories(*(y[:, -1].reshape(-1, count, *sizes) for y in (o, memory)))
    entering = F.pad(ends[:, :-1], (0, 0, 0, 0, 1, 0)).reshape(-1, 1, *sizes)
    return (memory + o * entering).reshape(-1, count * BLOCK, *sizes)[:, :length]


def full_rank(problem: RealProblem, reverse: bool, chunk: int) -> Tuple[Tensor, Tensor]:
    """Compute y and the last memory in log2 T steps.

    This form has all memories of a line at once, (B H, T, K, D): it is for inference on short lines."""
    i, dtype = problem.i, compute_dtype(problem.i.dtype)
    batch, heads, length, dim = i.shape

    def lines(x: Tensor, axis: int) -> Tensor:
        """(B H, T, K, D), where sizes may be 1."""
        if x.ndim == 3:                                                      # constant: the same for all lines
            return x.to(dtype).repeat(batch, 1, 1).unsqueeze(1)
        return x.to(dtype).flatten(0, 1).unsqueeze(axis)

    x, e, s = lines(i, -2), lines(problem.e, -1), lines(problem.s, -1)
    log = x.new_zeros(1, 1, 1, 1)
    if problem.z is not None:
        z, weight = problem.z.to(dtype).flatten(0, 1), problem.weight.to(dtype)
        z = z if z.ndim == 4 else z.unsqueeze(-1 if problem.axis == 'k' else -2)
        weight = weight.repeat(batch, 1, 1) if len(weight) > 1 else weight
        log = generated_logs(z, weight.unsqueeze(1), problem.form, problem.tau).clamp(STEP_LOG_MIN, 0.0)
    for steps, axis in ((problem.log_k, -1), (problem.log_d, -2)):
        if steps is not None:
            log = log + _lines(steps, i).unsqueeze(axis)
    o, memory = log.exp().expand(batch * heads, length, e.shape[2], dim), e * x
    if reverse:
        o, memory = o.flip(1), memory.flip(1)
    if problem.state is not None:
        entering = o[:, :1] * problem.state.to(dtype).flatten(0, 1).unsqueeze(1)
        memory = memory + torch.cat([entering, torch.zeros_like(memory[:, 1:])], 1)
    memory = _memories(o, memory)
    state = memory[:, -1]
    y = (s * (memory.flip(1) if reverse else memory)).sum(2)
    return y.unflatten(0, i.shape[:2]), state.unflatten(0, i.shape[:2])


def _unit_inverse(n: Tensor) -> Tensor:
    """Return (I - N)^-1 for strictly lower triangular N (G, C, C), by joining inverses of blocks of 1, 2, 4, ..."""
    lines, size = n.shape[0], int(n.shape[1])                                # a trace has tensors here
    padded = 1 << (size - 1).bit_length()
    n = F.pad(n, (0, padded - size, 0, padded - size))
    inverse, h = n.new_ones(lines * padded, 1, 1), 1                         # of all blocks: (G blocks, h, h)
    while h < padded:
        # The blocks below the diagonal, between the two halves of each pair.
        corner = torch.stack([n[:, at + h:at + 2 * h, at:at + h] for at in range(0, padded, 2 * h)], 1).flatten(0, 1)
        pairs = inverse.reshape(-1, 2, h, h)
        first, second = pairs[:, 0], pairs[:, 1]
        low = second @ (corner @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        inverse, h = torch.cat([top, torch.cat([low, second], -1)], -2), 2 * h
    return inverse if size == padded else inverse[:, :size, :size]


def delta_rule(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor], state: Optional[Tensor],
               reverse: bool, chunk: int) -> Tuple[Tensor, Tensor]:
    """Compute y (B, H, T, D) and the last memory of `eos_matmul` chunk by chunk; gk are canonical step logs."""
    dtype, shape, length = compute_dtype(i.dtype), i.shape[:2], i.shape[2]
    x, e, s, a, b = (y.to(dtype).flatten(0, 1) for y in (i, e, s, a, b))
    steps = _lines(i.new_zeros(1, 1, 1, 1, dtype=dtype) if gk is None else gk, i)
    state = x.new_zeros(x.shape[0], e.shape[2], x.shape[2]) if state is None else state.to(dtype).flatten(0, 1)
    outputs = []
    for part in _chunks(length, chunk, reverse):
        own, value, key, query, read, write = (_part(y, part) for y in (steps, x, e, s, a, b))
        logs = _logs(own, reverse)
        inside, strict = _decays(logs.upto, logs.upto, reverse), _decays(logs.before, logs.upto, reverse, False)
        reading, shrink, adding, expand = (logs.before.query(read), logs.upto.query(query), logs.upto.key(write),
                                           logs.upto.key(key))
        n = _matrix(reading, adding, strict)
        inverse = _unit_inverse(_transposed(n) if reverse else n)
        inverse = _transposed(inverse) if reverse else inverse
        w = inverse @ ((read * logs.before.exp()) @ state + _matrix(reading, expand, strict) @ value)
        y = _matrix(shrink, adding, inside) @ w + _matrix(shrink, expand, inside) @ value
        outputs.append((query * logs.upto.exp()) @ state + y)
        leave = logs.behind.exp()
        state = _transposed(logs.total.exp()) * state + _transposed(write * leave) @ w + (
            _transposed(key * leave) @ value)
    return _joined(outputs, reverse).unflatten(0, shape), state.unflatten(0, shape)
