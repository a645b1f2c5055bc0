"""Rooted trees and forests, given by the parents of their nodes, and their generations."""
from functools import cached_property, lru_cache
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .grid import quadtree_levels


class Generation(NamedTuple):
    """The nodes at one distance from the root.

    Attributes:
        nodes: their numbers.
        parents: the position of each node's parent in the generation before, sorted.
        arity: how many children each node of the generation before has; None if the numbers differ.
        first: the first number if the numbers are consecutive, else None.
    """
    nodes: Tensor
    parents: Tensor
    arity: Optional[int]
    first: Optional[int]

    def of(self, x: Tensor) -> Tensor:
        """Return x (..., V, m, r) of these nodes; a view if their numbers are consecutive."""
        if self.first is not None:
            return x.narrow(-3, self.first, len(self.nodes))
        return x.index_select(-3, self.nodes.to(x.device))

    def of_parents(self, above: Tensor) -> Tensor:
        """Return each node's parent's value from `above` (..., n, m, r) of the generation before."""
        if self.arity is not None:
            return above.unsqueeze(-3).expand(*above.shape[:-2], self.arity, *above.shape[-2:]).flatten(-4, -3)
        return above.index_select(-3, self.parents.to(above.device))

    def add_to_parents(self, total: Tensor, parts: Tensor) -> Tensor:
        """Add to total (..., n, m, r) the sum of the parts (..., children, m, r) of each parent's children."""
        if self.arity is not None:
            return total + parts.unflatten(-3, (-1, self.arity)).sum(-3)
        return total.index_add(-3, self.parents.to(parts.device), parts)


def _first(nodes: Tensor) -> Optional[int]:
    first = int(nodes[0])
    return first if torch.equal(nodes, torch.arange(first, first + len(nodes), device='cpu')) else None


class Tree:
    """A rooted tree, or a forest.

    Args:
        parents: the parent of each node, -1 for a root, in any numbering.
        sizes: the block size of each node, or one for all.
        forest: whether several roots are allowed.

    Attributes:
        parents: parents, (V,), int64, on the CPU.
        roots: numbers of the roots.
        depths: numbers of edges to the root, (V,).
        sizes: block sizes, (V,), int64; None if all are `block`.
        block: the largest block size.
        chain: nodes from leaf to root, path after path, (V,), if no node has two children; else None.

    Raises:
        ValueError: a parent is out of range, there is a cycle, there are two roots without `forest`, there is no node,
            or sizes do not fit. The error names the node.
    """

    def __init__(self, parents: Union[Sequence[int], Tensor], sizes: Union[int, Sequence[int], Tensor] = 1,
                 forest: bool = False):
        parents = torch.as_tensor(parents, device='cpu')
        if parents.ndim != 1 or not len(parents) or parents.is_floating_point():
            raise ValueError('Tree: parents must be a list of at least one integer, got '
                             f'{parents.dtype} of shape {tuple(parents.shape)}')
        self.parents = parents = parents.to(torch.int64)
        wrong = (parents < -1) | (parents >= len(parents))
        if wrong.any():
            node = int(wrong.nonzero()[0])
            raise ValueError(f'Tree: the parent of node {node} is {int(parents[node])}; allowed are -1 for a root and '
                             f'0 to {len(parents) - 1}')
        self.depths, roots = self._to_the_root()
        self.roots = (parents < 0).nonzero()[:, 0]
        if len(self.roots) > 1 and not forest:
            raise ValueError(f'Tree: nodes {int(self.roots[0])} and {int(self.roots[1])} are both roots (forest=True '
                             'allows it)')
        self.block, self.sizes = self._blocks(sizes)
        below = parents[parents >= 0]
        self.chain = None
        if len(below.unique()) == len(below):
            self.chain = (roots * len(self) + (len(self) - 1 - self.depths)).argsort()

    def __len__(self) -> int:
        return len(self.parents)

    def _to_the_root(self) -> Tuple[Tensor, Tensor]:
        """Return each node's depth and root, by a walk upwards whose stride doubles."""
        above = self.parents.clone()
        depths = (above >= 0).to(torch.int64)
        roots = torch.where(above < 0, torch.arange(len(self), device='cpu'), above)
        for _ in range(len(self).bit_length()):
            moving = above >= 0
            depths = depths + torch.where(moving, depths[above], 0)
            roots = roots[roots]
            above = torch.where(moving, above[above], -1)
        if (above >= 0).any():
            raise ValueError(f'Tree: no root is above node {int((above >= 0).nonzero()[0])}: its parents form a cycle')
        return depths, roots

    @cached_property
    def generations(self) -> List[Generation]:
        """Nodes by distance from the root, roots first."""
        children, order = self.parents.sort(stable=True)                 # numbers of nodes, grouped by parent
        first = torch.searchsorted(children, torch.arange(len(self) + 1, device='cpu'))
        nodes = order[:first[0]]
        generations = [Generation(nodes, nodes[:0], None, _first(nodes))]
        while True:
            counts = first[nodes + 1] - first[nodes]
            if not counts.any():
                return generations
            parents = torch.repeat_interleave(torch.arange(len(nodes), device='cpu'), counts)
            offset = torch.arange(len(parents), device='cpu') - (counts.cumsum(0) - counts)[parents]
            arity = int(counts[0]) if (counts == counts[0]).all() else None
            nodes = order[first[nodes][parents] + offset]
            generations.append(Generation(nodes, parents, arity, _first(nodes)))

    def _blocks(self, sizes: Union[int, Sequence[int], Tensor]) -> Tuple[int, Optional[Tensor]]:
        sizes = torch.as_tensor(sizes, device='cpu')
        fits = not sizes.is_floating_point() and sizes.shape in ((), self.parents.shape)
        if not fits or (sizes < 1).any():
            wrong = f'{sizes.dtype} of shape {tuple(sizes.shape)}'
            if fits:
                node = int((sizes.expand(len(self)) < 1).nonzero()[0])
                wrong = f'{int(sizes.expand(len(self))[node])} for node {node}'
            raise ValueError(f'Tree: sizes must be an integer block size of at least 1 for each of {len(self)} nodes, '
                             f'or one for all, got {wrong}')
        sizes = sizes.to(torch.int64).expand(len(self))
        block = int(sizes.max())
        return block, None if (sizes == block).all() else sizes

    def in_order(self, generations: Sequence[Tensor]) -> Tensor:
        """Return (..., V, m, r) in the order of node numbers from the parts of the generations."""
        starts = [generation.first for generation in self.generations]
        if None not in starts:
            return torch.cat([x for _, x in sorted(zip(starts, generations), key=lambda pair: pair[0])], -3)
        order = torch.cat([generation.nodes for generation in self.generations]).argsort()
        return torch.cat(list(generations), -3).index_select(-3, order.to(generations[0].device))

    def block_mask(self, device) -> Tensor:
        """Return (V, block), true for the entries of each node's block."""
        sizes = self.sizes if self.sizes is not None else torch.full((len(self),), self.block, device='cpu')
        return (torch.arange(self.block, device='cpu') < sizes[:, None]).to(device)

    @classmethod
    def path(cls, length: int, **kwargs) -> 'Tree':
        """Return a chain: the parent of node n is n + 1, and the last node is the root.

        Raises:
            ValueError: the length is below 1.
        """
        if length < 1:
            raise ValueError(f'Tree.path: length must be at least 1, got {length}')
        parents = torch.arange(1, length + 1, device='cpu')
        parents[-1] = -1
        return cls(parents, **kwargs)

    @classmethod
    def over_sequence(cls, length: int, arity: int, max_levels: Optional[int] = None, **kwargs) -> 'Tree':
        """Return a tree whose leaves are the elements of a sequence; `arity` neighbors share a parent.

        Nodes are numbered by level, leaves first, root last. With max_levels it is a forest of at
        most max_levels levels.

        Raises:
            ValueError: the arity is below 2, or the length or the number of levels is below 1.
        """
        if arity < 2 or length < 1 or (max_levels is not None and max_levels < 1):
            raise ValueError('Tree.over_sequence: length and max_levels must be at least 1 and arity at least 2, got '
                             f'{length}, {max_levels}, {arity}')
        lengths, start, parents = level_lengths(length, arity, max_levels), 0, []
        for count in lengths[:-1]:
            start += count
            parents.append(start + torch.arange(count, device='cpu') // arity)
        roots = torch.full((lengths[-1],), -1, device='cpu')
        return cls(torch.cat([*parents, roots]), forest=max_levels is not None, **kwargs)

    @classmethod
    def quad(cls, height: int, width: int, max_levels: Optional[int] = None, shift: Sequence[int] = (0, 0), **kwargs
             ) -> 'Tree':
        """Return a quad tree over a grid, with nodes numbered by level, finest first, row by row within a level."""
        levels, parents, start = quadtree_levels(height, width, max_levels, shift), [], 0
        for level, above in zip(levels, levels[1:]):
            start += level.height * level.width
            rows = (torch.arange(level.height, device='cpu') + level.top) // 2 - above.top
            columns = (torch.arange(level.width, device='cpu') + level.left) // 2 - above.left
            parents.append((start + rows[:, None] * above.width + columns).flatten())
        top = torch.full((levels[-1].height * levels[-1].width,), -1, device='cpu')
        return cls(torch.cat([*parents, top]), forest=max_levels is not None, **kwargs)


def level_lengths(length: int, arity: int, max_levels: Optional[int] = None) -> List[int]:
    """Return how many nodes each level of `Tree.over_sequence` has, leaves first."""
    lengths = [length]
    while lengths[-1] > 1 and len(lengths) != max_levels:
        lengths.append(-(-lengths[-1] // arity))
    return lengths


@lru_cache(maxsize=16)
def cached_path(length: int) -> Tree:
    """Return a cached `Tree.path`: layers need the same one at every call."""
    return Tree.path(length)


@lru_cache(maxsize=16)
def cached_sequence(length: int, arity: int, max_levels: Optional[int] = None, block: int = 1) -> Tree:
    """Return a cached `Tree.over_sequence`."""
    return Tree.over_sequence(length, arity, max_levels, sizes=block)
