"""The definition, every matrix written out: the oracle of the tests."""
from torch import Tensor

from ..common.decay import REFERENCE_DTYPE, row_log_decay


def decay_weights(q: Tensor, k: Tensor, a: Tensor, mask: str) -> Tensor:
    """Attention weights within rows: q, k (B, heads, H, W, D), a (B, heads, H, W) -> (B, heads, H, W, W)."""
    logits = q @ k.transpose(-1, -2)
    log_decay = row_log_decay(a, a.dtype)
    return logits.softmax(-1) * log_decay.exp() if mask == 'product' else (logits + log_decay).softmax(-1)


def decay_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, axis: str, mask: str) -> Tensor:
    dtype = REFERENCE_DTYPE
    q, k, values, a = (x.to(dtype) for x in (q, k, v, a))
    if axis == 'column':
        q, k, values, a = (x.transpose(2, 3) for x in (q, k, values, a))
    y = decay_weights(q, k, a, mask) @ values
    return (y.transpose(2, 3) if axis == 'column' else y).to(v.dtype)
