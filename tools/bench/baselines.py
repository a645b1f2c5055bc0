"""Baselines of `subquad benchmark`: what users would write instead of this package's operators.

Every function takes the inputs of its operator as `bench.operators` makes them, and returns the operator's output.
"""
from typing import Callable, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.common.numerics import column_log_decay, cumulative, row_log_decay
from ...kernels.polyline_attention.reference import polyline_log_masks

# --- polyline attention

def dense_polyline_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """The formula with its N x N matrices: 1/2 (softmax(q k' + log L) + softmax(q k' + log L~)) v.

    Arguments and result are those of kernels.polyline_attention.
    """
    log_mask, _ = polyline_log_masks(log_alpha, log_beta)
    logits = q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)
    weights = (logits + log_mask).softmax(-1) + (logits + log_mask.transpose(-1, -2)).softmax(-1)
    # The factor 1/2 scales the small output, not the weights: this saves a pass over memory.
    return ((weights.to(v.dtype) @ v.flatten(2, 3)) * 0.5).view(v.shape)


def sdpa_polyline_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """PyTorch's fused attention twice, with both masks in memory."""
    tokens = [x.flatten(2, 3) for x in (q, k, v)]
    parts = [F.scaled_dot_product_attention(*tokens, attn_mask=mask.to(q.dtype), scale=1.0)
             for mask in polyline_log_masks(log_alpha, log_beta)]
    return ((parts[0] + parts[1]) * 0.5).view(v.shape)


def flex_polyline_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """PyTorch's FlexAttention twice; a score_mod computes each log mask where it is used."""
    sums_along_rows = cumulative(log_alpha, -1, log_alpha.dtype)
    sums_along_columns = cumulative(log_beta, -2, log_beta.dtype)
    width = q.shape[3]

    def decayed(score, n, h, start, end):
        """The path from token `start` along its row, then along a column to token `end`."""
        i, j, row, column = start // width, start % width, end // width, end % width
        return (score - (sums_along_rows[n, h, i, j] - sums_along_rows[n, h, i, column]).abs()
                - (sums_along_columns[n, h, i, column] - sums_along_columns[n, h, row, column]).abs())

    def v2h(score, n, h, query, key):
        return decayed(score, n, h, query, key)

    def h2v(score, n, h, query, key):
        return decayed(score, n, h, key, query)

    tokens, flex = [x.flatten(2, 3) for x in (q, k, v)], _flex_attention()
    return ((flex(*tokens, score_mod=v2h, scale=1.0) + flex(*tokens, score_mod=h2v, scale=1.0)) * 0.5).view(v.shape)


def _flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


# --- attention within rows and columns

def dense_decay_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """softmax(q k' + log alpha) v within rows, with the matrices of all rows in memory."""
    return ((q @ k.transpose(-1, -2) + row_log_decay(log_alpha, log_alpha.dtype)).softmax(-1)).to(v.dtype) @ v


def sdpa_decay_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """PyTorch's fused attention within rows, with the mask in memory."""
    rows = [x.flatten(1, 2) for x in (q, k, v)]
    mask = row_log_decay(log_alpha, log_alpha.dtype).flatten(1, 2).to(q.dtype)
    return F.scaled_dot_product_attention(*rows, attn_mask=mask, scale=1.0).view(v.shape)


def flex_decay_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """PyTorch's FlexAttention within rows."""
    sums = cumulative(log_alpha, -1, log_alpha.dtype).flatten(1, 2)

    def decayed(score, n, line, query, key):
        return score - (sums[n, line, query] - sums[n, line, key]).abs()
    return _flex_attention()(*(x.flatten(1, 2) for x in (q, k, v)), score_mod=decayed, scale=1.0).view(v.shape)


def dense_crisscross_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """The formula with the weights of all rows and all columns in memory."""
    rows = (q @ k.transpose(-1, -2) + row_log_decay(log_alpha, log_alpha.dtype)).softmax(-1).to(v.dtype)
    queries, keys = (x.transpose(2, 3) for x in (q, k))
    decay = column_log_decay(log_beta, log_beta.dtype).permute(0, 1, 4, 2, 3)
    columns = (queries @ keys.transpose(-1, -2) + decay).softmax(-1).to(v.dtype)
    down = (columns @ v.transpose(2, 3)).transpose(2, 3)
    along = columns @ (rows @ v).transpose(2, 3)
    return (rows @ down + along.transpose(2, 3)) * 0.5


# --- polyline scan

def dense_polyline_scan(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """L x with the N x N mask ("naive" in PPMA's Figure 10)."""
    return (polyline_log_masks(log_alpha, log_beta)[0].exp().to(v.dtype) @ v.flatten(2, 3)).view(v.shape)


def dense_polyline_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
    """(q k' * (L + L~)) v with its N x N matrices."""
    log_masks = polyline_log_masks(log_alpha, log_beta)
    weights = (q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)) * (log_masks[0].exp() + log_masks[1].exp())
    return (weights.to(v.dtype) @ v.flatten(2, 3)).view(v.shape)


# --- separable attention

def patch_of(x: Tensor) -> Tuple[int, int]:
    """The patch size: 2 x 2 on a grid, 1 x 1 on a sequence (a grid of one row)."""
    return (2, 2) if x.shape[1] > 1 else (1, 1)


def eager_separable_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula on unfolded tokens, which copies every input and the output."""
    (height, width), patch = value.shape[1:3], patch_of(value)

    def unfolded(x):
        x = x.reshape(len(x), height // patch[0], patch[0], width // patch[1], patch[1], -1)
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)               # (B, P, N, D)
    query, key, value = (unfolded(x) for x in (query, key, value))
    y = value.relu() * (key * query.softmax(2)).sum(2, keepdim=True)
    y = y.reshape(len(y), *patch, height // patch[0], width // patch[1], -1)
    return y.permute(0, 3, 1, 4, 2, 5).reshape(len(y), height, width, -1)


def matmul_separable_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Slices instead of copies, with the context as a matrix product, for each place in a patch in turn."""
    patch = patch_of(value)
    if patch == (1, 1) and not torch.is_grad_enabled():
        return value.relu().mul_(query[:, 0].softmax(1).transpose(1, 2).bmm(key[:, 0])[:, None])
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    for i in range(patch[0]):
        for j in range(patch[1]):
            q, k = (x[:, i::patch[0], j::patch[1]].flatten(1, 2) for x in (query, key))
            context = q.softmax(1).transpose(1, 2) @ k                                # (B, 1, D)
            out[:, i::patch[0], j::patch[1]] = value[:, i::patch[0], j::patch[1]].relu() * context[:, :, None]
    return out


# --- quad-tree solve

def level_values(tensors: Sequence[Tensor]) -> List[Tensor]:
    """The values among the inputs of a quad-tree solve: one tensor per level, ahead of the edges."""
    return list(tensors[:(len(tensors) + 1) // 2])


def loop_quadtree_solve(*tensors: Tensor) -> Tensor:
    """The solve of the Laplacian, level by level, differentiated by autograd."""
    values, edges = level_values(tensors), tensors[len(level_values(tensors)):]

    def sum_children(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).sum((3, 5))

    def repeat_to_children(x: Tensor, like: Tensor) -> Tensor:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return x[:, :, :like.shape[2], :like.shape[3]]

    right, scales, pulls, excess = [values[0]], [], [], torch.ones_like(values[0][..., :1])
    for edge, value in zip((edge[..., None] for edge in edges), values[1:]):
        scales.append(1 / (excess + edge))
        pulls.append(edge * scales[-1])
        right.append(value + sum_children(pulls[-1] * right[-1]))
        excess = 1 + sum_children(pulls[-1] * excess)
    x = right[-1] / excess
    for r, scale, pull in zip(right[-2::-1], scales[::-1], pulls[::-1]):
        x = r * scale + pull * repeat_to_children(x, r)
    return x
