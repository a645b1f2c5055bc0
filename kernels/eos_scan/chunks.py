"""Lines of tokens in chunks: sizes, padding, decays, memories at chunk boundaries, and blocks that fit the cache.

A chunk is computed by products under a decay: the matrix x_t' diag(decay from j to t) y_j, and its products with
vectors.

There are two forms. `Quotients` refer the decays of a chunk to one point: a matrix is one product, and its factors
exceed 1, which is exact while the decay of a whole chunk is at least e^LEAST_SUM.

`Decays` are for decays of any size: all exponents are at most 0. A decay between two tokens is the product of two
factors that meet at a boundary between them, each at most 1, so that a factor underflows only where the product does.
Blocks of 1, 2, 4, ... tokens are joined in pairs, and the boundary is the one between the two blocks of a pair.

Arrays have shape (..., C, c), with C tokens in a chunk, a power of two for `Decays`, and c channels; without a decay,
C is any number. With `reverse` decays act towards the start, and the matrix is upper triangular.
"""
from typing import List, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import ranges
from .problem import DIRECTIONS

Pair = Tuple[Tensor, Tensor]
# Least sum of the step logs of a chunk for `Quotients`. Their exponents are at most half of it, and rounding in float32
# changes a decay by 2^-24 times the exponent: 2e-6.
LEAST_SUM = -64.0


class Quotients(NamedTuple):
    """Decays within chunks along one axis of the memory, as quotients of decays from the chunk's entry.

    query, key: the decay from token j to token t is query[t] * key[j], each (..., C, c).
    root: square root of the decay of the chunk, (..., 1, c). The decay from the chunk's entry to token t is
        query[t] * root, and that from token j to its exit key[j] * root.
    reverse: whether decays act towards the start.
    """

    query: Tensor
    key: Tensor
    root: Tensor
    reverse: bool

    @property
    def total(self) -> Tensor:
        """The decay of the chunk, (..., 1, c)."""
        return self.root.square()


class Decays(NamedTuple):
    """Decays within chunks along one axis of the memory.

    first: decay of each token's own step, (..., C, c); None if it does not count.
    totals: for pairs of blocks of 1, 2, 4, ... tokens, decays of the later and of the earlier one: (..., pairs, 1, c).
    total: decay of the chunk, (..., 1, c).
    mask: if c is 1, all decays as a matrix, (..., C, C), zero beyond the triangle; otherwise None.
    enter, leave: if c is 1, decays from the chunk's entry to each token and from there to its exit, (..., C, 1).
    reverse: whether the later token of a pair is the one of the smaller index.
    """

    first: Optional[Tensor]
    totals: List[Pair]
    total: Tensor
    mask: Optional[Tensor]
    enter: Optional[Tensor]
    leave: Optional[Tensor]
    reverse: bool


class Scaled(NamedTuple):
    """Vectors of tokens (..., C, c) and what their decays make of them.

    x: the vectors.
    halves: for pairs of blocks of 1, 2, 4, ... tokens, the vectors of the later block after the decay from the boundary
        (queries), or those of the earlier block after the decay to the boundary (keys): (..., pairs, tokens, c).
    end: all vectors after the decay from the chunk's entry (queries) or to its exit (keys).
    """

    x: Tensor
    halves: List[Tensor]
    end: Tensor


class Multiplied(NamedTuple):
    """Vectors of tokens x (..., C, c), their product with a side of `Quotients`, and the root of the chunk's decay."""

    x: Tensor
    product: Tensor
    root: Tensor

    @property
    def end(self) -> Tensor:
        """All vectors after the decay from the chunk's entry (queries) or to its exit (keys)."""
        return self.product * self.root.to(self.product.dtype)


AnyDecays = Union[Decays, Quotients]
AnyScaled = Union[Scaled, Multiplied]


def _halves(x: Tensor, reverse: bool) -> Pair:
    """Return the later and the earlier block of each pair: (..., blocks, h, c) -> two of (..., blocks / 2, h, c)."""
    first, second = x[..., 0::2, :, :], x[..., 1::2, :, :]
    return (first, second) if reverse else (second, first)


def _joined(later: Tensor, earlier: Tensor, reverse: bool) -> Tensor:
    """Return pairs of blocks (..., pairs, h, c) as blocks of twice the size."""
    return torch.cat([later, earlier] if reverse else [earlier, later], -2)


def decays(steps: Tensor, reverse: bool, exclusive: bool = False) -> Decays:
    """Compute the decays of chunks from step logs (..., C, c).

    With `exclusive`, the decay to a token lacks the token's own step, as for a product with the memory before it; then
    the matrix has no diagonal."""
    first = steps.exp()
    total, totals = first.unsqueeze(-2), []                                  # (..., blocks, 1, c)
    while total.shape[-3] > 1:
        totals.append(_halves(total, reverse))
        total = totals[-1][0] * totals[-1][1]
    found = Decays(None if exclusive else first, totals, total.squeeze(-3), None, None, None, reverse)
    return found if steps.shape[-1] > 1 else _with_mask(found, first, exclusive)


def _with_mask(decay: Decays, first: Tensor, exclusive: bool) -> Decays:
    """Join the decays of one channel to matrices of twice the size, until they have the chunk's."""
    reverse, ones = decay.reverse, torch.ones_like(first).unsqueeze(-2)
    enter, leave, mask = ones if exclusive else first.unsqueeze(-2), ones, ones - float(exclusive)
    for later, earlier in decay.totals:
        (near, near0), (far, far0), (low, low0) = (_halves(x, reverse) for x in (enter, leave, mask))
        enter, leave = _joined(near * earlier, near0, reverse), _joined(far, far0 * later, reverse)
        corner, beyond = near @ far0.mT, torch.zeros_like(low)
        low, low0 = ((low, corner), (beyond, low0)) if reverse else ((corner, low), (low0, beyond))
        mask = _joined(torch.cat(low, -1), torch.cat(low0, -1), reverse)
    enter, leave, mask = (x.squeeze(-3) for x in (enter, leave, mask))
    return decay._replace(enter=enter, leave=leave, mask=mask)


def scaled(x: Tensor, decay: Optional[AnyDecays], query: bool) -> AnyScaled:
    """Apply decays to the vectors x, as queries (from a boundary before them) or as keys (to a boundary after them)."""
    if isinstance(decay, Quotients):
        # Products of matrices need dense memory, so the vectors are copied here and nowhere else.
        return Multiplied(x, torch.mul(x, decay.query if query else decay.key, out=x.new_empty(x.shape)), decay.root)
    if decay is None:
        return Scaled(x, [], x)
    if decay.mask is not None:
        return Scaled(x, [], x * (decay.enter if query else decay.leave))
    first = decay.first if query else None
    end, halves = x.clone(memory_format=torch.contiguous_format) if first is None else x * first, []
    for n, (later, earlier) in enumerate(decay.totals):
        half = _pairs(end, 1 << n, decay.reverse)[0 if query else 1]
        halves.append(half.clone(memory_format=torch.contiguous_format))
        half.mul_(earlier if query else later)
    return Scaled(x, halves, end)


def _blocks(matrix: Tensor, h: int, reverse: bool) -> Tensor:
    """Return a view of the entries (later block, earlier block) of all pairs in (..., C, C): (..., pairs, h, h)."""
    pairs = matrix.shape[-1] // (2 * h)
    view = matrix.unflatten(-1, (pairs, 2 * h)).unflatten(-3, (pairs, 2 * h))
    view = view.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)               # (..., pairs, 2 h, 2 h)
    return view[..., :h, h:] if reverse else view[..., h:, :h]


def _pairs(x: Tensor, h: int, reverse: bool) -> Pair:
    return _halves(x.unflatten(-2, (-1, h)), reverse)


def triangle(matrix: Tensor, reverse: bool, diagonal: bool = True) -> Tensor:
    """Set the entries of a matrix whose row is before (with reverse: after) the column to 0, and return the matrix."""
    return matrix.triu_(0 if diagonal else 1) if reverse else matrix.tril_(0 if diagonal else -1)


def matrix(x: AnyScaled, y: AnyScaled, decay: Optional[AnyDecays], reverse: bool, diagonal: bool = True) -> Tensor:
    """Return A[t, j] = sum_c x[t, c] decay[t, j, c] y[j, c] of each chunk, (..., C, C); zero beyond the triangle."""
    if isinstance(decay, Quotients):
        return triangle(x.product @ y.product.mT, reverse, diagonal)
    if decay is None:
        return triangle(x.x @ y.x.mT, reverse, diagonal)
    if decay.mask is not None:
        product = (x.x @ y.x.mT).mul_(decay.mask)
        return product if diagonal else triangle(product, reverse, False)
    size = x.x.shape[-2]
    result = x.x.new_zeros(*x.x.shape[:-1], size)
    if diagonal:
        result.diagonal(dim1=-2, dim2=-1).copy_((x.x * y.x).sum(-1))
    for n, (later, earlier) in enumerate(zip(x.halves, y.halves)):
        _blocks(result, 1 << n, reverse).copy_(later @ earlier.mT)
    return result


def matrix_of_both(x: Tensor, y: Tensor, forward: AnyDecays, backward: AnyDecays) -> Tensor:
    """Return the sum of the matrices A[t, j] = sum_c x[t, c] decay[t, j, c] y[j, c] under decays towards the end and
    towards the start, the diagonal counted once, for `Quotients` or the decays of a single channel."""
    if isinstance(forward, Decays):
        return (x @ y.mT).mul_(forward.mask + triangle(backward.mask, True, False))
    # Products of matrices need dense memory, so the vectors are copied here and nowhere else.
    both = [torch.mul(z, decay, out=z.new_empty(z.shape)) for z, decay in (
        (x, forward.query), (y, forward.key), (x, backward.query), (y, backward.key))]
    return (both[0] @ both[1].mT).tril_().add_((both[2] @ both[3].mT).triu_(1))


def times(a: Tensor, y: AnyScaled, decay: Optional[AnyDecays], reverse: bool, end: Optional[Tensor] = None) -> Tensor:
    """Return sum_j a[t, j] decay[t, j, c] y[j, c] for each token t of a chunk, given a triangular matrix a.

    end: vectors to add after the decay from the chunk's entry to each token, (..., C, c)."""
    if isinstance(decay, Quotients):
        product = a @ y.product
        return (product if end is None else product.addcmul_(end, decay.root.to(end.dtype))).mul_(decay.query)
    if decay is None:
        return a @ y.x if end is None else end + a @ y.x
    if decay.mask is not None:
        product = (a * decay.mask) @ y.x
        return product if end is None else product.addcmul_(end, decay.enter)
    result = torch.zeros_like(y.x, memory_format=torch.contiguous_format) if end is None else end
    for n, (_, earlier) in reversed(list(enumerate(decay.totals))):
        half = _pairs(result, 1 << n, reverse)[0]
        half.mul_(earlier).add_(_blocks(a, 1 << n, reverse) @ y.halves[n])
    if decay.first is None:
        return result
    return result.mul_(decay.first).addcmul_(a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), y.x)


def transposed_times(a: Tensor, x: AnyScaled, decay: Optional[AnyDecays], reverse: bool, end: Optional[Tensor] = None
                     ) -> Tensor:
    """Return sum_t a[t, j] decay[t, j, c] x[t, c] for each token j of a chunk, given a triangular matrix a.

    end: vectors to add after the decay from each token to the chunk's exit, (..., C, c)."""
    if isinstance(decay, Quotients):
        product = a.mT @ x.product
        return (product if end is None else product.addcmul_(end, decay.root.to(end.dtype))).mul_(decay.key)
    if decay is None:
        return a.mT @ x.x if end is None else end + a.mT @ x.x
    if decay.mask is not None:
        product = (a * decay.mask).mT @ x.x
        return product if end is None else product.addcmul_(end, decay.leave)
    result = torch.zeros_like(x.x, memory_format=torch.contiguous_format) if end is None else end
    for n, (later, _) in reversed(list(enumerate(decay.totals))):
        half = _pairs(result, 1 << n, reverse)[1]
        half.mul_(later).add_(_blocks(a, 1 << n, reverse).mT @ x.halves[n])
    return result.addcmul_(a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), x.x)


# A line of up to this length is one chunk, because memories at boundaries would cost more than the larger matrix.
SINGLE_CHUNK = 64
# Elements of an argument that are computed at a time, so that temporaries stay in the cache.
BLOCK_ELEMENTS = 1 << 17


class Layout(NamedTuple):
    """A line of `length` tokens as `count` chunks of `size`, the last of which is padded by zeros.

    quotients: whether all decays of chunks are large enough for `Quotients`."""

    length: int
    size: int
    count: int
    quotients: bool

    def chunked(self, x: Tensor, lines: slice, chunks: slice, dtype: torch.dtype, dense: bool = True) -> Tensor:
        """Return a block of x (B, H, T, c) as (b, H, n, size, c) of a dtype; sizes of 1 of B and T stay.

        Without `dense` it may be a strided view."""
        x = x if x.shape[0] == 1 else x[lines]
        if x.shape[2] == 1 and self.length > 1:
            return x.unsqueeze(2).expand(-1, -1, -1, self.size, -1).to(dtype)
        stop = chunks.stop * self.size
        x = x[:, :, chunks.start * self.size:stop].to(dtype)
        x = x.contiguous() if dense else x
        if stop > self.length:
            x = F.pad(x, (0, 0, 0, stop - self.length))
        return x.unflatten(2, (chunks.stop - chunks.start, self.size))

    def tokens(self, part: slice) -> slice:
        """Return the tokens of some chunks."""
        return slice(part.start * self.size, min(part.stop * self.size, self.length))

    def add_steps(self, dlog: Tensor, new: Tensor, lines: slice, part: slice) -> None:
        """Add the gradient of the steps of a block, (b, H, n, size, c), to that of canonical step logs."""
        tokens = self.tokens(part)
        new = new.flatten(2, 3)[:, :, :tokens.stop - tokens.start]
        dlog = dlog if dlog.shape[0] == 1 else dlog[lines]
        dlog = dlog if dlog.shape[2] == 1 else dlog[:, :, tokens]
        dlog += new.sum_to_size(dlog.shape)

    def expanded(self, log: Optional[Tensor]) -> Optional[Tensor]:
        """Give constant step logs a time axis if a memory passes through the padding, which must not decay it."""
        if log is None or log.shape[2] > 1 or self.length == self.size * self.count:
            return log
        return log.expand(-1, -1, self.length, -1)

    def blocks(self, batch: int, elements: int, backward: bool = False) -> Tuple[List[slice], List[slice]]:
        """Return slices of the batch and slices of chunks, for arguments with `elements` in all.

        The slices of chunks are in the order of the time loop, reversed if `backward`."""
        per_chunk = max(1, elements // (batch * self.count))
        lines = max(1, BLOCK_ELEMENTS // (per_chunk * self.count))
        chunks = ranges(self.count, max(1, BLOCK_ELEMENTS // per_chunk))
        return ranges(batch, lines), chunks[::-1] if backward else chunks


def layout(length: int, chunk: int, *logs: Optional[Tensor]) -> Layout:
    """Choose chunks for canonical step logs.

    Without `Quotients`, blocks of decays are joined in pairs, so that the size is a power of two."""
    size, given, quotients = length if length <= SINGLE_CHUNK else chunk, False, True
    for log in logs:
        if log is not None:
            given, quotients = True, quotients and _decays_little(log, length, size)
    if length <= SINGLE_CHUNK and given and not quotients:
        size = 1 << (length - 1).bit_length()
    return Layout(length, size, -(-length // size), quotients)


def _decays_little(log: Tensor, length: int, size: int) -> bool:
    """Whether step logs add up to LEAST_SUM at least in each chunk. Reading the answer would wait for a GPU."""
    if not log.is_cpu:
        return False
    if log.shape[2] == 1:
        return bool(log.amin() * size >= LEAST_SUM)
    whole = length // size * size
    if whole and not log[:, :, :whole].unflatten(2, (-1, size)).sum(3).amin() >= LEAST_SUM:      # also for NaN
        return False
    return whole == length or bool(log[:, :, whole:].sum(2).amin() >= LEAST_SUM)


def carries(length: int, state: Optional[Tensor], last: bool) -> bool:
    """Whether a memory passes a boundary of chunks or an end of the line."""
    return length > SINGLE_CHUNK or state is not None or last


def boundary_shape(i: Tensor, keys: int, state: Optional[Tensor], direction: str, chunk: int, save: bool, last: bool
                   ) -> Tuple[int, ...]:
    """Return the shape of the memories at chunk boundaries that a backward pass needs."""
    batch, heads, length, dim = i.shape
    if not (save and carries(length, state, last)):
        return (0,)
    count = 1 if length <= SINGLE_CHUNK else -(-length // chunk)
    return len(DIRECTIONS[direction]), batch, heads, count + 1, keys, dim


def line_decays(log: Optional[Tensor], chunks: Layout, lines: slice, part: slice, *kinds: Tuple[bool, bool],
                dtype: Optional[torch.dtype] = None) -> List[Optional[AnyDecays]]:
    """Return the decays of a block from canonical step logs, or None without, for each pair (reverse, exclusive).

    `Quotients` are of the decays from a chunk's entry to the places before, between and behind its tokens, over that of
    half the way. A single channel gives a mask.

    dtype: that of `Quotients`; by default the dtype of the step logs."""
    if log is None:
        return [None] * len(kinds)
    steps, dtype = chunks.chunked(log, lines, part, log.dtype), dtype or log.dtype
    if not chunks.quotients:
        return [decays(steps, *kind) for kind in kinds]
    sums = steps.new_zeros(*steps.shape[:-2], steps.shape[-2] + 1, steps.shape[-1])
    torch.cumsum(steps, -2, out=sums[..., 1:, :])
    half = sums[..., -1:, :] / 2
    down = sums.sub_(half).exp_()
    down, up, root = down.to(dtype), down.reciprocal().to(dtype), half.exp_()
    found, before, behind = [], slice(None, -1), slice(1, None)
    for reverse, exclusive in kinds:
        from_key, to_query = (down, up) if reverse else (up, down)
        key = from_key[..., before if reverse else behind, :]
        query = to_query[..., before if reverse != exclusive else behind, :]
        if key.shape[-1] > 1:
            found.append(Quotients(query, key, root, reverse))
            continue
        mask = triangle(query * key.mT, reverse, not exclusive)
        found.append(Decays(None, [], root.square(), mask, query * root.to(dtype), key * root.to(dtype), reverse))
    return found


def carry(local: Tensor, total_k: Optional[Tensor], total_d: Optional[Tensor], state: Optional[Tensor], reverse: bool
          ) -> Tensor:
    """Return the memories at the boundaries of chunks, m[n+1] = diag(total_k[n]) m[n] diag(total_d[n]) + local[n].

    Args:
        local: what each chunk adds, (b, H, n, K, D).
        total_k, total_d: decay of each chunk, (b, H, n, 1, K) and (b, H, n, 1, D); sizes may be 1; or None.
        state: the memory that enters the first chunk (with reverse: the last), (b, H, K, D), or None for zeros.

    Returns:
        (b, H, n + 1, K, D), where place n is the boundary before chunk n.
    """
    count = local.shape[2]
    state = torch.zeros_like(local[:, :, 0]) if state is None else state
    found = [state]
    for n in reversed(range(count)) if reverse else range(count):
        if total_d is not None:
            state = state * total_d[:, :, n if total_d.shape[2] > 1 else 0]
        if total_k is None:
            state = state + local[:, :, n]
        else:
            state = torch.addcmul(local[:, :, n], state, total_k[:, :, n if total_k.shape[2] > 1 else 0].mT)
        found.append(state)
    return torch.stack(found[::-1] if reverse else found, 2)


# Rows of the largest memory.
LARGEST_KEYS = 128
# Tokens between the memories that a forward kernel stores for a backward kernel.
SPACING = 16


def memory_too_large(keys: int) -> Optional[str]:
    """Return why the kernels cannot take memories of so many rows; None if they can."""
    if keys <= LARGEST_KEYS:
        return None
    return f'the kernels take memories of at most {LARGEST_KEYS} rows (K), and these have {keys}.'


def triton_chunk(dtype: torch.dtype, length: int, chunk: int) -> int:
    """Return the tokens of a chunk of the kernels for rank one. Shorter lines are one chunk.

    Larger tiles do not stay in registers, in float32 or with memories that pass their boundaries.
    """
    half = dtype.itemsize == 2
    single = SINGLE_CHUNK if half else 32
    return single if length <= single else min(chunk, 32 if half else 16)
