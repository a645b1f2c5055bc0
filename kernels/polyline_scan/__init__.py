"""Product of the decay mask and a tensor in O(N), without the mask (PPMA, Theorem 2, Algorithm 1, appendix C.2)."""
from struct import Struct
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from ..common import checks
from ..common.declare import differentiate, late, node
from ..common.numerics import bounded, empty_result
from ..dispatch import OPERATORS, Operator, choose
from ..native import DONE, function
from . import portable, reference


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
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of the shape and dtype of x.

    Raises:
        ValueError: a shape, device, path or backend is not allowed, or the tensors exceed the memory. On a CPU,
            outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    logs = dict(log_alpha=log_alpha, log_beta=log_beta)
    if log_gamma is not None:
        logs['log_gamma'] = log_gamma
    rank = 3 + len(logs)
    checks.tensors('polyline_scan', {'x': rank, **dict.fromkeys(logs, rank - 1)}, x=x, **logs)
    for name, log in logs.items():
        checks.shapes('polyline_scan', (name, log, x.shape[:-1], 'a step log for each token and head of x'))
    checks.step_logs('polyline_scan', **logs)
    checks.one_of('polyline_scan', 'paths', paths, checks.PATHS)
    return choose('polyline_scan', backend, x, *logs.values())(x, list(logs.values()), paths)


# --- C++ and Triton: a scan is a chain of operators for one axis each

# `struct Scan` of native.cpp.
_ARGUMENTS = Struct('3Q7q')


def _run(x: Tensor, steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    x, shape = x.contiguous(), x.shape
    y = torch.empty_like(x, dtype=dtype)
    arguments = _ARGUMENTS.pack(
        x.data_ptr(), steps.data_ptr(), y.data_ptr(), shape[:dim].numel(), shape[dim], shape[dim + 1:-1].numel(),
        shape[-1], x.dtype == torch.bfloat16, dtype == torch.bfloat16, torch.get_num_threads())
    if function('polyline_scan')(arguments) == DONE:
        return y
    return portable.scan_along(x.float(), steps, dim, portable.axis_scan).to(dtype).contiguous()


# Two recurrences of a multiplication and an addition, and their sum.
@node('polyline_scan_native_fwd', _run, lambda x, *_: 6 * torch.Size(x).numel())
def _native_forward(x: Tensor, steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """As `_forward`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format, dtype=dtype)


# Two recurrences of a multiplication and an addition, and their sum.
@node('polyline_scan_fwd', late(__name__, 'triton.forward'),
      lambda x, *_: 6 * torch.Size(x).numel())
def _forward(x: Tensor, steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The scan of x (..., D) along its dimension `dim` >= 0, in `dtype`.

    steps: step logs of the shape of x without D, float32, dense."""
    return torch.empty_like(x, memory_format=torch.contiguous_format, dtype=dtype)


# Four recurrences, their sum, and two products summed over channels.
@node('polyline_scan_bwd', late(__name__, 'triton.backward'),
      lambda grad, x, *_: 16 * torch.Size(x).numel())
def _backward(grad: Tensor, x: Tensor, steps: Tensor, dim: int) -> Tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(steps)


differentiate(_forward, lambda grad, x, steps, dim, dtype: _backward(grad, x, steps, dim))


def polyline_scan_native(x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    return _by_axes(_native_forward, x, logs, paths)


def polyline_scan_triton(x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    return _by_axes(_forward, x, logs, paths)


def _by_axes(forward: Any, x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    if x.numel() == 0:
        return empty_result(x, *logs)
    steps = [bounded(log.float()).contiguous() for log in logs]
    passes = [(s, x.ndim - 2 - n) for n, s in enumerate(steps)]
    results = []
    for name, sequence in (('v2h', passes[::-1]), ('h2v', passes)):
        if paths in (name, 'both'):
            y = x
            # A line of one token is its own scan. A step log that requires a gradient must stay in
            # the graph.
            needed = [(s, dim) for s, dim in sequence if x.shape[dim] > 1 or s.requires_grad]
            sequence = needed or sequence[:1]
            for n, (s, dim) in enumerate(sequence):
                # Data between passes is float32, so half types are rounded only once.
                y = forward(y, s, dim, x.dtype if n == len(sequence) - 1 else torch.float32)
            results.append(y)
    return results[0] + results[1] if len(results) == 2 else results[0]


OPERATORS['polyline_scan'] = Operator(
    implementations={
        'reference': reference.polyline_scan,
        'portable': portable.polyline_scan,
        'native': polyline_scan_native,
        'triton': polyline_scan_triton,
        'export': portable.polyline_scan_export,
    },
    plain=True,
)
