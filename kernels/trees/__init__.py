"""Trees and their matrices: what `tree_solve` and `quadtree_solve` share (Myosotis, arXiv 2509.20503)."""
from .gaussian import tree_log_determinant, tree_marginal_variances, tree_sample
from .grid import Level, fold, heights, leaf_counts, means, quadtree_levels, third, unfold
from .orders import ORDERS, grid_order
from .parametrize import PARAMETRISATIONS, RHO, sibling_normalised, tree_blocks
from .tree import Tree, cached_path, cached_sequence, level_lengths

__all__ = ['Level', 'ORDERS', 'PARAMETRISATIONS', 'RHO', 'Tree', 'cached_path', 'cached_sequence', 'fold', 'grid_order',
           'heights', 'leaf_counts', 'level_lengths', 'means', 'quadtree_levels', 'sibling_normalised', 'third',
           'tree_blocks', 'tree_log_determinant', 'tree_marginal_variances', 'tree_sample', 'unfold']
