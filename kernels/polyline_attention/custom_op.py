"""Registration of polyline attention with PyTorch: schema, shapes, gradient and operation count of the portable backend
and of the Triton kernels. A compiler sees one node for each. Triton is imported at the first call."""
from typing import Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common import launch
from ..common.decay import (
    column_log_decay,
    compute_dtype,
    empty_result,
    needs_gradient,
    portable_bfloat16,
    rounded_sums,
    row_log_decay,
)
from . import portable


def _products(q: Sequence[int], v: Sequence[int]) -> int:
    """Return the floating-point operations of one product with K and one with V. q: (..., H, W, D)."""
    *groups, height, width, dim = q
    return 2 * torch.Size(groups).numel() * (height * width) ** 2 * (dim + v[-1])


@torch.library.custom_op('subquad::polyline_attention_portable_fwd', mutates_args=())
def _portable_forward(q: Tensor, k: Tensor, v: Tensor, row: Tensor, column: Tensor, mask_mode: str,
                      paths: str) -> Tensor:
    return portable.forward(q, k, v, row, column, mask_mode, paths)


@torch.library.custom_op('subquad::polyline_attention_portable_bwd', mutates_args=())
def _portable_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, row: Tensor, column: Tensor, mask_mode: str,
                       paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return portable.backward(grad, q, k, v, row, column, mask_mode, paths)


@_portable_forward.register_fake
def _(q, k, v, row, column, mask_mode, paths):
    return torch.empty_like(v)


@_portable_backward.register_fake
def _(grad, q, k, v, row, column, mask_mode, paths):
    return tuple(torch.empty_like(x) for x in (q, k, v, row, column))


def _portable_save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _portable_differentiate(ctx, grad: Tensor):
    return (*_portable_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), None, None)


_portable_forward.register_autograd(_portable_differentiate, setup_context=_portable_save)


@register_flop_formula(torch.ops.subquad.polyline_attention_portable_fwd)
def _(q, k, v, row, column, mask_mode, paths, out_shape=None, **kwargs) -> int:
    return _products(q, v)


@register_flop_formula(torch.ops.subquad.polyline_attention_portable_bwd)
def _(grad, q, k, v, row, column, mask_mode, paths, out_shape=None, **kwargs) -> int:
    return 2 * _products(q, v) + _products(q, [0])      # as torch counts attention: the logits are computed again


def polyline_attention_portable(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                                paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    tables = row_log_decay(log_alpha, q.dtype), column_log_decay(log_beta, q.dtype)
    dtype = q.dtype if portable_bfloat16(q, k, v, log_alpha, log_beta) else compute_dtype(q.dtype)
    inputs = [x.flatten(0, 1).contiguous() for x in (*(x.to(dtype) for x in (q, k, v)), *tables)]
    return _portable_forward(*inputs, mask_mode, paths).view(v.shape).to(v.dtype)


@torch.library.custom_op('subquad::polyline_attention_fwd', mutates_args=())
def _triton_forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str,
                    save: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output and, with `save`, the tensors that the backward pass needs (see `triton.forward`)."""
    from . import triton
    with torch.cuda.device_of(q):
        return triton.forward(q, k, v, sa, sb, mask_mode, paths, save)


@torch.library.custom_op('subquad::polyline_attention_bwd', mutates_args=())
def _triton_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, out: Tensor, first: Tensor,
                     lse: Tensor, mask_mode: str, paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import triton
    with torch.cuda.device_of(q):
        return triton.backward(grad, q, k, v, sa, sb, out, first, lse, mask_mode, paths)


@_triton_forward.register_fake
def _(q, k, v, sa, sb, mask_mode, paths, save):
    two = mask_mode == 'additive' and paths == 'both'
    first = launch.token_major(v.shape, v) if save and two else v.new_empty(0)
    rows = 1 + two + launch.own_logit_reference(q.dtype, q.shape[-1], v.shape[-1])
    lse = sa.new_empty((rows, *q.shape[:2], q.shape[2] * q.shape[3]) if save else (0,))
    return launch.token_major(v.shape, v), first, lse


@_triton_backward.register_fake
def _(grad, q, k, v, sa, sb, out, first, lse, mask_mode, paths):
    return (*(launch.token_major(x.shape, x) for x in (q, k, v)), torch.empty_like(sa), torch.empty_like(sb))


def _triton_save(ctx, inputs, output) -> None:
    *tensors, ctx.mask_mode, ctx.paths, ctx.saved = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _triton_differentiate(ctx, grad, *_):
    if not ctx.saved:
        raise RuntimeError('subquad::polyline_attention_fwd ran with save=False: it has no gradient')
    return (*_triton_backward(grad, *ctx.saved_tensors, ctx.mask_mode, ctx.paths), None, None, None)


_triton_forward.register_autograd(_triton_differentiate, setup_context=_triton_save)


@register_flop_formula(torch.ops.subquad.polyline_attention_fwd)
def _(q, k, v, *args, out_shape=None, **kwargs) -> int:
    return _products(q, v)


@register_flop_formula(torch.ops.subquad.polyline_attention_bwd)
def _(grad, q, k, v, *args, out_shape=None, **kwargs) -> int:
    return 2 * _products(q, v) + _products(q, [0])      # as torch counts attention: the logits are computed again


def polyline_attention_triton(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                              paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    return _triton_forward(q, k, v, rounded_sums(log_alpha, -1), rounded_sums(log_beta, -2), mask_mode, paths,
                           needs_gradient(q, k, v, log_alpha, log_beta))[0]
