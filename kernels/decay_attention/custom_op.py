"""The fused kernels as one operator of PyTorch: schema, shapes, gradient, operation count. Triton is imported at the
first call, not before."""
from typing import Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common import launch
from ..common.decay import needs_gradient, rounded_sums


@torch.library.custom_op('subquad::decay_attention_fwd', mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, axis: str, mask: str, save: bool) -> Tuple[Tensor, Tensor]:
    """Output, and with `save` what `_backward` needs: see `triton.forward`."""
    from . import triton
    with torch.cuda.device_of(q):
        return triton.forward(q, k, v, sums, axis, mask, save)


@torch.library.custom_op('subquad::decay_attention_bwd', mutates_args=())
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, out: Tensor, lse: Tensor, axis: str,
              mask: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    from . import triton
    with torch.cuda.device_of(q):
        return triton.backward(grad, q, k, v, sums, out, lse, axis, mask)


def _length(q: Sequence[int], axis: str) -> int:
    return q[3] if axis == 'row' else q[2]


@_forward.register_fake
def _(q, k, v, sums, axis, mask, save):
    whole = launch.largest_tile('decay_attention', q.dtype, q.shape[-1], v.shape[-1])
    save = save and _length(q.shape, axis) > whole
    lse = sums.new_empty((1, *q.shape[:2], q.shape[2] * q.shape[3]) if save else (0,))
    return launch.token_major(v.shape, v), lse


@_backward.register_fake
def _(grad, q, k, v, sums, out, lse, axis, mask):
    return (*(launch.token_major(x.shape, x) for x in (q, k, v)), torch.empty_like(sums))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.axis, ctx.mask, ctx.saved = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    if not ctx.saved:
        raise RuntimeError('subquad::decay_attention_fwd ran with save=False: it has no gradient')
    return (*_backward(grad, *ctx.saved_tensors, ctx.axis, ctx.mask), None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


def _pairs(q: Sequence[int], axis: str) -> int:
    """Query-key pairs of all lines."""
    batch, heads, height, width, _ = q
    return batch * heads * height * width * _length(q, axis)


@register_flop_formula(torch.ops.subquad.decay_attention_fwd)
def _(q, k, v, sums, axis, *args, out_shape=None, **kwargs) -> int:
    return 2 * _pairs(q, axis) * (q[-1] + v[-1])


@register_flop_formula(torch.ops.subquad.decay_attention_bwd)
def _(grad, q, k, v, sums, out, lse, axis, *args, out_shape=None, **kwargs) -> int:
    return 2 * _pairs(q, axis) * (3 * q[-1] + 2 * v[-1])


def decay_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, axis: str, mask: str) -> Tensor:
    if v.numel() == 0:
        return v.clone()
    sums = rounded_sums(a, -1 if axis == 'row' else -2)
    return _forward(q, k, v, sums, axis, mask, needs_gradient(q, k, v, a))[0]
