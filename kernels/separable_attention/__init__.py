"""Separable self-attention: one context vector for all tokens of a group, in O(N) (MobileViTv2, section 3.2)."""
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ..common import checks, patches
from ..common.declare import late, node
from ..common.launch import dense_like
from ..common.numerics import empty_result
from ..dispatch import OPERATORS, Operator, choose
from . import native, portable, reference

SAMPLINGS = patches.SAMPLINGS


def separable_attention(query: Tensor, key: Tensor, value: Tensor, *, patch_size: Union[int, Tuple[int, int]] = 1,
                        sampling: str = 'pixel', key_weight: Optional[Tensor] = None, key_bias: Optional[Tensor] = None,
                        return_scores: bool = False, backend: str = 'auto') -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Compute relu(value) * context, with context = mean over latent tokens of sum_n softmax_n(query) key[n].

    Tokens attend within groups. With `patch_size` (2, 2) and 'pixel' sampling, all tokens at one place of their
    2 x 2 patch form a group, so there are four groups. With 'patch' sampling each of 2 x 2 patches of the grid is a
    group. A sequence is a grid of one row. The grid need not be a multiple of the patch.

    Queries and keys may come from another grid than values (cross-attention). With `key_weight`, keys are
    `key @ key_weight' + key_bias`. Scores sum to 1, so the map is applied to the context, once per group.

    Args:
        query: logits of each token and latent token, shape (B, H, W, L) with L >= 1 (published networks have L = 1);
            float32, float64, float16 or bfloat16; any strides.
        key: shape (B, H, W, D), or (B, H, W, C) with key_weight; dtype of query.
        value: shape (B, Hv, Wv, D), dtype of query.
        patch_size: for 'pixel' sampling the height and width of a patch; for 'patch' sampling the number of patches
            along the height and the width. One number stands for both.
        sampling: 'pixel' or 'patch'.
        key_weight: shape (D, C), or None.
        key_bias: shape (D,), or None; only with key_weight.
        return_scores: also return the context scores.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, Hv, Wv, D) and the dtype of value. With return_scores also the scores (B, H, W, L), which
        sum to 1 within each group, in float32 (float64 for float64 input).

    Raises:
        ValueError: a shape, device, patch size, sampling or backend is not allowed, the tensors exceed the memory, or
            there are no tokens.
        TypeError: a dtype or a flag is not allowed, or a tensor is not dense.
    """
    # A tracer would record the checks or warn about each.
    if not torch.jit.is_tracing() and not _is_plain_call(
            query, key, value, patch_size, sampling, key_weight, key_bias, return_scores):
        _check(query, key, value, patch_size, sampling, key_weight, key_bias, return_scores)
    patch = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
    y = choose('separable_attention', backend, query, key, value)(
        query, key, value, key_weight, key_bias, patch, sampling)
    return (y, portable.context_scores(query, patch, sampling)) if return_scores else y


def _is_plain_call(query: Tensor, key: Tensor, value: Tensor, patch_size: Union[int, Tuple[int, int]], sampling: str,
                   key_weight: Optional[Tensor], key_bias: Optional[Tensor], return_scores: bool) -> bool:
    """Whether these are valid arguments as MobileViTv2's self-attention passes them, so that `_check`, which would take
    as long as the arithmetic on a small map, can be skipped."""
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or value.ndim != 4:
        return False
    if query.is_nested or key.is_nested or value.is_nested or value.numel() > checks.LARGE:
        return False
    batch, height, width, dim = value.shape
    return (query.layout is key.layout is value.layout is torch.strided and type(return_scores) is bool
            and type(patch_size) is int and patch_size > 0 and sampling in SAMPLINGS
            and query.dtype == key.dtype == value.dtype and value.dtype in checks.DTYPES
            and query.device == key.device == value.device and height > 0 and width > 0 and query.ndim == 4
            and key.shape == value.shape and query.shape[:3] == value.shape[:3] and query.shape[3] > 0
            and (key_weight is None if key_bias is None else
                 key_weight is not None and key_weight.shape == (dim, dim) and key_bias.shape == (dim,)
                 and key_weight.dtype == key_bias.dtype == value.dtype
                 and key_weight.device == key_bias.device == value.device))


def _check(query: Tensor, key: Tensor, value: Tensor, patch_size: Union[int, Tuple[int, int]], sampling: str,
           key_weight: Optional[Tensor], key_bias: Optional[Tensor], return_scores: bool) -> None:
    """Check all arguments; errors name the argument, its value and what is allowed."""
    op = 'separable_attention'
    patch = patches.patch(op, patch_size)
    checks.flags(op, return_scores=return_scores)
    weights = {name: x for name, x in (('key_weight', key_weight), ('key_bias', key_bias)) if x is not None}
    checks.tensors(op, dict(query=4, key=4, value=4, key_weight=2, key_bias=1), query=query, key=key, value=value,
                   **weights)
    checks.same_dtype(op, query=query, key=key, value=value, **weights)
    checks.one_of(op, 'sampling', sampling, SAMPLINGS)
    if query.shape[-1] < 1:
        raise ValueError(f'{op}: query must have at least one channel (one for each latent token), got shape '
                         f'{tuple(query.shape)}')
    checks.shapes(op, ('key', key, (*query.shape[:3], key.shape[-1]), 'the shape of query except the last dimension'))
    if value.shape[0] != key.shape[0]:
        raise ValueError(f'{op}: value must have the batch size of key ({key.shape[0]}), got {value.shape[0]}')
    for name, x in (('query', query), ('value', value)):
        if 0 in x.shape[1:3]:
            raise ValueError(f'{op}: {name} must have at least one token, got shape {tuple(x.shape)}')
    if key_bias is not None and key_weight is None:
        raise ValueError(f'{op}: key_bias needs key_weight')
    if key_weight is None:
        checks.shapes(op, ('value', value, (*value.shape[:3], key.shape[-1]), 'the channels of key'))
    else:
        checks.shapes(op, ('key_weight', key_weight, (value.shape[-1], key.shape[-1]), 'channels of value and of key'))
    if key_bias is not None:
        checks.shapes(op, ('key_bias', key_bias, (value.shape[-1],), 'the channels of value'))
    patches.check_groups(op, key.shape[1:3], value.shape[1:3], patch, sampling)


# --- Triton

def _map_count(key, key_weight) -> int:
    """Return the multiply-adds of the keys' map by its definition, which maps every token."""
    return torch.Size(key).numel() * key_weight[0] if key_weight is not None else 0


@node('separable_attention_fwd', lambda *args: late(__name__, 'triton.forward')(*args[:5], args[5:7], args[7]),
      lambda query, key, value, key_weight, *_: 2 * _map_count(key, key_weight))
def _forward(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor], key_bias: Optional[Tensor],
             patch_height: int, patch_width: int, sampling: str) -> Tuple[Tensor, Tensor, Tensor]:
    """The output and, for P groups, softmax statistics (B, P, 2, L) and summed keys (B, P, C), both
    in float32."""
    table = query.shape[0], patch_height * patch_width
    return (dense_like(value), query.new_empty(*table, 2, query.shape[-1], dtype=torch.float32),
            query.new_empty(*table, key.shape[-1], dtype=torch.float32))


@node('separable_attention_bwd',
      lambda *args: late(__name__, 'triton_backward.backward')(*args[:8], args[8:10], args[10]),
      lambda grad, query, key, value, key_weight, *_: 4 * _map_count(key, key_weight))
def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
              key_bias: Optional[Tensor], statistics: Tensor, summed: Tensor, patch_height: int, patch_width: int,
              sampling: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, and of the context (B, P, D) in float32."""
    return (dense_like(query), dense_like(key), dense_like(value),
            summed.new_empty(*summed.shape[:2], value.shape[-1]))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.patch_height, ctx.patch_width, ctx.sampling = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, grad_statistics, grad_summed):
    if grad is None:
        return (None,) * 8
    *_, key_weight, key_bias, _, summed = saved = ctx.saved_tensors
    dquery, dkey, dvalue, dcontext = _backward(grad, *saved, ctx.patch_height, ctx.patch_width,
                                               ctx.sampling)
    dweight = dbias = None
    if key_weight is not None and ctx.needs_input_grad[3]:
        dweight = (dcontext.flatten(0, 1).T @ summed.flatten(0, 1)).to(key_weight.dtype)
    if key_bias is not None and ctx.needs_input_grad[4]:
        dbias = dcontext.sum((0, 1)).to(key_bias.dtype)
    return dquery, dkey, dvalue, dweight, dbias, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _triton(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor], key_bias: Optional[Tensor],
            patch: patches.Patch, sampling: str) -> Tensor:
    if query.numel() * value.numel() == 0:
        return empty_result(value, query, key, key_weight, key_bias)
    return _forward(query, key, value, key_weight, key_bias, *patch, sampling)[0]


OPERATORS['separable_attention'] = Operator(
    implementations={
        'reference': reference.separable_attention,
        'portable': portable.separable_attention,
        'native': native.separable_attention,
        'triton': _triton,
        'export': portable.separable_attention_export,
    },
    plain=True,
    native_gradient=True,
)
