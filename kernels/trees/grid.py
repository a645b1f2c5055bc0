"""Quad trees as a pyramid of 2D grids, finest first: the parent of cell (i, j) is (i // 2, j // 2) of the next grid.

Height and width are arbitrary: a parent at the border has fewer children. A shift moves the grid down and to the right
of the tree's origin, so that other cells share a parent. Nothing is padded.
"""
from functools import lru_cache
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import checks
from ..common.checks import exporting

# Orders of the cells of a grid as a sequence.
ORDERS = ('morton', 'snake', 'raster')


class Level(NamedTuple):
    """One grid: its size, and the position of its first cell in the tree's coordinates."""
    height: int
    width: int
    top: int = 0
    left: int = 0

    def parent(self) -> 'Level':
        """Return the next coarser grid."""
        return Level(((self.top + self.height - 1) >> 1) - (self.top >> 1) + 1,
                     ((self.left + self.width - 1) >> 1) - (self.left >> 1) + 1, self.top >> 1, self.left >> 1)


def quadtree_levels(height: int, width: int, max_levels: Optional[int] = None, shift: Sequence[int] = (0, 0)
                    ) -> List[Level]:
    """Return the grids of a quad tree over height x width leaves, finest first, up to one cell or `max_levels` grids.

    Args:
        height, width: size of the grid of leaves, at least 1.
        max_levels: None for one tree; the number of levels for a forest (1 has leaves only).
        shift: rows and columns by which the grid is shifted against the tree, at least 0.

    Raises:
        ValueError: a size, number or shift is out of range.
    """
    if torch.jit.is_tracing():
        height, width = int(height), int(width)          # the trace is valid for these levels only
    if type(height) is type(width) is int and not torch.compiler.is_compiling() and isinstance(shift, (list, tuple)):
        return list(_kept_levels(height, width, max_levels, *shift))
    return _levels(height, width, max_levels, shift)


def _levels(height: int, width: int, max_levels: Optional[int], shift: Sequence[int]) -> List[Level]:
    """Compute `quadtree_levels`."""
    if not all(isinstance(n, (int, torch.SymInt)) and n >= 1 for n in (height, width)):
        raise ValueError(f'quadtree_levels: height and width must be integers of at least 1, got {height!r}, {width!r}')
    if max_levels is not None and (type(max_levels) is not int or max_levels < 1):
        raise ValueError(f'quadtree_levels: max_levels must be an integer of at least 1 or None, got {max_levels!r}')
    if not isinstance(shift, (list, tuple)) or len(shift) != 2 or not all(type(n) is int and n >= 0 for n in shift):
        raise ValueError(f'quadtree_levels: shift must be two integers of at least 0, got {shift!r}')
    levels = [Level(height, width, *shift)]
    while levels[-1][:2] != (1, 1) and len(levels) != max_levels:
        levels.append(levels[-1].parent())
    return levels


@lru_cache(maxsize=256, typed=True)                      # True is not 1
def _kept_levels(height: int, width: int, max_levels: Optional[int], *shift: int) -> List[Level]:
    return _levels(height, width, max_levels, shift)


def third_of_coarsest_cell(height: int, width: int, max_levels: Optional[int] = None) -> Tuple[int, int]:
    """Return the shift of every second layer, a third of the coarsest cell's side.

    It moves the boundaries of cells at every level. Half of the side would move those of the coarsest level only,
    because its other binary digits are zero."""
    side = 1 << (len(quadtree_levels(height, width, max_levels)) - 1)
    return (side // 3, side // 3)


def common_ancestor_levels(levels: Sequence[Level], row: int, column: int) -> Tensor:
    """Return the level of the lowest common ancestor of each leaf and the leaf at (row, column): (H, W), int64.

    It is the number of levels for leaves that have no common ancestor."""
    first = levels[0]
    rows, columns = (torch.arange(n) + start for n, start in zip(first[:2], first[2:]))
    result = torch.full(first[:2], len(levels))
    for n in reversed(range(len(levels))):
        same = ((rows >> n == row + first.top >> n)[:, None] & (columns >> n == column + first.left >> n))
        result[same] = n
    return result


def _slots(length: int, origin: int) -> Iterator[Tuple[slice, slice]]:
    """Yield slices of the first (second) children along an axis and of their parents."""
    for slot in (0, 1):
        first = (slot - origin) % 2
        count = (length - first + 1) // 2
        parent = ((first + origin) >> 1) - (origin >> 1)
        if count > 0:
            yield slice(first, None, 2), slice(parent, parent + count)


def quarters(level: Level) -> List[Tuple[Tuple, Tuple]]:
    """Return indices of the four kinds of children in (B, heads, H, W, ...), and of their parents in the next level."""
    return [((slice(None), slice(None), rows, columns), (slice(None), slice(None), above, left))
            for rows, above in _slots(level.height, level.top) for columns, left in _slots(level.width, level.left)]


def sum_children(x: Tensor, level: Level) -> Tensor:
    """Sum over the children of each parent: (B, C, H, W) on `level` -> (B, C, H', W') on the next level."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return mean_children(x, level) * 4.0
    padding = (level.top % 2, level.left % 2)
    # A row or column is added before the first if that is a second child. The pooling pads both sides, and drops a last
    # window that holds only padding.
    return F.avg_pool2d(x, 2, padding=padding, ceil_mode=True, divisor_override=1)


def mean_children(x: Tensor, level: Level) -> Tensor:
    """Return a quarter of `sum_children`, for exporters, many of which pool without padding and rounding up only."""
    return F.avg_pool2d(pad_to_parents(x, level), 2)


def pad_to_parents(x: Tensor, level: Level) -> Tensor:
    """Add the cells with value 0 that parents at the border lack: (B, C, H, W) -> (B, C, 2 H', 2 W')."""
    top, left = level.top % 2, level.left % 2
    bottom, right = (level.height + top) % 2, (level.width + left) % 2
    return F.pad(x, (left, right, top, bottom)) if top or left or bottom or right else x


def repeat_to_children(x: Tensor, level: Level) -> Tensor:
    """Repeat each parent's value for its children: (B, C, H', W') -> (B, C, H, W) on `level`."""
    x = F.interpolate(x, scale_factor=2.0, mode='nearest')
    top, left = level.top % 2, level.left % 2
    if exporting() and not (top or left or level.height % 2 or level.width % 2):
        return x                             # exporters keep a slice that changes nothing
    return x[:, :, top:top + level.height, left:left + level.width]


def leaf_counts(levels: Sequence[Level], like: Tensor, mask: Optional[Tensor] = None, *,
                op: str = 'leaf_counts') -> List[Tensor]:
    """Return how many leaves (valid ones with a mask (B, H, W)) each cell covers: (1 or B, 1, H_l, W_l), like's dtype.

    Errors begin with `op`.

    Raises:
        TypeError: the mask has another dtype than bool.
        ValueError: the mask has another shape or device.
    """
    first = levels[0]
    if mask is not None:
        checks.boolean(op, 'mask', mask, like)
        checks.shapes(op, ('mask', mask, (*mask.shape[:1], first.height, first.width), 'one for each leaf'))
    counts = [like.new_ones(1, 1, first.height, first.width) if mask is None else mask[:, None].to(like.dtype)]
    for level in levels[:-1]:
        counts.append(sum_children(counts[-1], level))
    return counts


def level_means(x: Tensor, levels: Sequence[Level], mask: Optional[Tensor] = None,
                counts: Optional[Sequence[Tensor]] = None) -> List[Tensor]:
    """Return x (B, C, H, W) and its means over the (valid) leaves of each cell of coarser grids: (B, C, H_l, W_l) each.

    Cells without a valid leaf have mean 0. Sums have at least float32. `counts` are the `leaf_counts` of the levels and
    the mask, if they are known."""
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    counts = leaf_counts(levels, total, mask, op='level_means') if counts is None else counts
    if mask is not None:
        total = total.masked_fill(counts[0] == 0, 0)     # whatever their values are, NaN too
        x = total.to(x.dtype)
    result = [x]
    for level, count in zip(levels, counts[1:]):
        total = sum_children(total, level)
        result.append((total / (count if mask is None else count.clamp(min=1))).to(x.dtype))
    return result


def level_means_export(x: Tensor, levels: Sequence[Level]) -> List[Tensor]:
    """Compute `level_means` without masks for exporters: the counts are literals, which become constants."""
    mean, result = x, [x]                    # `mean` counts the missing leaves of cells at the border as zeros
    for n, (level, above) in enumerate(zip(levels, levels[1:]), 1):
        mean = mean_children(mean, level)
        rows, columns = (_leaves_along(*sides, n) for sides in (
            (levels[0].height, levels[0].top, above.height), (levels[0].width, levels[0].left, above.width)))
        full = all(count == 2 ** n for count in rows + columns)
        share = None if full else torch.tensor([[4.0 ** n / (i * j) for j in columns] for i in rows], dtype=x.dtype,
                                               device=x.device)
        result.append(mean if share is None else mean * share[None, None])
    return result


def _leaves_along(length: int, origin: int, cells: int, n: int) -> List[int]:
    """Return how many of `length` leaves along an axis each of the `cells` of level n covers."""
    first = origin >> n
    edges = [min(max((first + cell << n) - origin, 0), length) for cell in range(cells + 1)]
    return [stop - start for start, stop in zip(edges, edges[1:])]


def grid_order(height: int, width: int, order: str) -> Tensor:
    """Return the raster index of each cell of the sequence, (height * width,), int64.

    'raster' reads row by row. 'snake' reads every second row backwards, so neighbors in the sequence are neighbors on
    the grid. 'morton' (z-order) sorts by the interleaved binary digits of row and column: if height and width are the
    same power of 2, each 4^l consecutive cells, from a multiple of 4^l on, form a square.

    Raises:
        ValueError: the order is unknown, or the grid has no cell.
    """
    checks.one_of('grid_order', 'order', order, ORDERS)
    height, width = int(height), int(width)      # a tracer passes tensors
    if height < 1 or width < 1:
        raise ValueError(f'grid_order: height and width must be at least 1, got {height} and {width}')
    rows, columns = (x.flatten() for x in torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij'))
    if order == 'raster':
        return torch.arange(height * width)
    if order == 'snake':
        return rows * width + torch.where(rows % 2 == 0, columns, width - 1 - columns)
    code = torch.zeros_like(rows)
    for bit in range((max(height, width) - 1).bit_length()):
        code += (rows >> bit & 1) << 2 * bit + 1 | (columns >> bit & 1) << 2 * bit
    return code.argsort()
