"""Tree-structured token mixing (Myo): a gated linear layer around a solve with the matrix of a quad tree.

"Myosotis: structured computation for attention like layer", arXiv 2509.20503, describes the layer for sequences, and
does not say how the edges of a tree over an image are computed. `TreeMixer` documents the choice made here.
"""
import math
from typing import Annotated, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import quadtree_attention, quadtree_solve
from ...kernels.trees import (
    PARAMETRIZATIONS,
    RHO,
    Level,
    Tree,
    level_means,
    quadtree_levels,
    third_of_coarsest_cell,
    tree_blocks,
    tree_marginal_variances,
)
from ...kernels.trees.edges import edge_logits, edges_of
from ..options import Flag, checked, integer, number, one_of, or_none

# The number of levels with their own bias, counted from the leaves: enough for 2^11 tokens a side. Higher levels share
# the last bias.
BIASED_LEVELS = 12
# Channels of a head's query and key, whose product is the logit of an edge.
EDGE_DIM = 8
# Initial edges, from the first head to the last, so that heads start with ranges from short to long.
_FIRST_EDGES = {'laplacian': (1.0, 16.0), 'symmetric': (0.5, 4.0), 'skew': (0.5, 4.0)}


@register_notrace_module
class TreeMixer(nn.Module):
    """out(SiLU(gate(x)) * solve(value(x))): (B, H, W, C) -> (B, H, W, C) for any H, W >= 1.

    Values, queries and keys of an inner node are the means over its leaves. For each head, the edge between a node c
    and its parent p has the logit q_c . k_p / sqrt(8) + bias[level, place among its siblings]. The parametrization maps
    it to the weight of the edge:
        'laplacian'  4^level * softplus(logit): the result is a weighted mean of all values, with long range;
        'symmetric'  the logit, bounded over the siblings (`quadtree_solve`);
        'skew'       the logit.

    Args:
        dim: channels C.
        num_heads: number of heads, each with its own edges; dim must be a multiple of it.
        parametrization: 'laplacian', 'symmetric' or 'skew'.
        static_edges: use biases only, without queries and keys.
        max_levels: maximum number of levels of a tree; None for one tree over the whole map.
        shift_grid: shift the grid down and to the right by a third of the coarsest cell, so that other tokens are
            neighbors in the tree.
        rho: bound of the 'symmetric' parametrization, between 0 and 1.
        device, dtype: device and dtype of the parameters.

    Attributes:
        decay_scale: the biases of level l, and the maximum number of levels, are those of level l - log2(decay_scale);
            `subquad.set_decay_scale` sets it. The factor 4^level is the number of tokens of a cell, and stays.

    Raises:
        ValueError: the value of an option is not allowed.
    """

    decay_scale = 1.0

    @checked
    def __init__(
            self,
            dim: int,
            num_heads: int,
            parametrization: Annotated[str, one_of(*PARAMETRIZATIONS)] = 'laplacian',
            static_edges: Flag = False,
            max_levels: Annotated[Optional[int], or_none(integer(2, 32))] = None,
            shift_grid: Flag = False,
            rho: Annotated[float, number(0, 1)] = RHO,
            device=None,
            dtype=None,
    ):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f'dim must be a multiple of num_heads, got {dim} and {num_heads}')
        if not 0 < rho < 1:
            raise ValueError(f'rho must be between 0 and 1, got {rho!r}')
        dd = {'device': device, 'dtype': dtype}
        self.num_heads, self.parametrization, self.rho = num_heads, parametrization, rho
        self.max_levels, self.shift_grid = max_levels, shift_grid
        self.value, self.gate = nn.Linear(dim, dim, **dd), nn.Linear(dim, dim, **dd)
        self.query, self.key = (
            None if static_edges else nn.Linear(dim, num_heads * EDGE_DIM, bias=False, **dd) for _ in range(2))
        self.edge_bias = nn.Parameter(torch.empty(BIASED_LEVELS, 2, 2, num_heads, **dd))
        self.out = nn.Linear(dim, dim, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize edges equally on all levels, and geometrically spaced over the heads."""
        low, high = (math.log(edge) for edge in _FIRST_EDGES[self.parametrization])
        first = torch.linspace(low, high, self.num_heads, dtype=torch.float32).exp()
        if self.parametrization == 'laplacian':
            first = torch.log(torch.expm1(first))                       # the inverse of softplus
        with torch.no_grad():
            self.edge_bias.copy_(first.expand_as(self.edge_bias))

    def forward(
            self,
            x: Tensor,
            mask: Optional[Tensor] = None,
            depth: Optional[int] = None,
            shift: Optional[Tuple[int, int]] = None,
    ) -> Tensor:
        """Mix tokens x (B, H, W, C).

        Args:
            x: tokens (B, H, W, C).
            mask: (B, H, W), true for tokens and false for padding, which does not affect the tokens; None for no
                padding.
            depth, shift: number of levels and shift of the trees, for images that are smaller than the map; None for
                those of the map's size.
        """
        levels = self.levels(*x.shape[1:3]) if depth is None else quadtree_levels(*x.shape[1:3], depth, shift)
        y = quadtree_attention(
            *self._queries_and_keys(x),
            self._split_heads(self.value(x)),
            self._biases(),
            parametrization=self.parametrization,
            rho=self.rho,
            mask=mask,
            shift=levels[0][2:],
            max_levels=self._max_levels() if depth is None else depth,
        )
        y = y.permute(0, 2, 3, 1, 4).reshape(x.shape)
        return self.out(F.silu(self.gate(x)) * y)

    def levels(self, height: int, width: int) -> List[Level]:
        """The grids of all levels of the tree over a map of this size."""
        max_levels = self._max_levels()
        shift = third_of_coarsest_cell(height, width, max_levels) if self.shift_grid else (0, 0)
        return quadtree_levels(height, width, max_levels, shift)

    def why_not_scale(self, scale: float) -> Optional[str]:
        """Return why `decay_scale` cannot be this, or None."""
        if self.max_levels is None:
            return None
        shift = math.log2(scale)
        if not shift.is_integer():
            return f'max_levels={self.max_levels} shifts by whole levels only, so the scale must be a power of 2'
        if self.max_levels + shift < 2:
            return f'max_levels={self.max_levels} would become {self.max_levels + int(shift)}, and must be at least 2'
        return None

    def _max_levels(self) -> Optional[int]:
        """The maximum number of levels, shifted by the decay scale."""
        if self.decay_scale == 1 or self.max_levels is None:
            return self.max_levels
        return self.max_levels + int(math.log2(self.decay_scale))

    def _biases(self) -> Tensor:
        """The biases of the edges, shifted by the decay scale: (L, 2, 2, heads)."""
        if self.decay_scale == 1:
            return self.edge_bias
        shift, last = math.log2(self.decay_scale), BIASED_LEVELS - 1
        sources = [min(max(n - shift, 0), last) for n in range(BIASED_LEVELS + max(0, math.ceil(shift)))]
        below, above = ([rounded(source) for source in sources] for rounded in (math.floor, math.ceil))
        bias = self.edge_bias
        part = torch.tensor([source % 1 for source in sources], device=bias.device).to(bias.dtype)
        return torch.lerp(bias[below], bias[above], part[:, None, None, None])

    def influence(self, x: Tensor, row: int, column: int, edges: Sequence[Tensor]) -> Tensor:
        """Return the contribution of every token to the solution at the query token: a row of the inverse matrix.

        The contributions by way of the means at inner nodes are included.

        Args:
            x: input of the layer, (B, H, W, C).
            row, column: position of the query token.
            edges: output of `edges`.

        Returns:
            (B, heads, H, W), in the dtype of the edges. For 'laplacian' it sums to 1 over a tree.
        """
        batch, height, width = x.shape[:3]
        levels = self.levels(height, width)
        with torch.enable_grad():
            like = edges[0] if edges else x              # a map of one token has no edges
            values = like.new_zeros(batch, self.num_heads, height, width).requires_grad_()
            solution = quadtree_solve(
                [v[..., None] for v in level_means(values, levels)],
                [e.detach() for e in edges],
                parametrization=self.parametrization,
                rho=self.rho,
                shift=levels[0][2:],
            )
            return torch.autograd.grad(solution[0][:, :, row, column].sum(), values)[0]

    def standard_deviation(self, x: Tensor) -> Tensor:
        """Return the standard deviation of each token under the Gaussian whose precision is the matrix of the solve.

        It is the root of the diagonal of the inverse matrix: small where the tree ties a token to many others.

        Args:
            x: input of the layer, (B, H, W, C).

        Returns:
            (B, heads, H, W), at least float32.

        Raises:
            ValueError: the matrix is not symmetric ('skew').
        """
        if self.parametrization == 'skew':
            raise ValueError("parametrization='skew' has no standard deviation: its matrix is not symmetric")
        levels = self.levels(*x.shape[1:3])
        tree = Tree.quad(*levels[0][:2], len(levels), levels[0][2:])
        edges = [edge.flatten(2) for edge in self.edges(x, levels)]
        like = edges[0] if edges else x
        roots = like.new_zeros(len(x), self.num_heads, len(tree) - sum(edge.shape[2] for edge in edges))
        z = torch.cat([*edges, roots], 2)[..., None, None]
        blocks = tree_blocks(tree, z, self.parametrization, rho=self.rho)
        variances = tree_marginal_variances(tree, *blocks)[..., 0, 0]
        return variances[..., :levels[0].height * levels[0].width].sqrt().unflatten(2, levels[0][:2])

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, heads, H, W, C / heads), a view."""
        return x.unflatten(3, (self.num_heads, -1)).permute(0, 3, 1, 2, 4)

    def _queries_and_keys(self, x: Tensor) -> Tuple[Optional[Tensor], Optional[Tensor]]:
        """Return queries and keys, (B, heads, H, W, 8), or None for static edges."""
        if self.query is None:
            return None, None
        return self._split_heads(self.query(x)), self._split_heads(self.key(x))

    def edges(self, x: Tensor, levels: Sequence[Level], mask: Optional[Tensor] = None) -> List[Tensor]:
        """Return the edges for `quadtree_solve`.

        Args:
            x: input of the layer, (B, H, W, C).
            levels: levels of the tree.
            mask: as for `forward`.

        Returns:
            (B, heads, H_l, W_l) for each level but the last, at least float32.
        """
        logits = edge_logits(*self._queries_and_keys(x), self._biases(), levels, mask)
        return edges_of([logit.expand(x.shape[0], -1, -1, -1) for logit in logits], self.parametrization)
