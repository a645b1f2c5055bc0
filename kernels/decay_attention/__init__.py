"""Softmax attention along one grid axis under a distance decay, and its two-axis chain (PPMA, section 3.4)."""
from torch import Tensor

from .. import checks
from ..dispatch import choose
from . import crisscross, operator, portable, reference

MASKS = ('logit', 'product')
AXES = ('row', 'column')
ORDERS = ('both', 'row_first', 'column_first')
_DECAY = {'reference': reference.decay_attention, 'portable': portable.decay_attention,
          'triton': operator.decay_attention, 'export': portable.decay_attention_export}
_CRISSCROSS = {'reference': reference.crisscross_attention, 'portable': crisscross.crisscross_attention,
               'triton': operator.crisscross_attention, 'export': crisscross.crisscross_attention_export}


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
    return choose('decay_attention', _DECAY, backend, q, k, v, a)(q, k, v, a, axis, mask)


def crisscross_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, mask: str = 'logit',
                         order: str = 'both', backend: str = 'auto') -> Tensor:
    """Criss-cross attention: rows and columns in turn. With P_w the weights of `decay_attention` within rows (decay
    logs a) and P_h those within columns (b):

        order='column_first':  P_w (P_h v)            (the V2H polyline: down the column, then along the row)
        order='row_first':     P_h (P_w v)            (H2V)
        order='both':          1/2 P_w (P_h v) + 1/2 P_h (P_w v)

    Args:
        q, k: (B, heads, H, W, D), float32, float64, float16 or bfloat16, any strides.
        v: (B, heads, H, W, Dv), the dtype of q.
        a, b: (B, heads, H, W) horizontal and vertical step logs, <= 0, as for `decay_attention`.
        mask: 'logit' (published weights) or 'product' (paper).
        order: 'both', 'row_first' or 'column_first'.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        (B, heads, H, W, Dv) in the dtype of v.

    Raises:
        ValueError, TypeError: as `decay_attention`.
    """
    checks.attention('crisscross_attention', q, k, v, a=a, b=b)
    checks.one_of('crisscross_attention', 'mask', mask, MASKS)
    checks.one_of('crisscross_attention', 'order', order, ORDERS)
    return choose('crisscross_attention', _CRISSCROSS, backend, q, k, v, a, b)(q, k, v, a, b, mask, order)
