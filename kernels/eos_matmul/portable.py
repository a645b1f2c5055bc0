"""The recurrence in plain PyTorch by chunks, as a diagonal one with two inputs, e i' and b w'.

With w_t = a_t' m_{t-1}, the w of a chunk are W = (I - N)^-1 (A m + F I), where m is the memory that enters the chunk, A
has the rows a_t' after the decay from the chunk's entry, and N and F are the strictly triangular matrices a b' and a e'
under the decay (the WY form of the delta rule, with general vectors)."""
from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..common.launch import token_order
from ..common.numerics import compute_dtype
from ..eos_scan.chunks import (
    AnyDecays,
    AnyScaled,
    Layout,
    boundary_shape,
    carries,
    layout,
    line_decays,
    matrix,
    scaled,
    times,
    transposed_times,
    triangle,
)
from ..eos_scan.dense import delta_rule
from ..eos_scan.problem import DIRECTIONS, Output, own_term, steps_of

Empty = Optional[Tensor]


class Chunks(NamedTuple):
    """Chunks (b, H, n, C, .) of a block: arguments after their decays, and the decays of s and of a."""

    x: Tensor
    e: AnyScaled
    s: AnyScaled
    a: AnyScaled
    b: AnyScaled
    decay: Optional[AnyDecays]
    before: Optional[AnyDecays]
    reverse: bool
    own: bool                   # whether the term of a token itself counts in this direction

    def weights(self) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return s b', s e', a b' and a e' under the decay."""
        return (matrix(self.s, self.b, self.decay, self.reverse),
                matrix(self.s, self.e, self.decay, self.reverse, self.own),
                matrix(self.a, self.b, self.before, self.reverse, False),
                matrix(self.a, self.e, self.before, self.reverse, False))

    def solve(self, n: Tensor, x: Tensor, transpose: bool = False) -> Tensor:
        """Return (I - N)^-1 x, or the transpose's."""
        n = n.mT if transpose else n
        return torch.linalg.solve_triangular(-n, x, upper=self.reverse != transpose, unitriangular=True)

    def transition(self, ta: Tensor) -> Tensor:
        """Return the matrix from the memory before a chunk to that after it, (b, H, n, K, K)."""
        product = self.b.end.mT @ ta
        if self.decay is None:
            product.diagonal(dim1=-2, dim2=-1).add_(1)
        else:
            product.diagonal(dim1=-2, dim2=-1).add_(self.decay.total.squeeze(-2))
        return product


def _carry(transition: Tensor, local: Tensor, state: Empty, reverse: bool) -> Tensor:
    """Return the memories at the boundaries of chunks, m[n+1] = transition[n] m[n] + local[n], as `chunks.carry`."""
    count = local.shape[2]
    state = torch.zeros_like(local[:, :, 0]) if state is None else state
    found = [state]
    for n in reversed(range(count)) if reverse else range(count):
        state = local[:, :, n] + transition[:, :, n] @ state
        found.append(state)
    return torch.stack(found[::-1] if reverse else found, 2)


def _boundaries(bounds: Tensor, reverse: bool) -> Tuple[Tensor, Tensor]:
    """Return the memories before and after each chunk."""
    return (bounds[:, :, 1:], bounds[:, :, :-1]) if reverse else (bounds[:, :, :-1], bounds[:, :, 1:])


def _blocks(tensors: List[Tensor], gk: Empty, chunks: Layout, backward: bool, reverse: bool, own: bool):
    """Yield slices of the batch with their blocks of chunks, each a function that makes `Chunks`."""
    i, e = tensors[:2]
    dtype = compute_dtype(i.dtype)

    def block(lines: slice, part: slice) -> Chunks:
        decay, before = line_decays(gk, chunks, lines, part, (reverse, False), (reverse, True))
        x, e, s, a, b = (chunks.chunked(x, lines, part, dtype) for x in tensors)
        return Chunks(x, scaled(e, decay, False), scaled(s, decay, True), scaled(a, before, True),
                      scaled(b, decay, False), decay, before, reverse, own)

    batches, parts = chunks.blocks(len(i), max(i.numel(), e.numel()), reverse != backward)
    for lines in batches:
        yield lines, [(part, block) for part in parts]


def forward(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Empty, state: Empty, direction: str, chunk: int,
            save: bool, last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Compute the output, memories at chunk boundaries for `backward`, if `save` and there are any, and the last
    memory, if `last`. gk: clamped step logs (B, H, T, K), where B, T and K may be 1, or None."""
    dtype, length, dim = compute_dtype(i.dtype), i.shape[2], i.shape[3]
    chunks, carried = layout(length, chunk, gk), carries(length, state, last)
    if last or state is not None:
        gk = chunks.expanded(gk)
    y = token_order(i)
    states = i.new_empty(boundary_shape(i, e.shape[3], state, direction, chunk, save, last), dtype=dtype)
    final = i.new_empty((*i.shape[:2], e.shape[3], dim) if last else 0, dtype=dtype)
    for n, reverse in enumerate(DIRECTIONS[direction]):
        for lines, blocks in _blocks([i, e, s, a, b], gk, chunks, False, reverse, n == 0):
            run = None if state is None else state[lines].to(dtype)
            for part, block in blocks:
                out, bounds = _chunks_forward(block(lines, part), run, carried)
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


def _chunks_forward(c: Chunks, state: Empty, carried: bool) -> Tuple[Tensor, Empty]:
    sb, se, ab, ae = c.weights()
    if not carried:
        return sb @ c.solve(ab, ae @ c.x) + se @ c.x, None
    keys = c.a.x.shape[-1]
    ta, w = c.solve(ab, torch.cat([c.a.end, ae @ c.x], -1)).split([keys, c.x.shape[-1]], -1)
    local = c.b.end.mT @ w + c.e.end.mT @ c.x
    bounds = _carry(c.transition(ta), local, state, c.reverse)
    entering, _ = _boundaries(bounds, c.reverse)
    return c.s.end @ entering + sb @ (ta @ entering + w) + se @ c.x, bounds


def backward(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Empty, state: Empty,
             states: Tensor, direction: str, chunk: int) -> Tuple[Tensor, ...]:
    """Return the gradients of i, e, s, a, b, gk and state, in float32 or float64; empty for those not given."""
    dtype, chunks = compute_dtype(i.dtype), layout(i.shape[2], chunk, gk)
    dgk = i.new_zeros(0 if gk is None else gk.shape, dtype=dtype)
    if state is not None or dfinal is not None:
        gk = chunks.expanded(gk)
    grads = [torch.zeros_like(t, dtype=dtype, memory_format=torch.contiguous_format) for t in (i, e, s, a, b)]
    dstate = i.new_empty(0 if state is None else state.shape, dtype=dtype)
    for n, reverse in enumerate(DIRECTIONS[direction]):
        for lines, blocks in _blocks([i, e, s, a, b], gk, chunks, True, reverse, n == 0):
            run = None if dfinal is None else dfinal[lines].to(dtype)
            for part, block in blocks:
                bounds = states[n, lines, :, part.start:part.stop + 1] if states.numel() else None
                found, steps, run = _chunks_backward(block(lines, part), chunks.chunked(dy, lines, part, dtype), bounds,
                                                     run)
                tokens = chunks.tokens(part)
                for grad, new in zip(grads, found):
                    grad[lines, :, tokens] += new.flatten(2, 3)[:, :, :tokens.stop - tokens.start]
                if steps is not None:
                    chunks.add_steps(dgk, steps, lines, part)
            if state is not None:
                dstate[lines] = run
    return (*grads, dgk, dstate)


def _chunks_backward(c: Chunks, dy: Tensor, bounds: Empty, adjoint: Empty) -> Tuple[List[Tensor], Empty, Empty]:
    """Return the gradients of x, e, s, a, b of chunks, that of their steps, and that of the memory that enters."""
    sb, se, ab, ae = c.weights()
    dw, seed = sb.mT @ dy, None
    w = ae @ c.x
    if bounds is not None:
        entering, leaving = _boundaries(bounds, c.reverse)
        ta = c.solve(ab, c.a.end)
        w = w + c.a.end @ entering
        flow = _carry(c.transition(ta).mT, c.s.end.mT @ dy + ta.mT @ dw, adjoint, not c.reverse)
        _, after = _boundaries(flow, c.reverse)
        adjoint = flow[:, :, -1 if c.reverse else 0]
        dw = dw + c.b.end @ after
    w, dr = c.solve(ab, w), c.solve(ab, dw, True)
    dsb, dse, dab, dae = (triangle(left @ right.mT, c.reverse, diagonal) for left, right, diagonal in (
        (dy, w, True), (dy, c.x, c.own), (dr, w, False), (dr, c.x, False)))
    dx = se.mT @ dy + ae.mT @ dr
    ends: List[Empty] = [None] * 4
    if bounds is not None:
        dx += c.e.end @ after
        ends = [dy @ entering.mT, dr @ entering.mT, w @ after.mT, c.x @ after.mT]
        seed = (after * leaving).sum(-1).unsqueeze(-2)
    ds = times(dsb, c.b, c.decay, c.reverse, ends[0]) + times(dse, c.e, c.decay, c.reverse)
    da = times(dab, c.b, c.before, c.reverse, ends[1]) + times(dae, c.e, c.before, c.reverse)
    db = transposed_times(dsb, c.s, c.decay, c.reverse, ends[2]) + transposed_times(dab, c.a, c.before, c.reverse)
    de = transposed_times(dse, c.s, c.decay, c.reverse, ends[3]) + transposed_times(dae, c.a, c.before, c.reverse)
    return [dx, de, ds, da, db], None if c.decay is None else _step_gradient(c, ds, da, db, de, seed), adjoint


def _step_gradient(c: Chunks, ds: Tensor, da: Tensor, db: Tensor, de: Tensor, seed: Empty) -> Tensor:
    """Return the gradient of the steps of chunks: as `step_gradient` of `eos_elementwise`, where a acts before the
    step of its own token."""
    own = c.a.x * da
    terms = c.s.x * ds - c.b.x * db - c.e.x * de + own
    if c.decay.total.shape[-1] == 1:
        terms, own, seed = (None if x is None else x.sum(-1, keepdim=True) for x in (terms, own, seed))
    sums = (terms.cumsum(-2) if c.reverse else terms.flip(-2).cumsum(-2).flip(-2)) - own
    return sums if seed is None else sums + seed


def eos_matmul_export(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Empty, scale: float, direction: str,
                      initial_state: Empty, output_state: bool, chunk: int) -> Output:
    """Compute with dense matrices of decays for each chunk, and inverses of chunks by products alone."""
    steps = steps_of(gk, i.dtype)
    y, state = delta_rule(i, e, s, a, b, steps, initial_state, direction == 'reverse', chunk)
    if direction == 'both':
        back, _ = delta_rule(i, e, s, a, b, steps, None, True, chunk)
        y = y + back - own_term(i, e, s)
    return (y * scale).to(i.dtype), state if output_state else None
