"""Depthwise convolution of channels-last tokens, with activation, residual and sum in the same pass."""
from struct import Struct
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import checks
from ..common.declare import gradients_of, late, node
from ..common.launch import dense_like
from ..common.numerics import cast_for_autocast, empty_result, needs_gradient
from ..dispatch import OPERATORS, Operator, choose
from ..native import DONE, function
from . import reference

LARGEST_KERNEL = 7


def depthwise_conv(
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        add: Optional[Tensor] = None,
        *,
        gelu: bool = False,
        residual: bool = False,
        backend: str = 'auto',
) -> Tensor:
    """Convolve each channel of tokens on a grid with its own k x k window, at stride 1 with zeros around the grid.

    With h = GELU(x) (exact, by the error function) or h = x:

        y[b, i, j, c] = bias[c] + sum_{m, n} weight[c, 0, m, n] h[b, i + m - k//2, j + n - k//2, c]
                        + h[b, i, j, c] (with `residual`) + add[b, i, j, c] (with `add`)

    Under autocast, x is cast as for a product.

    Args:
        x: tokens (B, H, W, C); float32, float64, float16 or bfloat16; any strides.
        weight: (C, 1, k, k) with an odd k, dtype of x or float32.
        bias: (C,), dtype of weight, or None for 0.
        add: a tensor of the shape and dtype of x, or None.
        gelu: apply GELU to x first.
        residual: add h.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, H, W, C) and the dtype of x.

    Raises:
        ValueError: a shape, device or backend is not allowed, or the tensors exceed the memory.
        TypeError: a dtype or a flag is not allowed, or a tensor is not dense.
    """
    op, own = 'depthwise_conv', {} if bias is None else {'bias': bias}
    extra = {} if add is None else {'add': add}
    checks.tensors(op, dict(x=4, weight=4, bias=1, add=4), 'weight', *own, x=x, weight=weight, **own, **extra)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x, add = cast_for_autocast(x), None if add is None else cast_for_autocast(add)
    if weight.dtype != x.dtype and weight.dtype != torch.float32:
        raise TypeError(f'{op}: weight must have the dtype of x ({x.dtype}) or torch.float32, got {weight.dtype}')
    channels, side = x.shape[3], weight.shape[-1]
    rows = [('weight', weight, (channels, 1, side, side), 'one square window for each channel of x')]
    if bias is not None:
        rows.append(('bias', bias, (channels,), 'the channels of x'))
    if add is not None:
        checks.same_dtype(op, x=x, add=add)
        rows.append(('add', add, x.shape, 'the shape of x'))
    checks.shapes(op, *rows)
    if side % 2 == 0:
        raise ValueError(f'{op}: weight must have windows of odd size, got {side} x {side}')
    if {type(gelu), type(residual)} != {bool}:
        checks.flags(op, gelu=gelu, residual=residual)
    return choose(op, backend, x, weight, *own.values(), *([] if add is None else [add]))(
        x, weight, bias, add, gelu, residual)


def _portable(x: Tensor, weight: Tensor, bias: Optional[Tensor], add: Optional[Tensor], gelu: bool,
              residual: bool) -> Tensor:
    """Convolve by PyTorch's own convolution. The residual is an increment of 1 at the center of the window."""
    h, padding = F.gelu(x) if gelu else x, weight.shape[-1] // 2
    if residual:
        weight = weight + F.pad(torch.ones_like(weight[:, :, :1, :1]), [padding] * 4)
    if weight.dtype != x.dtype:
        weight, bias = weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
    y = F.conv2d(h.permute(0, 3, 1, 2), weight, bias, padding=padding, groups=weight.shape[0]).permute(0, 2, 3, 1)
    return y if add is None else y + add


def _filled(weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Return the bias, or zeros for None."""
    return weight.new_zeros(weight.shape[0]) if bias is None else bias


def _products(x: Sequence[int], weight: Sequence[int]) -> int:
    """Return the floating-point operations of the windows, as torch counts a convolution."""
    return 2 * torch.Size(x).numel() * weight[-1] ** 2


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, gelu: bool, residual: bool, with_input: bool, with_weight: bool
               ) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; those that are not wanted are empty."""
    empty = x.new_empty(0)
    return (dense_like(x) if with_input else empty,
            dense_like(weight) if with_weight else weight.new_empty(0),
            weight.new_empty(weight.shape[0] if with_weight else 0))


def _nodes(name: str, forward: Callable[..., Tensor], backward: Callable[..., Tuple[Tensor, Tensor, Tensor]]) -> Any:
    """Register an implementation with its gradient, and return its operator."""
    @node(f'depthwise_conv{name}_fwd', forward, lambda x, weight, *_: _products(x, weight))
    def forward_node(x: Tensor, weight: Tensor, bias: Tensor, add: Optional[Tensor], gelu: bool, residual: bool
                     ) -> Tensor:
        return dense_like(x)

    backward_node = node(f'depthwise_conv{name}_bwd', backward, lambda grad, x, weight, gelu, residual, *wanted:
                         _products(x, weight) * sum(wanted))(_gradients)

    def save(ctx, inputs, output) -> None:
        *tensors, _, ctx.gelu, ctx.residual = inputs
        ctx.save_for_backward(*tensors)

    def differentiate(ctx, grad: Tensor):
        x, weight, bias = ctx.saved_tensors
        dadd = grad if ctx.needs_input_grad[3] else None
        if torch.is_grad_enabled():
            *grads, _, _, _ = gradients_of(_portable, (x, weight, bias, None, ctx.gelu, ctx.residual), grad,
                                           (*ctx.needs_input_grad[:3], False, False, False))
            return *grads, dadd, None, None
        with_input, with_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        dx, dweight, dbias = backward_node(grad, x, weight, ctx.gelu, ctx.residual, with_input, with_weight)
        return (dx if with_input else None, *((dweight, dbias) if with_weight else (None, None)),
                dadd, None, None)

    forward_node.register_autograd(differentiate, setup_context=save)
    return forward_node


# --- C++

_ARGUMENTS, _NONE = Struct('9Q6q5q3q5q'), (0, 0, 0)          # `struct Convolution` of native.cpp


def _native_forward(x: Tensor, weight: Tensor, bias: Tensor, add: Optional[Tensor], gelu: bool, residual: bool
                    ) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    x, weight, bias = x if x.stride(3) == 1 else x.contiguous(), weight.contiguous(), bias.contiguous()
    add = add if add is None or add.stride(3) == 1 else add.contiguous()
    done = function('depthwise_conv')(_ARGUMENTS.pack(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(), 0 if add is None else add.data_ptr(), 0, y.data_ptr(), *_NONE,
        *_NONE if add is None else add.stride()[:3], *_NONE,
        *x.shape, weight.shape[-1], *x.stride()[:3], x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16, gelu,
        residual, torch.get_num_threads())) == DONE
    return y if done else _portable(x, weight, bias, add, gelu, residual)


def _native_backward(grad: Tensor, x: Tensor, weight: Tensor, gelu: bool, residual: bool, with_input: bool,
                     with_weight: bool) -> Tuple[Tensor, Tensor, Tensor]:
    outputs = dx, dweight, dbias = _gradients(grad, x, weight, gelu, residual, with_input, with_weight)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    grad, x = (t if t.stride(3) == 1 else t.contiguous() for t in (grad, x))
    weight = weight.contiguous()
    done = function('depthwise_conv')(_ARGUMENTS.pack(
        x.data_ptr(), weight.data_ptr(), 0, 0, grad.data_ptr(), 0, dx.data_ptr(), dweight.data_ptr(), dbias.data_ptr(),
        *_NONE, *grad.stride()[:3], *x.shape, weight.shape[-1], *x.stride()[:3], x.dtype == torch.bfloat16,
        weight.dtype == torch.bfloat16, gelu, residual, torch.get_num_threads())) == DONE
    if not done:
        raise MemoryError('depthwise_conv: no memory for the gradients')
    return outputs


_native_node = _nodes('_native', _native_forward, _native_backward)


def _native(x: Tensor, weight: Tensor, bias: Optional[Tensor], add: Optional[Tensor], gelu: bool,
            residual: bool) -> Tensor:
    # Of windows up to 3 x 3, oneDNN has the faster gradient: 5.7 against 7.8 ms for eight 14 x 14 x 768 maps.
    small = weight.shape[-1] <= 3 and torch.is_grad_enabled() and needs_gradient(x, weight, bias)
    if small:
        return _portable(x, weight, bias, add, gelu, residual)
    return _native_node(x, weight, _filled(weight, bias), add, gelu, residual)


# --- Triton

def _too_large(x: Tensor, weight: Tensor, *_: Tensor) -> Optional[str]:
    """Return why the kernels, which hold windows in registers, cannot take the weight."""
    side, most = weight.shape[-1], LARGEST_KERNEL
    if side <= most:
        return None
    return f'the kernels take windows of at most {most} x {most}, and this one is {side} x {side}.'


_forward = _nodes('', late(__name__, 'triton.forward'), late(__name__, 'triton.backward'))


def _triton(x: Tensor, weight: Tensor, bias: Optional[Tensor], add: Optional[Tensor], gelu: bool,
            residual: bool) -> Tensor:
    if x.numel() == 0:
        return empty_result(x, weight, bias, add)
    return _forward(x, weight, _filled(weight, bias), add, gelu, residual)


OPERATORS['depthwise_conv'] = Operator(
    implementations={
        'reference': reference.depthwise_conv,
        'portable': _portable,
        'native': _native,
        'triton': _triton,
        'export': _portable,
    },
    plain=True,
    native_gradient=True,
    objection=_too_large,
)
