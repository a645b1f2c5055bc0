"""Tree solve by its definition in double precision, with the dense matrix; tests compare all backends with it."""
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..common.numerics import solve_each
from ..trees.topology import Tree


def double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def assemble(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the matrix T, (..., M, M) with M the sum of the block sizes, and the indices of its rows among V * m.

    T has A[v] at (v, v), B[v] at (v, p(v)) and C[v] at (p(v), v). a (or None for identities), b, c: (..., V, m, m)."""
    nodes, m = b.shape[-3:-1]
    dense = b.new_zeros(*b.shape[:-3], nodes, m, nodes, m)
    for v, parent in enumerate(tree.parents.tolist()):
        dense[..., v, :, v, :] = torch.eye(m, dtype=b.dtype, device=b.device) if a is None else a[..., v, :, :]
        if parent >= 0:
            dense[..., v, :, parent, :] = b[..., v, :, :]
            dense[..., parent, :, v, :] = c[..., v, :, :]
    rows = tree.block_mask(b.device).flatten().nonzero()[:, 0]
    return dense.reshape(*b.shape[:-3], nodes * m, nodes * m)[..., rows[:, None], rows], rows


def tree_solve(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor) -> Tensor:
    dtype = u.dtype
    a, b, c, u = (None if x is None else double(x) for x in (a, b, c, u))
    matrix, rows = assemble(tree, a, b, c)
    flat = u.flatten(-3, -2)
    x = torch.zeros_like(flat).index_copy(-2, rows, solve_each(matrix, flat[..., rows, :]))
    return x.reshape(u.shape).to(dtype)
