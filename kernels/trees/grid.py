"""Quad trees as a pyramid of 2D grids, finest first: the parent of cell (i, j) is (i // 2, j // 2) of the next grid.

Any height and width: a parent at the border has fewer children. With a shift the grid is set that many cells down and
to the right of the tree's origin, so that other cells share a parent; nothing is padded.
"""
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import checks


class Level(NamedTuple):
    """One grid: its size, and the row and column of the tree's coordinates that its first cell has."""
    height: int
    width: int
    top: int = 0
    left: int = 0

    def parent(self) -> 'Level':
        """The next coarser grid."""
        return Level(((self.top + self.height - 1) >> 1) - (self.top >> 1) + 1,
                     ((self.left + self.width - 1) >> 1) - (self.left >> 1) + 1, self.top >> 1, self.left >> 1)


def quadtree_levels(height: int, width: int, max_levels: Optional[int] = None, shift: Sequence[int] = (0, 0)
                    ) -> List[Level]:
    """The grids of a quad tree over height x width leaves, finest first, up to a single cell or `max_levels` grids.

    Args:
        height, width: of the leaves' grid, at least 1.
        max_levels: None for one tree; a number for a forest of trees that high (1: leaves alone).
        shift: rows and columns that the grid is moved against the tree, each at least 0.

    Raises:
        ValueError: a size, number or shift out of range.
    """
    if torch.jit.is_tracing():
        height, width = int(height), int(width)          # the trace holds for these levels: other sizes must fail
    if not all(isinstance(n, (int, torch.SymInt)) and n >= 1 for n in (height, width)):
        raise ValueError(f'quadtree_levels: height and width must be integers of at least 1, got {height!r}, {width!r}')
    if max_levels is not None and not (isinstance(max_levels, int) and max_levels >= 1):
        raise ValueError(f'quadtree_levels: max_levels must be an integer of at least 1 or None, got {max_levels!r}')
    if len(shift) != 2 or not all(isinstance(n, int) and n >= 0 for n in shift):
        raise ValueError(f'quadtree_levels: shift must be two integers of at least 0, got {shift!r}')
    levels = [Level(height, width, *shift)]
    while levels[-1][:2] != (1, 1) and len(levels) != max_levels:
        levels.append(levels[-1].parent())
    return levels


def third_of_coarsest_cell(height: int, width: int, max_levels: Optional[int] = None) -> Tuple[int, int]:
    """The shift of every other layer: a third of the coarsest cell's side, so that its boundaries move at every level
    (half of it would move the coarsest alone: its other binary digits are zero)."""
    side = 1 << (len(quadtree_levels(height, width, max_levels)) - 1)
    return (side // 3, side // 3)


def common_ancestor_levels(levels: Sequence[Level], row: int, column: int) -> Tensor:
    """(H, W) int64: the level of the lowest node that is above each leaf and above the one at (row, column); the number
    of levels where none is."""
    first = levels[0]
    rows, columns = (torch.arange(n) + start for n, start in zip(first[:2], first[2:]))
    result = torch.full(first[:2], len(levels))
    for n in reversed(range(len(levels))):
        same = ((rows >> n == row + first.top >> n)[:, None] & (columns >> n == column + first.left >> n))
        result[same] = n
    return result


def _slots(length: int, origin: int) -> Iterator[Tuple[slice, slice]]:
    """For first and second children along an axis: which they are, and which their parents are."""
    for slot in (0, 1):
        first = (slot - origin) % 2
        count = (length - first + 1) // 2
        parent = ((first + origin) >> 1) - (origin >> 1)
        if count > 0:
            yield slice(first, None, 2), slice(parent, parent + count)


def quarters(level: Level) -> List[Tuple[Tuple, Tuple]]:
    """Indices of the four kinds of children in a tensor (B, heads, H, W, ...), and of their parents in theirs."""
    return [((slice(None), slice(None), rows, columns), (slice(None), slice(None), above, left))
            for rows, above in _slots(level.height, level.top) for columns, left in _slots(level.width, level.left)]


def sum_children(x: Tensor, level: Level) -> Tensor:
    """Sums over the children of each parent: (B, C, H, W) on `level` -> (B, C, H', W') on the next."""
    padding = (level.top % 2, level.left % 2)
    # One more row or column before the first where it is a second child. The pooling pads both sides, and drops a last
    # window that holds padding alone.
    return F.avg_pool2d(x, 2, padding=padding, ceil_mode=True, divisor_override=1)


def repeat_to_children(x: Tensor, level: Level) -> Tensor:
    """Each parent's value at its children: (B, C, H', W') -> (B, C, H, W) on `level`."""
    x = F.interpolate(x, scale_factor=2.0, mode='nearest')
    top, left = level.top % 2, level.left % 2
    return x[:, :, top:top + level.height, left:left + level.width]


def leaf_counts(levels: Sequence[Level], like: Tensor, mask: Optional[Tensor] = None) -> List[Tensor]:
    """How many leaves (with a mask (B, H, W): valid ones) each cell covers, (1 or B, 1, H_l, W_l), in like's dtype.

    Raises:
        TypeError: a mask that is not of booleans.
        ValueError: a mask of another shape.
    """
    first = levels[0]
    if mask is not None:
        checks.boolean('quadtree_solve', 'mask', mask, like)
        checks.shape('quadtree_solve', 'mask', mask, (*mask.shape[:1], first.height, first.width), 'one for each leaf')
    counts = [like.new_ones(1, 1, first.height, first.width) if mask is None else mask[:, None].to(like.dtype)]
    for level in levels[:-1]:
        counts.append(sum_children(counts[-1], level))
    return counts


def level_means(x: Tensor, levels: Sequence[Level], mask: Optional[Tensor] = None) -> List[Tensor]:
    """x (B, C, H, W) and its means over the (valid) leaves of each cell of the coarser grids, zero where there is none:
    a list of (B, C, H_l, W_l). Summed in float32 at least."""
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    counts = leaf_counts(levels, total, mask)
    if mask is not None:
        total = total.masked_fill(counts[0] == 0, 0)     # whatever is there, NaN too
        x = total.to(x.dtype)
    result = [x]
    for level, count in zip(levels, counts[1:]):
        total = sum_children(total, level)
        result.append((total / (count if mask is None else count.clamp(min=1))).to(x.dtype))
    return result
