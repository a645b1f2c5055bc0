"""Blocks of a tree's matrix from free parameters, such that no pivot of its solve can vanish."""
from typing import Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import checks
from ..common.checks import exporting
from ..common.numerics import without_autocast
from .grid import Level, pad_to_parents, repeat_to_children, sum_children
from .sweeps import dagger
from .topology import Tree

PARAMETRIZATIONS = ('laplacian', 'symmetric', 'skew')
# Default bound of 'symmetric'. Smaller values have short range: at 0.5 a leaf gets 95 % of its mass from its siblings.
RHO = 0.98


def sibling_normalized(z: Tensor, level: Level, rho: float) -> Tensor:
    """Return b = rho / 2 * z / sqrt(1 + sum of z^2 over the siblings), for any z (B, heads, H, W) on a grid.

    Then sum b^2 <= rho^2 / 4 over the children of every node, and all pivots are at least (1 + sqrt(1 - rho^2)) / 2."""
    exact = z.to(torch.promote_types(z.dtype, torch.float32))
    # sqrt(1 + sum z^2) = m sqrt(1 / m^2 + sum (z / m)^2): z may be as large as its dtype allows.
    largest = exact.detach().abs().clamp(min=1)
    largest = repeat_to_children(_max_children(largest, level), level)
    ratio = exact / largest
    total = repeat_to_children(sum_children(ratio.square(), level), level) + largest.reciprocal().square()
    return (rho / 2 * ratio * total.rsqrt()).to(z.dtype)


def sibling_normalized_gradient(grad: Tensor, z: Tensor, level: Level, rho: float) -> Tensor:
    """Return the gradient of z given that of `sibling_normalized(z, level, rho)`; both have at least float32.

    With r^2 = 1 + sum of z^2: dz = rho / 2 * (db / r - z / r^3 * sum of db z)."""
    largest = repeat_to_children(_max_children(z.abs().clamp(min=1), level), level)
    ratio = z / largest                                  # as there: z may be as large as its dtype allows
    total = repeat_to_children(sum_children(ratio.square(), level), level) + largest.reciprocal().square()
    common = repeat_to_children(sum_children(grad * ratio, level), level)
    return rho / 2 * total.rsqrt() / largest * (grad - ratio / total * common)


def _max_children(x: Tensor, level: Level) -> Tensor:
    """Maximum over the children of each parent, as `sum_children`; x is at least 0."""
    if exporting():
        return F.max_pool2d(pad_to_parents(x, level), 2)
    padding = (level.top % 2, level.left % 2)
    return F.max_pool2d(x, 2, padding=padding, ceil_mode=True)


def tree_blocks(tree: Tree, z: Tensor, parametrization: str = 'laplacian', *, rho: Union[float, Tensor] = RHO,
                hermitian: bool = False) -> Tuple[Optional[Tensor], Tensor, Tensor]:
    """Compute blocks A, B and C for `tree_solve` whose pivots cannot vanish.

    'laplacian': the weight of the edge above v is z_v for blocks of size 1 (z >= 0: softplus of a logit, say) and
        Z_v Z_v^H for larger ones, restricted to the entries that both ends have. A_v = I + weights of v's edges,
        B = C = -weight. For blocks of size 1, rows of the inverse sum to 1 (to 5e-6 in float32 for weights of 100;
        `quadtree_solve` reaches 1e-6).
    'symmetric': B_v = rho / 2 * Z_v / sqrt(1 + sum of |Z|_F^2 over the siblings), C = B^T (with `hermitian` B^H),
        A = I.
    'skew': B = Z, C = -B^H, A = I.

    Args:
        tree: a tree with V nodes and a largest block size m.
        z: real or complex numbers of shape (..., V, m, m), not negative for 'laplacian' with blocks of size 1; those of
            roots are ignored.
        rho: the bound of 'symmetric', in (0, 1); a tensor (..., 1, 1, 1) sets one for each leading index.
        hermitian: whether 'symmetric' is Hermitian. On a tree, the phases of a Hermitian matrix are a change of basis,
            and those of a complex symmetric matrix are not.

    Returns:
        a (None for identities), b, c.

    Raises:
        ValueError: the name is unknown, or a shape or rho is not allowed. On a CPU, outside of graphs, also a negative
            weight.
    """
    checks.one_of('tree_blocks', 'parametrization', parametrization, PARAMETRIZATIONS)
    if tuple(z.shape[-3:]) != (len(tree), tree.block, tree.block):
        raise ValueError(f'tree_blocks: z must be (..., {len(tree)}, {tree.block}, {tree.block}), got {tuple(z.shape)}')
    if not isinstance(rho, Tensor) and not 0 < rho < 1:
        raise ValueError(f'tree_blocks: rho must be between 0 and 1, got {rho!r}')
    parents = tree.parents.clamp(min=0).to(z.device)
    child = (tree.parents >= 0).to(z.device)[:, None]
    own = tree.block_mask(z.device)
    both = own & own[parents] & child
    if parametrization == 'laplacian':
        z = z.masked_fill(~(both[:, :, None] & both[:, None]), 0)
        if tree.block == 1:
            checks.not_negative('tree_blocks', 'z', z.real if z.is_complex() else z,
                                "with parametrization='laplacian'")
        with without_autocast(z):
            weight = z if tree.block == 1 else z @ dagger(z)
        identity = torch.eye(tree.block, dtype=z.dtype, device=z.device)
        a = (identity + weight).index_add(-3, parents, weight)
        return a, -weight, -weight
    z = z.masked_fill(~((own & child)[:, :, None] & own[parents][:, None]), 0)
    if parametrization == 'skew':
        return None, z, -dagger(z)
    # sqrt(1 + sum |z|^2) = m sqrt(1 / m^2 + sum |z / m|^2): z may be as large as its dtype allows.
    size = z.detach().abs().amax((-2, -1))
    index = parents.expand(size.shape)
    largest = torch.ones_like(size).scatter_reduce(-1, index, size, 'amax').gather(-1, index)[..., None, None]
    ratio = z / largest
    squares = ratio.abs().square().sum((-2, -1), keepdim=True)
    totals = torch.zeros_like(squares).index_add(-3, parents, squares).index_select(-3, parents)
    b = rho / 2 * ratio / (largest.reciprocal().square() + totals).sqrt()
    return None, b, dagger(b) if hermitian else b.mT
