"""Tree-structured mixing of sequences (MyoSequence): a solve with the matrix of a tree over the sequence.

"Myosotis: structured computation for attention like layer", arXiv 2509.20503. The paper does not say how the edges
depend on the input; `TreeSequenceMixer` documents the choice made here.
"""
import math
from typing import List, Optional

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import tree_solve
from ...kernels.common.numerics import without_autocast
from ...kernels.trees import Tree, cached_sequence, level_lengths, tree_blocks
from .tree import EDGE_DIM

# The number of levels with their own embedding and edge biases, from the leaves up. Higher levels share the last.
LEVELS = 16


class Nodes:
    """The nodes of a tree over a sequence, leaves first: the tree, the level of each node, and the padding.

    Args:
        length: length of the sequence.
        arity: number of children of an inner node.
        block: side of the blocks of the tree's matrix.
        mask: (B, length), true for elements and false for padding; None for no padding.
        device: device of the sequence.
    """

    def __init__(
            self,
            length: int,
            arity: int,
            block: int,
            mask: Optional[Tensor],
            device,
    ):
        length = int(length)                                                    # in a trace, sizes are tensors
        self.tree: Tree = cached_sequence(length, arity, None, block)
        self.arity, self.lengths = arity, level_lengths(length, arity)
        self.level = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths)).to(device)
        self.level.clamp_(max=LEVELS - 1)
        self.place = torch.cat([torch.arange(length) % arity for length in self.lengths]).to(device)   # among siblings
        self.parents = self.tree.parents.clamp(min=0).to(device)
        leaves = torch.ones(1, length, device=device, dtype=torch.float32) if mask is None else mask.to(torch.float32)
        self.counts = self._sums(leaves[..., None])                             # leaves below each node, (B, n, 1)
        self.present = None if mask is None else torch.cat(self.counts, 1)[..., 0] > 0    # (B, V)

    def _sums(self, leaves: Tensor) -> List[Tensor]:
        """Sums over the leaves below each node: (B, L, C) -> (B, n, C) for each level of n nodes, leaves first."""
        result = [leaves]
        for length in self.lengths[1:]:
            padding = length * self.arity - result[-1].shape[1]
            result.append(F.pad(result[-1], (0, 0, 0, padding)).unflatten(1, (length, self.arity)).sum(2))
        return result

    def means(self, leaves: Tensor) -> Tensor:
        """Values of all V nodes: (B, L, C) -> (B, V, C). An inner node has the mean over the leaves below it."""
        total = leaves.to(torch.promote_types(leaves.dtype, torch.float32))
        if self.present is not None:
            total = total.masked_fill(self.counts[0] == 0, 0)
        levels = self._sums(total)
        return torch.cat([x / count.clamp(min=1) for x, count in zip(levels, self.counts)], 1).to(leaves.dtype)

    def top_means(self, x: Tensor, levels: int) -> List[Tensor]:
        """Means over the nodes of each of the top levels, root first: (B, V, C) -> (B, C) for each level."""
        parts = x.split(self.lengths, 1)
        result = []
        for part, count in zip(parts[::-1][:levels], self.counts[::-1]):
            weight = (count > 0).to(x.dtype)
            result.append((part * weight).sum(1) / weight.expand(len(part), *part.shape[1:2], 1).sum(1).clamp(min=1))
        return result


@register_notrace_module
class TreeSequenceMixer(nn.Module):
    """Solve with the matrix of a tree over a sequence: (B, V, dim) -> (B, V, dim), in the order of `Nodes`.

    The dim / num_heads channels of a head share the edges of the tree. With blocks of side m, they form m rows, and
    each column is a right-hand side.

    An edge is q_child . k_parent / sqrt(8) + bias[level, sibling index, head]. With m > 1 there is a projection for
    each row and column of the block. For 'symmetric' the bound of head h is exp(-step_h); the steps are fixed and
    log-spaced from 1e-3 to 1e-1.

    Args:
        dim: channels.
        num_heads: number of heads; dim must be a multiple of num_heads * block_size.
        arity: number of children of an inner node.
        block_size: side m of the blocks.
        parametrization: 'symmetric', 'laplacian' or 'skew'.
        static_edges: use biases only.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
            self,
            dim: int,
            num_heads: int,
            arity: int,
            block_size: int,
            parametrization: str,
            static_edges: bool,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_heads, self.arity, self.block_size = num_heads, arity, block_size
        self.parametrization = parametrization
        self.query, self.key = (
            None if static_edges else nn.Linear(dim, num_heads * block_size * EDGE_DIM, bias=False, **dd)
            for _ in range(2))
        self.edge_bias = nn.Parameter(torch.empty(LEVELS, arity, num_heads, block_size, block_size, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the edges, from short range in the first head to long range in the last.

        The moduli of the edges correspond to the timescales of S5. For 'laplacian' they are weights from 1 to 16, which
        grow by the arity from level to level.

        They differ at random between siblings. With equal edges a parent would know only the mean of its children, and
        could not tell them apart.
        """
        low, high = (1.0, 16.0) if self.parametrization == 'laplacian' else (0.5, 4.0)
        first = torch.linspace(math.log(low), math.log(high), self.num_heads, dtype=torch.float32).exp()[:, None, None]
        noise = torch.randn(*self.edge_bias.shape[:3], 1, 1)
        if self.parametrization == 'laplacian' and self.block_size == 1:
            first = torch.log(torch.expm1(first)) + noise                     # the inverse of softplus
        else:
            first = first * noise                                             # of both signs, like wavelets
        with torch.no_grad():
            self.edge_bias.copy_(first * torch.eye(self.block_size))

    def edges(self, x: Tensor, nodes: Nodes) -> Tensor:
        """Return the argument z of `tree_blocks`, (B or 1, heads, V, m, m), at least float32."""
        z = self.edge_bias[nodes.level, nodes.place].transpose(0, 1)[None]                       # (1, heads, V, m, m)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.query is not None:
            shape = (self.num_heads, self.block_size, EDGE_DIM)
            query, key = (linear(x).to(z.dtype).unflatten(2, shape).transpose(1, 2)
                          for linear in (self.query, self.key))                              # (B, heads, V, m, e)
            key = key.index_select(2, nodes.parents)
            dots = query @ key.mT if self.block_size > 1 else (query * key).sum(-1, keepdim=True)
            z = z + dots * EDGE_DIM ** -0.5
        if self.parametrization == 'laplacian':
            growth = self.arity ** nodes.level.to(z.dtype)[:, None, None]
            z = F.softplus(z) * growth if self.block_size == 1 else z * growth.sqrt()
        if nodes.present is not None:
            z = z.masked_fill(~nodes.present[:, None, :, None, None], 0)
        return z

    def forward(self, x: Tensor, nodes: Nodes) -> Tensor:
        """Map the values x (B, V, dim) of all nodes to the solution, of the same shape."""
        with without_autocast(x):
            z = self.edges(x.to(self.edge_bias.dtype), nodes)
            steps = torch.linspace(math.log(1e-3), math.log(1e-1), self.num_heads, device=z.device, dtype=z.dtype).exp()
            a, b, c = tree_blocks(nodes.tree, z, self.parametrization, rho=torch.exp(-steps)[:, None, None, None])
            u = x.to(z.dtype).unflatten(2, (self.num_heads, self.block_size, -1)).transpose(1, 2)  # (B, heads, V, m, r)
            y = tree_solve(nodes.tree, a, b, c, u)
        return y.transpose(1, 2).flatten(2).to(x.dtype)
