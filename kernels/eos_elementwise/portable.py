"""The recurrence of rank one in plain PyTorch by products of chunks. `eos_scan.full_rank` has the loop over tokens.

With G_t the gradient of the memory m_t, the gradients are de_t = G_t i_t, di_t = G_t' e_t, ds_t = m_t dy_t and, for the
step logs of the memory's rows, sum_d G_t o_t m_{t-1} (equations of section 3, where the paper's version of the last
one, with m_t, is a slip).
"""
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.decay import compute_dtype
from ..eos_scan import dense, small_memories
from ..eos_scan.chunks import Layout, boundary_shape, carries, carry, expanded, layout, line_decays
from ..eos_scan.decayed_products import (
    AnyDecays,
    Decays,
    matrix,
    matrix_of_both,
    scaled,
    times,
    transposed_times,
    triangle,
)
from ..eos_scan.problem import DIRECTIONS, Oscillation, Output, RealProblem, solve
from ..eos_scan.registration import empty_output

Empty = Optional[Tensor]


def _total(decay: Optional[AnyDecays]) -> Optional[Tensor]:
    return None if decay is None else decay.total


def _line_layout(i: Tensor, log_k: Empty, log_d: Empty, chunk: int) -> Layout:
    return layout(i.shape[2], chunk, log_k, log_d)


def _elements(i: Tensor, e: Tensor) -> int:
    return max(i.numel(), e.numel())


def _forward_dtype(i: Tensor, chunks: Layout, save: bool) -> torch.dtype:
    """Return the dtype of products: bfloat16 for inference in bfloat16 on a CPU, with memories in float32."""
    half = i.dtype == torch.bfloat16 and i.is_cpu and not save and chunks.quotients
    return i.dtype if half else compute_dtype(i.dtype)


def forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty, direction: str, chunk: int,
            save: bool, last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Compute the output, memories at chunk boundaries (directions, B, H, n + 1, K, D) for `backward`, if any are
    needed and `save`, and the last memory, if `last`. Arguments are those of a `RealProblem`."""
    if small_memories.chosen(i, e):
        y, final = small_memories.forward(i, e, s, log_k, log_d, state, direction, last)
        return y, i.new_empty(0, dtype=compute_dtype(i.dtype)), final
    chunks, full = _line_layout(i, log_k, log_d, chunk), compute_dtype(i.dtype)
    dtype = _forward_dtype(i, chunks, save)
    log_k, log_d = (expanded(log, chunks, last or state is not None) for log in (log_k, log_d))
    batch, heads, length, dim = i.shape
    carried, names = carries(length, state, last), DIRECTIONS[direction]
    # Without a decay of columns, one product of the values with the sum of both matrices.
    joined = not carried and len(names) == 2 and log_d is None and log_k is not None and (
        chunks.quotients or log_k.shape[3] == 1)
    y = empty_output(i)
    states = i.new_empty(boundary_shape(i, e.shape[3], state, direction, chunk, save, last), dtype=full)
    final = i.new_empty((batch, heads, e.shape[3], dim) if last else 0, dtype=full)
    for n, reverse in enumerate(names[:1] if joined else names):
        for lines, parts in chunks.blocks(batch, _elements(i, e), reverse):
            run = None if state is None else state[lines].to(full)
            for part in parts:
                kinds = [(way, False) for way in (names if joined else (reverse,))]
                decay_k, decay_d = (line_decays(log, chunks, lines, part, *kinds, dtype=dtype)
                                    for log in (log_k, log_d))
                x, key, query = (chunks.chunked(t, lines, part, dtype, log is None or not chunks.quotients)
                                 for t, log in ((i, log_d), (e, log_k), (s, log_k)))
                if joined:
                    out = _both_matrices(key, query, *decay_k) @ x
                else:
                    out, bounds = _chunks_forward(x, key, query, decay_k[0], decay_d[0], run, reverse, n == 0, carried)
                if carried:
                    run = bounds[:, :, 0 if reverse else -1]
                    if save:
                        states[n, lines, :, part.start:part.stop + 1] = bounds
                tokens = chunks.tokens(part)
                out = out.flatten(2, 3)[:, :, :tokens.stop - tokens.start]
                y[lines, :, tokens] = out if n == 0 else out + y[lines, :, tokens]
            if last:
                final[lines] = run
    return y, states, final


def _both_matrices(key: Tensor, query: Tensor, decay: AnyDecays, back: AnyDecays) -> Tensor:
    """Return the matrices between the tokens of chunks under the decays of both directions, (b, H, n, C, C)."""
    if isinstance(decay, Decays):
        return (query @ key.mT).mul_(decay.mask + triangle(back.mask, True, False))
    return matrix_of_both(query, key, decay, back)


def _chunks_forward(x: Tensor, e: Tensor, s: Tensor, k: Optional[AnyDecays], d: Optional[AnyDecays], state: Empty,
                    reverse: bool, diagonal: bool, carried: bool) -> Tuple[Tensor, Empty]:
    """Return the output of chunks (b, H, n, C, D) and the memories at their boundaries."""
    query, key, value = scaled(s, k, True), scaled(e, k, False), scaled(x, d, False)
    bounds, entered = None, None
    if carried:
        local = (key.end.mT @ value.end).to(compute_dtype(x.dtype))
        bounds = carry(local, _total(k), _total(d), state, reverse)
        entered = query.end @ _entering(bounds, reverse).to(x.dtype)
    return times(matrix(query, key, k, reverse, diagonal), value, d, reverse, entered), bounds


def backward(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty,
             states: Tensor, direction: str, chunk: int) -> Tuple[Tensor, ...]:
    """Return the gradients of i, e, s, log_k, log_d and state, in float32 or float64; empty for those not given."""
    if small_memories.chosen(i, e):
        return small_memories.backward(dy, dfinal, i, e, s, log_k, log_d, state, direction)
    dtype, chunks = compute_dtype(i.dtype), _line_layout(i, log_k, log_d, chunk)
    logs = [log_k, log_d]
    dlogs = [i.new_zeros(0 if log is None else log.shape, dtype=dtype) for log in logs]
    logs = [expanded(log, chunks, state is not None or dfinal is not None) for log in logs]
    grads = [torch.zeros_like(t, dtype=dtype, memory_format=torch.contiguous_format) for t in (i, e, s)]
    dstate = i.new_empty(0 if state is None else state.shape, dtype=dtype)
    for n, reverse in enumerate(DIRECTIONS[direction]):
        for lines, parts in chunks.blocks(len(i), _elements(i, e), not reverse):
            run = None if dfinal is None else dfinal[lines].to(dtype)
            for part in parts:
                block = [chunks.chunked(t, lines, part, dtype) for t in (dy, i, e, s)]
                decay = [line_decays(log, chunks, lines, part, (reverse, False))[0] for log in logs]
                bounds = states[n, lines, :, part.start:part.stop + 1] if states.numel() else None
                found, dsteps, run = _chunks_backward(*block, *decay, bounds, run, reverse, n == 0)
                tokens = chunks.tokens(part)
                for grad, new in zip(grads, found):
                    grad[lines, :, tokens] += new.flatten(2, 3)[:, :, :tokens.stop - tokens.start]
                for dlog, new in zip(dlogs, dsteps):
                    if new is not None:
                        chunks.add_steps(dlog, new, lines, part)
            if state is not None:
                dstate[lines] = run
    return (*grads, *dlogs, dstate)


def _chunks_backward(dy: Tensor, x: Tensor, e: Tensor, s: Tensor, k: Optional[AnyDecays], d: Optional[AnyDecays],
                     bounds: Empty, adjoint: Empty, reverse: bool, diagonal: bool
                     ) -> Tuple[List[Tensor], Sequence[Empty], Empty]:
    """Return the gradients of x, e, s, those of the steps of both axes, and that of the memory that enters.

    bounds: memories at the boundaries; None if nothing enters or leaves the chunks.
    adjoint: gradient of the memory that leaves the last chunk, or None for zeros."""
    query, key, value, grad = scaled(s, k, True), scaled(e, k, False), scaled(x, d, False), scaled(dy, d, True)
    seeds: List[Empty] = [None, None]
    ends: List[Empty] = [None] * 4
    if bounds is not None:
        entering, leaving = _entering(bounds, reverse), _entering(bounds, not reverse)
        flow = carry(query.end.mT @ grad.end, _total(k), _total(d), adjoint, not reverse)
        after, adjoint = _entering(flow, not reverse), flow[:, :, -1 if reverse else 0]
        ends = [grad.end @ entering.mT, value.end @ after.mT, key.end @ after,
                None if d is None else query.end @ entering]
        if k is not None or d is not None:
            product = after * leaving
            seeds = [product.sum(-1).unsqueeze(-2), product.sum(-2).unsqueeze(-2)]
    a, da = matrix(query, key, k, reverse, diagonal), matrix(grad, value, d, reverse, diagonal)
    ds, de = times(da, key, k, reverse, ends[0]), transposed_times(da, query, k, reverse, ends[1])
    dx = transposed_times(a, grad, d, reverse, ends[2])
    y = None if d is None else times(a, value, d, reverse, ends[3])
    dlog_k = None if k is None else step_gradient(s * ds - e * de, seeds[0], k)
    dlog_d = None if d is None else step_gradient(dy * y - x * dx, seeds[1], d)
    return [dx, de, ds], (dlog_k, dlog_d), adjoint


def _entering(bounds: Tensor, reverse: bool) -> Tensor:
    return bounds[:, :, 1:] if reverse else bounds[:, :, :-1]


def step_gradient(terms: Tensor, seed: Empty, decay: AnyDecays) -> Tensor:
    """Return the gradient of the steps of chunks, (b, H, n, C, c).

    Between two tokens, P = sum_d (gradient of the memory) * memory changes by s ds - e de of a token, which are the
    `terms`, and the gradient of a step is the P before its token. The sum starts from P at the chunk's end, `seed`."""
    if decay.total.shape[-1] == 1:
        terms, seed = terms.sum(-1, keepdim=True), None if seed is None else seed.sum(-1, keepdim=True)
    sums = terms.cumsum(-2) if decay.reverse else terms.flip(-2).cumsum(-2).flip(-2)
    return sums if seed is None else sums + seed


def eos_elementwise_export(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, scale: float, direction: str,
                           initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    """Compute with dense matrices of decays for each chunk, and for full rank in log2 T steps over all tokens."""
    return solve(_export, i, e, s, oscillation, scale, direction, initial_state, output_state, chunk)


def _export(problem: RealProblem, direction: str, output_state: bool, chunk: int) -> Output:
    run = dense.full_rank if problem.full_rank else dense.rank_one
    y, state = run(problem, direction == 'reverse', chunk)
    if direction == 'both':
        back, _ = run(problem, True, chunk)
        y = y + back - dense.diagonal(problem)
    return y.to(problem.i.dtype), state if output_state else None
