"""What the registrations of the recurrences share: gradients of forward operators, and results without elements."""
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.decay import compute_dtype, empty_result
from ..common.declare import check_saved


def in_dtypes(backward: Callable[..., Sequence[Tensor]], *args: Any) -> Tuple[Tensor, ...]:
    """Return backward(dy, dfinal, *tensors, ...), each gradient in the dtype of its tensor."""
    grads = backward(*args)
    return tuple(grad if x is None else grad.to(x.dtype) for grad, x in zip(grads, args[2:]))


def empty_gradient(x: Optional[Tensor], like: Tensor) -> Tensor:
    """Return an uninitialized gradient of x, without elements for None."""
    return like.new_empty(0, dtype=compute_dtype(like.dtype)) if x is None else x.new_empty(x.shape)


def empty_output(i: Tensor) -> Tensor:
    """Return an uninitialized (B, H, T, D) stored as (B, T, H, D): merging heads needs no copy."""
    batch, heads, length, dim = i.shape
    return i.new_empty(batch, length, heads, dim).transpose(1, 2)


def unchanged(i: Tensor, others: Sequence[Tensor], keys: int, state: Optional[Tensor], is_complex: bool = False
              ) -> Tuple[Tensor, Tensor]:
    """Return the output and the memory after lines without tokens, or without lines."""
    y, dtype = empty_result(i, *others), compute_dtype(i.dtype)
    dtype = dtype.to_complex() if is_complex else dtype
    if state is None:
        state = i.new_zeros(*i.shape[:2], keys, i.shape[3], dtype=dtype)
    return y, state.to(dtype) + y.sum()


def differentiate(forward: Any, backward: Any, tensors: int) -> None:
    """Register the gradient of a forward operator of so many tensors, other options, and `save` and `last`.

    It returns (y, states, memory); backward takes (dy, dmemory, tensors, states, options)."""
    def save(ctx, inputs, output) -> None:
        ctx.options, ctx.saved, ctx.last = inputs[tensors:-2], *inputs[-2:]
        ctx.present = [x is not None for x in inputs[:tensors]]
        ctx.save_for_backward(*inputs[:tensors], output[1])
        ctx.set_materialize_grads(False)

    def gradient(ctx, dy, _, dfinal):
        check_saved(forward, ctx.saved)
        *inputs, states = ctx.saved_tensors
        none = (None,) * (len(ctx.options) + 2)
        if dy is None and dfinal is None:
            return (*(None,) * tensors, *none)
        dy = torch.zeros_like(inputs[0]) if dy is None else dy
        grads = backward(dy, dfinal if ctx.last else None, *inputs, states, *ctx.options)
        return (*(grad if there else None for grad, there in zip(grads, ctx.present)), *none)

    forward.register_autograd(gradient, setup_context=save)
