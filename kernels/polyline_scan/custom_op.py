"""Registration of the Triton scan of one axis with PyTorch: schema, shapes, gradient and operation count. The polyline
scan is a chain of it. Triton is imported at the first call."""
from typing import List, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import bounded, empty_result


@torch.library.custom_op('subquad::polyline_scan_fwd', mutates_args=())
def _triton_forward(x: Tensor, steps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Scan x (..., D) along its dimension `dim` >= 0 and return the result in `dtype`.

    steps: step logs of the shape of x without D, float32, dense."""
    from . import triton
    with torch.cuda.device_of(x):
        return triton.forward(x, steps, dim, dtype)


@torch.library.custom_op('subquad::polyline_scan_bwd', mutates_args=())
def _triton_backward(grad: Tensor, x: Tensor, steps: Tensor, dim: int) -> Tuple[Tensor, Tensor]:
    from . import triton
    with torch.cuda.device_of(x):
        return triton.backward(grad, x, steps, dim)


@_triton_forward.register_fake
def _(x, steps, dim, dtype):
    return torch.empty_like(x, memory_format=torch.contiguous_format, dtype=dtype)


@_triton_backward.register_fake
def _(grad, x, steps, dim):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(steps)


def _triton_save(ctx, inputs, output) -> None:
    *tensors, ctx.dim, _ = inputs
    ctx.save_for_backward(*tensors)


_triton_forward.register_autograd(lambda ctx, grad: (*_triton_backward(grad, *ctx.saved_tensors, ctx.dim), None, None),
                                  setup_context=_triton_save)


@register_flop_formula(torch.ops.subquad.polyline_scan_fwd)
def _(x, *args, out_shape=None, **kwargs) -> int:
    return 6 * _count(x)                  # two recurrences of a multiplication and an addition, and their sum


@register_flop_formula(torch.ops.subquad.polyline_scan_bwd)
def _(grad, x, *args, out_shape=None, **kwargs) -> int:
    return 16 * _count(x)                 # four recurrences, their sum, and two products summed over channels


def _count(shape) -> int:
    return torch.Size(shape).numel()


def polyline_scan_triton(x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    if x.numel() == 0:
        return empty_result(x, *logs)
    steps = [bounded(log.float()).contiguous() for log in logs]
    passes = [(s, x.ndim - 2 - n) for n, s in enumerate(steps)]
    results = []
    for name, sequence in (('v2h', passes[::-1]), ('h2v', passes)):
        if paths in (name, 'both'):
            y = x
            # A line of one token is its own scan. A step log that requires a gradient must stay in the graph.
            sequence = [(s, dim) for s, dim in sequence if x.shape[dim] > 1 or s.requires_grad] or sequence[:1]
            for n, (s, dim) in enumerate(sequence):
                # Data between passes is float32, so half types are rounded only once.
                y = _triton_forward(y, s, dim, x.dtype if n == len(sequence) - 1 else torch.float32)
            results.append(y)
    return results[0] + results[1] if len(results) == 2 else results[0]
