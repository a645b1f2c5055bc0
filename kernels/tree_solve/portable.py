"""Tree solve in plain PyTorch: one generation of nodes after the other, or cyclic reduction if no node has two
children. Exporters take this form, too."""
from typing import Optional

from torch import Tensor

from ..trees.sweeps import as_path, eliminate, reduce_path, substitute
from ..trees.topology import Tree


def tree_solve(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor) -> Tensor:
    """Solve for x (..., V, m, r) with operations that autograd differentiates."""
    if tree.chain is None:
        _, down, local = eliminate(tree, a, b, c, u)
        return substitute(tree, down, local)
    diagonal, lower, upper, order = as_path(tree, a, b, c)
    return reduce_path(diagonal, lower, upper, u.index_select(-3, order)).index_select(-3, order.argsort())
