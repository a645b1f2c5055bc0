"""Tree solve in plain PyTorch: one generation of nodes after the other, or cyclic reduction if no node has two
children. Exporters take this form, too."""
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..trees.sweeps import as_path, dagger, eliminate, reduce_path, substitute
from ..trees.topology import Tree


def tree_solve(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor) -> Tensor:
    """Solve for x (..., V, m, r) with operations that autograd differentiates."""
    if tree.chain is None:
        _, down, local = eliminate(tree, a, b, c, u)
        return substitute(tree, down, local)
    diagonal, lower, upper, order = as_path(tree, a, b, c)
    return reduce_path(diagonal, lower, upper, u.index_select(-3, order)).index_select(-3, order.argsort())


class TreeSolve(torch.autograd.Function):
    """Solve with a gradient by hand, which saves only the coefficients and the result.

    No registered operator can take a `Tree`. The gradient is one solve on the same tree,
    T^H l = g, with A^H instead of A, C^H instead of B and B^H instead of C.
    Then du = l, dA_v = -l_v x_v^H, dB_v = -l_v x_p^H, dC_v = -l_p x_v^H."""

    @staticmethod
    def forward(ctx, tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor) -> Tensor:
        x = tree_solve(tree, a, b, c, u)
        ctx.tree = tree
        ctx.save_for_backward(a, b, c, x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        a, b, c, x = ctx.saved_tensors
        tree, (_, need_a, need_b, need_c, _) = ctx.tree, ctx.needs_input_grad
        diagonal = None if a is None else dagger(a)
        adjoint = TreeSolve.apply(tree, diagonal, dagger(c), dagger(b), grad)
        parents = tree.parents.clamp(min=0).to(x.device)
        root = (tree.parents < 0).to(x.device)[:, None, None]

        def outer(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
            return (-left @ dagger(right)).sum_to_size(like.shape)  # like may be shared by a batch

        da = outer(adjoint, x, a) if need_a else None
        db = outer(adjoint, x.index_select(-3, parents), b).masked_fill(root, 0) if need_b else None
        dc = outer(adjoint.index_select(-3, parents), x, c).masked_fill(root, 0) if need_c else None
        return None, da, db, dc, adjoint
