"""Softmax attention over a whole grid under the polyline path mask (PPMA, section 3, and the published code)."""
from torch import Tensor

from ..common import checks, launch
from ..dispatch import choose, register
from . import custom_op, portable, reference

register('polyline_attention', {
    'reference': reference.polyline_attention,
    'portable': custom_op.polyline_attention_portable,
    'triton': custom_op.polyline_attention_triton,
    'export': portable.polyline_attention_export,
}, launch.head_too_wide)


def polyline_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        *,
        mask_mode: str = 'additive',
        paths: str = 'both',
        backend: str = 'auto',
) -> Tensor:
    """Compute softmax attention between all tokens of an H x W grid, decayed along polyline paths.

    With L the V2H mask, `log L[(i,j),(k,l)] = -|Sa[i,j] - Sa[i,l]| - |Sb[i,l] - Sb[k,l]|` (Sa, Sb: inclusive
    cumulative sums of log_alpha along rows and of log_beta along columns) and L~ its transpose (H2V):

        'additive', paths='both':        1/2 softmax(q k' + log L) v + 1/2 softmax(q k' + log L~) v  (published code)
        'multiplicative', paths='both':  (softmax(q k') * (L + L~)) v                                (paper, eq. 10)

    With paths='v2h' or 'h2v' only that mask remains, without the factor 1/2. The operator does not scale q k'.

    Args:
        q, k: shape (B, heads, H, W, D), or (B, heads, H * W, D); float32, float64, float16 or
            bfloat16; any strides.
        v: shape (B, heads, H, W, Dv), or (B, heads, H * W, Dv), dtype of q.
        log_alpha: horizontal step logs, <= 0, shape (B, heads, H, W); log_alpha[..., 0] is not used. They are clamped
            to [-80, 0] (positive ones raise an error where they can be read), and clamped values have no gradient.
        log_beta: vertical step logs, <= 0, shape (B, heads, H, W); log_beta[..., 0, :] is not used.
        mask_mode: 'additive' or 'multiplicative'.
        paths: 'both', 'v2h' or 'h2v'.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of the shape and the dtype of v.

    Raises:
        ValueError: a shape, device, mask mode, path or backend is not allowed, or the tensors exceed the memory. On a
            CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, a tensor is not dense, or an argument has an old name.
    """
    checks.attention('polyline_attention', q, k, v, log_alpha=log_alpha, log_beta=log_beta, tokens=True)
    checks.one_of('polyline_attention', 'mask_mode', mask_mode, checks.MASK_MODES)
    checks.one_of('polyline_attention', 'paths', paths, checks.PATHS)
    run = choose('polyline_attention', backend, q, k, v, log_alpha, log_beta)
    if q.ndim == 5 or run is portable.polyline_attention_export:
        return run(q, k, v, log_alpha, log_beta, mask_mode, paths)
    grid = log_alpha.shape[2:]
    q, k, v = q.unflatten(2, grid), k.unflatten(2, grid), v.unflatten(2, grid)
    return run(q, k, v, log_alpha, log_beta, mask_mode, paths).flatten(2, 3)
