"""Criss-cross attention: decay attention within rows and within columns, chained (PPMA, section 3.4)."""
from torch import Tensor

from ..common import checks, launch
from ..dispatch import choose, register
from . import custom_op, portable, reference

register('crisscross_attention', {
    'reference': reference.crisscross_attention,
    'portable': custom_op.crisscross_attention_portable,
    'triton': custom_op.crisscross_attention_triton,
    'export': portable.crisscross_attention_export,
}, launch.head_too_wide)


def crisscross_attention(
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
    """Compute decayed softmax attention within rows and columns in turn.

    P_w are the weights of `decay_attention` within rows (step logs log_alpha), P_h those within columns (log_beta):

        paths='v2h':   P_w (P_h v)            (the V2H polyline: down the column, then along the row)
        paths='h2v':   P_h (P_w v)
        paths='both':  1/2 P_w (P_h v) + 1/2 P_h (P_w v)

    Args:
        q, k: shape (B, heads, H, W, D), or (B, heads, H * W, D); float32, float64, float16 or
            bfloat16; any strides.
        v: shape (B, heads, H, W, Dv), or (B, heads, H * W, Dv), dtype of q.
        log_alpha, log_beta: horizontal and vertical step logs, <= 0, shape (B, heads, H, W), as for `decay_attention`.
        mask_mode: 'additive' (published weights) or 'multiplicative' (paper).
        paths: 'both', 'v2h' or 'h2v'.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of the shape and the dtype of v.

    Raises:
        ValueError, TypeError: as for `decay_attention`.
    """
    checks.attention('crisscross_attention', q, k, v, log_alpha=log_alpha, log_beta=log_beta, tokens=True)
    checks.one_of('crisscross_attention', 'mask_mode', mask_mode, checks.MASK_MODES)
    checks.one_of('crisscross_attention', 'paths', paths, checks.PATHS)
    run = choose('crisscross_attention', backend, q, k, v, log_alpha, log_beta)
    if q.ndim == 5 or run is portable.crisscross_attention_export:
        return run(q, k, v, log_alpha, log_beta, mask_mode, paths)
    grid = log_alpha.shape[2:]
    q, k, v = q.unflatten(2, grid), k.unflatten(2, grid), v.unflatten(2, grid)
    return run(q, k, v, log_alpha, log_beta, mask_mode, paths).flatten(2, 3)
