"""The time loop for an oscillation of full rank: o exists for a chunk of tokens at a time, never for a whole line.

The loop itself is one multiply-add of memories a token. Everything else is computed for a chunk at once."""
from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..common.launch import token_order
from ..common.numerics import STEP_LOG_MIN, compute_dtype, ranges
from .generator import generated_logs, generated_slope
from .problem import DIRECTIONS, RealProblem, keys_of

# Tokens whose oscillation exists at a time; the memory before each chunk is kept for the backward pass.
CHUNK = 32
# Elements of the oscillation that exist at a time.
BLOCK_ELEMENTS = 1 << 18


class Tokens(NamedTuple):
    """A block of lines and tokens in the order of the time loop."""

    lines: slice
    time: slice
    reverse: bool

    def of(self, x: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
        """Return x (B, H, T, ...), or (H, K, D), of a block as (b, H, C, K, D) with sizes of 1 where it has them."""
        if x is None:
            return None
        if x.ndim == 3:
            return x[None, :, None].to(dtype)
        x = x if x.shape[0] == 1 else x[self.lines]
        x = x if x.shape[2] == 1 else x[:, :, self.time]
        return (x.flip(2) if self.reverse and x.shape[2] > 1 else x).to(dtype)

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add x (b, H, C, ...) to a block of total, summed over the axes where total has a size of 1."""
        x = x.flip(2) if self.reverse else x
        if total.ndim == 3:
            total += x.sum((0, 2)).sum_to_size(total.shape)
            return
        part = total if total.shape[0] == 1 else total[self.lines]
        part = part if part.shape[2] == 1 else part[:, :, self.time]
        part += x.sum_to_size(part.shape)


class Block(NamedTuple):
    """Arguments of a block; vectors along K are (b, H, C, K, 1), along D (b, H, C, 1, D)."""

    i: Tensor
    e: Tensor
    s: Tensor
    o: Tensor
    z: Optional[Tensor]
    weight: Optional[Tensor]


def _schedule(problem: RealProblem, reverse: bool, backward: bool):
    """Yield slices of the batch, each with its blocks of tokens in the order of the pass."""
    batch, heads, length, dim = problem.i.shape
    times = [slice(n, min(n + CHUNK, length)) for n in range(0, length, CHUNK)]
    lines = max(1, BLOCK_ELEMENTS // (heads * min(length, CHUNK) * keys_of(problem.e.shape) * dim))
    for part in ranges(batch, lines):
        yield part, [Tokens(part, time, reverse) for time in (times[::-1] if reverse != backward else times)]


def _vector(x: Optional[Tensor], axis: int) -> Optional[Tensor]:
    return x if x is None or x.ndim == 3 else x.unsqueeze(axis)


def _block(problem: RealProblem, tokens: Tokens, dtype: torch.dtype) -> Block:
    i, e, s, log_k, log_d, z, weight = (tokens.of(x, dtype) for x in (
        _vector(problem.i, -2), _vector(problem.e, -1), _vector(problem.s, -1), _vector(problem.log_k, -1),
        _vector(problem.log_d, -2), problem.z, problem.weight))
    log = i.new_zeros((1,) * 5) if z is None else generated_logs(z, weight, problem.form, problem.tau).clamp_(
        STEP_LOG_MIN, 0.0)
    for rank_one in (log_k, log_d):
        log = log if rank_one is None else log + rank_one
    return Block(i, e, s, log.exp_(), z, weight)


def _run(add: Tensor, o: Tensor, state: Tensor, out: Tensor) -> None:
    """Compute out[t] = o[t] * out[t-1] + add[t] along dimension 2; sizes of o may be 1."""
    for t in range(out.shape[2]):
        state = torch.addcmul(add[:, :, t], o[:, :, t if o.shape[2] > 1 else 0], state, out=out[:, :, t])


def forward(problem: RealProblem, direction: str, save: bool, last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Compute the output, the memories before chunks (directions, B, H, chunks, K, D) if `save`, and the last memory
    if `last`."""
    dtype = compute_dtype(problem.i.dtype)
    batch, heads, length, dim = problem.i.shape
    shape, names = (batch, heads, keys_of(problem.e.shape), dim), DIRECTIONS[direction]
    y = token_order(problem.i)
    states = y.new_empty((len(names), *shape[:2], -(-length // CHUNK), *shape[2:]) if save else 0, dtype=dtype)
    final = y.new_empty(shape if last else 0, dtype=dtype)
    for n, reverse in enumerate(names):
        for lines, blocks in _schedule(problem, reverse, False):
            state = y.new_zeros((lines.stop - lines.start, *shape[1:]), dtype=dtype)
            if problem.state is not None:
                state.copy_(problem.state[lines])
            for tokens in blocks:
                if save:
                    states[n, lines, :, tokens.time.start // CHUNK] = state
                block = _block(problem, tokens, dtype)
                memory = block.e * block.i
                own = (block.s * memory).sum(-2) if n else 0             # counted in the first direction
                _run(memory, block.o, state, memory)
                state = memory[:, :, -1].clone()
                out = (block.s * memory).sum(-2) - own
                out = out.flip(2) if reverse else out
                y[lines, :, tokens.time] = y[lines, :, tokens.time] + out if n else out
            if last:
                final[lines] = state
    return y, states, final


def backward(dy: Tensor, dfinal: Optional[Tensor], problem: RealProblem, states: Tensor, direction: str
             ) -> Tuple[List[Tensor], Tensor]:
    """Return the gradients of i, e, s, log_k, log_d, z and weight, and that of the state; empty for those not given."""
    dtype = compute_dtype(problem.i.dtype)
    grads = [problem.i.new_zeros(0 if x is None else x.shape, dtype=dtype) for x in problem[:7]]
    dstate = problem.i.new_empty(0 if problem.state is None else problem.state.shape, dtype=dtype)
    for n, reverse in enumerate(DIRECTIONS[direction]):
        for lines, blocks in _schedule(problem, reverse, True):
            adjoint = torch.zeros_like(states[n, lines, :, 0])
            if dfinal is not None:
                adjoint.copy_(dfinal[lines])
            for tokens in blocks:
                state = states[n, lines, :, tokens.time.start // CHUNK]
                _block_backward(dy, problem, tokens, state, adjoint, grads, n > 0)
            if problem.state is not None:
                dstate[lines] = adjoint
    return grads, dstate


def _block_backward(dy: Tensor, problem: RealProblem, tokens: Tokens, state: Tensor, adjoint: Tensor,
                    grads: List[Tensor], again: bool) -> None:
    """Add the gradients of a block; replace the adjoint of the memory after it by that of the memory before it.

    again: whether the term of a token itself was counted in another direction."""
    dtype = adjoint.dtype
    block, dy = _block(problem, tokens, dtype), tokens.of(dy.unsqueeze(-2), dtype)
    added = block.e * block.i
    memory = torch.empty_like(added)
    _run(added, block.o, state, memory)
    tokens.add(grads[2], _reduced((memory - added if again else memory) * dy, grads[2], -1))
    shrink = block.s * dy
    flow = torch.empty_like(memory)                                          # G_t
    for t in reversed(range(flow.shape[2])):
        torch.add(shrink[:, :, t], adjoint, out=flow[:, :, t])
        torch.mul(flow[:, :, t], block.o[:, :, t if block.o.shape[2] > 1 else 0], out=adjoint)
    into = flow - shrink if again else flow
    tokens.add(grads[0], (into * block.e).sum(-2))
    tokens.add(grads[1], _reduced(into * block.i, grads[1], -1))
    memory -= added                                                          # o_t m_{t-1}
    dlog = memory.mul_(flow)
    if problem.log_k is not None:
        tokens.add(grads[3], dlog.sum(-1))
    if problem.log_d is not None:
        tokens.add(grads[4], dlog.sum(-2))
    if problem.z is not None:
        du = dlog.mul_(generated_slope(block.z, block.weight, problem.form, problem.tau))
        tokens.add(grads[5], du * block.weight)
        tokens.add(grads[6], du * block.z)


def _reduced(product: Tensor, grad: Tensor, axis: int) -> Tensor:
    """Sum a gradient of the size of the memory over the axis that a vector lacks."""
    return product if grad.ndim == 3 else product.sum(axis)
