"""Softmax attention along one grid axis, decayed with distance (PPMA, section 3.4)."""
from struct import Struct
from typing import Callable, Sequence, Tuple

import torch
from torch import Tensor

from ..common import checks, launch
from ..common.declare import differentiate, late, node
from ..common.numerics import (
    cumulative,
    empty_result,
    needs_gradient,
    portable_dtype,
)
from ..dispatch import OPERATORS, Operator, choose
from ..native import DONE, function
from . import portable, reference

AXES = ('row', 'column')


def decay_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        *,
        axis: str = 'row',
        mask_mode: str = 'additive',
        backend: str = 'auto',
) -> Tensor:
    """Compute softmax attention within each row or column of a grid, decayed with distance.

    With S the inclusive cumulative sum of log_decay along the axis and D[j, l] = -|S[j] - S[l]|:

        mask_mode='additive':        softmax(q k' + D) v
        mask_mode='multiplicative':  (softmax(q k') * exp(D)) v

    Args:
        q, k: shape (B, heads, H, W, D); float32, float64, float16 or bfloat16; any strides.
        v: shape (B, heads, H, W, Dv), dtype of q.
        log_decay: step logs along the axis, <= 0, shape (B, heads, H, W). They are clamped to [-80, 0] (positive ones
            raise an error where they can be read), and clamped values have no gradient.
        axis: 'row' (the tokens of a grid row attend to each other) or 'column'.
        mask_mode: 'additive' or 'multiplicative'.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of shape (B, heads, H, W, Dv) and the dtype of v.

    Raises:
        ValueError: a shape, device, axis, mask mode or backend is not allowed, or the tensors exceed the memory. On a
            CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    checks.attention('decay_attention', q, k, v, log_decay=log_decay)
    checks.one_of('decay_attention', 'axis', axis, AXES)
    checks.one_of('decay_attention', 'mask_mode', mask_mode, checks.MASK_MODES)
    run = choose('decay_attention', backend, q, k, v, log_decay)
    return run(q, k, v, log_decay, axis, mask_mode)


# --- what PyTorch sees

Four = Tuple[Tensor, Tensor, Tensor, Tensor]


@node('decay_attention_portable_fwd', portable.forward,
      lambda q, k, v, *_: 2 * q[0] * q[1] ** 2 * (q[2] + v[2]))
def _portable_forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, mask_mode: str) -> Tensor:
    return torch.empty_like(v)


@node('decay_attention_portable_bwd', portable.backward,
      lambda grad, q, k, v, *_: 2 * q[0] * q[1] ** 2 * (3 * q[2] + 2 * v[2]))
def _portable_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, mask_mode: str) -> Four:
    return tuple(torch.empty_like(x) for x in (q, k, v, sums))


differentiate(_portable_forward, lambda grad, *saved: _portable_backward(grad.contiguous(), *saved))


def _portable(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, axis: str, mask_mode: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_decay)
    dtype = portable_dtype(q, k, v, log_decay)
    sums = cumulative(log_decay, -1 if axis == 'row' else -2, q.dtype)
    inputs = [q.to(dtype), k.to(dtype), v.to(dtype), sums]
    inputs = [x.transpose(2, 3) for x in inputs] if axis == 'column' else inputs
    y = _portable_forward(*(x.flatten(0, 2).contiguous() for x in inputs), mask_mode)
    y = y.view(inputs[2].shape)
    return (y.transpose(2, 3) if axis == 'column' else y).to(v.dtype)


def _length(q: Sequence[int], axis: str) -> int:
    return q[3] if axis == 'row' else q[2]


def _pairs(q: Sequence[int], axis: str) -> int:
    """Return the number of query-key pairs of all lines."""
    batch, heads, height, width, _ = q
    return batch * heads * height * width * _length(q, axis)


# --- C++

def _flops(q: Sequence[int], k, v: Sequence[int], sums, axis: str, *_) -> int:
    return 2 * _pairs(q, axis) * (q[-1] + v[-1])


def _backward_flops(grad, q: Sequence[int], k, v: Sequence[int], sums, axis: str, *_) -> int:
    return 2 * _pairs(q, axis) * (3 * q[-1] + 2 * v[-1])


# `struct Lines` of native.cpp: a pointer and strides for each tensor, and the rest.
_ARGUMENTS = Struct(10 * 'Q4q' + '9q')


def _native_lines(inputs: Sequence[Tensor], results: Sequence[Tensor], axis: str, mask_mode: str,
                  run_portable: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
    """Write the results for [grad,] q, k, v and sums. PyTorch computes them again if numbers are out of range."""
    *rest, sums = inputs
    *grad, q, k, v = rest = [launch.unit_stride(x) for x in rest]
    column = axis == 'column'
    tensors = (*rest, sums, None, *results) if grad else (None, *rest, sums, *results, *[None] * 4)
    fields = [n for x in tensors for n in ([0] * 5 if x is None else [x.data_ptr(), *launch.strides(x, column)])]
    batch, heads, height, width, dim = q.shape
    arguments = _ARGUMENTS.pack(*fields, batch, heads, *((width, height) if column else (height, width)), dim,
                                v.shape[-1], q.dtype == torch.bfloat16, mask_mode == 'multiplicative',
                                torch.get_num_threads())
    if function('decay_attention')(arguments) != DONE:
        def by_line(x: Tensor) -> Tensor:
            return x.transpose(2, 3) if column else x

        again = run_portable(*(by_line(x).flatten(0, 2).float().contiguous() for x in inputs), mask_mode)
        for x, y in zip(results, again, strict=True):
            by_line(x).copy_(y.view(by_line(x).shape))
    return results


def _run_forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, axis: str, mask_mode: str) -> Tensor:
    y = launch.token_major(v.shape, v)
    return _native_lines((q, k, v, sums), [y], axis, mask_mode, lambda *args: [portable.forward(*args)])[0]


def _run_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, axis: str, mask_mode: str
                  ) -> Four:
    results = _native_gradients(q, k, v, sums)
    return _native_lines((grad, q, k, v, sums), results, axis, mask_mode, portable.backward)


def _native_gradients(*inputs: Tensor) -> Four:
    """Return tensors for the gradients: the heads of a token lie side by side, as the products read them."""
    *rest, sums = inputs
    return *(launch.token_major(x.shape, x) for x in rest), launch.dense_like(sums)


@node('decay_attention_native_fwd', _run_forward, _flops)
def _native_forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, axis: str, mask_mode: str) -> Tensor:
    return launch.token_major(v.shape, v)


@node('decay_attention_native_bwd', _run_backward, _backward_flops)
def _native_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, axis: str, mask_mode: str
                     ) -> Four:
    return _native_gradients(q, k, v, sums)


differentiate(_native_forward, _native_backward)


def _native(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, axis: str, mask_mode: str) -> Tensor:
    sums = cumulative(log_decay, -1 if axis == 'row' else -2, q.dtype)
    return _native_forward(q, k, v, sums, axis, mask_mode)


# --- Triton

def statistics_shape(q: Tensor, v: Tensor, axis: str, save: bool) -> Tuple[int, ...]:
    """Return the shape of `triton.Lines.statistics`."""
    whole = launch.fits_tile('decay_attention', q.dtype, _length(q.shape, axis), q.shape[-1],
                             v.shape[-1])
    return (2, *q.shape[:4]) if save and not whole else (0,)


@node('decay_attention_fwd', late(__name__, 'triton.forward'), _flops)
def _triton_forward(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, axis: str, mask_mode: str, save: bool
                    ) -> Tuple[Tensor, Tensor]:
    """The output and, with `save`, what the backward pass needs of long lines: `triton.Lines`."""
    statistics = steps.new_empty(statistics_shape(q, v, axis, save), dtype=torch.float32)
    return launch.token_major(v.shape, v), statistics


@node('decay_attention_bwd', late(__name__, 'triton_backward.backward'),
      lambda grad, q, k, v, steps, out, statistics, axis, *_: (
          2 * _pairs(q, axis) * (3 * q[-1] + 2 * v[-1])))
def _triton_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, steps: Tensor, out: Tensor, statistics: Tensor,
                     axis: str, mask_mode: str) -> Four:
    return (*(launch.token_major(x.shape, x) for x in (q, k, v)), launch.heads_last(steps))


def _kept(outputs: Tuple[Tensor, Tensor]) -> Tuple[Tensor, Tensor]:
    """Keep the output alive for long lines only, where the backward pass needs it."""
    out, statistics = outputs
    return out if statistics.numel() else statistics, statistics


differentiate(_triton_forward, _triton_backward, _kept)


def _triton(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, axis: str, mask_mode: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_decay)
    save = needs_gradient(q, k, v, log_decay)
    return _triton_forward(q, k, v, log_decay, axis, mask_mode, save)[0]


OPERATORS['decay_attention'] = Operator(
    implementations={
        'reference': reference.decay_attention,
        'portable': _portable,
        'native': _native,
        'triton': _triton,
        'export': portable.decay_attention_export,
    },
    native_gradient=True,
    objection=launch.head_too_wide,
)
