"""Operators: one folder each with a float64-able `reference`, a fast pure-PyTorch `portable` and an export form.

    decay_attention            softmax attention along one grid axis, decayed with distance      O(N^1.5)
    crisscross_attention       two of them chained, in both orders                              O(N^1.5)
    polyline_attention         softmax attention over the whole grid under the polyline mask     O(N^2) time
    polyline_scan              the polyline mask times a tensor, in two or three dimensions      O(N)
    polyline_linear_attention  linear attention under the polyline mask, by scans                O(N)
    separable_attention        one context vector, by softmax scores, for all tokens of a group  O(N)
    quadtree_solve             the inverse of a quad tree's matrix times a tensor                O(N)
    tree_solve                 the same for any tree, blocks of any size, real or complex        O(N)

The polyline operators and the quad tree take heads first, `(B, heads, H, W, D)`, and step logs, where they have them,
as *steps* `(B, heads, H, W)`, never cumulative
sums; separable attention, which has no heads, takes `(B, H, W, D)`.
"""
if __name__ != 'subquad.kernels':
    raise ImportError(f'import subquad.kernels, not {__name__!r}: the folder of the checkout is not a package of its '
                      'own')

from .crisscross_attention import crisscross_attention
from .decay_attention import decay_attention
from .dispatch import use_backend, why_not
from .polyline_attention import polyline_attention
from .polyline_linear_attention import polyline_linear_attention
from .polyline_scan import polyline_scan
from .quadtree_solve import quadtree_solve
from .separable_attention import separable_attention
from .tree_solve import tree_solve

__all__ = ['crisscross_attention', 'decay_attention', 'polyline_attention', 'polyline_linear_attention',
           'polyline_scan', 'quadtree_solve', 'separable_attention', 'tree_solve', 'use_backend', 'why_not']
