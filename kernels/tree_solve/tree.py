"""Rooted trees (and forests) by their parents, with what a solve by levels needs of them."""
from functools import lru_cache
from typing import List, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from .grid import quadtree_levels


class Generation(NamedTuple):
    """The nodes at one distance from the root: their numbers, the place of each one's parent in the generation before
    (sorted), how many children every node of that one has (None if not all the same), and the first number where the
    numbers are consecutive (None where not)."""
    nodes: Tensor
    parents: Tensor
    arity: Optional[int]
    first: Optional[int]

    def of(self, x: Tensor) -> Tensor:
        """x (..., V, m, r) of these nodes; a view where their numbers are consecutive."""
        if self.first is not None:
            return x.narrow(-3, self.first, len(self.nodes))
        return x.index_select(-3, self.nodes.to(x.device))

    def of_parents(self, above: Tensor) -> Tensor:
        """What the parents have, for each node: above (..., n, m, r) of the generation before."""
        if self.arity is not None:
            return above.unsqueeze(-3).expand(*above.shape[:-2], self.arity, *above.shape[-2:]).flatten(-4, -3)
        return above.index_select(-3, self.parents.to(above.device))

    def add_to_parents(self, total: Tensor, parts: Tensor) -> Tensor:
        """total (..., n, m, r) plus the sum of the parts (..., children, m, r) of each parent's children."""
        if self.arity is not None:
            return total + parts.unflatten(-3, (-1, self.arity)).sum(-3)
        return total.index_add(-3, self.parents.to(parts.device), parts)


def _first(nodes: Tensor) -> Optional[int]:
    first = int(nodes[0])
    return first if torch.equal(nodes, torch.arange(first, first + len(nodes))) else None


class Tree:
    """A rooted tree or forest.

    Args:
        parents: the parent of each node, -1 for a root; any numbering.
        sizes: the block size of each node, or one for all.

    Attributes:
        parents: (V,) int64 on the CPU. generations: roots first. sizes: (V,) int64 or None (all `block`).
        block: the largest block size. chain: (V,) nodes from leaf to root, path after path, where no node has two
            children; None otherwise.

    Raises:
        ValueError: a parent out of range, a cycle, no node, or sizes that do not fit.
    """

    def __init__(self, parents: Union[Sequence[int], Tensor], sizes: Union[int, Sequence[int], Tensor] = 1):
        parents = torch.as_tensor(parents, dtype=torch.int64, device='cpu')
        if parents.ndim != 1 or not len(parents):
            raise ValueError(f'Tree: parents must be a list of at least one number, got shape {tuple(parents.shape)}')
        wrong = (parents < -1) | (parents >= len(parents))
        if wrong.any():
            node = int(wrong.nonzero()[0])
            raise ValueError(f'Tree: the parent of node {node} is {int(parents[node])}; allowed are -1 for a root and '
                             f'0 to {len(parents) - 1}')
        self.parents = parents
        self.generations = self._generations()
        if sum(len(generation.nodes) for generation in self.generations) < len(parents):
            reached = torch.zeros(len(parents), dtype=torch.bool)
            for generation in self.generations:
                reached[generation.nodes] = True
            raise ValueError(f'Tree: no root is above node {int((~reached).nonzero()[0])}: its parents form a cycle')
        self.block, self.sizes = self._blocks(sizes)
        below = self.parents[self.parents >= 0]
        self.chain = self._chain() if len(below.unique()) == len(below) else None

    def __len__(self) -> int:
        return len(self.parents)

    def _generations(self) -> List[Generation]:
        children, order = self.parents.sort(stable=True)                 # numbers of nodes, grouped by parent
        first = torch.searchsorted(children, torch.arange(len(self.parents) + 1))
        roots = order[:first[0]]
        generations = ([Generation(roots, torch.empty(0, dtype=torch.int64), None, _first(roots))] if len(roots)
                       else [])
        while generations:
            nodes = generations[-1].nodes
            counts = first[nodes + 1] - first[nodes]
            if not counts.any():
                break
            parents = torch.repeat_interleave(torch.arange(len(nodes)), counts)
            offset = torch.arange(len(parents)) - (counts.cumsum(0) - counts)[parents]
            arity = int(counts[0]) if (counts == counts[0]).all() else None
            nodes = order[first[nodes][parents] + offset]
            generations.append(Generation(nodes, parents, arity, _first(nodes)))
        return generations

    def _blocks(self, sizes: Union[int, Sequence[int], Tensor]):
        sizes = torch.as_tensor(sizes, dtype=torch.int64, device='cpu')
        if sizes.ndim == 0:
            sizes = sizes.expand(len(self))
        if sizes.shape != self.parents.shape or (sizes < 1).any():
            raise ValueError(f'Tree: sizes must be a block size of at least 1 for each of {len(self)} nodes, or one '
                             f'for all, got {sizes.tolist()}')
        block = int(sizes.max())
        return block, None if (sizes == block).all() else sizes

    def _chain(self) -> Tensor:
        path = torch.full((len(self),), -1)                              # which path a node is on
        path[self.generations[0].nodes] = torch.arange(len(self.generations[0].nodes))
        for above, generation in zip(self.generations, self.generations[1:]):
            path[generation.nodes] = path[above.nodes[generation.parents]]
        paths: List[List[int]] = [[] for _ in self.generations[0].nodes]
        for generation in reversed(self.generations):
            for node in generation.nodes.tolist():
                paths[path[node]].append(node)
        return torch.tensor([node for nodes in paths for node in nodes])

    def in_order(self, generations: Sequence[Tensor]) -> Tensor:
        """(..., V, m, r) by number of node, from the parts of the generations."""
        starts = [generation.first for generation in self.generations]
        if None not in starts:
            return torch.cat([x for _, x in sorted(zip(starts, generations), key=lambda pair: pair[0])], -3)
        order = torch.cat([generation.nodes for generation in self.generations]).argsort()
        return torch.cat(list(generations), -3).index_select(-3, order.to(generations[0].device))

    def parts(self, device) -> Tensor:
        """(V, block), true for the entries of each node's block."""
        sizes = self.sizes if self.sizes is not None else torch.full((len(self),), self.block)
        return (torch.arange(self.block) < sizes[:, None]).to(device)

    @classmethod
    def path(cls, length: int, **kwargs) -> 'Tree':
        """A chain: the parent of node n is n + 1, the root is the last."""
        return cls([*range(1, length), -1], **kwargs)

    @classmethod
    def over_sequence(cls, length: int, arity: int, max_levels: Optional[int] = None, **kwargs) -> 'Tree':
        """A tree over a sequence, its elements the leaves: nodes are numbered by level, leaves first, the root last;
        `arity` neighbours share a parent. With max_levels the trees of a forest end there.

        Raises:
            ValueError: an arity below 2, or a length below 1.
        """
        if arity < 2 or length < 1:
            raise ValueError('Tree.over_sequence: length must be at least 1 and arity at least 2, got '
                             f'{length}, {arity}')
        return cls(torch.cat([above for above in _levels_of_parents(length, arity, max_levels)]), **kwargs)

    @classmethod
    def quad(cls, height: int, width: int, max_levels: Optional[int] = None, shift: Sequence[int] = (0, 0), **kwargs
             ) -> 'Tree':
        """A quad tree over a grid: nodes are numbered by level, finest first, row by row within a level."""
        levels, parents, start = quadtree_levels(height, width, max_levels, shift), [], 0
        for level, above in zip(levels, levels[1:]):
            start += level.height * level.width
            rows = (torch.arange(level.height) + level.top) // 2 - above.top
            columns = (torch.arange(level.width) + level.left) // 2 - above.left
            parents.append((start + rows[:, None] * above.width + columns).flatten())
        top = torch.full((levels[-1].height * levels[-1].width,), -1)
        return cls(torch.cat([*parents, top]), **kwargs)


def level_lengths(length: int, arity: int, max_levels: Optional[int] = None) -> List[int]:
    """How many nodes each level of `Tree.over_sequence` has, leaves first."""
    lengths = [length]
    while lengths[-1] > 1 and len(lengths) != max_levels:
        lengths.append(-(-lengths[-1] // arity))
    return lengths


def _levels_of_parents(length: int, arity: int, max_levels: Optional[int]) -> List[Tensor]:
    lengths, start, result = level_lengths(length, arity, max_levels), 0, []
    for count in lengths[:-1]:
        start += count
        result.append(start + torch.arange(count) // arity)
    return [*result, torch.full((lengths[-1],), -1)]


@lru_cache(maxsize=16)
def cached_path(length: int) -> Tree:
    """`Tree.path`, kept: layers ask for the same one at every call."""
    return Tree.path(length)


@lru_cache(maxsize=16)
def cached_sequence(length: int, arity: int, max_levels: Optional[int] = None, block: int = 1) -> Tree:
    """`Tree.over_sequence`, kept."""
    return Tree.over_sequence(length, arity, max_levels, sizes=block)
