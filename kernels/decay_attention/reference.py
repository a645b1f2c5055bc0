"""Decay attention by its definition in float64, with every matrix written out; tests compare all backends with it."""
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE, row_log_decay


def decay_weights(q: Tensor, k: Tensor, log_decay: Tensor, mask_mode: str) -> Tensor:
    """Return weights (B, heads, H, W, W) within rows from q, k (B, heads, H, W, D), log_decay (B, heads, H, W)."""
    logits = q @ k.transpose(-1, -2)
    log_mask = row_log_decay(log_decay, log_decay.dtype)
    return logits.softmax(-1) * log_mask.exp() if mask_mode == 'multiplicative' else (logits + log_mask).softmax(-1)


def decay_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, axis: str, mask_mode: str) -> Tensor:
    dtype = REFERENCE_DTYPE
    q, k, values, log_decay = (x.to(dtype) for x in (q, k, v, log_decay))
    if axis == 'column':
        q, k, values, log_decay = (x.transpose(2, 3) for x in (q, k, values, log_decay))
    y = decay_weights(q, k, log_decay, mask_mode) @ values
    return (y.transpose(2, 3) if axis == 'column' else y).to(v.dtype)
