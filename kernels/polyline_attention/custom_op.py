"""The fused kernels as one operator of PyTorch: schema, shapes, gradient, operation count. Triton is imported at the
first call, not before."""
from typing import Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common import launch
from ..common.decay import needs_gradient, rounded_sums


@torch.library.custom_op('subquad::polyline_attention_fwd', mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask: str, paths: str,
             save: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Output, and with `save` what `_backward` needs: see `triton.forward`."""
    from . import triton
    with torch.cuda.device_of(q):
        return triton.forward(q, k, v, sa, sb, mask, paths, save)


@torch.library.custom_op('subquad::polyline_attention_bwd', mutates_args=())
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, out: Tensor, first: Tensor,
              lse: Tensor, mask: str, paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import triton
    with torch.cuda.device_of(q):
        return triton.backward(grad, q, k, v, sa, sb, out, first, lse, mask, paths)


@_forward.register_fake
def _(q, k, v, sa, sb, mask, paths, save):
    two = mask == 'logit' and paths == 'both'
    first = launch.token_major(v.shape, v) if save and two else v.new_empty(0)
    lse = sa.new_empty((1 + two, *q.shape[:2], q.shape[2] * q.shape[3]) if save else (0,))
    return launch.token_major(v.shape, v), first, lse


@_backward.register_fake
def _(grad, q, k, v, sa, sb, out, first, lse, mask, paths):
    return (*(launch.token_major(x.shape, x) for x in (q, k, v)), torch.empty_like(sa), torch.empty_like(sb))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.mask, ctx.paths, ctx.saved = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    if not ctx.saved:
        raise RuntimeError('subquad::polyline_attention_fwd ran with save=False: it has no gradient')
    return (*_backward(grad, *ctx.saved_tensors, ctx.mask, ctx.paths), None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


def _products(q: Sequence[int], v: Sequence[int]) -> int:
    """Floating-point operations of one product with K and one with V."""
    batch, heads, height, width, dim = q
    return 2 * batch * heads * (height * width) ** 2 * (dim + v[-1])


@register_flop_formula(torch.ops.subquad.polyline_attention_fwd)
def _(q, k, v, *args, out_shape=None, **kwargs) -> int:
    return _products(q, v)


@register_flop_formula(torch.ops.subquad.polyline_attention_bwd)
def _(grad, q, k, v, *args, out_shape=None, **kwargs) -> int:
    return 2 * _products(q, v) + _products(q, [0])      # as torch counts attention: the logits are computed again


def polyline_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, mask: str, paths: str) -> Tensor:
    if v.numel() == 0:
        return v.clone()
    return _forward(q, k, v, rounded_sums(a, -1), rounded_sums(b, -2), mask, paths, needs_gradient(q, k, v, a, b))[0]
