"""Expand-oscillation-shrink recurrence with an elementwise oscillation (LCSM, Qin et al., 2024, section 3)."""
from functools import partial
from typing import Any, Callable, Optional, Sequence, Tuple, Union

from torch import Tensor

from ..common import launch
from ..common.declare import differentiate, late, node
from ..common.numerics import compute_dtype, needs_gradient, without_autocast
from ..dispatch import OPERATORS, Operator, choose
from ..eos_scan import DecayGenerator, fla, full_rank
from ..eos_scan.chunks import SINGLE_CHUNK, SPACING, boundary_shape, memory_too_large, triton_chunk
from ..eos_scan.eos_arguments import check_keys, check_oscillation, check_run, tensors_of
from ..eos_scan.problem import (
    DIRECTIONS,
    Oscillation,
    Output,
    RealProblem,
    empty_gradient,
    in_dtypes,
    keys_of,
    loop_flops,
    results,
    solve,
    unchanged,
)
from . import native, portable, reference


def eos_elementwise(
        i: Tensor,
        e: Tensor,
        s: Tensor,
        *,
        log_o_k: Optional[Tensor] = None,
        log_o_d: Optional[Tensor] = None,
        log_o: Optional[Tensor] = None,
        theta: Optional[Tensor] = None,
        generator: Optional[DecayGenerator] = None,
        scale: float = 1.0,
        reverse: bool = False,
        bidirectional: bool = False,
        initial_state: Optional[Tensor] = None,
        output_state: bool = False,
        chunk: int = 64,
        backend: str = 'auto',
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Compute y_t = Re(m_t' s_t) scale with the memory m_t = o_t * m_{t-1} + e_t i_t' (K x D) along each line.

    The oscillation is o = exp(log_o_k + log_o_d + log_o) e^{i theta}, where log_o_k is the same for all columns of the
    memory and log_o_d for all rows; without any of them it is 1, which is linear attention without normalization.
    Oscillations of rank one (log_o_k, log_o_d, theta of rows) are computed by products of chunks, all others by a loop
    over tokens that never stores o. On a CPU, 'native' takes the loop for all of them, and 'portable' also if B H is at
    least 128, K D at most 2 and T at most 1,024.

    Args:
        i: input, shape (B, H, T, D); float32, float64, float16 or bfloat16; any strides. D is the width of a value.
        e, s: expand and shrink, shape (B, H, T, K), dtype of i; or (H, K, D), constant in time, which multiply the
            memory elementwise: m[k, d] takes e[k, d] i[d] and y[d] = sum_k s[k, d] m[k, d]. With theta they may be
            complex, of i's precision.
        log_o_k: step logs <= 0 of the memory's rows, shape (B, H, T, K), (B, H, T, 1), (H, K) or (H, 1). Step logs are
            clamped to [-80, 0] (positive ones raise an error where they can be read), and clamped values have no
            gradient.
        log_o_d: the same of the memory's columns, with D instead of K.
        log_o: step logs of full rank, shape (H, K, D), or (B, H, T, K, D) where the caller has them in memory.
        theta: angles, shape (B, H, T, K), (B, H, T, 1), (H, K), (H, 1) or (H, K, D). If e, s and the
            oscillation are constant, the recurrence is a convolution. Otherwise, an angle for each element, or e or s
            of shape (H, K, D), takes memory for T x K x D numbers, and graphs take it for constant ones too.
        generator: a decay of full rank by its factors, see `DecayGenerator`, instead of log_o.
        scale: factor of the output.
        reverse: run from the last token to the first: the result equals that of flipped arguments, flipped.
        bidirectional: the sum of both directions with the term of t itself, (s_t' e_t) i_t, counted once.
        initial_state: memory before the first token, shape (B, H, K, D), or None for zeros; complex with theta.
        output_state: also return the memory after the last token (with reverse: after the first).
        chunk: tokens of a chunk on longer lines: 16, 32, 64 or 128. For oscillations of rank one, 'portable' and
            'export' take lines of up to 64 tokens as one chunk. 'triton' takes lines of up to 64 tokens as one chunk
            in float16 and bfloat16, and chunks of at most 32 tokens on longer lines; in float32 and float64 these are
            32 and 16. Not used by 'native', 'reference' and 'fla', by loops over tokens, by theta with constant e, s
            and oscillation outside of graphs, and by 'portable' and 'triton' for both directions without oscillation.
        backend: 'auto', 'triton', 'native', 'portable', 'reference', 'export', or 'fla' for the operators of fla-core,
            which must be installed.

    Returns:
        y, of the shape and dtype of i; with output_state also the memory (B, H, K, D), in float32 or, for float64,
        float64; complex with theta.

    Raises:
        ValueError: a shape, device, size, name or combination of arguments is not allowed, or the tensors exceed the
            memory. On a CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op = 'eos_elementwise'
    keys = check_keys(op, i, e=e, s=s)
    oscillation = Oscillation(log_o_k, log_o_d, log_o, theta, generator)
    check_oscillation(op, oscillation, i, e, s, keys)
    direction = check_run(op, i, keys, scale, reverse, bidirectional, initial_state, output_state, chunk,
                          theta is not None)
    tensors = tensors_of(i, e, s, *oscillation, initial_state)
    run = choose(op, backend, *tensors)
    with without_autocast(i):
        if i.numel() == 0:
            y, state = unchanged(i, tensors[1:], keys, initial_state, theta is not None)
        else:
            y, state = run(i, e, s, oscillation, scale, direction, initial_state, output_state, chunk)
    return (y, state) if output_state else y


# --- what PyTorch sees of oscillations of rank one

Empty = Optional[Tensor]
Three = Tuple[Tensor, Tensor, Tensor]
Six = Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _chunk_flops(i: Sequence[int], keys: int, direction: str, chunk: int, single: int) -> Tuple[int, int]:
    """Return the operations of the products within chunks, and of one product with memories.

    `small_memories` needs fewer, but whether it runs depends on device and batch, which a count of
    a network does not.

    single: tokens of the longest line that is one chunk."""
    batch, heads, length, dim = i
    tokens = batch * heads * length * len(DIRECTIONS[direction])
    inside = 2 * tokens * min(length, chunk) * (keys + dim)
    return inside, 2 * tokens * keys * dim if length > single else 0


def _flops(i, e, direction: str, chunk: int, single: int) -> int:
    inside, memory = _chunk_flops(i, e[3], direction, chunk, single)
    return inside + 2 * memory


def _backward_flops(i, e, direction: str, chunk: int, single: int) -> int:
    inside, memory = _chunk_flops(i, e[3], direction, chunk, single)
    return 5 * inside // 2 + 4 * memory


@node('eos_elementwise_portable_fwd', portable.forward,
      lambda i, e, s, log_k, log_d, state, direction, chunk, *_: (
          _flops(i, e, direction, chunk, SINGLE_CHUNK)))
def _portable_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty, direction: str,
                      chunk: int, save: bool, last: bool) -> Three:
    states = boundary_shape(i, keys_of(e.shape), state, direction, chunk, save, last)
    # Asked last: it guards the batch of exported programs.
    if len(states) > 1 and portable.token_by_token(i, e):
        states = (0,)
    return results(i, e, launch.token_order(i), states, last)


@node('eos_elementwise_portable_bwd', partial(in_dtypes, portable.backward),
      lambda dy, dfinal, i, e, *others: _backward_flops(i, e, *others[-2:], SINGLE_CHUNK))
def _portable_backward(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty,
                       state: Empty, states: Tensor, direction: str, chunk: int) -> Six:
    return tuple(empty_gradient(x, i) for x in (i, e, s, log_k, log_d, state))


@node('eos_elementwise_fwd', late(__name__, 'triton.forward'),
      lambda i, e, s, log_k, log_d, state, direction, chunk, *_: (
          _flops(i, e, direction, chunk, chunk)))
def _triton_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, state: Empty, direction: str,
                    chunk: int, save: bool, last: bool) -> Three:
    carried = save and (i.shape[2] > chunk or state is not None or last)
    count = -(-i.shape[2] // chunk) + 1
    states = (len(DIRECTIONS[direction]), *i.shape[:2], count, keys_of(e.shape), i.shape[3])
    states = states if carried else (0,)
    return results(i, e, launch.token_order(i), states, last)


@node('eos_elementwise_bwd', partial(in_dtypes, late(__name__, 'triton_backward.backward')),
      lambda dy, dfinal, i, e, *others: _backward_flops(i, e, *others[-2:], others[-1]))
def _triton_backward(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty,
                     state: Empty, states: Tensor, direction: str, chunk: int) -> Six:
    return (*(launch.token_order(x) for x in (i, e, s)),
            *(empty_gradient(x, i) for x in (log_k, log_d, state)))


# --- what PyTorch sees of oscillations of full rank

Eight = Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _full_flops(i, e, s, log_k, log_d, z, weight, state, form, tau, direction, *_) -> int:
    return 3 * loop_flops(i, e, direction)     # the oscillation, the memory, the output


def _full_backward_flops(dy, dfinal, i, e, *others) -> int:
    return 8 * loop_flops(i, e, others[-1])    # both again, the adjoint, and five gradients


def _full_forward(forward: Callable, i, e, s, log_k, log_d, z, weight, state, form, tau, *options) -> Three:
    return forward(RealProblem(i, e, s, log_k, log_d, z, weight, 'k', form, tau, state), *options)


def _full_backward(backward: Callable, dy, dfinal, i, e, s, log_k, log_d, z, weight, state, states, form, tau, direction
                   ) -> Sequence[Tensor]:
    problem = RealProblem(i, e, s, log_k, log_d, z, weight, 'k', form, tau, state)
    grads, dstate = backward(dy, dfinal, problem, states, direction)
    return *grads, dstate


def _full_states(i: Tensor, e: Tensor, direction: str, spacing: int, save: bool) -> Tuple[int, ...]:
    """Return the shape of the memories before every `spacing` tokens."""
    count = -(-i.shape[2] // spacing)
    return (len(DIRECTIONS[direction]), *i.shape[:2], count, keys_of(e.shape), i.shape[3]) if save else (0,)


@node('eos_elementwise_full_portable_fwd', partial(_full_forward, full_rank.forward), _full_flops)
def _portable_full_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, z: Empty, weight: Empty,
                           state: Empty, form: str, tau: float, direction: str, save: bool, last: bool) -> Three:
    states = _full_states(i, e, direction, full_rank.CHUNK, save)
    return results(i, e, launch.token_order(i), states, last)


@node('eos_elementwise_full_fwd',
      partial(_full_forward, late(__name__, 'triton_full_rank.forward')), _full_flops)
def _triton_full_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, z: Empty, weight: Empty,
                         state: Empty, form: str, tau: float, direction: str, save: bool, last: bool) -> Three:
    return results(i, e, i.new_empty(i.shape), _full_states(i, e, direction, SPACING, save), last)


def _full_gradients(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, z: Empty,
                    weight: Empty, state: Empty, states: Tensor, form: str, tau: float, direction: str) -> Eight:
    return tuple(empty_gradient(x, i) for x in (i, e, s, log_k, log_d, z, weight, state))


_portable_full_backward = node(
    'eos_elementwise_full_portable_bwd',
    partial(in_dtypes, partial(_full_backward, full_rank.backward)),
    _full_backward_flops)(_full_gradients)
_triton_full_backward = node(
    'eos_elementwise_full_bwd',
    partial(in_dtypes, partial(_full_backward, late(__name__, 'triton_full_rank.backward'))),
    _full_backward_flops)(_full_gradients)

for _forward, _backward in ((_portable_forward, _portable_backward),
                            (_triton_forward, _triton_backward),
                            (_portable_full_forward, _portable_full_backward),
                            (_triton_full_forward, _triton_full_backward)):
    differentiate(_forward, _backward, kept=lambda outputs: outputs[1:2], used=(0, 2))


# --- what PyTorch sees of C++, which takes both kinds of oscillations

def _native_flops(i, e, s, log_k, log_d, z, weight, state, form: str, tau: float, direction: str, *_) -> int:
    if z is not None:
        return 3 * loop_flops(i, e, direction)
    return _flops(i, e, direction, SINGLE_CHUNK, SINGLE_CHUNK)


def _native_backward_flops(dy, dfinal, i, e, s, log_k, log_d, z, weight, state, form, tau, direction: str) -> int:
    if z is not None:
        return 8 * loop_flops(i, e, direction)
    return _backward_flops(i, e, direction, SINGLE_CHUNK, SINGLE_CHUNK)


@node('eos_elementwise_native_fwd', native.forward, _native_flops)
def _native_forward(i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, z: Empty, weight: Empty, state: Empty,
                    form: str, tau: float, direction: str, save: bool, last: bool) -> Tuple[Tensor, Tensor]:
    y, _, final = results(i, e, launch.token_order(i), (0,), last)
    return y, final


@node('eos_elementwise_native_bwd', partial(in_dtypes, native.backward), _native_backward_flops)
def _native_backward(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, log_k: Empty, log_d: Empty, z: Empty,
                     weight: Empty, state: Empty, form: str, tau: float, direction: str) -> Eight:
    return (*(empty_gradient(x, i) if x is None else launch.token_order(x) for x in (i, e, s, log_k, log_d)),
            *(empty_gradient(x, i) for x in (z, weight, state)))


differentiate(_native_forward, _native_backward, used=(0, 1))

# --- what PyTorch sees of a grid with the layers around the recurrence

def _axes_flops(x, weight, bias, heads: int, keys: int, *_) -> int:
    batch, height, width, _ = x
    dim = weight[0] // heads
    return sum(_flops((batch * lines, heads, length, dim), (0, 0, 0, keys), 'both', SINGLE_CHUNK, SINGLE_CHUNK)
               for lines, length in ((width, height), (height, width)))


@node('eos_axes_native_fwd', native.axes, _axes_flops)
def native_axes(x: Tensor, weight: Tensor, bias: Tensor, heads: int, keys: int, rate: float, eps: float) -> Tensor:
    """Run gated linear attention in both directions along the columns of a grid, and then along its rows.

        y = SiLU(gate) * LayerNorm(rows(LayerNorm(columns(values))))

    x: (B, H, W, 2 C + 3 heads keys), float32 or bfloat16: values and gate (C each), and what SiLU makes e and s of, and
    sigmoid(.)^rate the decays of rows of the memory (heads keys each). weight, bias: (C,), of the second norm. The
    result is (B, H, W, C). There is no gradient.
    """
    return x.new_empty(*x.shape[:3], weight.shape[0])


# --- implementations

def _run(forward: Any, full_forward: Any, problem: RealProblem, direction: str, output_state: bool, chunk: int
         ) -> Output:
    """Run the operator for oscillations of rank one, or that for full rank."""
    i, e, s, log_k, log_d, z, weight, _, form, tau, state = problem
    save = needs_gradient(i, e, s, log_k, log_d, z, weight, state)
    if problem.full_rank:
        y, _, final = full_forward(i, e, s, log_k, log_d, problem.z_of_memory, weight, state, form,
                                   tau, direction, save, output_state)
    elif direction == 'both' and log_k is log_d is None:          # all tokens share one memory, e' i
        x, e, s = (y.to(compute_dtype(y.dtype)) for y in (i, e, s))
        return (s @ (e.mT @ x)).to(i.dtype), None
    else:
        y, _, final = forward(i, e, s, log_k, log_d, state, direction, chunk, save, output_state)
    return y, final if output_state else None


def run_triton(problem: RealProblem, direction: str, output_state: bool, chunk: int) -> Output:
    chunk = triton_chunk(problem.i.dtype, problem.i.shape[2], chunk)
    return _run(_triton_forward, _triton_full_forward, problem, direction, output_state, chunk)


def run_native(problem: RealProblem, direction: str, output_state: bool, chunk: int) -> Output:
    """Run in C++, or by PyTorch for weights and step logs of the memory's size, and for small memories."""
    i, e, s, log_k, log_d, z, weight, _, form, tau, state = problem
    z = problem.z_of_memory
    if (e.ndim == 3 or s.ndim == 3 or z is not None and 1 not in z.shape[3:] or portable.token_by_token(i, e)
            or direction == 'both' and log_k is log_d is z is None):      # no loop: all tokens share one memory
        return _run(_portable_forward, _portable_full_forward, problem, direction, output_state, chunk)
    save = needs_gradient(i, e, s, log_k, log_d, z, weight, state)
    y, final = _native_forward(i, e, s, log_k, log_d, z, weight, state, form, tau, direction, save, output_state)
    return y, final if output_state else None


def _unsupported(i: Tensor, e: Tensor, *tensors: Tensor) -> Optional[str]:
    """Return why the Triton kernels cannot take these arguments; None if they can."""
    # Weights (H, K, D) and step logs for all of (B, H, T, K, D) make an oscillation of full rank.
    return None if all(x.ndim in (2, 4) for x in (e, *tensors)) else memory_too_large(keys_of(e.shape))


OPERATORS['eos_elementwise'] = Operator(
    implementations={
        'reference': reference.eos_elementwise,
        'portable': partial(solve, partial(_run, _portable_forward, _portable_full_forward)),
        'native': partial(solve, run_native),
        'triton': partial(solve, run_triton),
        'export': portable.eos_elementwise_export,
        'fla': fla.eos_elementwise_fla,
    },
    native_gradient=True,
    objection=_unsupported,
)
