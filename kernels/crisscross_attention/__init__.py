"""Criss-cross attention: decayed softmax attention within rows and within columns, chained (PPMA, section 3.4)."""
from torch import Tensor

from ..common import checks
from ..decay_attention import MASKS
from ..dispatch import choose
from . import custom_op, portable, reference, triton

ORDERS = ('both', 'row_first', 'column_first')
_IMPLEMENTATIONS = {'reference': reference.crisscross_attention, 'portable': custom_op.crisscross_attention_portable,
                    'triton': triton.crisscross_attention, 'export': portable.crisscross_attention_export}


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
    return choose('crisscross_attention', _IMPLEMENTATIONS, backend, q, k, v, a, b)(q, k, v, a, b, mask, order)
