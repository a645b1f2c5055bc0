"""Solves with the sparse matrix of a tree in linear time: attention-like layers without a softmax (Myosotis, arXiv
2509.20503). Every function says its equation; `sweeps.py` has the recursion."""
from typing import List, Optional, Sequence

import torch
from torch import Tensor

from .. import checks
from ..dispatch import choose
from ..precision import without_autocast
from . import operator, portable, reference, sweeps
from .arguments import check_blocks, check_levels, own_parts
from .diagnose import explain_quadtree, explain_tree, is_lost
from .gaussian import tree_log_determinant, tree_marginal_variances, tree_sample
from .grid import Level, fold, heights, leaf_counts, means, quadtree_levels, third, unfold
from .orders import ORDERS, grid_order
from .parametrise import RHO, sibling_normalised, tree_blocks
from .tree import Tree, cached_path, cached_sequence, level_lengths

PARAMETRISATIONS = portable.PARAMETRISATIONS
# A tracer takes plain operations, not a Function.
_TREE = {'reference': reference.tree_solve, 'portable': sweeps.TreeSolve.apply, 'export': sweeps.solve}
_QUAD = {'reference': reference.quadtree_solve, 'portable': operator.quadtree_solve_portable,
         'triton': operator.quadtree_solve, 'export': portable.quadtree_solve_export}

__all__ = ['Level', 'ORDERS', 'PARAMETRISATIONS', 'RHO', 'Tree', 'cached_path', 'cached_sequence', 'fold', 'grid_order',
           'heights', 'leaf_counts', 'level_lengths', 'means', 'quadtree_levels', 'quadtree_solve', 'third',
           'tree_blocks', 'tree_log_determinant', 'tree_marginal_variances', 'tree_sample', 'tree_solve', 'unfold']


def tree_solve(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor, *, backend: str = 'auto') -> Tensor:
    """x of T x = u, where row v of T is A_v x_v + B_v x_p(v) + sum over children c of C_c x_c = u_v (equation 1).

    Linear in the number of nodes, and as many steps as the tree is high; a tree without branches (a tridiagonal matrix,
    or with b = 0 a recurrence) takes log2 of its length steps. The gradient is one more solve; only a, b, c and x are
    kept for it. `tree_blocks` makes a, b and c for which no pivot can vanish.

    Args:
        tree: with V nodes and a largest block size m. Of a node with a smaller block the first rows and columns count;
            what a, b, c and u hold outside of them is ignored, and x is zero there.
        a: (..., V, m, m), or None for identities.
        b: (..., V, m, m), at row v and column p(v); what it holds for roots is ignored.
        c: (..., V, m, m), at row p(v) and column v; for roots ignored.
        u: (..., V, m, r), r right-hand sides. Leading dimensions (batch, heads) broadcast.
        backend: 'auto', 'portable' or 'reference'; there is no Triton kernel for general trees.

    Returns:
        (..., V, m, r).

    Raises:
        ValueError: a shape, device or backend that does not fit, a size beyond the memory; on a CPU also, with the
            node, a coefficient that is not finite and a singular pivot.
        TypeError: a dtype other than float32, float64, complex64 and complex128, or several, or a tensor that is not
            dense.
    """
    given = {name: x for name, x in (('a', a), ('b', b), ('c', c), ('u', u)) if x is not None}
    check_blocks('tree_solve', tree, given)
    if backend in ('triton', 'export'):
        raise ValueError(f"tree_solve: backend must be 'auto', 'portable' or 'reference', got {backend!r}")
    a, b, c, u = own_parts(tree, a, b, c, u)
    solve = choose('tree_solve', _TREE, backend, u)
    try:
        with without_autocast(u):
            x = solve(tree, a, b, c, u)
    except torch.linalg.LinAlgError:                    # it knows places in a batch, not nodes
        explain_tree('tree_solve', tree, a, b, c)
        raise
    if is_lost(x.index_select(-3, tree.roots.to(x.device))):
        explain_tree('tree_solve', tree, a, b, c)
    return x


def quadtree_solve(values: Sequence[Tensor], edges: Sequence[Tensor], *, parametrisation: str = 'laplacian',
                   rho: float = RHO, mask: Optional[Tensor] = None, shift: Sequence[int] = (0, 0),
                   backend: str = 'auto') -> List[Tensor]:
    """x of T x = u on a quad tree over a grid of any height and width, or a forest of such trees.

    'laplacian': T = I + the graph Laplacian of the edges' weights w >= 0. T^-1 has no negative entry and rows that sum
        to 1: x is a weighted mean of u, as in attention.
    'symmetric': T = I + M with M symmetric, b = rho / 2 * z / sqrt(1 + sum of z^2 over the siblings) for any edges z;
        its eigenvalues are in [1 - rho, 1 + rho].
    'skew': T = I + M with M = -M', for any edges b; the norm of T^-1 is at most 1.

    Level l of the tree has ceil(H / 2^l) x ceil(W / 2^l) nodes (`quadtree_levels`, which also knows shifted trees), the
    parent of (i, j) is (i // 2, j // 2). `means` gives the usual values of inner nodes.

    Args:
        values: u of each level, finest first: (B, heads, H_l, W_l, D); float32, float64, float16 or bfloat16, any
            strides. As many levels as there are up to a single node, or fewer for a forest.
        edges: of each level but the last, between a node and its parent, (B, heads, H_l, W_l), of any of these dtypes.
        parametrisation: 'laplacian', 'symmetric' or 'skew'.
        rho: of 'symmetric', in (0, 1).
        mask: (B, H, W), booleans, true for leaves that are there (the padding of a batch is not); no edge leads to what
            is not there, so that x within the mask does not depend on u without.
        shift: rows and columns that the grid is moved against the tree.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        x of each level, like values.

    Raises:
        ValueError: a shape, device, number of levels, shift, name or rho that does not fit, a size beyond the memory;
            on a CPU outside of graphs also, with the level, a negative edge of 'laplacian', an edge that is not finite
            and a pivot of zero.
        TypeError: a dtype that is not allowed, or a tensor that is not dense.
    """
    op = 'quadtree_solve'
    values, edges = list(values), list(edges)
    levels = check_levels(op, values, edges, shift)
    checks.one_of(op, 'parametrisation', parametrisation, PARAMETRISATIONS)
    if mask is not None:
        checks.boolean(op, 'mask', mask, values[0])
        checks.shape(op, 'mask', mask, (values[0].shape[0], *values[0].shape[2:4]), 'one for each leaf')
        counts = leaf_counts(levels, edges[0].float() if edges else values[0].float(), mask)
        edges = [edge.masked_fill(count == 0, 0) for edge, count in zip(edges, counts)]
    if parametrisation == 'laplacian':
        for n, edge in enumerate(edges):
            checks.not_negative(op, f'edges[{n}]', edge, "weights of a graph's edges, whose Laplacian is solved with")
    if parametrisation == 'symmetric':
        if not 0 < rho < 1:
            raise ValueError(f'{op}: rho must be between 0 and 1, got {rho!r}')
        edges = [sibling_normalised(edge, level, rho) for edge, level in zip(edges, levels)]
    solve = choose(op, _QUAD, backend, values[0])
    x = solve(values, edges, parametrisation, tuple(shift))
    if is_lost(x[-1]):
        explain_quadtree(op, edges, levels, parametrisation)
    return x
