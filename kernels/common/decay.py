"""Decay along a grid axis: log decays between positions, and cumulative sums, from step logs."""
from typing import Optional

import torch
from torch import Tensor

from .tracing import exporting

# exp(-80) is 1.8e-35, which float32 still represents, and a path through such a step has no weight. Without the floor,
# a step log of -inf would give -inf - -inf = NaN in a difference of cumulative sums.
STEP_LOG_MIN = -80.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float32 for half types, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# References compute in float64 for any input dtype: tests compare every dtype with them.
REFERENCE_DTYPE = torch.float64


def bounded(steps: Tensor) -> Tensor:
    """Clamp step logs to [-80, 0]; values outside have no gradient.

    A positive step log would make a scan grow without bound, and would cancel others in a difference of sums."""
    return steps.clamp(STEP_LOG_MIN, 0.0)


def cumulative(steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the inclusive cumulative sum of step logs along `dim`, in at least float32.

    The rounding error of a difference of two sums grows with the sums. In float32 the output's error is 1e-6 for decays
    as networks learn them, and 1.5e-4 if small steps follow two hundred steps of -80 on one line (both measured).
    """
    return steps.to(compute_dtype(dtype)).clamp(STEP_LOG_MIN, 0.0).cumsum(dim)


def log_decay(sums: Tensor, dim: int) -> Tensor:
    """Return the log decay -|S[j] - S[l]| between all positions of a dimension, given the sums S of `cumulative`.

    Where S[j] = S[l], the gradient is that from below: an absolute value would have the gradient 0 there, and a step
    log of 0 could not change. A recorded graph has the absolute value, which all runtimes and quantizers know.

    Args:
        sums: (..., L, ...).
        dim: dimension of the positions, counted from the last one, which is -1.

    Returns:
        (..., L, L, ...): dimension `dim - 1` is j, and `dim` is l."""
    difference = sums.unsqueeze(dim) - sums.unsqueeze(dim - 1)
    if exporting():
        return -difference.abs()
    signs = index_signs(sums.shape[dim], sums)
    return difference.mul_(signs.reshape(*signs.shape, *[1] * (-1 - dim)))


def row_log_decay(log_alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log alpha_{i, j:l} = -|Sa[i, j] - Sa[i, l]|.

    log_alpha: (..., H, W); the result has shape (..., H, W, W) and is indexed [i, j, l]."""
    return log_decay(cumulative(log_alpha, -1, dtype), -1)


def column_log_decay(log_beta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log beta_{i:k, l} = -|Sb[i, l] - Sb[k, l]|.

    log_beta: (..., H, W); the result has shape (..., H, H, W) and is indexed [i, k, l]."""
    return log_decay(cumulative(log_beta, -2, dtype), -2)


def index_signs(size: int, like: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return sign(j - l) for positions j in `rows` and l < `size`: (rows, size), of the dtype of `like`.

    It is the sign of S[l] - S[j] for sums S that never increase, except where these are equal."""
    index = torch.arange(size, device=like.device, dtype=like.dtype)
    return (index[rows, None] - index).sign()


def rounded_sums(steps: Tensor, dim: int) -> Tensor:
    """Return the sums of `cumulative` for Triton kernels: added in float64, rounded once, dense float32."""
    return bounded(steps).cumsum(dim, dtype=torch.float64).float().contiguous()


def steps_gradient(dsums: Tensor, steps: Tensor, dim: int) -> Tensor:
    """Return the gradient of step logs in float64, given that of their `rounded_sums` along `dim`.

    A step is part of its sum and of all later ones. If only differences of sums matter, their gradients add up to 0, so
    the later ones are minus the earlier ones."""
    earlier = dsums.cumsum(dim, dtype=torch.float64) - dsums
    return torch.where((steps >= STEP_LOG_MIN) & (steps <= 0), -earlier, 0)


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a backward pass may follow: gradients are enabled and a tensor requires one."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def empty_result(like: Tensor, *inputs: Optional[Tensor]) -> Tensor:
    """Return a result without elements, in the shape of `like`, that gives all inputs a gradient of zero."""
    return like + sum(x.real.sum().to(like.dtype) for x in inputs if x is not None)


def portable_bfloat16(*tensors: Tensor) -> bool:
    """Whether portable attention multiplies and exponentiates in the bfloat16 of its tensors, with sums in float32.

    It does on CPUs without gradients, where that halves the time. Logits are rounded to bfloat16 as PyTorch's products
    are. The backward pass computes weights again, in float32."""
    return tensors[0].dtype == torch.bfloat16 and tensors[0].device.type == 'cpu' and not needs_gradient(*tensors)
