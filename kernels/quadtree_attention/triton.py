"""Quad-tree attention on Triton: the kernels of `quadtree_solve`, and operations of PyTorch for means and edges.

This module imports no Triton: the operators of `quadtree_solve` do, at their first call."""
from functools import partial
from typing import Optional

from torch import Tensor

from ..quadtree_solve import quadtree_solve
from ..trees.edges import composed
from .portable import Options


def quadtree_attention(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
                       options: Options) -> Tensor:
    return composed(q, k, v, bias, mask, options.parametrization, options.levels(v),
                    partial(quadtree_solve, rho=options.rho, backend='triton'))
