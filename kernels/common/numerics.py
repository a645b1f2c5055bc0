"""What implementations compute with: dtypes, decay along a grid axis from step logs, and memory for blocks."""
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import List, Optional, Sequence

import torch
from torch import Tensor

from .checks import exporting

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


def needs_gradient(*tensors: Optional[Tensor]) -> bool:
    """Whether a backward pass may follow: gradients are enabled and a tensor requires one."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)


def empty_result(like: Tensor, *inputs: Optional[Tensor]) -> Tensor:
    """Return a result without elements, in the shape of `like`, that gives all inputs a gradient of zero."""
    return like + sum(x.real.sum().to(like.dtype) for x in inputs if x is not None)


def solve_each(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix^-1 right for (..., N, N) and (..., N, D), one matrix at a time.

    On two threads, `torch.linalg.solve` of PyTorch 2.13 solves a batch of 256 x 256 matrices wrongly.
    """
    if matrix.numel() == 0:
        return torch.linalg.solve(matrix, right)
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    matrices, rights = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (matrix, right))
    return torch.stack([torch.linalg.solve(*pair) for pair in zip(matrices, rights)]).reshape(*batch, *right.shape[-2:])


def portable_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which portable attention multiplies and exponentiates tensors of the first one's dtype.

    It is at least float32, but bfloat16 on CPUs without gradients, where that halves the time: sums are float32, and
    logits are rounded to bfloat16 as PyTorch's products are. The backward pass computes weights again, in float32."""
    dtype = tensors[0].dtype
    half = dtype == torch.bfloat16 and tensors[0].is_cpu and not needs_gradient(*tensors)
    return dtype if half else compute_dtype(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which products on x's device keep the dtype of their arguments."""
    return nullcontext() if x.device.type == 'meta' else torch.autocast(x.device.type, enabled=False)


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype that autocast would use for a product, if autocast is enabled."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == 'meta' or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


# Sums of exponentials from here to the reciprocal are exact: numbers of float32 end at 2^-149 and 2^128, and the rest
# is for the number of summands and their products with values.
LEAST_SUM = 2.0 ** -100


def ranges(total: int, step: int) -> List[slice]:
    """Split [0, total) into slices of about equal size, each of at most max(step, 1)."""
    step = max(1, min(total, step))
    if step >= total:
        return [slice(0, total)] if total else []
    step = -(-total // -(-total // step))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


class Workspace:
    """Memory that all blocks of one call share: a new allocation per block costs more than its arithmetic."""

    def __init__(self, like: Tensor):
        self.like, self.parts = like, {}

    def get(self, name: str, shape: Sequence[int], dtype: Optional[torch.dtype] = None) -> Tensor:
        """Return an uninitialized tensor for `out=`; calls with the same name share memory, and have one dtype."""
        count = prod(shape)
        if name not in self.parts or self.parts[name].numel() < count:
            self.parts[name] = self.like.new_empty(count, dtype=dtype)
        return self.parts[name][:count].view(shape)


def sums_are_safe(sums: Tensor) -> bool:
    """Whether sums of exponentials that were not referred to their maximum are exact: none overflowed, and those that
    underflowed are nothing beside their sum. Reading the answer waits for a GPU.

    Args:
        sums: float32 or float64, of weights at least one of which has a log mask of 0.
    """
    low, high = torch.aminmax(sums)
    return LEAST_SUM <= float(low) and float(high) <= 1 / LEAST_SUM      # false for NaN


def packed(x: Tensor) -> Tensor:
    """Return x, as a contiguous copy if it is bfloat16 on a CPU.

    PyTorch's arithmetic on bfloat16 with gaps or repeated numbers works through single numbers, and its copies do not:
    dividing 280 x 56 rows of 16 by a number each takes 0.22 ms, with a copy 0.05 (measured on two cores).
    """
    return x.contiguous() if x.is_cpu and x.dtype == torch.bfloat16 else x
