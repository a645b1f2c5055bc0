"""Registration of decay attention with PyTorch: schema, shapes, gradient and operation count of the portable backend
and of the Triton kernels. A compiler sees one node for each. Triton is imported at the first call."""
from typing import Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common import launch
from ..common.decay import compute_dtype, cumulative, empty_result, needs_gradient, portable_bfloat16
from . import portable


@torch.library.custom_op('subquad::decay_attention_portable_fwd', mutates_args=())
def _portable_forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, mask_mode: str) -> Tensor:
    return portable.forward(q, k, v, sums, mask_mode)


@torch.library.custom_op('subquad::decay_attention_portable_bwd', mutates_args=())
def _portable_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor,
                       mask_mode: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    return portable.backward(grad, q, k, v, sums, mask_mode)


@_portable_forward.register_fake
def _(q, k, v, sums, mask_mode):
    return torch.empty_like(v)


@_portable_backward.register_fake
def _(grad, q, k, v, sums, mask_mode):
    return tuple(torch.empty_like(x) for x in (q, k, v, sums))


def _portable_save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.mask_mode = inputs[-1]


_portable_forward.register_autograd(
    lambda ctx, grad: (*_portable_backward(grad.contiguous(), *ctx.saved_tensors, ctx.mask_mode), None),
    setup_context=_portable_save)


@register_flop_formula(torch.ops.subquad.decay_attention_portable_fwd)
def _(q, k, v, sums, mask_mode, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] ** 2 * (q[2] + v[2])


@register_flop_formula(torch.ops.subquad.decay_attention_portable_bwd)
def _(grad, q, k, v, sums, mask_mode, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] ** 2 * (3 * q[2] + 2 * v[2])


def decay_attention_portable(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, axis: str, mask_mode: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_decay)
    dtype = q.dtype if portable_bfloat16(q, k, v, log_decay) else compute_dtype(q.dtype)
    sums = cumulative(log_decay, -1 if axis == 'row' else -2, q.dtype)
    inputs = [*(x.to(dtype) for x in (q, k, v)), sums]
    inputs = [x.transpose(2, 3) for x in inputs] if axis == 'column' else inputs
    y = _portable_forward(*(x.flatten(0, 2).contiguous() for x in inputs), mask_mode).view(inputs[2].shape)
    return (y.transpose(2, 3) if axis == 'column' else y).to(v.dtype)


@torch.library.custom_op('subquad::decay_attention_fwd', mutates_args=())
def _triton_forward(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, axis: str, mask_mode: str,
                    save: bool) -> Tuple[Tensor, Tensor]:
    """Return the output and, with `save`, what the backward pass needs of long lines (see `triton.Lines`)."""
    from . import triton
    with torch.cuda.device_of(q):
        return triton.forward(q, k, v, steps, axis, mask_mode, save)


@torch.library.custom_op('subquad::decay_attention_bwd', mutates_args=())
def _triton_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, steps: Tensor, out: Tensor, statistics: Tensor,
                     axis: str, mask_mode: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    from . import triton_backward
    with torch.cuda.device_of(q):
        return triton_backward.backward(grad, q, k, v, steps, out, statistics, axis, mask_mode)


def _length(q: Sequence[int], axis: str) -> int:
    return q[3] if axis == 'row' else q[2]


def statistics_shape(q: Tensor, v: Tensor, axis: str, save: bool) -> Tuple[int, ...]:
    """Return the shape of `triton.Lines.statistics`."""
    whole = launch.fits_tile('decay_attention', q.dtype, _length(q.shape, axis), q.shape[-1], v.shape[-1])
    return (2, *q.shape[:4]) if save and not whole else (0,)


@_triton_forward.register_fake
def _(q, k, v, steps, axis, mask_mode, save):
    statistics = steps.new_empty(statistics_shape(q, v, axis, save), dtype=torch.float32)
    return launch.token_major(v.shape, v), statistics


@_triton_backward.register_fake
def _(grad, q, k, v, steps, *args):
    return (*(launch.token_major(x.shape, x) for x in (q, k, v)), launch.heads_last(steps))


def _triton_save(ctx, inputs, output) -> None:
    *tensors, ctx.axis, ctx.mask_mode, ctx.saved = inputs
    out, statistics = output
    # Only long lines need the output: do not keep it alive otherwise.
    ctx.save_for_backward(*tensors, out if statistics.numel() else statistics, statistics)
    ctx.set_materialize_grads(False)


def _triton_differentiate(ctx, grad, *_):
    if not ctx.saved:
        raise RuntimeError('subquad::decay_attention_fwd ran with save=False: it has no gradient')
    return (*_triton_backward(grad, *ctx.saved_tensors, ctx.axis, ctx.mask_mode), None, None, None)


_triton_forward.register_autograd(_triton_differentiate, setup_context=_triton_save)


def _pairs(q: Sequence[int], axis: str) -> int:
    """Return the number of query-key pairs of all lines."""
    batch, heads, height, width, _ = q
    return batch * heads * height * width * _length(q, axis)


@register_flop_formula(torch.ops.subquad.decay_attention_fwd)
def _(q, k, v, steps, axis, *args, out_shape=None, **kwargs) -> int:
    return 2 * _pairs(q, axis) * (q[-1] + v[-1])


@register_flop_formula(torch.ops.subquad.decay_attention_bwd)
def _(grad, q, k, v, steps, out, statistics, axis, *args, out_shape=None, **kwargs) -> int:
    return 2 * _pairs(q, axis) * (3 * q[-1] + 2 * v[-1])


def decay_attention_triton(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, axis: str, mask_mode: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_decay)
    return _triton_forward(q, k, v, log_decay, axis, mask_mode, needs_gradient(q, k, v, log_decay))[0]
