"""Separable attention in plain PyTorch with tensors of rank 4 at most, and a form for exporters.

The contexts are a product with a matrix of scores that is zero outside of a token's group. Values are read once."""
from functools import lru_cache
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.checks import is_traced_or_wrapped
from ..common.patches import Patch, fold_patches, group_count, group_index, unfold_patches


def _outside(height: int, width: int, patch: Patch, sampling: str, dtype: torch.dtype, device) -> Tensor:
    """Return (groups, 1, H * W): 0 for the tokens of a group, -inf for all others."""
    rows, columns = (group_index(n, p, sampling, device) for n, p in zip((height, width), patch))
    per_row = group_count(width, patch[1], sampling)
    group = (rows[:, None] * per_row + columns).flatten()
    other = group != torch.arange(group_count(height, patch[0], sampling) * per_row, device=device)[:, None]
    return torch.zeros(other.shape, dtype=dtype, device=device).masked_fill_(other, float('-inf'))[:, None]


@lru_cache(maxsize=64)
def _kept_outside(*key) -> Tensor:
    with torch.inference_mode(False):            # training could not use a tensor made in inference mode
        return _outside(*key)


def _group_scores(query: Tensor, patch: Patch, sampling: str, plain: bool) -> Tensor:
    """Return scores (B, groups, L, H * W), which sum to 1 in a group and are 0 outside, in at least float32.

    `plain`: the mask of the groups may be kept, because no trace or transform is in progress."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(dtype).flatten(1, 2).transpose(1, 2)[:, None]
    if patch == (1, 1):
        return logits.softmax(-1)
    outside = (_kept_outside if plain else _outside)(*query.shape[1:3], patch, sampling, dtype, query.device)
    return (logits + outside).softmax(-1)


def context_scores(query: Tensor, patch: Patch, sampling: str) -> Tensor:
    """Return the weight (B, H, W, L) of each token in its group's context. query: as for the public function."""
    scores = _group_scores(query, patch, sampling, not is_traced_or_wrapped(query))
    return scores.sum(1).transpose(1, 2).reshape(query.shape)


def _broadcastable(context: Tensor, value: Tensor, patch: Patch, sampling: str, width_of_keys: int
                   ) -> Tuple[Tensor, Tensor]:
    """Reshape context (B, groups, D) and value (B, H, W, D) to rank 4 so that they broadcast against each other.

    Only copies of the size of a grid row or two are made."""
    batch, height, width, dim = value.shape
    if context.shape[1] == 1:
        return context.reshape(batch, 1, 1, dim), value
    whole = width_of_keys % patch[1] == 0
    columns = patch[1] if whole else group_count(width_of_keys, patch[1], sampling)            # groups in a row
    table = context.reshape(batch, context.shape[1] // columns, columns, dim)  # (B, rows of groups, columns, D)
    if height % patch[0] or width % patch[1]:
        for axis in (1, 2):
            index = group_index(value.shape[axis], patch[axis - 1], sampling, value.device)
            table = table.index_select(axis, index)
        return table, value                                                    # both (B, H, W, D)
    if sampling == 'pixel':                                                    # rows (i, pi), columns (j, pj)
        table = table.reshape(batch, 1, patch[0], patch[1] * dim).expand(-1, height // patch[0], -1, -1)
        lines = batch * height // patch[0]
        return (table.reshape(lines, patch[0], 1, patch[1] * dim),
                value.reshape(lines, patch[0], width // patch[1], patch[1] * dim))
    table = table.reshape(batch, patch[0], 1, patch[1] * dim).expand(-1, -1, height // patch[0], -1)
    lines = batch * height                                                     # rows (pi, i), columns (pj, j)
    return table.reshape(lines, patch[1], 1, dim), value.reshape(lines, patch[1], width // patch[1], dim)


def separable_attention(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
                        key_bias: Optional[Tensor], patch: Patch, sampling: str) -> Tensor:
    if patch[1] == 1 and (patch[0] == 1 or patch[0] >= max(query.shape[1], value.shape[1])):
        return _by_rows(query, key, value, key_weight, key_bias, whole=patch[0] == 1)
    plain = not is_traced_or_wrapped(value)
    scores = _group_scores(query, patch, sampling, plain)
    scores = scores.mean(2) if query.shape[-1] > 1 else scores[:, :, 0]
    context = (scores @ key.flatten(1, 2).to(scores.dtype)).to(value.dtype)    # (B, groups, C)
    if key_weight is not None:
        context = F.linear(context, key_weight, key_bias)
    context, active = _broadcastable(context, value.relu(), patch, sampling, query.shape[2])
    in_place = plain and not torch.is_grad_enabled()                           # nothing else needs `active`
    return (active.mul_(context) if in_place else active * context).reshape(value.shape)


def _by_rows(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor], key_bias: Optional[Tensor],
             whole: bool) -> Tensor:
    """Compute separable attention for groups that are single rows, or the whole grid (`whole`)."""
    # Every call costs time on a small map, so calls that would return their argument are skipped.
    batch, rows, columns, latent = query.shape
    axis = 1 if whole else 0
    key = key.flatten(axis, axis + 1)
    # Logits of one latent token are contiguous: a softmax along the last, dense dimension takes half the time.
    query = query.reshape(len(key), 1, key.shape[1]) if latent == 1 else query.flatten(axis, axis + 1).mT
    scores = query.softmax(2, torch.promote_types(query.dtype, torch.float32))  # (B rows, L, N)
    if latent > 1:
        scores = scores.mean(1, keepdim=True)
    context = torch.bmm(scores, key if key.dtype == scores.dtype else key.to(scores.dtype))
    if context.dtype != value.dtype:
        context = context.to(value.dtype)
    if key_weight is not None:
        context = F.linear(context, key_weight, key_bias)
    context = context[:, None] if whole else context.view(batch, rows, 1, context.shape[-1])[:, :value.shape[1]]
    return value.relu() * context


def separable_attention_export(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
                               key_bias: Optional[Tensor], patch: Patch, sampling: str) -> Tensor:
    """Compute with channels first and elementwise products; grids that are no multiple of the patch run portably."""
    height, width = value.shape[1:3]
    rows = patch == (query.shape[1], 1) == (height, 1)         # every row is a group, so nothing is folded
    if not rows and any(size % patch[n % 2] for n, size in enumerate((*query.shape[1:3], height, width))):
        return separable_attention(query, key, value, key_weight, key_bias, patch, sampling)
    if key_weight is not None:
        key = F.linear(key, key_weight, key_bias)
    query, key, value = (x.permute(0, 3, 1, 2) for x in (query, key, value.relu()))
    if not rows:
        query, key, value = (fold_patches(x, patch, sampling) for x in (query, key, value))
    scores = query.softmax(-1)
    if query.shape[1] > 1:
        scores = scores.mean(1, keepdim=True)
    y = value * (key * scores).sum(-1, keepdim=True)
    return (y if rows else unfold_patches(y, patch, sampling, height, width)).permute(0, 2, 3, 1)
