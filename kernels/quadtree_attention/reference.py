"""Quad-tree attention by its definition in float64, with dense matrices; tests compare all backends with it."""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE, solve_each
from ..quadtree_solve.reference import quadtree_matrix
from ..trees.topology import Tree
from .portable import Options


def _rows(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """(B, heads, H, W, D) -> (B, heads, N, D), with zeros for leaves that do not exist."""
    x = x.to(REFERENCE_DTYPE).flatten(2, 3)
    return x if mask is None else torch.where(mask.flatten(1)[:, None, :, None], x, 0)


def quadtree_attention(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
                       options: Options) -> Tensor:
    levels, (height, width) = options.levels(v), v.shape[2:4]
    parents = Tree.quad(height, width, options.max_levels, options.shift).parents.to(v.device)
    nodes, leaves, edges = len(parents), height * width, int((parents >= 0).sum())
    # covers[n, m]: leaf m is below node n.
    covers = torch.zeros(nodes, leaves, dtype=REFERENCE_DTYPE, device=v.device)
    node = torch.arange(leaves, device=v.device)
    for _ in levels:
        covers[node, torch.arange(leaves, device=v.device)] = 1
        node = parents[node] if node[0] < edges else node
    exists = covers if mask is None else covers * mask.flatten(1)[:, None].to(REFERENCE_DTYPE)
    counts = exists.sum(-1).expand(len(v), -1)                                               # (B, V)
    means = (exists.expand(len(v), -1, -1) / counts.clamp(min=1)[..., None])[:, None]        # (B, 1, V, N)
    parents, biases = parents[:edges], []
    for n, level in enumerate(levels[:-1]):
        row, column = (torch.arange(size, device=v.device) + origin for size, origin in (level[::2], level[1::2]))
        biases.append(bias.to(REFERENCE_DTYPE)[min(n, len(bias) - 1)][row[:, None] % 2, column % 2].flatten(0, 1))
    logits = torch.cat([torch.empty(0, v.shape[1], device=v.device), *biases]).to(REFERENCE_DTYPE).T.expand(
        len(v), -1, -1)                                                                      # (B, heads, edges)
    if q is not None:
        queries, keys = (means @ _rows(x, mask) for x in (q, k))
        logits = logits + (queries[:, :, :edges] * keys[:, :, parents]).sum(-1) / q.shape[-1] ** 0.5
    logits = torch.where(counts[:, None, :edges] > 0, logits, float('-inf') if options.parametrization == 'laplacian'
                         else 0)
    if options.parametrization == 'laplacian':
        level = torch.cat([torch.full((x.height * x.width,), n) for n, x in enumerate(levels)])[:edges].to(v.device)
        weights = 4.0 ** level * F.softplus(logits)
    elif options.parametrization == 'symmetric':
        squares = torch.zeros_like(means[..., 0]).expand(-1, v.shape[1], -1).index_add(2, parents, logits.square())
        weights = options.rho / 2 * logits / (1 + squares[:, :, parents]).sqrt()
    else:
        weights = logits
    split = [x.height * x.width for x in levels[:-1]]
    maps = [x.unflatten(2, level[:2]) for x, level in zip(weights.split(split, 2) if split else [], levels)]
    matrix = quadtree_matrix(maps, height, width, options.parametrization, options.shift)
    matrix = matrix.to(v.device)                            # that of a single level has no edges to tell its device
    x = solve_each(matrix, means @ _rows(v, mask))
    return x[:, :, :leaves].unflatten(2, (height, width)).to(v.dtype)
