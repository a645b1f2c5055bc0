"""Polyline scan by its definition in float64, with the N x N mask; tests compare all backends with it."""
from typing import List

from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE, cumulative, log_decay
from ..polyline_attention.reference import polyline_log_masks


def polyline_log_mask_3d(log_alpha: Tensor, log_beta: Tensor, log_gamma: Tensor) -> Tensor:
    """Return log L3D, (B, heads, N, N), from step logs (B, heads, Z, H, W) along W, H and Z (appendix C.2).

    Between (i, j, k) and (l, m, n): alpha along row (i, j) from k to n, beta from j to m at (i, ., n), gamma from i to
    l at (., m, n)."""
    logs = ((log_alpha, -1), (log_beta, -2), (log_gamma, -3))
    # (i, j, k, n), (i, j, m, n) and (i, l, m, n)
    alpha, beta, gamma = (log_decay(cumulative(x, dim, x.dtype), dim) for x, dim in logs)
    total = (alpha[..., :, :, :, None, None, :] + beta[..., :, :, None, None, :, :]
             + gamma[..., :, None, None, :, :, :])                           # (i, j, k, l, m, n)
    tokens = log_alpha.shape[2:].numel()
    return total.reshape(*log_alpha.shape[:2], tokens, tokens)


def polyline_mask(logs: List[Tensor], paths: str, dtype) -> Tensor:
    logs = [x.to(dtype) for x in logs]
    mask = (polyline_log_masks(*logs)[0] if len(logs) == 2 else polyline_log_mask_3d(*logs)).exp()
    return {'v2h': mask, 'h2v': mask.transpose(-1, -2), 'both': mask + mask.transpose(-1, -2)}[paths]


def polyline_scan(x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    dtype = REFERENCE_DTYPE
    return (polyline_mask(logs, paths, dtype) @ x.to(dtype).flatten(2, -2)).reshape(x.shape).to(x.dtype)
