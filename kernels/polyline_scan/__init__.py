"""Product of the decay mask and a tensor in O(N), without the mask (PPMA, Theorem 2, Algorithm 1, appendix C.2)."""
from typing import Optional

from torch import Tensor

from ..common import checks
from ..dispatch import choose, register
from . import custom_op, portable, reference

register('polyline_scan', {
    'reference': reference.polyline_scan,
    'portable': portable.polyline_scan,
    'triton': custom_op.polyline_scan_triton,
    'export': portable.polyline_scan_export,
})


def polyline_scan(
        x: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        log_gamma: Optional[Tensor] = None,
        *,
        paths: str = 'v2h',
        backend: str = 'auto',
) -> Tensor:
    """Multiply x by the V2H decay mask L of the grid, by its transpose L~ (H2V), or by their sum.

    One axis is a symmetric scan, y[j] = sum_l exp(-|S[j] - S[l]|) x[l] with S the cumulative sum of the axis' step
    logs. L x is the vertical scan followed by the horizontal one, and L~ x the horizontal followed by the vertical
    one. With log_gamma a third, outermost axis is scanned: L3D x = horizontal(vertical(depth(x))), and its transpose
    scans in the opposite order.

    Args:
        x: shape (B, heads, H, W, D), or (B, heads, Z, H, W, D) with log_gamma; float32, float64, float16 or bfloat16;
            any strides.
        log_alpha, log_beta: step logs along W and along H, <= 0, of the shape of x without D. They are clamped to
            [-80, 0] (positive ones raise an error where they can be read), and clamped values have no gradient.
        log_gamma: step logs along Z, of the same shape, or None in two dimensions.
        paths: 'v2h' (L x), 'h2v' (L~ x) or 'both' (their sum).
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of the shape and dtype of x.

    Raises:
        ValueError: a shape, device, path or backend is not allowed, or the tensors exceed the memory. On a CPU,
            outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, a tensor is not dense, or an argument has an old name.
    """
    logs = dict(log_alpha=log_alpha, log_beta=log_beta)
    if log_gamma is not None:
        logs['log_gamma'] = log_gamma
    rank = 3 + len(logs)
    checks.tensors('polyline_scan', {'x': rank, **dict.fromkeys(logs, rank - 1)}, x=x, **logs)
    for name, log in logs.items():
        checks.shape('polyline_scan', name, log, x.shape[:-1], 'a step log for each token and head of x')
    checks.step_logs('polyline_scan', **logs)
    checks.one_of('polyline_scan', 'paths', paths, checks.PATHS)
    return choose('polyline_scan', backend, x, *logs.values())(x, list(logs.values()), paths)
