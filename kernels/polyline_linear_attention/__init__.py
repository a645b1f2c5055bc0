"""Linear attention under the polyline mask (PPMA, Theorem 2 and appendix C), by scans, in O(N)."""
from torch import Tensor

from ..common import checks
from ..dispatch import choose
from ..polyline_scan import ORDERS
from . import portable, reference, triton

_IMPLEMENTATIONS = {'reference': reference.polyline_linear_attention, 'portable': portable.polyline_linear_attention,
                    'triton': triton.polyline_linear_attention, 'export': portable.polyline_linear_attention_export}


def polyline_linear_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, order: str = 'both',
                              backend: str = 'auto') -> Tensor:
    """(q k' * M) v for the polyline mask M = L, L~ or L + L~, in O(N R Dv): sum_r q_r * scan(k_r * v).

    With q = phi(Q), k = phi(K) this is the paper's PPMLA; with q = S1 and k = S2' its decomposed form PPMDA. No
    normalisation: append a column of ones to v and divide by its result for one.

    Args:
        q, k: (B, heads, H, W, R), float32, float64, float16 or bfloat16, any strides.
        v: (B, heads, H, W, Dv), the dtype of q.
        a, b: (B, heads, H, W) horizontal and vertical step logs, <= 0, as for `polyline_scan`.
        order: 'v2h' (M = L), 'h2v' (L~) or 'both' (L + L~).
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        (B, heads, H, W, Dv) in the dtype of v.

    Raises:
        ValueError, TypeError: as `polyline_scan`.
    """
    checks.attention('polyline_linear_attention', q, k, v, a=a, b=b)
    checks.one_of('polyline_linear_attention', 'order', order, ORDERS)
    return choose('polyline_linear_attention', _IMPLEMENTATIONS, backend, q, k, v, a, b)(q, k, v, a, b, order)
