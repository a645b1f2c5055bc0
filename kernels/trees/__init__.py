"""Trees and their matrices, which `tree_solve` and `quadtree_solve` share (Myosotis, arXiv 2509.20503)."""
from .gaussian import tree_log_determinant, tree_marginal_variances, tree_sample
from .grid import (
    ORDERS,
    Level,
    common_ancestor_levels,
    grid_order,
    leaf_counts,
    level_means,
    level_means_export,
    quadtree_levels,
    repeat_to_children,
    sum_children,
    third_of_coarsest_cell,
)
from .parametrize import PARAMETRIZATIONS, RHO, sibling_normalized, tree_blocks
from .topology import Tree, cached_path, cached_sequence, level_lengths

__all__ = [
    'Level', 'ORDERS', 'PARAMETRIZATIONS', 'RHO', 'Tree', 'cached_path', 'cached_sequence', 'common_ancestor_levels',
    'grid_order', 'leaf_counts', 'level_lengths', 'level_means', 'level_means_export', 'quadtree_levels',
    'repeat_to_children', 'sibling_normalized', 'sum_children', 'third_of_coarsest_cell', 'tree_blocks',
    'tree_log_determinant', 'tree_marginal_variances', 'tree_sample',
]
