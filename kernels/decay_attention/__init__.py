"""Softmax attention along one grid axis under a distance decay (PPMA, section 3.4)."""
from torch import Tensor

from ..common import checks
from ..dispatch import choose
from . import custom_op, portable, reference

MASKS = ('logit', 'product')
AXES = ('row', 'column')
_IMPLEMENTATIONS = {'reference': reference.decay_attention, 'portable': portable.decay_attention,
                    'triton': custom_op.decay_attention, 'export': portable.decay_attention_export}


def decay_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, *, axis: str = 'row', mask: str = 'logit',
                    backend: str = 'auto') -> Tensor:
    """Attention within each row (or column) of a grid, all of them at once.

    With S the inclusive cumulative sum of a along the axis and D[j, l] = -|S[j] - S[l]|:

        mask='logit':    softmax(q k' + D) v          mask='product':  (softmax(q k') * exp(D)) v

    Args:
        q, k: (B, heads, H, W, D), float32, float64, float16 or bfloat16, any strides.
        v: (B, heads, H, W, Dv), the dtype of q.
        a: (B, heads, H, W) step logs along the axis, <= 0; values below -80 count as -80, and positive ones, where they
            are not refused, as 0; neither has a gradient.
        axis: 'row' (tokens of one grid row attend to each other) or 'column'.
        mask: 'logit' or 'product'.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        (B, heads, H, W, Dv) in the dtype of v.

    Raises:
        ValueError: a shape, device, axis, mask or backend that does not fit, a size beyond the memory; on a CPU outside
            of graphs also a positive step log.
        TypeError: a dtype that is not allowed, or a tensor that is not dense.
    """
    checks.attention('decay_attention', q, k, v, a=a)
    checks.one_of('decay_attention', 'axis', axis, AXES)
    checks.one_of('decay_attention', 'mask', mask, MASKS)
    return choose('decay_attention', _IMPLEMENTATIONS, backend, q, k, v, a)(q, k, v, a, axis, mask)
