"""Operators on grids and trees, each with a float64 reference, a portable PyTorch backend for any device, Triton
kernels (except `tree_solve`), and most with C++ for CPUs.

    decay_attention            softmax attention along one grid axis, decayed with distance      O(N^1.5)
    crisscross_attention       two of them chained, on both paths                               O(N^1.5)
    polyline_attention         softmax attention over the whole grid under the decay mask        O(N^2) time
    polyline_scan              the decay mask times a tensor, in two or three dimensions         O(N)
    polyline_linear_attention  linear attention under the decay mask, by scans                   O(N)
    separable_attention        one context vector, by softmax scores, for all tokens of a group  O(N)
    quadtree_solve             the inverse of a quad tree's matrix times a tensor                O(N)
    quadtree_attention         that solve, with edges from queries and keys                      O(N)
    tree_solve                 the same for any tree, blocks of any size, real or complex        O(N)
    eos_elementwise            a linear recurrence with elementwise decays, both directions     O(N)
    selective_scan             recurrences of Mamba along rows and columns of a grid             O(N)
    eos_matmul                 the same with matrices as decays, such as delta rules            O(N)
    rotary_embedding           rotations of queries and keys by the angles of a table           O(N)
    depthwise_conv             a window for each channel, with GELU and sums in the same pass    O(N)

Operators with heads take tensors of shape `(B, heads, H, W, D)`. Step logs have shape `(B, heads, H, W)` and hold one
step each, never cumulative sums. `separable_attention` and `depthwise_conv` have no heads and take `(B, H, W, D)`;
`rotary_embedding`, `eos_elementwise` and `eos_matmul` take `(B, heads, N, D)`.
"""
if __name__ != 'subquad.kernels':
    raise ImportError(f'import subquad.kernels instead of {__name__!r}: the folder kernels/ is not a top-level '
                      'package')

import torch

from .dispatch import OPERATORS, use_backend, why_not

# isort: split
# The table of operators. Each line imports a folder, which declares its operator.
from .crisscross_attention import crisscross_attention
from .decay_attention import decay_attention
from .depthwise_conv import depthwise_conv
from .eos_elementwise import eos_elementwise
from .eos_matmul import eos_matmul
from .polyline_attention import polyline_attention
from .polyline_linear_attention import polyline_linear_attention
from .polyline_scan import polyline_scan
from .quadtree_attention import quadtree_attention
from .quadtree_solve import quadtree_solve
from .rotary_embedding import rotary_embedding
from .selective_scan import selective_scan
from .separable_attention import separable_attention
from .tree_solve import tree_solve

__all__ = [*OPERATORS, 'use_backend', 'why_not']

# Let glibc keep up to 62 MB of freed memory. It returns large blocks to the system, to be mapped again page by page,
# which takes a fifth of MobileViTv2's time. Its thresholds follow the largest block freed so far (M_MMAP_THRESHOLD in
# mallopt(3)).
torch.empty(31 * 2 ** 20, dtype=torch.uint8)
