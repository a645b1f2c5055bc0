"""Linear attention under the decay mask (PPMA, Theorem 2 and appendix C), by scans, in O(N)."""
from torch import Tensor

from ..common import checks
from ..dispatch import OPERATORS, Operator, choose
from . import portable, reference


def polyline_linear_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        *,
        paths: str = 'both',
        backend: str = 'auto',
) -> Tensor:
    """Compute (q k' * M) v for the decay mask M = L, L~ or L + L~ in O(N R Dv), as sum_r q_r * scan(k_r * v).

    With q = phi(Q), k = phi(K) this is the paper's PPMLA; with q = S1 and k = S2' its decomposed form PPMDA. The result
    is not normalized: to normalize it, append a column of ones to v and divide by that column of the result.

    Args:
        q, k: shape (B, heads, H, W, R); float32, float64, float16 or bfloat16; any strides.
        v: shape (B, heads, H, W, Dv), dtype of q.
        log_alpha, log_beta: horizontal and vertical step logs, <= 0, shape (B, heads, H, W), as for `polyline_scan`.
        paths: 'v2h' (M = L), 'h2v' (L~) or 'both' (L + L~).
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, heads, H, W, Dv) and the dtype of v.

    Raises:
        ValueError, TypeError: as for `polyline_scan`.
    """
    checks.attention('polyline_linear_attention', q, k, v, log_alpha=log_alpha, log_beta=log_beta)
    checks.one_of('polyline_linear_attention', 'paths', paths, checks.PATHS)
    run = choose('polyline_linear_attention', backend, q, k, v, log_alpha, log_beta)
    return run(q, k, v, log_alpha, log_beta, paths)


OPERATORS['polyline_linear_attention'] = Operator(
    implementations={
        'reference': reference.polyline_linear_attention,
        'portable': portable.polyline_linear_attention,
        'triton': portable.polyline_linear_attention_triton,
        'export': portable.polyline_linear_attention_export,
    },
    plain=True,
)
