"""Softmax attention along one grid axis, decayed with distance (PPMA, section 3.4)."""
from torch import Tensor

from ..common import checks, launch
from ..dispatch import choose, register
from . import custom_op, portable, reference

AXES = ('row', 'column')
register('decay_attention', {
    'reference': reference.decay_attention,
    'portable': custom_op.decay_attention_portable,
    'triton': custom_op.decay_attention_triton,
    'export': portable.decay_attention_export,
}, launch.head_too_wide)


def decay_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        *,
        axis: str = 'row',
        mask_mode: str = 'additive',
        backend: str = 'auto',
) -> Tensor:
    """Compute softmax attention within each row or column of a grid, decayed with distance.

    With S the inclusive cumulative sum of log_decay along the axis and D[j, l] = -|S[j] - S[l]|:

        mask_mode='additive':        softmax(q k' + D) v
        mask_mode='multiplicative':  (softmax(q k') * exp(D)) v

    Args:
        q, k: shape (B, heads, H, W, D); float32, float64, float16 or bfloat16; any strides.
        v: shape (B, heads, H, W, Dv), dtype of q.
        log_decay: step logs along the axis, <= 0, shape (B, heads, H, W). They are clamped to [-80, 0] (positive ones
            raise an error where they can be read), and clamped values have no gradient.
        axis: 'row' (the tokens of a grid row attend to each other) or 'column'.
        mask_mode: 'additive' or 'multiplicative'.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, heads, H, W, Dv) and the dtype of v.

    Raises:
        ValueError: a shape, device, axis, mask mode or backend is not allowed, or the tensors exceed the memory. On a
            CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, a tensor is not dense, or an argument has an old name.
    """
    checks.attention('decay_attention', q, k, v, log_decay=log_decay)
    checks.one_of('decay_attention', 'axis', axis, AXES)
    checks.one_of('decay_attention', 'mask_mode', mask_mode, checks.MASK_MODES)
    run = choose('decay_attention', backend, q, k, v, log_decay)
    return run(q, k, v, log_decay, axis, mask_mode)
