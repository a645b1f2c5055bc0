"""Registration of separable attention on Triton with PyTorch: schema, shapes, gradient and operation count. Triton is
imported at the first call."""
from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import empty_result
from ..common.launch import dense_like
from ..common.patches import Patch


@torch.library.custom_op('subquad::separable_attention_fwd', mutates_args=())
def _triton_forward(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor], key_bias: Optional[Tensor],
                    patch_height: int, patch_width: int, sampling: str) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output and, for P groups, softmax statistics (B, P, 2, L) and summed keys (B, P, C) in float32."""
    from . import triton
    with torch.cuda.device_of(query):
        return triton.forward(query, key, value, key_weight, key_bias, (patch_height, patch_width), sampling)


@torch.library.custom_op('subquad::separable_attention_bwd', mutates_args=())
def _triton_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
                     key_bias: Optional[Tensor], statistics: Tensor, summed: Tensor, patch_height: int,
                     patch_width: int, sampling: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, and of the context (B, P, D) in float32."""
    from . import triton_backward
    with torch.cuda.device_of(query):
        return triton_backward.backward(grad, query, key, value, key_weight, key_bias, statistics, summed,
                               (patch_height, patch_width), sampling)


@_triton_forward.register_fake
def _(query, key, value, key_weight, key_bias, patch_height, patch_width, sampling):
    table = query.shape[0], patch_height * patch_width
    return (dense_like(value), query.new_empty(*table, 2, query.shape[-1], dtype=torch.float32),
            query.new_empty(*table, key.shape[-1], dtype=torch.float32))


@_triton_backward.register_fake
def _(grad, query, key, value, key_weight, key_bias, statistics, summed, patch_height, patch_width, sampling):
    return (dense_like(query), dense_like(key), dense_like(value),
            summed.new_empty(*summed.shape[:2], value.shape[-1]))


def _triton_save(ctx, inputs, output) -> None:
    *tensors, ctx.patch_height, ctx.patch_width, ctx.sampling = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _triton_differentiate(ctx, grad, grad_statistics, grad_summed):
    if grad is None:
        return (None,) * 8
    *_, key_weight, key_bias, _, summed = saved = ctx.saved_tensors
    dquery, dkey, dvalue, dcontext = _triton_backward(grad, *saved, ctx.patch_height, ctx.patch_width, ctx.sampling)
    dweight = dbias = None
    if key_weight is not None and ctx.needs_input_grad[3]:
        dweight = (dcontext.flatten(0, 1).T @ summed.flatten(0, 1)).to(key_weight.dtype)
    if key_bias is not None and ctx.needs_input_grad[4]:
        dbias = dcontext.sum((0, 1)).to(key_bias.dtype)
    return dquery, dkey, dvalue, dweight, dbias, None, None, None


_triton_forward.register_autograd(_triton_differentiate, setup_context=_triton_save)


def _map_count(key, key_weight) -> int:
    """Return the multiply-adds of the keys' linear map by its definition, which maps every token."""
    return torch.Size(key).numel() * key_weight[0] if key_weight is not None else 0


@register_flop_formula(torch.ops.subquad.separable_attention_fwd)
def _(query, key, value, key_weight, *args, out_shape=None, **kwargs) -> int:
    return 2 * _map_count(key, key_weight)


@register_flop_formula(torch.ops.subquad.separable_attention_bwd)
def _(grad, query, key, value, key_weight, *args, out_shape=None, **kwargs) -> int:
    return 4 * _map_count(key, key_weight)


def separable_attention_triton(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
                               key_bias: Optional[Tensor], patch: Patch, sampling: str) -> Tensor:
    if query.numel() * value.numel() == 0:
        return empty_result(value, query, key, key_weight, key_bias)
    return _triton_forward(query, key, value, key_weight, key_bias, *patch, sampling)[0]
