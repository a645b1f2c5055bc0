"""Registration of the recurrence with PyTorch: schemas, shapes, gradient and operation counts of the portable backend.
A compiler sees one node for each."""
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import compute_dtype, needs_gradient
from ..eos_scan.chunks import SINGLE_CHUNK, boundary_shape
from ..eos_scan.problem import DIRECTIONS, Output, steps_of
from ..eos_scan.registration import differentiate, empty_gradient, empty_output, in_dtype, unchanged
from . import portable


@torch.library.custom_op('subquad::eos_matmul_portable_fwd', mutates_args=())
def _portable_forward(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor],
                      state: Optional[Tensor], direction: str, chunk: int, save: bool, last: bool
                      ) -> Tuple[Tensor, Tensor, Tensor]:
    return portable.forward(i, e, s, a, b, gk, state, direction, chunk, save, last)


@torch.library.custom_op('subquad::eos_matmul_portable_bwd', mutates_args=())
def _portable_backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor,
                       gk: Optional[Tensor], state: Optional[Tensor], states: Tensor, direction: str, chunk: int
                       ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = portable.backward(dy, dfinal, i, e, s, a, b, gk, state, states, direction, chunk)
    return tuple(in_dtype(grad, x) for grad, x in zip(grads, (i, e, s, a, b, gk, state)))


@_portable_forward.register_fake
def _(i, e, s, a, b, gk, state, direction, chunk, save, last):
    dtype, keys = compute_dtype(i.dtype), e.shape[3]
    final = (*i.shape[:2], keys, i.shape[3]) if last else (0,)
    states = boundary_shape(i, keys, state, direction, chunk, save, last)
    return empty_output(i), i.new_empty(states, dtype=dtype), i.new_empty(final, dtype=dtype)


@_portable_backward.register_fake
def _(dy, dfinal, i, e, s, a, b, gk, state, *args):
    return tuple(empty_gradient(x, i) for x in (i, e, s, a, b, gk, state))


differentiate(_portable_forward, _portable_backward, 7)


def _flops(i: Sequence[int], keys: int, direction: str, chunk: int) -> Tuple[int, int]:
    """Return the operations of a product of chunks with K or D columns on average, and of one with a memory."""
    tokens = torch.Size(i[:3]).numel() * len(DIRECTIONS[direction])
    return (tokens * min(i[2], chunk) * (keys + i[3]),
            2 * tokens * keys * i[3] if i[2] > SINGLE_CHUNK else 0)


@register_flop_formula(torch.ops.subquad.eos_matmul_portable_fwd)
def _(i, e, s, a, b, gk, state, direction, chunk, *args, out_shape=None, **kwargs) -> int:
    inside, memory = _flops(i, e[3], direction, chunk)
    return 8 * inside + 4 * memory


@register_flop_formula(torch.ops.subquad.eos_matmul_portable_bwd)
def _(dy, dfinal, i, e, s, a, b, gk, state, states, direction, chunk, *args, out_shape=None, **kwargs) -> int:
    inside, memory = _flops(i, e[3], direction, chunk)
    return 20 * inside + 10 * memory


def eos_matmul_portable(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor], scale: float,
                        direction: str, initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    if i.numel() == 0:
        return unchanged(i, e, initial_state, output_state)
    save = needs_gradient(*(x for x in (i, e, s, a, b, gk, initial_state) if x is not None))
    y, _, final = _portable_forward(i, e, s if scale == 1 else s * scale, a, b, steps_of(gk, i.dtype), initial_state,
                                    direction, chunk, save, output_state)
    return y, final if output_state else None
