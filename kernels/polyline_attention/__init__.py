"""Full attention over a grid under the polyline path mask (PPMA, section 3 and the published code)."""
from torch import Tensor

from ..common import checks
from ..dispatch import choose
from . import custom_op, portable, reference

MASKS = ('logit', 'product')
PATHS = ('both', 'v2h', 'h2v')
_IMPLEMENTATIONS = {'reference': reference.polyline_attention, 'portable': portable.polyline_attention,
                    'triton': custom_op.polyline_attention, 'export': portable.polyline_attention_export}


def polyline_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, mask: str = 'logit',
                       paths: str = 'both', backend: str = 'auto') -> Tensor:
    """Softmax attention of every token to every token of an H x W grid, decayed along polyline paths.

    With L the V2H mask, `log L[(i,j),(k,l)] = -|Sa[i,j] - Sa[i,l]| - |Sb[i,l] - Sb[k,l]|` (Sa, Sb: inclusive
    cumulative sums of a along rows and of b along columns) and L~ its transpose (H2V):

        mask='logit',   paths='both':  1/2 softmax(q k' + log L) v + 1/2 softmax(q k' + log L~) v   (published code)
        mask='product', paths='both':  (softmax(q k') * (L + L~)) v                                 (paper, eq. 10)

    With paths='v2h' or 'h2v' only that mask remains (and no 1/2). q is used as it comes: scale it or k beforehand.

    Args:
        q, k: (B, heads, H, W, D), float32, float64, float16 or bfloat16, any strides.
        v: (B, heads, H, W, Dv), the dtype of q.
        a: (B, heads, H, W) horizontal step logs, <= 0; a[..., 0] is never used. Values below -80 count as -80,
            and positive ones, where they are not refused, as 0; neither has a gradient.
        b: (B, heads, H, W) vertical step logs, <= 0; b[..., 0, :] is never used.
        mask: 'logit' or 'product'.
        paths: 'both', 'v2h' or 'h2v'.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        (B, heads, H, W, Dv) in the dtype of v.

    Raises:
        ValueError: a shape, device, mask, path or backend that does not fit, a size beyond the memory; on a CPU outside
            of graphs also a positive step log.
        TypeError: a dtype that is not allowed, or a tensor that is not dense.
    """
    checks.attention('polyline_attention', q, k, v, a=a, b=b)
    checks.one_of('polyline_attention', 'mask', mask, MASKS)
    checks.one_of('polyline_attention', 'paths', paths, PATHS)
    return choose('polyline_attention', _IMPLEMENTATIONS, backend, q, k, v, a, b)(q, k, v, a, b, mask, paths)
