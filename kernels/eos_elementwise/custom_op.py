"""Registration of the elementwise recurrence with PyTorch: schemas, shapes, gradients and operation counts of the
portable backend and of the Triton kernels, for oscillations of rank one and of full rank. A compiler sees one node for
each. Triton is imported at the first call."""
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common import launch
from ..common.decay import compute_dtype, needs_gradient
from ..eos_scan import full_rank, small_memories
from ..eos_scan.chunks import SINGLE_CHUNK, boundary_shape
from ..eos_scan.problem import DIRECTIONS, Oscillation, Output, RealProblem, solve
from ..eos_scan.registration import differentiate, empty_gradient, empty_output, in_dtype
from ..eos_scan.tile_limits import SPACING, memory_too_large
from . import portable

Three = Tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op('subquad::eos_elementwise_portable_fwd', mutates_args=())
def _portable_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor], log_d: Optional[Tensor],
                      state: Optional[Tensor], direction: str, chunk: int, save: bool, last: bool) -> Three:
    return portable.forward(i, e, s, log_k, log_d, state, direction, chunk, save, last)


@torch.library.custom_op('subquad::eos_elementwise_portable_bwd', mutates_args=())
def _portable_backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor],
                       log_d: Optional[Tensor], state: Optional[Tensor], states: Tensor, direction: str, chunk: int
                       ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = portable.backward(dy, dfinal, i, e, s, log_k, log_d, state, states, direction, chunk)
    return tuple(in_dtype(grad, x) for grad, x in zip(grads, (i, e, s, log_k, log_d, state)))


@torch.library.custom_op('subquad::eos_elementwise_fwd', mutates_args=())
def _triton_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor], log_d: Optional[Tensor],
                    state: Optional[Tensor], direction: str, chunk: int, save: bool, last: bool) -> Three:
    from . import triton
    with torch.cuda.device_of(i):
        return triton.forward(i, e, s, log_k, log_d, state, direction, chunk, save, last)


@torch.library.custom_op('subquad::eos_elementwise_bwd', mutates_args=())
def _triton_backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor],
                     log_d: Optional[Tensor], state: Optional[Tensor], states: Tensor, direction: str, chunk: int
                     ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import triton_backward
    with torch.cuda.device_of(i):
        grads = triton_backward.backward(dy, dfinal, i, e, s, log_k, log_d, state, states, direction, chunk)
    return tuple(in_dtype(grad, x) for grad, x in zip(grads, (i, e, s, log_k, log_d, state)))


@torch.library.custom_op('subquad::eos_elementwise_full_portable_fwd', mutates_args=())
def _portable_full_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor], log_d: Optional[Tensor],
                           z: Optional[Tensor], weight: Optional[Tensor], state: Optional[Tensor], form: str,
                           tau: float, direction: str, save: bool, last: bool) -> Three:
    problem = RealProblem(i, e, s, log_k, log_d, z, weight, 'k', form, tau, state)
    return full_rank.forward(problem, direction, save, last)


@torch.library.custom_op('subquad::eos_elementwise_full_portable_bwd', mutates_args=())
def _portable_full_backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor,
                            log_k: Optional[Tensor], log_d: Optional[Tensor], z: Optional[Tensor],
                            weight: Optional[Tensor], state: Optional[Tensor], states: Tensor, form: str, tau: float,
                            direction: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = RealProblem(i, e, s, log_k, log_d, z, weight, 'k', form, tau, state)
    grads, dstate = full_rank.backward(dy, dfinal, problem, states, direction)
    return tuple(in_dtype(grad, x) for grad, x in zip((*grads, dstate), (*problem[:7], state)))


@torch.library.custom_op('subquad::eos_elementwise_full_fwd', mutates_args=())
def _triton_full_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor], log_d: Optional[Tensor],
                         z: Optional[Tensor], weight: Optional[Tensor], state: Optional[Tensor], form: str, tau: float,
                         direction: str, save: bool, last: bool) -> Three:
    from . import triton_full_rank
    problem = RealProblem(i, e, s, log_k, log_d, z, weight, 'k', form, tau, state)
    with torch.cuda.device_of(i):
        return triton_full_rank.forward(problem, direction, save, last)


@torch.library.custom_op('subquad::eos_elementwise_full_bwd', mutates_args=())
def _triton_full_backward(dy: Tensor, dfinal: Optional[Tensor], i: Tensor, e: Tensor, s: Tensor,
                          log_k: Optional[Tensor], log_d: Optional[Tensor], z: Optional[Tensor],
                          weight: Optional[Tensor], state: Optional[Tensor], states: Tensor, form: str, tau: float,
                          direction: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from . import triton_full_rank
    problem = RealProblem(i, e, s, log_k, log_d, z, weight, 'k', form, tau, state)
    with torch.cuda.device_of(i):
        grads, dstate = triton_full_rank.backward(dy, dfinal, problem, states, direction)
    return tuple(in_dtype(grad, x) for grad, x in zip((*grads, dstate), (*problem[:7], state)))


def _keys(e: Tensor) -> int:
    return e.shape[1 if e.ndim == 3 else 3]


def _stored(i: Tensor, e: Tensor, direction: str, spacing: int, save: bool) -> Tuple[int, ...]:
    """Return the shape of the memories before every `spacing` tokens."""
    count = -(-i.shape[2] // spacing)
    return (len(DIRECTIONS[direction]), *i.shape[:2], count, _keys(e), i.shape[3]) if save else (0,)


def _fake(i: Tensor, e: Tensor, y: Tensor, states: Sequence[int], last: bool) -> Three:
    dtype = compute_dtype(i.dtype)
    final = (*i.shape[:2], _keys(e), i.shape[3]) if last else (0,)
    return y, i.new_empty(states, dtype=dtype), i.new_empty(final, dtype=dtype)


@_portable_forward.register_fake
def _(i, e, s, log_k, log_d, state, direction, chunk, save, last):
    states = boundary_shape(i, _keys(e), state, direction, chunk, save, last)
    if len(states) > 1 and small_memories.chosen(i, e):     # Asked last: it guards the batch of exported programs.
        states = (0,)
    return _fake(i, e, empty_output(i), states, last)


@_portable_backward.register_fake
def _(dy, dfinal, i, e, s, log_k, log_d, state, *args):
    return tuple(empty_gradient(x, i) for x in (i, e, s, log_k, log_d, state))


@_triton_forward.register_fake
def _(i, e, s, log_k, log_d, state, direction, chunk, save, last):
    carried = save and (i.shape[2] > chunk or state is not None or last)
    count = -(-i.shape[2] // chunk)
    states = (len(DIRECTIONS[direction]), *i.shape[:2], count + 1, _keys(e), i.shape[3]) if carried else (0,)
    return _fake(i, e, launch.token_order(i), states, last)


@_triton_backward.register_fake
def _(dy, dfinal, i, e, s, log_k, log_d, state, *args):
    return (*(launch.token_order(x) for x in (i, e, s)), *(empty_gradient(x, i) for x in (log_k, log_d, state)))


@_portable_full_forward.register_fake
def _(i, e, s, log_k, log_d, z, weight, state, form, tau, direction, save, last):
    return _fake(i, e, empty_output(i), _stored(i, e, direction, full_rank.CHUNK, save), last)


@_triton_full_forward.register_fake
def _(i, e, s, log_k, log_d, z, weight, state, form, tau, direction, save, last):
    return _fake(i, e, i.new_empty(i.shape), _stored(i, e, direction, SPACING, save), last)


def _fake_full_backward(dy, dfinal, i, e, s, log_k, log_d, z, weight, state, *args):
    return tuple(empty_gradient(x, i) for x in (i, e, s, log_k, log_d, z, weight, state))


differentiate(_portable_forward, _portable_backward, 6)
for _forward, _backward in ((_portable_full_forward, _portable_full_backward),
                            (_triton_full_forward, _triton_full_backward)):
    _backward.register_fake(_fake_full_backward)
    differentiate(_forward, _backward, 8)
differentiate(_triton_forward, _triton_backward, 6)


def _chunk_flops(i: Sequence[int], keys: int, direction: str, chunk: int, single: int) -> Tuple[int, int]:
    """Return the operations of the products within chunks, and of one product of each token with a memory.

    `small_memories` needs fewer, but whether it runs depends on device and batch, which a count of a network does not.

    single: tokens of the longest line that is one chunk."""
    batch, heads, length, dim = i
    tokens = batch * heads * length * len(DIRECTIONS[direction])
    return 2 * tokens * min(length, chunk) * (keys + dim), 2 * tokens * keys * dim if length > single else 0


@register_flop_formula(torch.ops.subquad.eos_elementwise_portable_fwd)
def _(i, e, s, log_k, log_d, state, direction, chunk, *args, out_shape=None, **kwargs) -> int:
    inside, memory = _chunk_flops(i, e[3], direction, chunk, SINGLE_CHUNK)
    return inside + 2 * memory


@register_flop_formula(torch.ops.subquad.eos_elementwise_portable_bwd)
def _(dy, dfinal, i, e, s, log_k, log_d, state, states, direction, chunk, *args, out_shape=None, **kwargs) -> int:
    inside, memory = _chunk_flops(i, e[3], direction, chunk, SINGLE_CHUNK)
    return 5 * inside // 2 + 4 * memory


@register_flop_formula(torch.ops.subquad.eos_elementwise_fwd)
def _(i, e, s, log_k, log_d, state, direction, chunk, *args, out_shape=None, **kwargs) -> int:
    inside, memory = _chunk_flops(i, e[3], direction, chunk, chunk)
    return inside + 2 * memory


@register_flop_formula(torch.ops.subquad.eos_elementwise_bwd)
def _(dy, dfinal, i, e, s, log_k, log_d, state, states, direction, chunk, *args, out_shape=None, **kwargs) -> int:
    inside, memory = _chunk_flops(i, e[3], direction, chunk, chunk)
    return 5 * inside // 2 + 4 * memory


def _loop_flops(i: Sequence[int], e: Sequence[int], direction: str) -> int:
    """Return the operations that each do one multiplication and addition for every element of every memory."""
    return 2 * torch.Size(i).numel() * e[1 if len(e) == 3 else 3] * len(DIRECTIONS[direction])


@register_flop_formula([torch.ops.subquad.eos_elementwise_full_portable_fwd,
                        torch.ops.subquad.eos_elementwise_full_fwd])
def _(i, e, s, log_k, log_d, z, weight, state, form, tau, direction, *args, out_shape=None, **kwargs) -> int:
    return 3 * _loop_flops(i, e, direction)              # the oscillation, the memory, the output


@register_flop_formula([torch.ops.subquad.eos_elementwise_full_portable_bwd,
                        torch.ops.subquad.eos_elementwise_full_bwd])
def _(dy, dfinal, i, e, s, log_k, log_d, z, weight, state, states, form, tau, direction, *args, out_shape=None,
      **kwargs) -> int:
    return 8 * _loop_flops(i, e, direction)              # both again, the adjoint, and five gradients


def _full_attention(i: Tensor, e: Tensor, s: Tensor) -> Tensor:
    """Return the output of both directions without decay: all tokens share one memory, e' i."""
    i, e, s, dtype = *(x.to(compute_dtype(x.dtype)) for x in (i, e, s)), i.dtype
    return (s @ (e.mT @ i)).to(dtype)


def _run_full(forward: Any, problem: RealProblem, direction: str, output_state: bool) -> Output:
    """Run a loop over tokens, for an oscillation of full rank."""
    i, e, s, log_k, log_d, _, weight, _, form, tau, state = problem
    save = needs_gradient(*(x for x in problem if isinstance(x, Tensor)))
    y, _, final = forward(i, e, s, log_k, log_d, problem.z_of_memory, weight, state, form, tau, direction, save,
                          output_state)
    return y, final if output_state else None


def run_portable(problem: RealProblem, direction: str, output_state: bool, chunk: int) -> Output:
    if problem.full_rank:
        return _run_full(_portable_full_forward, problem, direction, output_state)
    i, e, s, log_k, log_d, *_, state = problem
    if direction == 'both' and log_k is log_d is None:
        return _full_attention(i, e, s), None
    save = needs_gradient(*(x for x in problem if isinstance(x, Tensor)))
    y, _, final = _portable_forward(i, e, s, log_k, log_d, state, direction, chunk, save, output_state)
    return y, final if output_state else None


def run_triton(problem: RealProblem, direction: str, output_state: bool, chunk: int) -> Output:
    if problem.full_rank:
        return _run_full(_triton_full_forward, problem, direction, output_state)
    i, e, s, log_k, log_d, *_, state = problem
    if direction == 'both' and log_k is log_d is None:
        return _full_attention(i, e, s), None
    save = needs_gradient(*(x for x in problem if isinstance(x, Tensor)))
    y, _, final = _triton_forward(i, e, s, log_k, log_d, state, direction,
                                  triton_chunk(i.dtype, i.shape[2], chunk), save, output_state)
    return y, final if output_state else None


def unsupported(i: Tensor, e: Tensor, *tensors: Tensor) -> Optional[str]:
    """Return why the Triton kernels cannot take these arguments; None if they can."""
    # Weights (H, K, D) and step logs for all of (B, H, T, K, D) make an oscillation of full rank.
    return None if all(x.ndim in (2, 4) for x in (e, *tensors)) else memory_too_large(_keys(e))


def eos_elementwise_portable(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, scale: float, direction: str,
                             initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    return solve(run_portable, i, e, s, oscillation, scale, direction, initial_state, output_state, chunk)


def triton_chunk(dtype: torch.dtype, length: int, chunk: int) -> int:
    """Return the tokens of a chunk of the Triton kernels for rank one. Lines of up to this length are one chunk.

    Larger tiles do not stay in registers, in float32 or with memories that pass their boundaries."""
    half = dtype.itemsize == 2
    single = SINGLE_CHUNK if half else 32
    return single if length <= single else min(chunk, 32 if half else 16)


def eos_elementwise_triton(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, scale: float, direction: str,
                           initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    return solve(run_triton, i, e, s, oscillation, scale, direction, initial_state, output_state, chunk)
