"""Linear attention under the decay mask: sum_r q_r * scan(k_r * v), by either scan."""
from typing import List

from torch import Tensor

from ..common.numerics import bounded, compute_dtype, empty_result
from ..polyline_scan import polyline_scan_triton
from ..polyline_scan.portable import axis_scan, by_group, dense_axis_scan, scan_grid

# State elements (tokens x R x Dv) that are scanned at a time: about 16 MB in float32, and 512 MB
# on Triton.
STATE_ELEMENTS, GPU_STATE_ELEMENTS = 4_000_000, 1 << 27


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, logs: List[Tensor], paths: str, scan) -> Tensor:
    """Compute sum_r q_r * scan(k_r * v). q, k: (G, H, W, R), v: (G, H, W, Dv), logs: (G, H, W)."""
    groups, height, width, dim = v.shape
    query, key, value = (x.reshape(groups, height * width, x.shape[-1]) for x in (q, k, v))
    state = (key.unsqueeze(3) * value.unsqueeze(2)).reshape(groups, height, width, q.shape[-1] * dim)  # (G, H, W, R*Dv)
    state = scan_grid(state, logs, paths, scan).reshape(groups, height * width, q.shape[-1], dim)  # (G, N, R, Dv)
    return (query.unsqueeze(3) * state).sum(2).reshape(v.shape)


def polyline_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor,
                              paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    dtype = compute_dtype(q.dtype)
    q, k, values = (by_group(x.to(dtype)) for x in (q, k, v))
    logs = [bounded(by_group(steps.to(dtype))) for steps in (log_alpha, log_beta)]
    step = max(1, min(q.shape[-1], STATE_ELEMENTS // values.numel()))
    parts = [_linear_attention(query, key, values, logs, paths, axis_scan)
             for query, key in zip(q.split(step, -1), k.split(step, -1))]
    return sum(parts[1:], parts[0]).reshape(v.shape).to(v.dtype)


def polyline_linear_attention_export(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor,
                                     paths: str) -> Tensor:
    """Scan without loops, as `polyline_scan_export`; every tensor but the arguments has rank 4 at most."""
    dtype = compute_dtype(q.dtype)
    q, k, values = (by_group(x.to(dtype)) for x in (q, k, v))
    logs = [bounded(by_group(steps.to(dtype))) for steps in (log_alpha, log_beta)]
    return _linear_attention(q, k, values, logs, paths, dense_axis_scan).reshape(v.shape).to(v.dtype)


def polyline_linear_attention_triton(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor,
                                     log_beta: Tensor, paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    step = max(1, min(q.shape[-1], GPU_STATE_ELEMENTS // v.numel()))
    parts = []
    for query, key in zip(q.split(step, -1), k.split(step, -1)):
        # Sums of products over a whole grid exceed the range of float16.
        state = key.float().unsqueeze(-1) * v.float().unsqueeze(-2)          # (B, heads, H, W, R, Dv)
        scanned = polyline_scan_triton(state.flatten(-2), [log_alpha, log_beta], paths)
        state = scanned.view(state.shape)
        parts.append((query.float().unsqueeze(-2) @ state).squeeze(-2))
    return sum(parts[1:], parts[0]).to(v.dtype)
