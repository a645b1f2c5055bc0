"""Registration of portable criss-cross attention with PyTorch: schema, shapes, gradient and operation count. On Triton
it is a chain of the operators of `decay_attention`, which are registered there."""
from typing import Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import compute_dtype, cumulative
from . import portable


@torch.library.custom_op('subquad::crisscross_attention_portable_fwd', mutates_args=())
def _portable_forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str) -> Tensor:
    return portable.forward(q, k, v, sa, sb, mask_mode, paths)


@torch.library.custom_op('subquad::crisscross_attention_portable_bwd', mutates_args=())
def _portable_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str,
                       paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return portable.backward(grad, q, k, v, sa, sb, mask_mode, paths)


@_portable_forward.register_fake
def _(q, k, v, sa, sb, mask_mode, paths):
    return torch.empty_like(v)


@_portable_backward.register_fake
def _(grad, q, k, v, sa, sb, mask_mode, paths):
    return tuple(torch.empty_like(x) for x in (q, k, v, sa, sb))


def _portable_save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


_portable_forward.register_autograd(
    lambda ctx, grad: (*_portable_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), None, None),
    setup_context=_portable_save)


def _line_pairs(q: Sequence[int]) -> int:
    groups, height, width, _ = q
    return groups * height * width * (height + width)


@register_flop_formula(torch.ops.subquad.crisscross_attention_portable_fwd)
def _(q, k, v, sa, sb, mask_mode, paths, out_shape=None, **kwargs) -> int:
    return 2 * _line_pairs(q) * (q[-1] + v[-1] * (2 if paths == 'both' else 1))


@register_flop_formula(torch.ops.subquad.crisscross_attention_portable_bwd)
def _(grad, q, k, v, sa, sb, mask_mode, paths, out_shape=None, **kwargs) -> int:
    return 2 * _line_pairs(q) * (3 * q[-1] + v[-1] * (5 if paths == 'both' else 3))


def crisscross_attention_portable(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                                  paths: str) -> Tensor:
    if v.numel() == 0:
        return torch.zeros_like(v)
    dtype = compute_dtype(q.dtype)
    sums = cumulative(log_alpha, -1, q.dtype), cumulative(log_beta, -2, q.dtype)
    inputs = [x.to(dtype).flatten(0, 1).contiguous() for x in (q, k, v, *sums)]
    return _portable_forward(*inputs, mask_mode, paths).view(v.shape).to(v.dtype)
