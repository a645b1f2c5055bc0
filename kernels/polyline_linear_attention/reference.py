"""Linear attention under the decay mask by its definition in float64, with N x N matrices, for tests."""
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE
from ..polyline_scan.reference import polyline_mask


def polyline_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor,
                              paths: str) -> Tensor:
    dtype = REFERENCE_DTYPE
    q, k, values = (x.to(dtype).flatten(2, 3) for x in (q, k, v))
    weights = (q @ k.transpose(-1, -2)) * polyline_mask([log_alpha, log_beta], paths, dtype)
    return (weights @ values).reshape(v.shape).to(v.dtype)
