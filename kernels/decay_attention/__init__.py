"""Softmax attention along one grid axis under a distance decay (PPMA, section 3.4)."""
from torch import Tensor

from ..common import checks, launch
from ..dispatch import choose, register
from . import custom_op, portable, reference

MASK_MODES = ('additive', 'multiplicative')
AXES = ('row', 'column')
_IMPLEMENTATIONS = register('decay_attention', {
    'reference': reference.decay_attention,
    'portable': custom_op.decay_attention_portable,
    'triton': custom_op.decay_attention_triton,
    'export': portable.decay_attention_export,
}, launch.head_too_wide)


@checks.renamed(a='log_decay', mask='mask_mode')
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
    """Attention within each row (or column) of a grid, all of them at once.

    With S the inclusive cumulative sum of log_decay along the axis and D[j, l] = -|S[j] - S[l]|:

        mask_mode='additive':        softmax(q k' + D) v
        mask_mode='multiplicative':  (softmax(q k') * exp(D)) v

    Args:
        q, k: (B, heads, H, W, D), float32, float64, float16 or bfloat16, any strides.
        v: (B, heads, H, W, Dv), the dtype of q.
        log_decay: (B, heads, H, W) step logs along the axis, <= 0; values below -80 count as -80, and positive ones,
            where they are not refused, as 0; neither has a gradient.
        axis: 'row' (tokens of one grid row attend to each other) or 'column'.
        mask_mode: 'additive' or 'multiplicative'.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        (B, heads, H, W, Dv) in the dtype of v.

    Raises:
        ValueError: a shape, device, axis, mask mode or backend that does not fit, a size beyond the memory; on a CPU
            outside of graphs also a positive step log.
        TypeError: a dtype that is not allowed, or a tensor that is not dense.
    """
    checks.attention('decay_attention', q, k, v, log_decay=log_decay)
    checks.one_of('decay_attention', 'axis', axis, AXES)
    checks.one_of('decay_attention', 'mask_mode', mask_mode, MASK_MODES)
    run = choose('decay_attention', _IMPLEMENTATIONS, backend, q, k, v, log_decay)
    return run(q, k, v, log_decay, axis, mask_mode)
