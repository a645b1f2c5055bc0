"""Separable attention in C++: the nodes of the forward and the backward pass."""
from struct import Struct
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.declare import gradients_of, node
from ..common.launch import dense_like
from ..common.numerics import needs_gradient
from ..common.patches import Patch
from ..native import DONE, function
from . import portable

# `struct Separable` of native.cpp.
_ARGUMENTS = Struct('13Q8q3q4q3q3q3q2q')


def _call(pointers: Sequence[int], query: Tensor, key: Tensor, value: Tensor, patch: Tuple[int, int, str],
          grad_strides: Tuple[int, int, int] = (0, 0, 0)) -> None:
    arguments = _ARGUMENTS.pack(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), *pointers, *query.shape[:3], *value.shape[1:3],
        query.shape[3], key.shape[3], value.shape[3], patch[0], patch[1], patch[2] == 'pixel', *query.stride(),
        *key.stride()[:3], *value.stride()[:3], *grad_strides, value.dtype == torch.bfloat16, torch.get_num_threads())
    if function('separable_attention')(arguments) != DONE:
        raise MemoryError('separable_attention: no memory for the logits of a group')


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _tables(query: Tensor, value: Tensor, patch_height: int, patch_width: int) -> Tuple[Tensor, Tensor]:
    batch, height, width, _ = query.shape
    groups = min(patch_height, height) * min(patch_width, width)           # at most; those that exist come first
    return (query.new_empty(query.shape, dtype=torch.float32),
            query.new_empty((batch, groups, value.shape[3]), dtype=torch.float32))


def _run_forward(query, key, value, key_weight, key_bias, patch_height, patch_width, sampling, statistics=None):
    patch = patch_height, patch_width, sampling
    key, value, (scores, context) = _dense(key), _dense(value), _tables(query, value, patch_height, patch_width)
    y = torch.empty_like(value, memory_format=torch.contiguous_format)
    if key_weight is not None:
        key_weight, key_bias = key_weight.contiguous(), None if key_bias is None else key_bias.contiguous()
    _call((0 if key_weight is None else key_weight.data_ptr(), 0 if key_bias is None else key_bias.data_ptr(),
           0 if statistics is None else statistics.data_ptr(), scores.data_ptr(), context.data_ptr(), y.data_ptr(),
           0, 0, 0, 0), query, key, value, patch)
    return y, scores, context


def _run_backward(grad, query, key, value, scores, context, *patch):
    grad, key, value = _dense(grad), _dense(key), _dense(value)
    dquery, dkey, dvalue = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    _call((0, 0, 0, scores.data_ptr(), context.data_ptr(), 0, grad.data_ptr(), dquery.data_ptr(), dkey.data_ptr(),
           dvalue.data_ptr()), query, key, value, patch, grad.stride()[:3])
    return dquery, dkey, dvalue


def _forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], key_weight: Any, key_bias: Any,
                   patch_height: int, patch_width: int, *_: Any) -> int:
    """Return the operations of the weighted sums, and of the map of keys for each group."""
    groups = query[0] * patch_height * patch_width
    return 2 * torch.Size(key).numel() + (2 * groups * key[3] * value[3] if key_weight is not None else 0)


@node('separable_attention_native_fwd', _run_forward, _forward_flops)
def native_forward(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor], key_bias: Optional[Tensor],
                   patch_height: int, patch_width: int, sampling: str, statistics: Optional[Tensor] = None
                   ) -> Tuple[Tensor, Tensor, Tensor]:
    """Return y, the softmax of each latent token (B, H, W, L), and contexts (B, P, D), both in float32.

    P is at least the number of groups, whose contexts come first.
    query, key, value: float32 or bfloat16, any strides. With `statistics`, (B, 2) in float32, the mean of an image is
    subtracted from its keys, and they are multiplied by the second number.
    """
    return (dense_like(value), *_tables(query, value, patch_height, patch_width))


@node('separable_attention_native_bwd', _run_backward,
      lambda grad, query, key, *_: 6 * torch.Size(key).numel())
def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, context: Tensor,
              patch_height: int, patch_width: int, sampling: str) -> Tuple[Tensor, Tensor, Tensor]:
    return dense_like(query), dense_like(key), dense_like(value)


def _save(ctx, inputs, output) -> None:
    ctx.patch = inputs[5:8]
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    if grad is None:
        return (None,) * 9
    saved = ctx.saved_tensors                                    # checkpointing gives them once
    inputs = saved[:3]
    if torch.is_grad_enabled():                                  # for a second derivative, which portable has
        grads = gradients_of(lambda *args: portable.separable_attention(*args, None, None, ctx.patch[:2], ctx.patch[2]),
                             inputs, grad, ctx.needs_input_grad[:3])
    else:
        grads = _backward(grad, *saved, *ctx.patch)
    return (*grads, *(None,) * 6)


native_forward.register_autograd(_differentiate, setup_context=_save)


def native_attention(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
                     key_bias: Optional[Tensor], patch: Patch, sampling: str, statistics: Optional[Tensor] = None
                     ) -> Tensor:
    """Return y of `native_forward`."""
    return native_forward(query, key, value, key_weight, key_bias, *patch, sampling, statistics)[0]


def separable_attention(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
                        key_bias: Optional[Tensor], patch: Patch, sampling: str) -> Tensor:
    """Run the native operator. Gradients through a map of keys, and of groups of whole rows, where PyTorch is as fast,
    are PyTorch's."""
    if not (torch.is_grad_enabled() and needs_gradient(query, key, value, key_weight, key_bias)):
        return native_attention(query, key, value, key_weight, key_bias, patch, sampling)
    if key_weight is not None or patch[1] == 1:
        return portable.separable_attention(query, key, value, key_weight, key_bias, patch, sampling)
    return native_forward(query, key, value, None, None, *patch, sampling)[0]
