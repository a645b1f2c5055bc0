"""Solves with the matrix of a quad tree over a grid in linear time (Myosotis, arXiv 2509.20503, section 3)."""
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common import checks
from ..common.declare import late, node
from ..dispatch import OPERATORS, Operator, choose
from ..trees import PARAMETRIZATIONS, RHO, leaf_counts, sibling_normalized
from ..trees.diagnose import has_nonfinite
from ..trees.tree_arguments import check_levels
from . import portable, reference


def quadtree_solve(values: Sequence[Tensor], edges: Sequence[Tensor], *, parametrization: str = 'laplacian',
                   rho: float = RHO, mask: Optional[Tensor] = None, shift: Sequence[int] = (0, 0), backend: str = 'auto'
                   ) -> List[Tensor]:
    """Solve T x = u on a quad tree over a grid of any height and width, or on a forest of such trees.

    'laplacian': T = I + the graph Laplacian of the edges' weights w >= 0. T^-1 has no negative entry and its
        rows sum to 1, so x is a weighted mean of u, as in attention.
    'symmetric': T = I + M with M symmetric, b = rho / 2 * z / sqrt(1 + sum of z^2 over the siblings) for any edges z;
        its eigenvalues are in [1 - rho, 1 + rho].
    'skew': T = I + M with M = -M', for any edges b; the norm of T^-1 is at most 1.

    Level l of the tree has ceil(H / 2^l) x ceil(W / 2^l) nodes (`quadtree_levels`, which also knows shifted trees), the
    parent of (i, j) is (i // 2, j // 2). `level_means` computes the usual values of inner nodes.

    Args:
        values: u of each level, finest first, of shape (B, heads, H_l, W_l, D); float32, float64, float16 or bfloat16;
            any strides. Give all levels up to a single node, or fewer for a forest.
        edges: edges between the nodes of a level and their parents, for each level but the last, of shape
            (B, heads, H_l, W_l) and any of these dtypes.
        parametrization: 'laplacian', 'symmetric' or 'skew'.
        rho: the bound of 'symmetric', in (0, 1).
        mask: padding mask, booleans of shape (B, H, W), true for leaves that exist. Edges to other leaves are 0, so x
            inside of the mask does not depend on u outside.
        shift: rows and columns by which the grid is shifted against the tree.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        x of each level, with the shapes and the dtype of values.

    Raises:
        ValueError: a shape, device, number of levels, shift, name or rho is not allowed, or the tensors exceed the
            memory. On a CPU, outside of graphs, also: an edge of 'laplacian' is negative, an edge is not finite, or a
            pivot is zero; the error names the level.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op = 'quadtree_solve'
    values, edges = list(values), list(edges)
    levels = check_levels(op, values, edges, shift)
    checks.one_of(op, 'parametrization', parametrization, PARAMETRIZATIONS)
    if mask is not None:
        checks.boolean(op, 'mask', mask, values[0])
        checks.shapes(op, ('mask', mask, (values[0].shape[0], *values[0].shape[2:4]), 'one for each leaf'))
        counts = leaf_counts(levels, edges[0].float() if edges else values[0].float(), mask)
        edges = [edge.masked_fill(count == 0, 0) for edge, count in zip(edges, counts)]
    if parametrization == 'laplacian':
        for n, edge in enumerate(edges):
            checks.not_negative(op, f'edges[{n}]', edge, "with parametrization='laplacian'")
    if parametrization == 'symmetric':
        checks.number(op, 'rho', rho)
        if not 0 < rho < 1:
            raise ValueError(f'{op}: rho must be between 0 and 1, got {rho!r}')
        edges = [sibling_normalized(edge, level, rho) for edge, level in zip(edges, levels)]
    solve = choose(op, backend, values[0])
    x = solve(values, edges, parametrization, tuple(shift))
    if has_nonfinite(x[-1]):
        portable.raise_for_singular_quadtree(op, edges, levels, parametrization)
    return x


# --- what PyTorch sees

def _count(shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _flops(values, *_) -> int:
    """For each node and channel: multiply and add up, multiply by 1 / S, multiply and add down."""
    return 5 * _count(values)


def _backward_flops(grads, *_) -> int:
    """The adjoint solve, and two differences, a product and a sum for each edge and channel."""
    return 9 * _count(grads)


def _forward(values: List[Tensor], edges: List[Tensor], parametrization: str, shift: List[int]) -> List[Tensor]:
    return [torch.empty_like(x) for x in values]


def _backward(grads: List[Tensor], solution: List[Tensor], edges: List[Tensor], parametrization: str, shift: List[int]
              ) -> Tuple[List[Tensor], List[Tensor]]:
    return ([torch.empty_like(grad, dtype=x.dtype) for grad, x in zip(grads, solution)],
            [torch.empty_like(edge) for edge in edges])


def _save(ctx, inputs, output) -> None:
    _, edges, ctx.parametrization, ctx.shift = inputs
    ctx.levels = len(output)
    ctx.save_for_backward(*output, *edges)
    ctx.set_materialize_grads(False)


def _differentiate(forward: Any, backward: Any) -> None:
    def gradient(ctx, grads):
        saved = ctx.saved_tensors
        solution, edges = list(saved[:ctx.levels]), list(saved[ctx.levels:])
        if all(grad is None for grad in grads):
            return [None] * ctx.levels, [None] * len(edges), None, None
        grads = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, solution)]
        return (*backward(grads, solution, edges, ctx.parametrization, ctx.shift), None, None)
    forward.register_autograd(gradient, setup_context=_save)


_portable = node('quadtree_solve_portable_fwd', portable.forward, _flops)(_forward)
_portable_backward = node(
    'quadtree_solve_portable_bwd', portable.backward, _backward_flops)(_backward)
_triton = node('quadtree_solve_fwd', late(__name__, 'triton.forward'), _flops)(_forward)
_triton_backward = node(
    'quadtree_solve_bwd', late(__name__, 'triton.backward'), _backward_flops)(_backward)
_differentiate(_portable, _portable_backward)
_differentiate(_triton, _triton_backward)

OPERATORS['quadtree_solve'] = Operator(
    implementations={
        'reference': reference.quadtree_solve,
        'portable': _portable,
        'triton': _triton,
        'export': portable.quadtree_solve_export,
    },
)
