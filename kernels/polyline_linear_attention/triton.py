"""Linear attention under the decay mask on Triton: the kernels of `polyline_scan`, over k_r * v for every r.

This module imports no Triton: the operators of `polyline_scan` do, at their first call."""
from torch import Tensor

from ..common.numerics import empty_result
from ..polyline_scan import polyline_scan_triton

# State elements (tokens x R x Dv) that are scanned at a time: 512 MB in float32.
GPU_STATE_ELEMENTS = 1 << 27


def polyline_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor,
                              paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    step = max(1, min(q.shape[-1], GPU_STATE_ELEMENTS // v.numel()))
    parts = []
    for query, key in zip(q.split(step, -1), k.split(step, -1)):
        # Sums of products over a whole grid exceed the range of float16.
        state = (key.float().unsqueeze(-1) * v.float().unsqueeze(-2)).flatten(-2)     # (B, heads, H, W, R * Dv)
        state = polyline_scan_triton(state, [log_alpha, log_beta], paths).unflatten(-1, (key.shape[-1], v.shape[-1]))
        parts.append((query.float().unsqueeze(-2) @ state).squeeze(-2))
    return sum(parts[1:], parts[0]).to(v.dtype)
