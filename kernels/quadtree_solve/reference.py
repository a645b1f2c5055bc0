"""Quad-tree solve by its definition in float64, with the dense matrix; tests compare all backends with it."""
from typing import List, Sequence

import torch
from torch import Tensor

from ..common.numerics import solve_each
from ..trees.grid import quadtree_levels
from ..trees.topology import Tree


def quadtree_matrix(edges: Sequence[Tensor], height: int, width: int, parametrization: str, shift: Sequence[int]
                    ) -> Tensor:
    """Return the dense matrix (B, heads, V, V) of a quad tree, whose nodes are numbered as in `Tree.quad`.

    edges: for each level but the last, weights of the Laplacian or b of the other parametrizations."""
    tree = Tree.quad(height, width, len(edges) + 1, shift)
    edge = torch.cat([x.flatten(2) for x in edges], -1) if edges else None
    batch = edge.shape[:2] if edges else (1, 1)
    matrix = torch.eye(len(tree), dtype=torch.float64).expand(*batch, -1, -1).clone()
    if not edges:
        return matrix
    child = torch.arange(edge.shape[-1])
    parent = tree.parents[child]
    matrix = matrix.to(edge.device)
    if parametrization == 'laplacian':
        for ends in ((child, child), (parent, parent)):
            matrix = matrix.transpose(0, 2).transpose(1, 3).index_put(
                ends, edge.permute(2, 0, 1), accumulate=True).transpose(1, 3).transpose(0, 2)
        up = down = -edge
    else:
        down, up = edge, -edge if parametrization == 'skew' else edge
    for index, values in (((child, parent), down), ((parent, child), up)):
        matrix = matrix.transpose(0, 2).transpose(1, 3).index_put(index, values.permute(2, 0, 1)
                                                                  ).transpose(1, 3).transpose(0, 2)
    return matrix


def quadtree_solve(values: Sequence[Tensor], edges: Sequence[Tensor], parametrization: str, shift: Sequence[int]
                   ) -> List[Tensor]:
    height, width = values[0].shape[2:4]
    matrix = quadtree_matrix([x.double() for x in edges], height, width, parametrization, shift)
    flat = torch.cat([x.double().flatten(2, 3) for x in values], 2)
    x = solve_each(matrix.to(flat.device), flat)             # that of a single level has no edges to tell its device
    sizes = [level.height * level.width for level in quadtree_levels(height, width, len(values), shift)]
    return [part.reshape(like.shape).to(like.dtype) for part, like in zip(x.split(sizes, 2), values)]
