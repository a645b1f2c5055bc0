"""The recurrence of rank one in plain PyTorch by products of chunks. `eos_scan.full_rank` has the loop over tokens.

With G_t the gradient of the memory m_t, the gradients are de_t = G_t i_t, di_t = G_t' e_t, ds_t = m_t dy_t and, for the
step logs of the memory's rows, sum_d G_t o_t m_{t-1} (equations of section 3, where the paper's version of the last
one, with m_t, is a slip).
"""
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.numerics import compute_dtype
from ..eos_scan import dense, small_memories
from ..eos_scan.chunks import (
    AnyDecays,
    boundary_shape,
    carries,
    carry,
    layout,
    line_decays,
    matrix,
    matrix_of_both,
    scaled,
    times,
    transposed_times,
)
from ..eos_scan.problem import DIRECTIONS, Oscillation, Output, RealProblem, own_term, solve

Empty = Optional[Tensor]


# Where `small_memories` runs. 128 lines of 2 numbers with 64 to 1,024 tokens, on one and two threads, are 1.2 to 3.4
# times as fast as by products of chunks with gradients. Without gradients, they are 1 to 2 times as fast in float32,
# and 0.8 to 1.2 times in bfloat16, in which chunks compute. 64 lines lose without gradients, and so do memories of 4
# numbers on lines of 1,024 tokens.
LARGEST_MEMORY, LEAST_LINES, LONGEST_LINE = 2, 128, 1024


def token_by_token(i: Tensor, e: Tensor) -> bool:
    """Whether `small_memories` runs for i (B, H, T, D) and e (B, H, T, K)."""
    batch, heads, length, dim = i.shape
    return (i.is_cpu and e.shape[3] * dim <= LARGEST_MEMORY and batch * heads >= LEAST_LINES
            and length <= LONGEST_LINE)


def _total(decay: Optional[AnyDecays]) -> Optional[Tensor]:
    return None if decay is None else decay.total


def forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty, direction: str, chunk: int,
            save: bool, last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Compute the output, memories at chunk boundaries (directions, B, H, n + 1, K, D) for `backward`, if any are
    needed and `save`, and the last memory, if `last`. Arguments are those of a `RealProblem`.

    For inference in bfloat16 on a CPU, products are bfloat16 and memories float32."""
    full = compute_dtype(i.dtype)
    if token_by_token(i, e):
        y, final = small_memories.forward(i, e, s, log_k, log_d, state, direction, last)
        return y, i.new_empty(0, dtype=full), final
    batch, heads, length, dim = i.shape
    chunks, names = layout(length, chunk, log_k, log_d), DIRECTIONS[direction]
    dtype = i.dtype if i.dtype == torch.bfloat16 and i.is_cpu and not save and chunks.quotients else full
    carried = carries(length, state, last)
    if last or state is not None:
        log_k, log_d = chunks.expanded(log_k), chunks.expanded(log_d)
    # Without a decay of columns, one product of the values with the sum of both matrices.
    joined = not carried and len(names) == 2 and log_d is None and log_k is not None and (
        chunks.quotients or log_k.shape[3] == 1)
    y = i.new_empty(batch, length, heads, dim).transpose(1, 2)                 # merging heads needs no copy
    states = i.new_empty(boundary_shape(i, e.shape[3], state, direction, chunk, save, last) if save else 0, dtype=full)
    final = i.new_empty((batch, heads, e.shape[3], dim) if last else 0, dtype=full)
    # A product with a side of `Quotients` reads strided memory.
    dense_k, dense_d = (log_k is None or not chunks.quotients), (log_d is None or not chunks.quotients)
    for n, reverse in enumerate(names[:1] if joined else names):
        kinds = ((False, False), (True, False)) if joined else ((reverse, False),)
        batches, parts = chunks.blocks(batch, max(i.numel(), e.numel()), reverse)
        for lines in batches:
            run = None if state is None else state[lines].to(full)
            for part in parts:
                decays_k = line_decays(log_k, chunks, lines, part, *kinds, dtype=dtype)
                x = chunks.chunked(i, lines, part, dtype, dense_d)
                key = chunks.chunked(e, lines, part, dtype, dense_k)
                query = chunks.chunked(s, lines, part, dtype, dense_k)
                if joined:
                    out = matrix_of_both(query, key, *decays_k) @ x
                else:
                    decay_d = line_decays(log_d, chunks, lines, part, *kinds, dtype=dtype)[0]
                    out, bounds = _chunks_forward(x, key, query, decays_k[0], decay_d, run, reverse, n == 0, carried)
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
    if token_by_token(i, e):
        return small_memories.backward(dy, dfinal, i, e, s, log_k, log_d, state, direction)
    dtype, chunks = compute_dtype(i.dtype), layout(i.shape[2], chunk, log_k, log_d)
    logs = [log_k, log_d]
    dlogs = [i.new_zeros(0 if log is None else log.shape, dtype=dtype) for log in logs]
    if state is not None or dfinal is not None:
        logs = [chunks.expanded(log) for log in logs]
    grads = [torch.zeros_like(t, dtype=dtype, memory_format=torch.contiguous_format) for t in (i, e, s)]
    dstate = i.new_empty(0 if state is None else state.shape, dtype=dtype)
    for n, reverse in enumerate(DIRECTIONS[direction]):
        batches, parts = chunks.blocks(len(i), max(i.numel(), e.numel()), not reverse)
        for lines in batches:
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
        y = y + back - own_term(*problem[:3])
    return y.to(problem.i.dtype), state if output_state else None
