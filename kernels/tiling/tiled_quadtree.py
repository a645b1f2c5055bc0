"""Quad-tree solve in bands: each band eliminates its subtrees, the coarse tree is solved, and the bands follow.

A band is the leaves of one row of cells of a level. Eliminating a subtree leaves its Schur complement: what it adds to
the pivot and to the right-hand side of its root.
"""
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common import checks
from ..common.numerics import compute_dtype
from ..quadtree_solve.portable import coefficients, sweep, sweep_down, sweep_up
from ..trees import PARAMETRIZATIONS, RHO, Level, quadtree_levels, sibling_normalized
from .bands import Device, Source, Target, check_grid, check_target, read, total_size, write

_OP = 'quadtree_solve_tiled'


class _Problem(NamedTuple):
    """The arguments, and the grids of all levels. `top` is the level whose cells are the roots of a band's subtrees."""
    values: Sequence[Source]
    edges: Sequence[Source]
    levels: List[Level]
    top: int
    parametrization: str
    rho: float
    device: Device

    def band(self, row: int) -> List[Level]:
        """Return the grids of the subtrees below a row of cells of level `top`, in the tree's coordinates."""
        found = []
        for n, level in enumerate(self.levels[:self.top + 1]):
            first = self.levels[self.top].top + row
            start = max(first << (self.top - n), level.top)
            stop = min((first + 1) << (self.top - n), level.top + level.height)
            found.append(Level(stop - start, level.width, start, level.left))
        return found

    def read_values(self, n: int, rows: Level) -> Tensor:
        """Return values of some rows of level n, (B, heads, rows, W_n, D)."""
        value = self._read('values', self.values, n, rows)
        checks.tensors(_OP, {f'values[{n}]': 5}, **{f'values[{n}]': value})
        checks.shapes(_OP, (f'values[{n}]', value, (*value.shape[:2], *rows[:2], value.shape[4]), f'level {n}'))
        return value

    def read_edges(self, n: int, rows: Level, like: Tensor) -> Tensor:
        """Return the edges of some rows of level n in the dtype of the arithmetic, (B, heads, rows, W_n)."""
        edge = self._read('edges', self.edges, n, rows)
        checks.tensors(_OP, {f'edges[{n}]': 4}, **{f'edges[{n}]': edge})
        checks.shapes(_OP, (f'edges[{n}]', edge, (*like.shape[:2], *rows[:2]), f'level {n}'))
        if self.parametrization == 'laplacian':
            checks.not_negative(_OP, f'edges[{n}]', edge, "with parametrization='laplacian'")
        edge = edge.to(compute_dtype(like.dtype))
        return sibling_normalized(edge, rows, self.rho) if self.parametrization == 'symmetric' else edge

    def _read(self, name: str, sources: Sequence[Source], n: int, rows: Level) -> Tensor:
        start = rows.top - self.levels[n].top
        return read(_OP, f'{name}[{n}]', sources[n], 2, start, start + rows.height, self.device)


def _eliminate(problem: _Problem, row: int) -> Tuple[List[Level], List[Tensor], Tuple, torch.dtype]:
    """Return the grids of a band, its right-hand sides without children, its coefficients, and the dtype of values."""
    levels = problem.band(row)
    values = [problem.read_values(n, level) for n, level in enumerate(levels)]
    edges = [problem.read_edges(n, level, values[0]) for n, level in enumerate(levels[:-1])]
    numbers = coefficients(edges, levels, problem.parametrization)
    dtype = compute_dtype(values[0].dtype)
    return levels, sweep_up([x.to(dtype) for x in values], levels, numbers[1]), numbers, values[0].dtype


def _solve_coarse(problem: _Problem, right: Tensor, pivot: Tensor) -> List[Tensor]:
    """Return x from level `top` on, given the right-hand sides and 1 / S of its nodes after the elimination."""
    levels = problem.levels[problem.top:]
    values = [right, *(problem.read_values(n, level).to(right.dtype)
                       for n, level in enumerate(levels[1:], problem.top + 1))]
    edges = [problem.read_edges(n, level, right) for n, level in enumerate(levels[:-1], problem.top)]
    numbers = coefficients(edges, levels, problem.parametrization, pivot.reciprocal())
    return sweep(values, levels, *numbers)


def _each_level(name: str, given: Any) -> List[Any]:
    """Return a list with an entry for each level."""
    if not isinstance(given, (list, tuple)):
        raise TypeError(f'{_OP}: {name} must be a list with one entry for each level, got {type(given).__name__}')
    return list(given)


def _problem(values: Sequence[Source], edges: Sequence[Source], rows: int, size: Optional[Sequence[int]],
             parametrization: str, rho: float, shift: Sequence[int], device: Device) -> _Problem:
    """Check the arguments."""
    checks.one_of(_OP, 'parametrization', parametrization, PARAMETRIZATIONS)
    if not 0 < rho < 1:
        raise ValueError(f'{_OP}: rho must be between 0 and 1, got {rho!r}')
    values, edges = _each_level('values', values), _each_level('edges', edges)
    if not values:
        raise ValueError(f'{_OP}: values must have at least one level, got none')
    if len(edges) != len(values) - 1:
        raise ValueError(f'{_OP}: edges must have one entry for each level except the last ({len(values) - 1}), got '
                         f'{len(edges)}')
    if type(rows) is not int or rows < 2 or rows & (rows - 1):
        raise ValueError(f'{_OP}: rows must be a power of 2 from 2 on, got {rows!r}')
    height, width = total_size(_OP, values[0], size, 'size', (2, 3))
    levels = quadtree_levels(height, width, None, shift)
    if len(values) > len(levels):
        raise ValueError(f'{_OP}: a tree over {height} x {width} leaves has {len(levels)} levels, got {len(values)}')
    levels = levels[:len(values)]
    for name, sources in (('values', values), ('edges', edges)):
        for n, (source, level) in enumerate(zip(sources, levels)):
            check_grid(_OP, f'{name}[{n}]', source, level[:2], f'level {n} of this tree')
    top = min(rows.bit_length() - 1, len(levels) - 1)
    return _Problem(values, edges, levels, top, parametrization, rho, device)


@torch.no_grad()
def quadtree_solve_tiled(
        values: Sequence[Source],
        edges: Sequence[Source],
        out: Sequence[Target],
        *,
        parametrization: str = 'laplacian',
        rho: float = RHO,
        shift: Sequence[int] = (0, 0),
        rows: int = 64,
        size: Optional[Sequence[int]] = None,
        device: Device = None,
) -> None:
    """Compute `quadtree_solve` of an image that is larger than the memory, in bands of rows.

    Level log2(rows) and the levels above it are solved in the memory. The levels below it are read twice, and each of
    their bands is written once. The result equals that of `quadtree_solve` up to rounding. There is no padding mask:
    set the edges of nodes without a valid leaf to 0.

    Args:
        values: u of each level, finest first, (B, heads, H_l, W_l, D): arrays, or functions (start, stop) that return
            the rows from start to stop of the level; float32, float64, float16 or bfloat16.
        edges: edges of each level but the last, (B, heads, H_l, W_l): arrays or functions.
        out: for each level an array of the shape of its values with a floating-point dtype, a function
            (start, stop, band), or None, which drops the level's result.
        parametrization, rho, shift: as for `quadtree_solve`.
        rows: rows of leaves of a band, a power of 2 from 2 on; the height need not be a multiple of it.
        size: (H, W), needed where values[0] is a function.
        device: device of the arithmetic; None for that of the bands.

    Raises:
        ValueError: a shape, number of levels, shift, name or number is not allowed. On a CPU also a negative edge with
            'laplacian'.
        TypeError: an input or a dtype is not allowed.
    """
    problem = _problem(values, edges, rows, size, parametrization, rho, shift, device)
    top, height = problem.top, problem.levels[problem.top].height
    out = _each_level('out', out)
    if len(out) != len(problem.levels):
        raise ValueError(f'{_OP}: out must have one entry for each of the {len(problem.levels)} levels, got {len(out)}')
    for n, (target, level) in enumerate(zip(out, problem.levels)):
        check_grid(_OP, f'out[{n}]', target, level[:2], f'level {n} of this tree')
        check_target(_OP, f'out[{n}]', target)
    roots, pivots = [], []
    for row in range(height):
        levels, right, (scale, _, _), _ = _eliminate(problem, row)
        roots.append(right[-1])
        pivots.append(scale[-1] if scale else torch.ones_like(right[-1][..., 0]))
    coarse = _solve_coarse(problem, torch.cat(roots, 2), torch.cat(pivots, 2))
    for row in range(height):
        levels, right, (scale, _, down), dtype = _eliminate(problem, row)
        solution = [y.mul(s[..., None]) for y, s in zip(right[:-1], scale)] + [coarse[0][:, :, row:row + 1].clone()]
        for n, x in enumerate(sweep_down(solution, levels, down)[:top]):
            start = levels[n].top - problem.levels[n].top
            write(_OP, f'out[{n}]', out[n], 2, start, start + levels[n].height, x.to(dtype))
    for n, x in enumerate(coarse, top):
        write(_OP, f'out[{n}]', out[n], 2, 0, x.shape[2], x.to(dtype))
