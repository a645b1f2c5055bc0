"""Solves with the sparse matrix of a tree in linear time, for attention-like layers without a softmax (Myosotis, arXiv
2509.20503, section 3). `trees/sweeps.py` has the recursion."""
from typing import Optional

import torch
from torch import Tensor

from ..common.numerics import without_autocast
from ..dispatch import OPERATORS, Operator, choose
from ..trees import Tree
from ..trees.diagnose import has_nonfinite, raise_for_singular_tree
from ..trees.tree_arguments import check_blocks, own_parts
from . import portable, reference


def tree_solve(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor, *, backend: str = 'auto') -> Tensor:
    """Solve T x = u, where row v of T is A_v x_v + B_v x_p(v) + sum over children c of C_c x_c = u_v (equation 1).

    Time is linear in the number of nodes, in as many steps as the tree has generations. A tree without branches (a
    tridiagonal matrix, or with b = 0 a recurrence) takes log2 of its length steps. The gradient is one more solve and
    saves only a, b, c and x. There is no pivoting, except on the reference: a regular matrix with a singular pivot is
    refused, and small pivots magnify rounding errors. `tree_blocks` computes a, b and c for which no pivot can vanish.

    Args:
        tree: a tree with V nodes and a largest block size m. A node with a smaller block uses the first rows and
            columns; other entries of a, b, c and u are ignored, and x is zero there.
        a: diagonal blocks, shape (..., V, m, m), or None for identities.
        b: blocks at row v and column p(v), shape (..., V, m, m); those of roots are ignored.
        c: blocks at row p(v) and column v, shape (..., V, m, m); those of roots are ignored.
        u: right-hand sides, shape (..., V, m, r). Leading dimensions (batch, heads) broadcast.
        backend: 'auto', 'portable' or 'reference'; general trees have no Triton kernel.

    Returns:
        x, shape (..., V, m, r).

    Raises:
        ValueError: a shape, device or backend is not allowed, or the tensors exceed the memory. On a CPU also: a
            coefficient is not finite or a pivot is singular; the error names the node.
        TypeError: a dtype is not float32, float64, complex64 or complex128, dtypes differ, or a tensor is not dense.
    """
    given = {name: x for name, x in (('a', a), ('b', b), ('c', c), ('u', u)) if x is not None}
    check_blocks('tree_solve', tree, given)
    if backend in ('triton', 'export'):
        raise ValueError(f"tree_solve: backend must be 'auto', 'portable' or 'reference', got {backend!r}")
    a, b, c, u = own_parts(tree, a, b, c, u)
    solve = choose('tree_solve', backend, u)
    try:
        with without_autocast(u):
            x = solve(tree, a, b, c, u)
    except torch.linalg.LinAlgError:                    # it names places in a batch, not nodes
        raise_for_singular_tree('tree_solve', tree, a, b, c)
        raise
    if has_nonfinite(x.index_select(-3, tree.roots.to(x.device))):
        raise_for_singular_tree('tree_solve', tree, a, b, c)
    return x


OPERATORS['tree_solve'] = Operator(
    implementations={
        'reference': reference.tree_solve,
        'portable': portable.TreeSolve.apply,
        # A tracer takes plain operations, not an autograd Function.
        'export': portable.tree_solve,
    },
    objection='it has no Triton kernel.',
)
