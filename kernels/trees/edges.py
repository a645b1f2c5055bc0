"""Edges of a quad tree from queries and keys: a logit for each node but the roots, and the edge's weight from it."""
from typing import Callable, List, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import without_autocast
from .grid import Level, leaf_counts, level_means, repeat_to_children


def as_maps(x: Tensor) -> Tensor:
    """(B, heads, H, W, D) -> (B, heads * D, H, W), a view if heads are slices of channels-last tokens."""
    return x.permute(0, 2, 3, 1, 4).flatten(3).permute(0, 3, 1, 2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, C, H, W) -> (B, heads, H, W, C / heads), a view of channels-last maps."""
    return x.permute(0, 2, 3, 1).unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4)


def edge_biases(bias: Tensor, n: int, level: Level) -> Tensor:
    """Return the bias of each cell of level n, which depends on its place among its siblings: (1, heads, H_n, W_n).

    bias: (L, 2, 2, heads); levels above the last share its last entry. The result has at least float32."""
    table, heads = bias[min(n, len(bias) - 1)], bias.shape[-1]
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    top, left = level.top % 2, level.left % 2
    rows, columns = (level.height + top + 1) // 2, (level.width + left + 1) // 2
    # Tensor.repeat would reach exporters with one more dimension for each that it repeats.
    table = table.permute(2, 0, 1).reshape(-1, 1, 4).expand(-1, rows, -1)                 # (heads, rows, 2 * 2)
    table = table.reshape(-1, 1, 2).expand(-1, columns, -1).reshape(1, heads, 2 * rows, 2 * columns)
    if tuple(table.shape[2:]) == (level.height, level.width):
        return table
    return table[:, :, top:top + level.height, left:left + level.width]


def edge_logits(q: Optional[Tensor], k: Optional[Tensor], bias: Tensor, levels: Sequence[Level],
                mask: Optional[Tensor] = None, counts: Optional[Sequence[Tensor]] = None) -> List[Tensor]:
    """Return q_c . k_p / sqrt(E) + bias for each node c with parent p, at least float32.

    Args:
        q, k: (B, heads, H, W, E), or None for biases only.
        bias: (L, 2, 2, heads).
        levels: levels of the tree.
        mask: padding mask, (B, H, W).
        counts: `leaf_counts` of the levels and the mask in float32, if they are known.

    Returns:
        (B or 1, heads, H_l, W_l) for each level but the last.
    """
    logits = [edge_biases(bias, n, level) for n, level in enumerate(levels[:-1])]
    if q is None or not logits:
        return logits
    q, k = (as_maps(x.to(torch.promote_types(x.dtype, torch.float32))) for x in (q, k))
    queries, keys = (level_means(x, levels, mask, counts) for x in (q, k))
    scale = dot_scale(q, q.shape[1] // bias.shape[-1])
    products = ((query * repeat_to_children(key, level)).permute(0, 2, 3, 1)
                for query, key, level in zip(queries, keys[1:], levels))
    return [scaled_dots(x, scale).permute(0, 3, 1, 2) + logit for x, logit in zip(products, logits)]


def dot_scale(like: Tensor, dim: int) -> Tensor:
    """Return the vector for `scaled_dots` over `dim` channels."""
    return like.new_full((dim,), dim ** -0.5)


def scaled_dots(products: Tensor, scale: Tensor) -> Tensor:
    """Sum the products of each head, times `scale`: (..., heads * E) -> (..., heads).

    A product with a vector is faster than a sum over so short a dimension."""
    heads = products.shape[-1] // len(scale)             # no size is -1, which an empty batch leaves open
    with without_autocast(products):
        return torch.mv(products.reshape(-1, len(scale)), scale).view(*products.shape[:-1], heads)


def edges_of(logits: Sequence[Tensor], parametrization: str) -> List[Tensor]:
    """Return the argument `edges` of `quadtree_solve`: 4^level * softplus(logit) for 'laplacian', else the logit."""
    if parametrization == 'laplacian':
        return [F.softplus(logit) * 4.0 ** n if n else F.softplus(logit) for n, logit in enumerate(logits)]
    return list(logits)


def composed(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
             parametrization: str, levels: Sequence[Level], solve: Callable[..., List[Tensor]]) -> Tensor:
    """Compute `quadtree_attention` by operations that autograd and compilers know, around a `quadtree_solve`."""
    maps = as_maps(v)
    counts = leaf_counts(levels, v.new_empty(0, dtype=torch.promote_types(v.dtype, torch.float32)), mask)
    values = [split_heads(x, v.shape[1]) for x in level_means(maps, levels, mask, counts)]
    logits = [x.expand(v.shape[0], -1, -1, -1) for x in edge_logits(q, k, bias, levels, mask, counts)]
    return solve(values, edges_of(logits, parametrization), parametrization=parametrization, mask=mask,
                 shift=levels[0][2:])[0]
