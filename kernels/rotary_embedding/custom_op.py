"""Registration of rotary embedding on Triton with PyTorch: schema, shapes, gradient and operation count. Triton is
imported at the first call."""
from typing import Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.launch import token_order


@torch.library.custom_op('subquad::rotary_embedding_fwd', mutates_args=())
def _triton_forward(q: Tensor, k: Tensor, table: Tensor, scale: float, inverse: bool) -> Tuple[Tensor, Tensor]:
    """Rotate q and k, or with `inverse` rotate them back; k is scaled in both cases."""
    from . import triton
    with torch.cuda.device_of(q):
        return triton.forward(q, k, table, scale, inverse)


@_triton_forward.register_fake
def _(q, k, table, scale, inverse):
    return token_order(q), token_order(k)


def _triton_save(ctx, inputs, output) -> None:
    _, _, table, ctx.scale, ctx.inverse = inputs
    ctx.save_for_backward(table)


def _triton_differentiate(ctx, dq: Tensor, dk: Tensor):
    dq, dk = _triton_forward(dq, dk, ctx.saved_tensors[0], ctx.scale, not ctx.inverse)
    return dq, dk, None, None, None


_triton_forward.register_autograd(_triton_differentiate, setup_context=_triton_save)


@register_flop_formula(torch.ops.subquad.rotary_embedding_fwd)
def _(q, k, table, *args, out_shape=None, **kwargs) -> int:
    return 0                                     # like torch's counter, which leaves elementwise operations out


def rotary_embedding_triton(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    if q.numel() == 0:
        return q.clone(), k.clone()
    return _triton_forward(q, k, table.contiguous(), scale, False)
