"""Expand-oscillation-shrink recurrence whose oscillation is a diagonal plus a matrix of rank one (LCSM, section 3)."""
from functools import partial
from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ..common import launch
from ..common.declare import differentiate, late, node
from ..common.numerics import needs_gradient, without_autocast
from ..dispatch import OPERATORS, Operator, choose
from ..eos_scan import fla
from ..eos_scan.chunks import SINGLE_CHUNK, boundary_shape, memory_too_large
from ..eos_scan.eos_arguments import check_keys, check_log, check_run, tensors_of
from ..eos_scan.problem import (
    DIRECTIONS,
    Output,
    empty_gradient,
    in_dtypes,
    loop_flops,
    results,
    steps_of,
    unchanged,
)
from . import portable, reference


def eos_matmul(
        i: Tensor,
        e: Tensor,
        s: Tensor,
        *,
        a: Tensor,
        b: Tensor,
        gk: Optional[Tensor] = None,
        scale: float = 1.0,
        reverse: bool = False,
        bidirectional: bool = False,
        initial_state: Optional[Tensor] = None,
        output_state: bool = False,
        chunk: int = 64,
        backend: str = 'auto',
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Compute y_t = m_t' s_t scale with m_t = (Diag(exp gk_t) + b_t a_t') m_{t-1} + e_t i_t' along each line.

    DeltaNet (fast weight programming) with keys k and rates beta has a = k, b = -beta k and e = beta k. The memory
    grows without bound unless the oscillation contracts: for a = k, b = -beta k this means beta |k|^2 <= 2.

    Chunks are computed by products: with w_t = a_t' m_{t-1} the recurrence is one with a diagonal oscillation and two
    inputs, e i' and b w', and the w of a chunk solve a triangular system.

    Args:
        i: input, shape (B, H, T, D); float32, float64, float16 or bfloat16; any strides.
        e, s, a, b: expand, shrink and the factors of the matrix of rank one, shape (B, H, T, K), dtype of i.
        gk: step logs <= 0 of the diagonal, shape (B, H, T, K), (B, H, T, 1), (H, K) or (H, 1), or None for the
            identity. They are clamped to [-80, 0] (positive ones raise an error where they can be read), and clamped
            values have no gradient.
        scale: factor of the output.
        reverse: run from the last token to the first: the result equals that of flipped arguments, flipped.
        bidirectional: the sum of both directions with the term of t itself, (s_t' e_t) i_t, counted once.
        initial_state: memory before the first token, shape (B, H, K, D), or None for zeros.
        output_state: also return the memory after the last token (with reverse: after the first).
        chunk: tokens of a chunk on longer lines: 16, 32, 64 or 128. 'portable' and 'export' take lines of up to 64
            tokens as one chunk. 'triton', 'reference' and 'fla' go token by token and do not use it.
        backend: 'auto', 'triton', 'portable', 'reference', 'export', or 'fla' for the operators of fla-core, which
            must be installed.

    Returns:
        y, of the shape and dtype of i; with output_state also the memory (B, H, K, D), in float32 or, for float64,
        float64.

    Raises:
        ValueError: a shape, device, size or combination of arguments is not allowed, or the tensors exceed the memory.
            On a CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op = 'eos_matmul'
    keys = check_keys(op, i, static=False, e=e, s=s, a=a, b=b)
    for name, x in dict(e=e, s=s, a=a, b=b).items():
        if x.is_complex():
            raise TypeError(f'{op}: {name} must be real, got dtype {x.dtype}')
    if gk is not None:
        check_log(op, 'gk', gk, i, keys)
    direction = check_run(op, i, keys, scale, reverse, bidirectional, initial_state, output_state, chunk)
    tensors = tensors_of(i, e, s, a, b, gk, initial_state)
    run = choose(op, backend, *tensors)
    with without_autocast(i):
        if i.numel() == 0:
            y, state = unchanged(i, tensors[1:], keys, initial_state)
        else:
            y, state = run(i, e, s, a, b, gk, scale, direction, initial_state, output_state, chunk)
    return (y, state) if output_state else y


# --- what PyTorch sees

Empty = Optional[Tensor]
Three = Tuple[Tensor, Tensor, Tensor]


def _chunk_flops(i: Sequence[int], keys: int, direction: str, chunk: int, inside: int, memory: int) -> int:
    """Return the operations of so many products inside of chunks and with a memory."""
    tokens = torch.Size(i[:3]).numel() * len(DIRECTIONS[direction])
    return (inside * tokens * min(i[2], chunk) * (keys + i[3])
            + (memory * 2 * tokens * keys * i[3] if i[2] > SINGLE_CHUNK else 0))


def _gradients(dy: Tensor, dfinal: Empty, i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Empty,
               state: Empty, states: Tensor, direction: str, chunk: int
               ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(empty_gradient(x, i) for x in (i, e, s, a, b, gk, state))


@node('eos_matmul_portable_fwd', portable.forward,
      lambda i, e, s, a, b, gk, state, direction, chunk, *_: (
          _chunk_flops(i, e[3], direction, chunk, inside=8, memory=4)))
def _portable_forward(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Empty, state: Empty, direction: str,
                      chunk: int, save: bool, last: bool) -> Three:
    states = boundary_shape(i, e.shape[3], state, direction, chunk, save, last)
    return results(i, e, launch.token_order(i), states, last)


_portable_backward = node(
    'eos_matmul_portable_bwd', partial(in_dtypes, portable.backward),
    lambda dy, dfinal, i, e, *others: (
        _chunk_flops(i, e[3], *others[-2:], inside=20, memory=10)))(_gradients)


# The kernels go token by token and have no chunks. The operations are w, the decay, b w', e i' and
# the output.
@node('eos_matmul_fwd', lambda *args: late(__name__, 'triton.forward')(*args[:8], *args[9:]),
      lambda i, e, s, a, b, gk, state, direction, *_: 5 * loop_flops(i, e, direction))
def _triton_forward(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Empty, state: Empty, direction: str,
                    chunk: int, save: bool, last: bool) -> Three:
    states = (len(DIRECTIONS[direction]), *i.shape) if save else (0,)
    return results(i, e, i.new_empty(i.shape), states, last)


# The memory again, four for its gradient, five gradients.
_triton_backward = node(
    'eos_matmul_bwd', lambda *args: in_dtypes(late(__name__, 'triton.backward'), *args[:-1]),
    lambda dy, dfinal, i, e, *others: 12 * loop_flops(i, e, others[-2]))(_gradients)

for _forward, _backward in ((_portable_forward, _portable_backward),
                            (_triton_forward, _triton_backward)):
    differentiate(_forward, _backward, kept=lambda outputs: outputs[1:2], used=(0, 2))


def _run(forward: Any, i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Empty, scale: float, direction: str,
         initial_state: Empty, output_state: bool, chunk: int) -> Output:
    save = needs_gradient(i, e, s, a, b, gk, initial_state)
    y, _, final = forward(i, e, s if scale == 1 else s * scale, a, b, steps_of(gk, i.dtype),
                          initial_state, direction, chunk, save, output_state)
    return y, final if output_state else None


OPERATORS['eos_matmul'] = Operator(
    implementations={
        'reference': reference.eos_matmul,
        'portable': partial(_run, _portable_forward),
        'triton': partial(_run, _triton_forward),
        'export': portable.eos_matmul_export,
        'fla': fla.eos_matmul_fla,
    },
    objection=lambda i, e, *_: memory_too_large(e.shape[3]),
)
