"""The polyline mask times a tensor without the mask (PPMA, Theorem 2, Algorithm 1, appendix C.2), in O(N)."""
from typing import Optional

from torch import Tensor

from ..common import checks
from ..dispatch import choose
from . import custom_op, portable, reference

ORDERS = ('v2h', 'h2v', 'both')
_IMPLEMENTATIONS = {'reference': reference.polyline_scan, 'portable': portable.polyline_scan,
                    'triton': custom_op.polyline_scan, 'export': portable.polyline_scan_export}


def polyline_scan(x: Tensor, a: Tensor, b: Tensor, c: Optional[Tensor] = None, *, order: str = 'v2h',
                  backend: str = 'auto') -> Tensor:
    """L x, L~ x or their sum, L being the V2H polyline mask of the grid and L~ its transpose.

    One axis is a symmetric scan, y[j] = sum_l exp(-|S[j] - S[l]|) x[l] with S the cumulative sum of the axis' step
    logs. L x is the vertical scan followed by the horizontal one; L~ x the other way round. With c a third, outermost
    axis is scanned: L3D x = horizontal(vertical(depth(x))), and the transpose in the opposite order.

    Args:
        x: (B, heads, H, W, D), or (B, heads, Z, H, W, D) with c; float32, float64, float16 or bfloat16, any strides.
        a, b: step logs along W and along H, <= 0, of the shape of x without D; values below -80 count as -80, and
            positive ones, where they are not refused, as 0; neither has a gradient.
        c: step logs along Z, of the same shape, or None in two dimensions.
        order: 'v2h' (L x), 'h2v' (L~ x) or 'both' (their sum).
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor like x.

    Raises:
        ValueError: a shape, device, order or backend that does not fit, a size beyond the memory; on a CPU outside of
            graphs also a positive step log.
        TypeError: a dtype that is not allowed, or a tensor that is not dense.
    """
    logs = dict(a=a, b=b) if c is None else dict(a=a, b=b, c=c)
    rank = 5 if c is None else 6
    checks.tensors('polyline_scan', {'x': rank, **dict.fromkeys(logs, rank - 1)}, x=x, **logs)
    for name, log in logs.items():
        checks.shape('polyline_scan', name, log, x.shape[:-1], 'a step log for each token and head of x')
    checks.step_logs('polyline_scan', **logs)
    checks.one_of('polyline_scan', 'order', order, ORDERS)
    return choose('polyline_scan', _IMPLEMENTATIONS, backend, x, *logs.values())(x, list(logs.values()), order)
