"""Registration of the recurrence with PyTorch: schemas, shapes, gradients and operation counts of the portable backend
and of the Triton kernels. A compiler sees one node for each. Triton is imported at the first call of a kernel."""
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import compute_dtype, needs_gradient
from ..eos_scan.chunks import SINGLE_CHUNK, boundary_shape
from ..eos_scan.problem import DIRECTIONS, Output, steps_of
from ..eos_scan.registration import differentiate, empty_gradient, empty_output, in_dtype
from ..eos_scan.tile_limits import memory_too_large
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


@torch.library.custom_op('subquad::eos_matmul_fwd', mutates_args=())
def _triton_forward(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor],
                    state: Optional[Tensor], direction: str, chunk: int, save: bool, last: bool
                    ) -> Tuple[Tensor, Tensor, Tensor]:
    """Compute as the portable forward pass does; `chunk` is ignored, because the kernel goes token by token."""
    from . import triton
    with torch.cuda.device_of(i):
        return triton.forward(i, e, s, a, b, gk, state, direction, save, last)


@torch.library.custom_op('subquad::eos_matmul_bwd', mutates_args=())
def _triton_backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor,
                     gk: Optional[Tensor], state: Optional[Tensor], states: Tensor, direction: str, chunk: int
                     ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import triton
    with torch.cuda.device_of(i):
        grads = triton.backward(dy, dfinal, i, e, s, a, b, gk, state, states, direction)
    return tuple(in_dtype(grad, x) for grad, x in zip(grads, (i, e, s, a, b, gk, state)))


def _fake(i: Tensor, e: Tensor, y: Tensor, states: Sequence[int], last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(i.dtype)
    final = (*i.shape[:2], e.shape[3], i.shape[3]) if last else (0,)
    return y, i.new_empty(states, dtype=dtype), i.new_empty(final, dtype=dtype)


@_portable_forward.register_fake
def _(i, e, s, a, b, gk, state, direction, chunk, save, last):
    return _fake(i, e, empty_output(i), boundary_shape(i, e.shape[3], state, direction, chunk, save, last), last)


@_triton_forward.register_fake
def _(i, e, s, a, b, gk, state, direction, chunk, save, last):
    return _fake(i, e, i.new_empty(i.shape), (len(DIRECTIONS[direction]), *i.shape) if save else (0,), last)


def _fake_backward(dy, dfinal, i, e, s, a, b, gk, state, *args):
    return tuple(empty_gradient(x, i) for x in (i, e, s, a, b, gk, state))


for _forward, _backward in ((_portable_forward, _portable_backward), (_triton_forward, _triton_backward)):
    _backward.register_fake(_fake_backward)
    differentiate(_forward, _backward, 7)


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


def _loop_flops(i: Sequence[int], keys: int, direction: str) -> int:
    """Return the operations that each do one multiplication and addition for every element of every memory."""
    return 2 * torch.Size(i).numel() * keys * len(DIRECTIONS[direction])


@register_flop_formula(torch.ops.subquad.eos_matmul_fwd)
def _(i, e, s, a, b, gk, state, direction, *args, out_shape=None, **kwargs) -> int:
    return 5 * _loop_flops(i, e[3], direction)           # w, the decay, b w', e i', the output


@register_flop_formula(torch.ops.subquad.eos_matmul_bwd)
def _(dy, dfinal, i, e, s, a, b, gk, state, states, direction, *args, out_shape=None, **kwargs) -> int:
    return 12 * _loop_flops(i, e[3], direction)          # the memory again, four for its gradient, five gradients


def unsupported(i: Tensor, e: Tensor, *tensors: Tensor) -> Optional[str]:
    """Return why the Triton kernels cannot take these arguments; None if they can."""
    return memory_too_large(e.shape[3])


def _run(forward: Any, i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor], scale: float,
         direction: str, initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    save = needs_gradient(*(x for x in (i, e, s, a, b, gk, initial_state) if x is not None))
    y, _, final = forward(i, e, s if scale == 1 else s * scale, a, b, steps_of(gk, i.dtype), initial_state, direction,
                          chunk, save, output_state)
    return y, final if output_state else None


def eos_matmul_portable(*arguments: Any) -> Output:
    return _run(_portable_forward, *arguments)


def eos_matmul_triton(*arguments: Any) -> Output:
    return _run(_triton_forward, *arguments)
