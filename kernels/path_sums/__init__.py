"""Step logs of polyline attention and their sums on a GPU, for prepared networks. The operator has no gradient."""
import torch
from torch import Tensor

from ..common.declare import late, node


@node('path_sums_fwd', late(__name__, 'triton.forward'), lambda *_: 0)
def path_sums(z: Tensor, a_log: Tensor, scale: float, sums: bool) -> Tensor:
    """Return the step logs -exp(a_log) softplus(z) / scale, clamped to [-80, 0], or their sums from the first token on.

    Args:
        z: (B, H, W, heads) or (B, H, W, 2 heads): the horizontal steps of all heads, then the vertical ones if these
            differ; float32, float16 or bfloat16, any strides.
        a_log: (heads,).
        scale: a positive number.
        sums: add up the horizontal step logs along rows, and the vertical ones along columns, in float64.

    Returns:
        (2, B, heads, H, W), float32: horizontal and vertical.
    """
    return z.new_empty((2, z.shape[0], len(a_log), *z.shape[1:3]), dtype=torch.float32)
