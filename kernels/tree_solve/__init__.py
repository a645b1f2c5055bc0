"""The solve with the sparse matrix of a tree in linear time: attention-like layers without a softmax (Myosotis, arXiv
2509.20503). `trees/sweeps.py` has the recursion."""
from typing import Optional

import torch
from torch import Tensor

from ..common.autocast import without_autocast
from ..dispatch import choose, register
from ..trees import Tree
from ..trees.arguments import check_blocks, own_parts
from ..trees.diagnose import explain_tree, is_lost
from . import custom_op, portable, reference, triton

_IMPLEMENTATIONS = register('tree_solve', {
    'reference': reference.tree_solve,
    'portable': custom_op.TreeSolve.apply,
    # A tracer takes plain operations, not an autograd Function.
    'export': portable.tree_solve,
}, triton.WHY_NOT)


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
    solve = choose('tree_solve', _IMPLEMENTATIONS, backend, u)
    try:
        with without_autocast(u):
            x = solve(tree, a, b, c, u)
    except torch.linalg.LinAlgError:                    # it knows places in a batch, not nodes
        explain_tree('tree_solve', tree, a, b, c)
        raise
    if is_lost(x.index_select(-3, tree.roots.to(x.device))):
        explain_tree('tree_solve', tree, a, b, c)
    return x
