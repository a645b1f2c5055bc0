"""Lines of tokens in chunks: sizes, padding, decays, memories at chunk boundaries, and blocks that fit the cache."""
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.workspace import keep_freed_memory, ranges
from .decayed_products import LEAST_SUM, AnyDecays, decays, entry_decays
from .problem import DIRECTIONS

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

    def blocks(self, batch: int, elements: int, backward: bool = False) -> Iterator[Tuple[slice, list]]:
        """Yield slices of the batch with a list of slices of chunks, for arguments with `elements` in all.

        The slices of chunks are in the order of the time loop, reversed if `backward`."""
        keep_freed_memory()
        per_chunk = max(1, elements // (batch * self.count))
        lines = max(1, BLOCK_ELEMENTS // (per_chunk * self.count))
        chunks = ranges(self.count, max(1, BLOCK_ELEMENTS // per_chunk))
        for part in ranges(batch, lines):
            yield part, chunks[::-1] if backward else chunks


def layout(length: int, chunk: int, *logs: Optional[Tensor]) -> Layout:
    """Choose chunks for canonical step logs.

    Without `Quotients`, blocks of decays are joined in pairs, so that the size is a power of two."""
    given = [log for log in logs if log is not None]
    size = length if length <= SINGLE_CHUNK else chunk
    dense = all(_decays_little(log, length, size) for log in given)
    if length <= SINGLE_CHUNK and given and not dense:
        size = 1 << (length - 1).bit_length()
    return Layout(length, size, -(-length // size), dense)


def _decays_little(log: Tensor, length: int, size: int) -> bool:
    """Whether step logs add up to LEAST_SUM at least in each chunk. Reading the answer would wait for a GPU."""
    if not log.is_cpu:
        return False
    if log.shape[2] == 1:
        return bool(log.amin() * size >= LEAST_SUM)
    count = length // size
    sums = [log[:, :, :count * size].unflatten(2, (count, size)).sum(3), log[:, :, count * size:].sum(2)]
    return all(bool(x.amin() >= LEAST_SUM) for x in sums if x.numel())       # false for NaN


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

    dtype: that of `Quotients`; by default the dtype of the step logs."""
    if log is None:
        return [None] * len(kinds)
    steps = chunks.chunked(log, lines, part, log.dtype)
    if not chunks.quotients:
        return [decays(steps, *kind) for kind in kinds]
    entry = entry_decays(steps, dtype or log.dtype)
    return [entry.quotients(*kind) for kind in kinds]


def expanded(log: Optional[Tensor], chunks: Layout, needed: bool) -> Optional[Tensor]:
    """Give constant step logs a time axis if a memory passes through the padding, which must not decay it."""
    if log is None or log.shape[2] > 1 or not needed or chunks.length == chunks.size * chunks.count:
        return log
    return log.expand(-1, -1, chunks.length, -1)


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
