"""Registration of the portable quad-tree attention with PyTorch: schema, shapes, gradient and operation count.

A compiler sees one node. On a GPU the layer is operations around `quadtree_solve`, which a compiler fuses.
"""
from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import empty_result, needs_gradient
from ..common.launch import token_major
from . import portable
from .portable import Options


@torch.library.custom_op('subquad::quadtree_attention_portable_fwd', mutates_args=())
def _portable_forward(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
                      parametrization: str, rho: float, shift: List[int], max_levels: Optional[int],
                      save: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output and, with `save`, the tensors that the backward pass needs (see `portable.forward`)."""
    out, *saved = portable.forward(q, k, v, bias, mask, Options(parametrization, rho, shift, max_levels))
    return (out, *saved) if save else (out, *(x.new_empty(0) for x in saved))


@torch.library.custom_op('subquad::quadtree_attention_portable_bwd', mutates_args=())
def _portable_backward(grad: Tensor, q: Optional[Tensor], k: Optional[Tensor], bias: Tensor, mask: Optional[Tensor],
                       out: Tensor, inner: Tensor, logits: Tensor, parametrization: str, rho: float, shift: List[int],
                       max_levels: Optional[int]) -> List[Tensor]:
    """Return the gradients of v, bias and, unless they are None, of q and k."""
    options = Options(parametrization, rho, shift, max_levels)
    return portable.backward(grad, q, k, bias, mask, out, inner, logits, options)


@_portable_forward.register_fake
def _(q, k, v, bias, mask, parametrization, rho, shift, max_levels, save):
    shapes = portable.saved_shapes(q, v, Options(parametrization, rho, shift, max_levels)) if save else ((0,), (0,))
    dtype = portable.exact_dtype(q, v)
    return token_major(v.shape, v), *(v.new_empty(shape, dtype=dtype) for shape in shapes)


@_portable_backward.register_fake
def _(grad, q, k, bias, mask, out, inner, logits, parametrization, rho, shift, max_levels):
    gradients = [token_major(x.shape, x) for x in ((out,) if q is None else (out, q, k))]
    return [gradients[0], torch.empty_like(bias), *gradients[1:]]


def _portable_save(ctx, inputs, output) -> None:
    q, k, _, bias, mask, *ctx.options, ctx.saved = inputs
    ctx.save_for_backward(q, k, bias, mask, *output)
    ctx.set_materialize_grads(False)


def _portable_differentiate(ctx, grad, *_):
    if not ctx.saved:
        raise RuntimeError('subquad::quadtree_attention_portable_fwd ran with save=False: it has no gradient')
    if grad is None:
        return (None,) * 10
    dv, dbias, *dqk = _portable_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *(dqk or (None, None)), dv, dbias, *(None,) * 6


_portable_forward.register_autograd(_portable_differentiate, setup_context=_portable_save)


def _count(v, shift, max_levels) -> int:
    """Return the number of channels of all nodes."""
    batch, heads, height, width, dim = v
    levels = portable.quadtree_levels(height, width, max_levels, shift)
    return batch * heads * dim * sum(level.height * level.width for level in levels)


@register_flop_formula(torch.ops.subquad.quadtree_attention_portable_fwd)
def _(q, k, v, bias, mask, parametrization, rho, shift, max_levels, save, out_shape=None, **kwargs) -> int:
    return 5 * _count(v, shift, max_levels)              # as `quadtree_solve`


@register_flop_formula(torch.ops.subquad.quadtree_attention_portable_bwd)
def _(grad, q, k, bias, mask, out, inner, logits, parametrization, rho, shift, max_levels, out_shape=None,
      **kwargs) -> int:
    return 9 * _count(grad, shift, max_levels)


def quadtree_attention_portable(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor,
                                mask: Optional[Tensor], options: Options) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, bias)
    save = needs_gradient(*(x for x in (q, k, v, bias) if x is not None))
    return _portable_forward(q, k, v, bias, mask, options.parametrization, options.rho, list(options.shift),
                             options.max_levels, save)[0]
