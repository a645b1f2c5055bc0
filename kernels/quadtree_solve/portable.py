"""Quad-tree solve in plain PyTorch, level by level, with a hand-written gradient, and a form for exporters.

Blocks have size 1, and A = 1 (for the Laplacian, A_v = 1 + the weights of v's edges). Then the sweeps need three
numbers per node: 1 / S, the factor -C / S of r_v in its parent's r, and the factor -B / S of x_p in x_v.
"""
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.numerics import compute_dtype
from ..trees.grid import Level, mean_children, quadtree_levels, quarters, repeat_to_children

Coefficients = Tuple[List[Tensor], List[Tensor], List[Tensor]]


def _levels(values: Sequence[Tensor], shift: Sequence[int]) -> List[Level]:
    return quadtree_levels(*values[0].shape[2:4], len(values), shift)


def coefficients(edges: Sequence[Tensor], levels: Sequence[Level], parametrization: str,
                 carried: Optional[Tensor] = None) -> Coefficients:
    """Return 1 / S, -C / S and -B / S of every node, lists of (B, heads, H_l, W_l); the last level has only 1 / S.

    `carried` is that of the first level, below, if its nodes have children that were eliminated; None for leaves.

    For the Laplacian, the sweep carries not S but its excess over the edge to the parent, e = S - w, with
    e_p = 1 + sum w e / S. It never subtracts nearly equal numbers, so rows of the inverse sum to 1 to the last
    digit."""
    scale, up, down = [], [], []
    # `carried`: e of the Laplacian, S of the others; 1 without children.
    for edge, level, above in zip(edges, levels, levels[1:]):
        carried = torch.ones_like(edge) if carried is None else carried
        if parametrization == 'laplacian':
            scale.append((carried + edge).reciprocal_())
            up.append(edge * scale[-1])
            down.append(up[-1])
            added = up[-1] * carried
        else:
            scale.append(carried.reciprocal())
            down.append((edge * scale[-1]).neg_())
            up.append(-down[-1] if parametrization == 'skew' else down[-1])
            added = up[-1] * edge
        carried = edge.new_ones(*edge.shape[:2], above.height, above.width)
        for child, parent in quarters(level):
            carried[parent].add_(added[child])
    if carried is not None:
        scale.append(carried.reciprocal_())
    return scale, up, down


def sweep(values: Sequence[Tensor], levels: Sequence[Level], scale: Sequence[Tensor], up: Sequence[Tensor],
          down: Sequence[Tensor]) -> List[Tensor]:
    """Return x of every level, a list of (B, heads, H_l, W_l, D); values are not modified."""
    right = sweep_up(values, levels, up)
    solution = [torch.mul(r, s[..., None], out=torch.empty_like(r) if n == 0 else r)
                for n, (r, s) in enumerate(zip(right, scale))]
    return sweep_down(solution, levels, down)


def sweep_up(values: Sequence[Tensor], levels: Sequence[Level], up: Sequence[Tensor]) -> List[Tensor]:
    """Return the right-hand sides r of every level without its children; values are not modified."""
    right = [values[0], *(x.clone() for x in values[1:])]
    for level, x, above, push in zip(levels, right, right[1:], up):
        for child, parent in quarters(level):
            above[parent].addcmul_(push[child][..., None], x[child])
    return right


def sweep_down(solution: List[Tensor], levels: Sequence[Level], down: Sequence[Tensor]) -> List[Tensor]:
    """Add to y = r / S of every level the part of its parents, in place, from x of the last level down."""
    for level, x, above, pull in reversed([*zip(levels, solution, solution[1:], down)]):
        for child, parent in quarters(level):
            x[child].addcmul_(pull[child][..., None], above[parent])
    return solution


def edge_gradients(adjoint: Sequence[Tensor], solution: Sequence[Tensor], edges: Sequence[Tensor],
                   levels: Sequence[Level], parametrization: str) -> List[Tensor]:
    """Return the gradients of the edges from the adjoint's and the solve's x."""
    result = []
    for n, (edge, level) in enumerate(zip(edges, levels)):
        grad = torch.empty_like(edge)
        for child, parent in quarters(level):
            g, x, gp, xp = adjoint[n][child], solution[n][child], adjoint[n + 1][parent], solution[n + 1][parent]
            if parametrization == 'laplacian':
                part = ((gp - g) * (x - xp)).sum(-1)
            else:
                part = (g * xp).neg_()
                part = (part.addcmul_(gp, x) if parametrization == 'skew' else part.addcmul_(gp, x, value=-1)).sum(-1)
            grad[child] = part
        result.append(grad)
    return result


def _computed(tensors: Sequence[Tensor], dtype: torch.dtype) -> List[Tensor]:
    return [x.detach().to(dtype) for x in tensors]


def forward(values: List[Tensor], edges: List[Tensor], parametrization: str, shift: Sequence[int]) -> List[Tensor]:
    """Return x of every level in the dtype of values."""
    if not edges:
        return [x.clone() for x in values]
    dtype, levels = compute_dtype(values[0].dtype), _levels(values, shift)
    scale, up, down = coefficients(_computed(edges, dtype), levels, parametrization)
    return [x.to(values[0].dtype) for x in sweep(_computed(values, dtype), levels, scale, up, down)]


def backward(grads: List[Tensor], solution: List[Tensor], edges: List[Tensor], parametrization: str,
             shift: Sequence[int]) -> Tuple[List[Tensor], List[Tensor]]:
    """Return the gradients of values and of edges, by one solve with the transpose and products."""
    if not edges:
        return [x.clone() for x in grads], []
    dtype, levels = compute_dtype(solution[0].dtype), _levels(solution, shift)
    exact = _computed(edges, dtype)
    scale, up, down = coefficients(exact, levels, parametrization)
    adjoint = sweep(_computed(grads, dtype), levels, scale, down, up)      # the transpose exchanges up and down
    products = edge_gradients(adjoint, _computed(solution, dtype), exact, levels, parametrization)
    return [x.to(y.dtype) for x, y in zip(adjoint, solution)], [x.to(e.dtype) for x, e in zip(products, edges)]


def quadtree_solve_export(values: List[Tensor], edges: List[Tensor], parametrization: str, shift: Sequence[int]
                          ) -> List[Tensor]:
    """Solve with `quadtree_solve_maps`; every tensor but the arguments and the results has rank 4 at most."""
    batch, heads, _, _, dim = values[0].shape
    levels, dtype = _levels(values, shift), compute_dtype(values[0].dtype)

    def spread(x: Tensor) -> Tensor:
        """Repeat a head's number for each of its channels."""
        images, _, height, width = x.shape
        x = x.reshape(images * heads, 1, height, width).expand(-1, dim, -1, -1)
        return x.reshape(images, heads * dim, height, width)

    maps = [v.to(dtype).permute(0, 1, 4, 2, 3).reshape(batch, heads * dim, *v.shape[2:4]) for v in values]
    edges = [edge.to(dtype) for edge in edges]
    if parametrization == 'laplacian':
        edges = [edge * 4.0 ** -n for n, edge in enumerate(edges)]
    solution = quadtree_solve_maps(maps, edges, parametrization, levels, spread)
    return [x.reshape(batch, heads, dim, level.height, level.width).permute(0, 1, 3, 4, 2).to(values[0].dtype)
            for x, level in zip(solution, levels)]


def quadtree_solve_maps(values: Sequence[Tensor], edges: Sequence[Tensor], parametrization: str,
                        levels: Sequence[Level], spread: Callable[[Tensor], Tensor]) -> List[Tensor]:
    """Solve for channels-first maps, for exporters: sums over children by pooling, values at children by interpolation.

    It uses no custom operator and no in-place operation, and computes with tensors of rank 4 at most.

    Args:
        values: (B, C, H_l, W_l) for each level.
        edges: (B or 1, heads, H_l, W_l) for each level but the last. The weights of 'laplacian' are divided by
            4^level. All numbers of a cell then have the size of means over its leaves, which half precision can hold.
        parametrization: 'laplacian', 'symmetric' (with normalized edges) or 'skew'.
        levels: the grids.
        spread: repeats a head's number for each of its channels: (B or 1, heads, H, W) -> (B or 1, C, H, W).

    Returns:
        The solution, (B, C, H_l, W_l) for each level.
    """
    laplacian = parametrization == 'laplacian'
    right, pull, pivots = [], [], []     # pivots: None for 1
    carried, below = None, None          # of the finer level: what it adds to the pivots and to the right-hand side
    for n, value in enumerate(values):
        own = 4.0 ** -n if laplacian else 1.0
        value = value * own if laplacian and n else value
        right.append(value if below is None else value + below)
        pivot = None if carried is None else carried + own
        if n == len(edges):
            pivots.append(pivot)
            break
        edge = edges[n]
        excess, pivot = pivot, edge + (own if pivot is None else pivot) if laplacian else pivot
        pivots.append(pivot)
        # Quotients instead of reciprocals: Core ML adds a small number to the argument of a reciprocal.
        down = edge if pivot is None else edge / pivot
        down = down if laplacian else -down
        up = -down if parametrization == 'skew' else down
        carried = up * edge if not laplacian else up if excess is None else up * excess
        pull.append(spread(down))
        below = (-pull[n] if parametrization == 'skew' else pull[n]) * right[n]
        carried, below = (mean_children(x, levels[n]) for x in (carried, below))
        if not laplacian:
            carried, below = carried * 4.0, below * 4.0
    own = [r if pivot is None else r / spread(pivot) for r, pivot in zip(right, pivots)]
    solution = own[-1:]
    for n in reversed(range(len(edges))):
        solution.append(own[n] + pull[n] * repeat_to_children(solution[-1], levels[n]))
    return solution[::-1]


def raise_for_singular_quadtree(op: str, edges: Sequence[Tensor], levels: Sequence[Level],
                                parametrization: str) -> None:
    """Raise a ValueError for the first level with an edge that is not finite or with a pivot of zero, if any."""
    exact: List[Tensor] = [edge.detach().double() for edge in edges]
    for n, edge in enumerate(exact):
        if not edge.isfinite().all():
            raise ValueError(f'{op}: edges[{n}] has a number that is not finite')
    scales, _, _ = coefficients(exact, levels, parametrization)
    for n, scale in enumerate(scales):
        if not scale.isfinite().all():
            hint = ' (weights must not be negative)' if parametrization == 'laplacian' else ''
            raise ValueError(f'{op}: the matrix cannot be solved: a pivot of level {n} is zero{hint}')
