"""Tree-structured token mixing (Myo): a gated linear layer around the solve with a quad tree's matrix.

"Myosotis: structured computation for attention like layer", arXiv 2509.20503, has the layer for sequences, and leaves
the edges of a tree over an image open; what is chosen here is said at `TreeMixer`.
"""
import math
from typing import ClassVar, List, Optional, Sequence

import torch
import torch.nn.functional as F
from timm.layers import is_exportable
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import quadtree_solve
from ...kernels.common.autocast import without_autocast
from ...kernels.trees import PARAMETRISATIONS, RHO, Level, means, quadtree_levels, third, unfold
from ..options import Options, check, flag, integer, one_of, or_none

# Levels with a bias of their own, counted from the leaves; higher ones share the last. 2^11 tokens a side.
BIASED_LEVELS = 12
# Channels of a head's query and key, whose product is the logit of an edge.
EDGE_DIM = 8
# Edges at the start, from the first head to the last: short and long range side by side.
_FIRST_EDGES = {'laplacian': (1.0, 16.0), 'symmetric': (0.5, 4.0), 'skew': (0.5, 4.0)}


@register_notrace_module
class TreeMixer(nn.Module):
    """out(SiLU(gate(x)) * solve(value(x))), (B, H, W, C) -> (B, H, W, C) for any H, W >= 1.

    Inner nodes have the means of their leaves, for values as for the queries and keys of edges. The edge between node c
    and its parent p has, for each head, the logit q_c . k_p / sqrt(8) + bias[level, place among its siblings]; from it
        'laplacian'  the weight 4^level * softplus(logit): x is a weighted mean of all values, with long range;
        'symmetric'  the logit itself, bounded over the siblings (`quadtree_solve`);
        'skew'       the logit itself.

    Args:
        dim: C. num_heads: heads share an edge; dim must be a multiple of it.
        parametrisation: 'laplacian', 'symmetric' or 'skew'.
        static_edges: biases alone, no queries and keys.
        max_levels: height of the trees; None for one tree over the whole map.
        shifted: the grid is set a third of the coarsest cell down and to the right, so that other tokens are neighbours
            in the tree.
        rho: of 'symmetric'.
        device, dtype: of the parameters.

    Raises:
        ValueError: an option that is not allowed.
    """

    OPTIONS: ClassVar[Options] = {'parametrisation': one_of(*PARAMETRISATIONS), 'static_edges': flag(),
                                  'max_levels': or_none(integer(2, 32))}

    def __init__(self, dim: int, num_heads: int, parametrisation: str = 'laplacian', static_edges: bool = False,
                 max_levels: Optional[int] = None, shifted: bool = False, rho: float = RHO, device=None, dtype=None):
        super().__init__()
        check('TreeMixer', self.OPTIONS, dict(parametrisation=parametrisation, static_edges=static_edges,
                                              max_levels=max_levels))
        if dim % num_heads:
            raise ValueError(f'dim must be a multiple of num_heads, got {dim} and {num_heads}')
        if not 0 < rho < 1:
            raise ValueError(f'rho must be between 0 and 1, got {rho!r}')
        dd = {'device': device, 'dtype': dtype}
        self.num_heads, self.parametrisation, self.rho = num_heads, parametrisation, rho
        self.max_levels, self.shifted = max_levels, shifted
        self.value, self.gate = nn.Linear(dim, dim, **dd), nn.Linear(dim, dim, **dd)
        self.query, self.key = (None if static_edges else nn.Linear(dim, num_heads * EDGE_DIM, bias=False, **dd)
                                for _ in range(2))
        self.edge_bias = nn.Parameter(torch.empty(BIASED_LEVELS, 2, 2, num_heads, **dd))
        self.out = nn.Linear(dim, dim, **dd)
        self.backend = 'export' if is_exportable() else 'auto'
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Edges of a head alike on all levels, spread from head to head in equal ratios."""
        low, high = (math.log(edge) for edge in _FIRST_EDGES[self.parametrisation])
        first = torch.linspace(low, high, self.num_heads).exp()
        if self.parametrisation == 'laplacian':
            first = torch.log(torch.expm1(first))                       # the inverse of softplus
        with torch.no_grad():
            self.edge_bias.copy_(first.expand_as(self.edge_bias))

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """mask: (B, H, W), true for the tokens that are there; what is behind the others reaches no token within."""
        levels = self.levels(*x.shape[1:3])
        values = [self._heads(v) for v in means(self.value(x).permute(0, 3, 1, 2), levels, mask)]
        y = quadtree_solve(values, self.edges(x, levels, mask), parametrisation=self.parametrisation, rho=self.rho,
                           mask=mask, shift=levels[0][2:], backend=self.backend)[0]
        y = y.permute(0, 2, 3, 1, 4).reshape(x.shape)
        return self.out(F.silu(self.gate(x)) * y)

    def levels(self, height: int, width: int) -> List[Level]:
        """The grids of the tree over a map of that size."""
        shift = third(height, width, self.max_levels) if self.shifted else (0, 0)
        return quadtree_levels(height, width, self.max_levels, shift)

    def influence(self, x: Tensor, row: int, column: int, edges: Sequence[Tensor]) -> Tensor:
        """What every token contributes to the solve's result at one: a row of the inverse, inner nodes' means included.

        Args:
            x: (B, H, W, C), the layer's input.
            row, column: of the token.
            edges: from `edges`.

        Returns:
            (B, heads, H, W), in the edges' dtype; sums to 1 over a tree for 'laplacian'.
        """
        batch, height, width = x.shape[:3]
        levels = self.levels(height, width)
        with torch.enable_grad():
            like = edges[0] if edges else x              # a map of one token has none
            values = like.new_zeros(batch, self.num_heads, height, width).requires_grad_()
            solution = quadtree_solve([v[..., None] for v in means(values, levels)], [e.detach() for e in edges],
                                      parametrisation=self.parametrisation, rho=self.rho, shift=levels[0][2:])
            return torch.autograd.grad(solution[0][:, :, row, column].sum(), values)[0]

    def _heads(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, heads, H, W, C / heads), a view."""
        return x.permute(0, 2, 3, 1).unflatten(3, (self.num_heads, -1)).permute(0, 3, 1, 2, 4)

    def edges(self, x: Tensor, levels: Sequence[Level], mask: Optional[Tensor] = None) -> List[Tensor]:
        """What `quadtree_solve` takes as edges: (B, heads, H_l, W_l) for each level but the last, at least float32.

        Args:
            x: (B, H, W, C), the layer's input.
            levels: of the tree. mask: as for `forward`.
        """
        logits: List[Tensor] = [self._biases(n, level) for n, level in enumerate(levels[:-1])]
        if self.query is None:
            logits = [bias.expand(len(x), -1, -1, -1) for bias in logits]
        else:
            query, key = (self._pyramid(linear(x), levels, mask) for linear in (self.query, self.key))
            logits = [self._dots(query[n], unfold(key[n + 1], level)) + bias
                      for n, (level, bias) in enumerate(zip(levels, logits))]
        if self.parametrisation == 'laplacian':
            return [F.softplus(logit) * 4.0 ** n for n, logit in enumerate(logits)]
        return logits

    def _pyramid(self, x: Tensor, levels: Sequence[Level], mask: Optional[Tensor]) -> List[Tensor]:
        return means(x.to(torch.promote_types(x.dtype, torch.float32)).permute(0, 3, 1, 2), levels, mask)

    def _dots(self, query: Tensor, key: Tensor) -> Tensor:
        """Scaled products of each head's channels: (B, heads * 8, H, W) twice -> (B, heads, H, W)."""
        products = (query * key).permute(0, 2, 3, 1)
        shape = (*products.shape[:3], self.num_heads)
        # By a product with a vector: sums over so short a dimension are slow.
        scale = products.new_full((EDGE_DIM,), EDGE_DIM ** -0.5)
        with without_autocast(products):
            return torch.mv(products.reshape(-1, EDGE_DIM), scale).view(shape).permute(0, 3, 1, 2)

    def _biases(self, n: int, level: Level) -> Tensor:
        """(1, heads, H_l, W_l): each cell's by its place among its siblings."""
        table = self.edge_bias[min(n, BIASED_LEVELS - 1)]
        table = table.to(torch.promote_types(table.dtype, torch.float32))
        for axis, (length, first) in enumerate(((level.height, level.top), (level.width, level.left))):
            place = (torch.arange(length, device=table.device) + first) % 2
            table = table.index_select(axis, place)
        return table.permute(2, 0, 1)[None]
