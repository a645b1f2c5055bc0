"""Decay along a grid axis: what the operators build from step logs."""
import torch
from torch import Tensor

# exp(-80) is 1.8e-35: still a float32, and a path through such a step is dead. Without the floor a step log of -inf
# would give -inf - -inf = NaN in a difference of cumulative sums.
STEP_LOG_MIN = -80.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half types are computed in float32; float32 and float64 stay."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# References compute in float64 whatever comes in: they are the oracle for every dtype.
REFERENCE_DTYPE = torch.float64


def bounded(steps: Tensor) -> Tensor:
    """Step logs from -80 to 0, with no gradient beyond. Positive ones would make a scan grow without bound, and in a
    difference of sums they would cancel others."""
    return steps.clamp(STEP_LOG_MIN, 0.0)


def cumulative(steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Inclusive cumulative sum of step logs along `dim`, in at least float32; same shape.

    In float32 a difference of two sums is as exact as their size allows: 1e-6 for decays as networks learn them, 1.5e-4
    in the output where small steps follow two hundred of -80 on one line (measured; float64 input has no such limit).
    """
    return bounded(steps.to(compute_dtype(dtype))).cumsum(dim)


def row_log_decay(log_alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """log alpha_{i, j:l} = -|Sa[i, j] - Sa[i, l]|. log_alpha: (..., H, W) -> (..., H, W, W), indexed [i, j, l]."""
    total = cumulative(log_alpha, -1, dtype)
    return -(total[..., :, None] - total[..., None, :]).abs()


def column_log_decay(log_beta: Tensor, dtype: torch.dtype) -> Tensor:
    """log beta_{i:k, l} = -|Sb[i, l] - Sb[k, l]|. log_beta: (..., H, W) -> (..., H, H, W), indexed [i, k, l]."""
    total = cumulative(log_beta, -2, dtype)
    return -(total[..., :, None, :] - total[..., None, :, :]).abs()


def rounded_sums(steps: Tensor, dim: int) -> Tensor:
    """`cumulative` for the fused kernels: added up in float64, then rounded once to dense float32."""
    return bounded(steps).cumsum(dim, dtype=torch.float64).float().contiguous()


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
