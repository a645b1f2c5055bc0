"""Errors for solves without a finite result: they name the node whose coefficient or pivot is at fault.

The check follows the solve: a coefficient that is not finite, or a pivot of zero, makes the result at the roots not
finite, which costs little to see. Results on a GPU are not checked, because that would wait for them.
"""
from contextlib import suppress
from typing import List, Optional

import torch
from torch import Tensor

from ..common.checks import is_traced_or_wrapped
from .sweeps import as_path, eliminate, reduce_path
from .topology import Tree


def has_nonfinite(top: Tensor) -> bool:
    """Whether a result at the roots is not finite; False if its values cannot be read."""
    return not is_traced_or_wrapped(top) and top.device.type == 'cpu' and not bool(top.detach().isfinite().all())


def raise_for_singular_tree(op: str, tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor) -> None:
    """Raise a ValueError for the first node with a coefficient that is not finite or a singular pivot, if any."""
    a, b, c = (None if x is None else x.detach() for x in (a, b, c))
    for name, x in (('a', a), ('b', b), ('c', c)):
        if x is not None:
            bad = ~x.isfinite().flatten(-2).all(-1)
            if name != 'a':
                bad = bad & (tree.parents >= 0).to(bad.device)
            if bad.any():
                raise ValueError(f'{op}: {name} of node {int(bad.nonzero()[0, -1])} is not finite')

    def check(nodes: Tensor, pivot: Tensor) -> None:
        singular = torch.linalg.lu_factor_ex(pivot)[2] != 0
        if singular.any():
            node = int(nodes[int(singular.nonzero()[0, -1])])
            raise ValueError(
                f'{op}: the pivot of node {node} (its block of `a` minus the terms of the nodes eliminated before it) '
                "is singular; if the matrix is regular, backend='reference' solves it, with pivoting")

    right = torch.zeros_like(b[..., :1])
    if tree.chain is None:
        eliminate(tree, a, b, c, right, lambda generation, pivot: check(generation.nodes, pivot))
        return
    *blocks, order = as_path(tree, a, b, c)
    pivots: List[Tensor] = []
    with suppress(torch.linalg.LinAlgError):
        reduce_path(*blocks, right, pivots)
    for n, pivot in enumerate(pivots):                   # each step eliminates every second node that is left
        check(order[2 ** n - 1::2 ** (n + 1)], pivot)
