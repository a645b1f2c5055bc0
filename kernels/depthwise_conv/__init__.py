"""Depthwise convolution of channels-last tokens, with activation, residual and sum in the same pass."""
from typing import Optional

import torch
from torch import Tensor

from ..common import checks
from ..common.autocast import cast_for_autocast
from ..dispatch import choose, register
from . import custom_op, portable, reference

LARGEST_KERNEL = 7


def _too_large(x: Tensor, weight: Tensor, *_: Tensor) -> Optional[str]:
    """Return why the kernels, which hold a window of each channel in registers, cannot take the weight."""
    if weight.shape[-1] > LARGEST_KERNEL:
        return (f'the kernels take windows of at most {LARGEST_KERNEL} x {LARGEST_KERNEL}, and this one is '
                f'{weight.shape[-1]} x {weight.shape[-1]}.')
    return None


register('depthwise_conv', {
    'reference': reference.depthwise_conv,
    'portable': portable.depthwise_conv,
    'triton': custom_op.depthwise_conv_triton,
    'export': portable.depthwise_conv,
}, _too_large)


def depthwise_conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
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
        bias: (C,), dtype of weight.
        add: a tensor of the shape and dtype of x, or None.
        gelu: apply GELU to x first.
        residual: add h.
        backend: 'auto', 'triton', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, H, W, C) and the dtype of x.

    Raises:
        ValueError: a shape, device or backend is not allowed, or the tensors exceed the memory.
        TypeError: a dtype or a flag is not allowed, or a tensor is not dense.
    """
    op, extra = 'depthwise_conv', {} if add is None else {'add': add}
    checks.tensors(op, dict(x=4, weight=4, bias=1, add=4), x=x, weight=weight, bias=bias, **extra)
    x = cast_for_autocast(x)
    if add is not None:
        add = cast_for_autocast(add)
        checks.same_dtype(op, x=x, add=add)
        checks.shape(op, 'add', add, x.shape, 'the shape of x')
    checks.same_dtype(op, weight=weight, bias=bias)
    if weight.dtype != x.dtype and weight.dtype != torch.float32:
        raise TypeError(f'{op}: weight must have the dtype of x ({x.dtype}) or torch.float32, got {weight.dtype}')
    channels, side = x.shape[3], weight.shape[-1]
    checks.shape(op, 'weight', weight, (channels, 1, side, side), 'one square window for each channel of x')
    checks.shape(op, 'bias', bias, (channels,), 'the channels of x')
    if side % 2 == 0:
        raise ValueError(f'{op}: weight must have windows of odd size, got {side} x {side}')
    checks.flags(op, gelu=gelu, residual=residual)
    run = choose(op, backend, x, weight, bias)
    return run(x, weight, bias, add, gelu, residual)
