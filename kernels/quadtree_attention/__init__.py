"""A layer like attention that mixes tokens by a solve on a quad tree (Myosotis, arXiv 2509.20503)."""
from typing import Optional, Sequence

from torch import Tensor

from ..common import checks
from ..dispatch import choose, register
from ..trees import PARAMETRIZATIONS, RHO, quadtree_levels
from . import custom_op, portable, reference, triton

register('quadtree_attention', {
    'reference': reference.quadtree_attention,
    'portable': custom_op.quadtree_attention_portable,
    'triton': triton.quadtree_attention,
    'export': portable.quadtree_attention_export,
})


def quadtree_attention(
        q: Optional[Tensor],
        k: Optional[Tensor],
        v: Tensor,
        bias: Tensor,
        *,
        parametrization: str = 'laplacian',
        rho: float = RHO,
        mask: Optional[Tensor] = None,
        shift: Sequence[int] = (0, 0),
        max_levels: Optional[int] = None,
        backend: str = 'auto',
) -> Tensor:
    """Solve for the values of a grid on a quad tree whose edges come from queries and keys.

    The value, query and key of an inner node are the means over its leaves (`level_means`). For each head, the edge
    between a node c and its parent p has the logit

        z = q_c . k_p / sqrt(E) + bias[level of c, row of c % 2, column of c % 2],

    where rows and columns are those of the level's grid in the tree. The weight of the edge is 4^level * softplus(z)
    for 'laplacian', and z for 'symmetric' and 'skew'. The result is the solution of `quadtree_solve` at the leaves.

    Args:
        q, k: queries and keys of the leaves, (B, heads, H, W, E); float32, float64, float16 or bfloat16; any strides.
            None for edges from biases only.
        v: values of the leaves, (B, heads, H, W, D) and any of these dtypes.
        bias: (L, 2, 2, heads); levels from L on take the last entry.
        parametrization: 'laplacian', 'symmetric' or 'skew', as for `quadtree_solve`.
        rho: the bound of 'symmetric', in (0, 1).
        mask: padding mask, booleans of shape (B, H, W), true for leaves that exist. Others do not affect them.
        shift: rows and columns by which the grid is shifted against the tree.
        max_levels: None for one tree; the number of levels for a forest.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, heads, H, W, D) and the dtype of v.

    Raises:
        ValueError: a shape, device, number of levels, shift, name or rho is not allowed, or the tensors exceed the
            memory. On a CPU also: an edge is not finite, or a pivot is zero; the error names the level.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op, products = 'quadtree_attention', {} if q is None and k is None else {'q': q, 'k': k}
    checks.tensors(op, {'q': 5, 'k': 5, 'v': 5, 'bias': 4}, v=v, bias=bias, **products)
    checks.one_of(op, 'parametrization', parametrization, PARAMETRIZATIONS)
    checks.number(op, 'rho', rho)
    if not 0 < rho < 1:
        raise ValueError(f'{op}: rho must be between 0 and 1, got {rho!r}')
    if 0 in v.shape[2:4]:
        raise ValueError(f'{op}: v must have at least one leaf, got shape {tuple(v.shape)}')
    quadtree_levels(1, 1, max_levels, shift)    # it checks both; the sizes of v may be symbols
    checks.shape(op, 'bias', bias, (bias.shape[0], 2, 2, v.shape[1]), 'levels, rows, columns and the heads of v')
    if not bias.shape[0]:
        raise ValueError(f'{op}: bias must have at least one level, got shape {tuple(bias.shape)}')
    if products:
        checks.same_dtype(op, **products)
        checks.shape(op, 'q', q, (*v.shape[:4], q.shape[-1]), 'the shape of v except the last dimension')
        checks.shape(op, 'k', k, q.shape, 'as q')
    if mask is not None:
        checks.boolean(op, 'mask', mask, v)
        checks.shape(op, 'mask', mask, (v.shape[0], *v.shape[2:4]), 'one for each leaf')
    run = choose(op, backend, v, bias, *products.values())
    return run(q, k, v, bias, mask, portable.Options(parametrization, rho, tuple(shift), max_levels))
