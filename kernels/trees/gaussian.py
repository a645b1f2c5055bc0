"""Gaussians whose precision is a tree's matrix: log-determinant, marginal variances and exact samples in O(V).

Given its parent, node c is Gaussian with precision S_c and mean y_c - W_c x_p (`sweeps.py` defines S, y and W).
"""
from typing import List, Optional

import torch
from torch import Tensor

from .sweeps import as_path, correlated, dagger, divide, eliminate, product, reduce_path, substitute
from .topology import Tree
from .tree_arguments import check_blocks, own_parts


def _pivots(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor) -> List[Tensor]:
    """Return blocks whose determinants have the determinant of T as their product."""
    u = torch.zeros_like(b[..., :1])
    if tree.chain is None:
        return eliminate(tree, a, b, c, u).pivots
    diagonal, lower, upper, order = as_path(tree, a, b, c)
    pivots: List[Tensor] = []
    reduce_path(diagonal, lower, upper, u.index_select(-3, order), pivots)
    return pivots


def tree_log_determinant(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor) -> Tensor:
    """Return log |det T|, of shape (...), which is differentiable. Arguments are those of `tree_solve`.

    Raises:
        ValueError, TypeError: as for `tree_solve`.
    """
    a, b, c = _own('tree_log_determinant', tree, a, b, c)
    return sum(torch.linalg.slogdet(pivot)[1].sum(-1) for pivot in _pivots(tree, a, b, c))


def tree_marginal_variances(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor) -> Tensor:
    """Return the diagonal blocks of T^-1, (..., V, m, m), for a Hermitian positive definite T.

    One more downward sweep computes V_root = S^-1 and V_c = S_c^-1 + W_c V_p W_c^H. If no node has two children, the
    blocks are the gradient of log det T, which needs no loop over nodes. Entries outside of a node's block are zero.

    Raises:
        ValueError, TypeError: as for `tree_solve`.
    """
    a, b, c = _own('tree_marginal_variances', tree, a, b, c)
    m = b.shape[-1]
    inside = tree.block_mask(b.device)
    keep = inside[:, :, None] & inside[:, None]
    if tree.chain is not None:
        with torch.enable_grad():
            blocks = torch.eye(m, dtype=b.dtype, device=b.device).expand(b.shape) if a is None else a
            blocks = blocks.detach().clone().requires_grad_()
            total = sum(torch.linalg.slogdet(pivot)[1].sum() for pivot in _pivots(tree, blocks, b.detach(), c.detach()))
            return dagger(torch.autograd.grad(total, blocks)[0]) * keep
    pivots, down, _ = eliminate(tree, a, b, c, torch.zeros_like(b[..., :1]))
    identity = torch.eye(m, dtype=b.dtype, device=b.device)
    variances = [divide(pivots[0], identity.expand(pivots[0].shape))[0]]
    for generation, pivot, w in zip(tree.generations[1:], pivots[1:], down[1:]):
        above = generation.of_parents(variances[-1])
        variances.append(divide(pivot, identity.expand(pivot.shape))[0] + product(product(w, above), dagger(w)))
    return tree.in_order(variances) * keep


def tree_sample(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, noise: Tensor) -> Tensor:
    """Draw samples of the Gaussian with precision T (Hermitian positive definite) and mean zero, from white noise.

    They are the result of the downward sweep with L^-H noise_c instead of y_c, where S_c = L L^H (Cholesky).

    Args:
        tree, a, b, c: as for `tree_solve`.
        noise: independent numbers of variance 1 for r samples, shape (..., V, m, r).

    Returns:
        Samples with covariance T^-1, shape (..., V, m, r).

    Raises:
        ValueError, TypeError: as for `tree_solve`.
        torch.linalg.LinAlgError: T is not positive definite.
    """
    a, b, c, noise = _own('tree_sample', tree, a, b, c, noise)
    noise = noise * tree.block_mask(noise.device)[..., None]
    if tree.chain is not None:
        diagonal, lower, upper, order = as_path(tree, a, b, c)
        return reduce_path(diagonal, lower, upper, noise.index_select(-3, order), sample=True
                           ).index_select(-3, order.argsort())
    pivots, down, _ = eliminate(tree, a, b, c, torch.zeros_like(b[..., :1]))
    local = [correlated(pivot, generation.of(noise)) for pivot, generation in zip(pivots, tree.generations)]
    return substitute(tree, down, local)


def _own(op: str, tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, noise: Optional[Tensor] = None):
    """Return checked arguments in one batch shape, zero outside of each node's block."""
    given = {'a': a, 'b': b, 'c': c, 'noise': noise}
    check_blocks(op, tree, {name: x for name, x in given.items() if x is not None})
    a, b, c, whole = own_parts(tree, a, b, c, b if noise is None else noise)
    a, b, c = (None if x is None else x.expand(*whole.shape[:-3], *x.shape[-3:]) for x in (a, b, c))
    return (a, b, c) if noise is None else (a, b, c, whole)
