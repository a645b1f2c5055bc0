"""Polyline attention by its definition in float64, with every N x N matrix; tests compare all backends with it."""
from typing import Tuple

from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE, column_log_decay, row_log_decay


def polyline_log_masks(log_alpha: Tensor, log_beta: Tensor) -> Tuple[Tensor, Tensor]:
    """Return log L (V2H) and log L~ (H2V), (B, heads, N, N) each, from step logs (B, heads, H, W)."""
    row = row_log_decay(log_alpha, log_alpha.dtype)                    # (B, heads, i, j, l)
    column = column_log_decay(log_beta, log_beta.dtype)                # (B, heads, i, k, l)
    v2h = row[..., :, :, None, :] + column[..., :, None, :, :]         # (B, heads, i, j, k, l)
    tokens = log_alpha.shape[-2] * log_alpha.shape[-1]
    v2h = v2h.reshape(*log_alpha.shape[:2], tokens, tokens)
    return v2h, v2h.transpose(-1, -2)


def polyline_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                       paths: str) -> Tensor:
    dtype = REFERENCE_DTYPE
    shape, result = v.shape, v.dtype
    q, k, v = (x.to(dtype).flatten(2, 3) for x in (q, k, v))           # (B, heads, N, D)
    masks = dict(zip(('v2h', 'h2v'), polyline_log_masks(log_alpha.to(dtype), log_beta.to(dtype))))
    chosen = [masks[p] for p in masks if paths in (p, 'both')]
    logits = q @ k.transpose(-1, -2)
    if mask_mode == 'multiplicative':
        weights = logits.softmax(-1) * sum(m.exp() for m in chosen)
    else:
        weights = sum((logits + m).softmax(-1) for m in chosen) / len(chosen)
    return (weights @ v).reshape(shape).to(result)
