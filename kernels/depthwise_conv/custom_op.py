"""Registration of depthwise convolution on Triton with PyTorch: schema, shapes, gradient and operation count. Triton is
imported at the first call."""
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import empty_result
from ..common.launch import dense_like


@torch.library.custom_op('subquad::depthwise_conv_fwd', mutates_args=())
def _triton_forward(x: Tensor, weight: Tensor, bias: Tensor, add: Optional[Tensor], gelu: bool,
                    residual: bool) -> Tensor:
    from . import triton
    with torch.cuda.device_of(x):
        return triton.forward(x, weight, bias, add, gelu, residual)


@torch.library.custom_op('subquad::depthwise_conv_bwd', mutates_args=())
def _triton_backward(grad: Tensor, x: Tensor, weight: Tensor, gelu: bool, residual: bool, with_input: bool,
                     with_weight: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; those that are not wanted are empty."""
    from . import triton
    with torch.cuda.device_of(x):
        return triton.backward(grad, x, weight, gelu, residual, with_input, with_weight)


@_triton_forward.register_fake
def _(x, weight, bias, add, gelu, residual):
    return dense_like(x)


@_triton_backward.register_fake
def _(grad, x, weight, gelu, residual, with_input, with_weight):
    empty = x.new_empty(0)
    return (dense_like(x) if with_input else empty,
            dense_like(weight) if with_weight else weight.new_empty(0),
            weight.new_empty(weight.shape[0] if with_weight else 0))


def _triton_save(ctx, inputs, output) -> None:
    x, weight, _, _, ctx.gelu, ctx.residual = inputs
    ctx.save_for_backward(x, weight)


def _triton_differentiate(ctx, grad: Tensor):
    with_input, with_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
    dx, dweight, dbias = _triton_backward(grad, *ctx.saved_tensors, ctx.gelu, ctx.residual, with_input, with_weight)
    return (dx if with_input else None, *((dweight, dbias) if with_weight else (None, None)),
            grad if ctx.needs_input_grad[3] else None, None, None)


_triton_forward.register_autograd(_triton_differentiate, setup_context=_triton_save)


def _products(x: Sequence[int], weight: Sequence[int]) -> int:
    """Return the floating-point operations of the windows, as torch counts a convolution."""
    return 2 * torch.Size(x).numel() * weight[-1] ** 2


@register_flop_formula(torch.ops.subquad.depthwise_conv_fwd)
def _(x, weight, *args, out_shape=None, **kwargs) -> int:
    return _products(x, weight)


@register_flop_formula(torch.ops.subquad.depthwise_conv_bwd)
def _(grad, x, weight, gelu, residual, with_input, with_weight, out_shape=None, **kwargs) -> int:
    return _products(x, weight) * (with_input + with_weight)


def depthwise_conv_triton(x: Tensor, weight: Tensor, bias: Tensor, add: Optional[Tensor], gelu: bool,
                          residual: bool) -> Tensor:
    if x.numel() == 0:
        return empty_result(x, weight, bias, add)
    return _triton_forward(x, weight, bias, add, gelu, residual)
