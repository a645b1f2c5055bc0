"""Products of chunks under a decay: the matrix x_t' diag(decay from j to t) y_j, and its products with vectors.

All exponents are at most 0. A decay between two tokens is the product of two factors that meet at a boundary between
them, each at most 1, so that decays of any size need no case of their own: a factor underflows only where the product
does. Blocks of 1, 2, 4, ... tokens are joined in pairs, and the boundary is the one between the two blocks of a pair.

Arrays have shape (..., C, c), with C = 2^n tokens in a chunk and c channels. With `reverse` decays act towards the
start, and the matrix is upper triangular.
"""
from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

Pair = Tuple[Tensor, Tensor]


class Decays(NamedTuple):
    """Decays within chunks along one axis of the memory, from step logs (..., C, c).

    levels: for pairs of blocks of 1, 2, 4, ... tokens, decays from the boundary between the two to each token of the
        later block (inclusive) and from each token of the earlier block to the boundary: (..., pairs, tokens, c).
    enter: decay from the chunk's entry to each token, (..., C, c).
    leave: decay from each token to the chunk's exit, (..., C, c).
    total: decay of the chunk, (..., 1, c).
    mask: if c is 1, all decays as a matrix, (..., C, C), zero beyond the triangle; otherwise None.
    reverse: whether the later token of a pair is the one of the smaller index.
    """

    levels: List[Pair]
    enter: Tensor
    leave: Tensor
    total: Tensor
    mask: Optional[Tensor]
    reverse: bool


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
    total = steps.unsqueeze(-2).exp()                                    # (..., blocks, 1, c)
    enter = torch.ones_like(total) if exclusive else total
    leave = torch.ones_like(total)
    mask = None if steps.shape[-1] > 1 else torch.zeros_like(total) if exclusive else torch.ones_like(total)
    levels = []
    while enter.shape[-3] > 1:
        (enter, enter0), (leave, leave0), (later, earlier) = (_halves(x, reverse) for x in (enter, leave, total))
        levels.append((enter, leave0))
        if mask is not None:
            mask = _joined_masks(mask, enter @ leave0.mT, reverse)
        enter, leave = _joined(enter * earlier, enter0, reverse), _joined(leave, leave0 * later, reverse)
        total = later * earlier
    enter, leave, total = (x.squeeze(-3) for x in (enter, leave, total))
    return Decays(levels, enter, leave, total, None if mask is None else mask.squeeze(-3), reverse)


def _joined_masks(mask: Tensor, corner: Tensor, reverse: bool) -> Tensor:
    later, earlier = _halves(mask, reverse)
    beyond = torch.zeros_like(corner)
    later, earlier = torch.cat([later, corner] if reverse else [corner, later], -1), torch.cat(
        [beyond, earlier] if reverse else [earlier, beyond], -1)
    return _joined(later, earlier, reverse)


def _blocks(matrix: Tensor, h: int, reverse: bool) -> Tensor:
    """Return a view of the entries (later block, earlier block) of all pairs in (..., C, C): (..., pairs, h, h)."""
    pairs = matrix.shape[-1] // (2 * h)
    view = matrix.unflatten(-1, (pairs, 2 * h)).unflatten(-3, (pairs, 2 * h))
    view = view.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)               # (..., pairs, 2 h, 2 h)
    return view[..., :h, h:] if reverse else view[..., h:, :h]


def _pairs(x: Tensor, h: int, reverse: bool) -> Pair:
    return _halves(x.unflatten(-2, (-1, h)), reverse)


def triangle(matrix: Tensor, reverse: bool, diagonal: bool = True) -> Tensor:
    """Return the entries whose row is not before (with reverse: not after) the column."""
    return matrix.triu(0 if diagonal else 1) if reverse else matrix.tril(0 if diagonal else -1)


def matrix(x: Tensor, y: Tensor, decay: Optional[Decays], reverse: bool, diagonal: bool = True) -> Tensor:
    """Return A[t, j] = sum_c x[t, c] decay[t, j, c] y[j, c] of each chunk, (..., C, C); zero beyond the triangle."""
    if decay is None:
        return triangle(x @ y.mT, reverse, diagonal)
    if decay.mask is not None:
        product = (x @ y.mT).mul_(decay.mask)
        return product if diagonal else triangle(product, reverse, False)
    size = x.shape[-2]
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    result = x.new_zeros(*lead, size, size)
    if diagonal:
        result.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
    for enter, leave in decay.levels:
        h = enter.shape[-2]
        later, earlier = _pairs(x, h, reverse)[0] * enter, _pairs(y, h, reverse)[1] * leave
        _blocks(result, h, reverse).copy_(later @ earlier.mT)
    return result


def times(a: Tensor, y: Tensor, decay: Optional[Decays], reverse: bool) -> Tensor:
    """Return sum_j a[t, j] decay[t, j, c] y[j, c] for each token t of a chunk, given a triangular matrix a."""
    if decay is None:
        return a @ y
    if decay.mask is not None:
        return (a * decay.mask) @ y
    result = a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * y
    for enter, leave in decay.levels:
        h = enter.shape[-2]
        block, target = _blocks(a, h, reverse), _pairs(result, h, reverse)[0]
        target.add_((block @ (_pairs(y, h, reverse)[1] * leave)).mul_(enter))
    return result


def transposed_times(a: Tensor, x: Tensor, decay: Optional[Decays], reverse: bool) -> Tensor:
    """Return sum_t a[t, j] decay[t, j, c] x[t, c] for each token j of a chunk, given a triangular matrix a."""
    if decay is None:
        return a.mT @ x
    if decay.mask is not None:
        return (a * decay.mask).mT @ x
    result = a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * x
    for enter, leave in decay.levels:
        h = enter.shape[-2]
        block, target = _blocks(a, h, reverse), _pairs(result, h, reverse)[1]
        target.add_((block.mT @ (_pairs(x, h, reverse)[0] * enter)).mul_(leave))
    return result
