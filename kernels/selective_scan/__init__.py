"""Selective state space recurrence along paths over a grid (Gu & Dao, "Mamba", 2023; Liu et al., "VMamba", 2024)."""
from functools import partial
from struct import Struct
from typing import Any, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import checks
from ..common.declare import differentiate, late, node
from ..common.numerics import compute_dtype, empty_result, needs_gradient, without_autocast
from ..dispatch import OPERATORS, Operator, choose
from ..eos_elementwise import eos_elementwise
from ..eos_scan import DecayGenerator
from ..eos_scan.chunks import SPACING, memory_too_large
from ..native import DONE, function
from . import reference
from .grid_paths import PATHS, to_grid, to_lines, token_rows


def selective_scan(
        u: Tensor,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        skip: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,
        *,
        paths: Sequence[str] = ('right',),
        backend: str = 'auto',
) -> Tensor:
    """Sum the outputs of selective scans, one along each path over the grid.

    For path p, with the tokens t in its order, h = 0 before the first one, channels d and states n:

        step_t[d] = softplus(delta_t[p, d] + bias[p, d])
        h_t[d, n] = exp(step_t[d] a[p, d, n]) h_{t-1}[d, n] + step_t[d] b_t[p, n] u_t[d]
        y_t[d] = sum_n c_t[p, n] h_t[d, n] + skip[p, d] u_t[d]

    Arithmetic is in float32 (float64 for float64); neither the decays nor the states of all tokens are stored.

    Args:
        u: input, shape (B, H, W, D); float32, float64, float16 or bfloat16; any strides. A sequence has H = 1.
        delta: step sizes before softplus, shape (B, H, W, P, D), dtype of u.
        a: rates <= 0 of the decays, shape (P, D, N), the -exp(A_log) of published networks. Step logs are clamped to
            -80.
        b, c: shape (B, H, W, P, N), dtype of u.
        skip: factors of the input that is added, the D of published networks, shape (P, D), or None for 0.
        bias: shape (P, D), or None for 0.
        paths: P names: 'right' goes through the rows from the first to the last, each from left to right; 'down' goes
            through the columns from left to right, each from top to bottom; 'left' and 'up' are their reverses.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        y, of the shape and dtype of u.

    Raises:
        ValueError: a shape, device, path or backend is not allowed, or the tensors exceed the memory. On a CPU,
            outside of graphs, also a positive rate.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    op = 'selective_scan'
    given = dict(u=u, delta=delta, a=a, b=b, c=c)
    given.update((name, x) for name, x in (('skip', skip), ('bias', bias)) if x is not None)
    checks.tensors(op, dict(u=4, delta=5, a=3, b=5, c=5, skip=2, bias=2), 'u', 'delta', 'b', 'c', **given)
    for path in paths:
        checks.one_of(op, 'paths', path, tuple(PATHS))
    batch, height, width, channels = u.shape
    tokens, states, count = (batch, height, width), a.shape[2], len(paths)
    if not count or not states:
        raise ValueError(f'{op}: at least one path and one state are needed, got {count} paths and {states} states')
    per_path = (count, channels)
    checks.shapes(op, ('delta', delta, (*tokens, *per_path), 'a step size for each token, path and channel of u'),
                  ('a', a, (*per_path, states), 'a rate for each path, channel and state'),
                  ('b', b, (*tokens, count, states), 'a number for each token, path and state'),
                  ('c', c, (*tokens, count, states), 'a number for each token, path and state'),
                  *((name, given[name], per_path, 'a number for each path and channel')
                    for name in ('skip', 'bias') if name in given))
    checks.step_logs(op, a=a)
    run = choose(op, backend, *given.values())
    with without_autocast(u):
        if u.numel() == 0:
            return empty_result(u, *given.values())
        return run(u, delta, a, b, c, skip, bias, tuple(paths))


def _by_lines(backend: str, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Optional[Tensor],
              bias: Optional[Tensor], paths: Sequence[str]) -> Tensor:
    """Run `eos_elementwise` on the lines of each path."""
    dtype = compute_dtype(u.dtype)
    x, delta, a, b, c = (y.to(dtype) for y in (u, delta, a, b, c))
    total = None
    for p, path in enumerate(paths):
        columns_first, reverse = PATHS[path]
        step, e, s = (y[..., p, :] for y in (delta, b, c))
        step = F.softplus(step if bias is None else step + bias[p].to(dtype))
        z, i, e, s = (to_lines(y, columns_first) for y in (step, step * x, e, s))
        # Decays of one state are of rank one, which most backends compute by products of chunks.
        decays = ({'log_o_d': z * a[p, :, 0]} if a.shape[2] == 1 and backend != 'export' else
                  {'generator': DecayGenerator(z, -a[p].mT[None], 'd', 'exponential')})
        y = to_grid(eos_elementwise(i, e, s, **decays, reverse=reverse, backend=backend), u, columns_first)
        if skip is not None:
            y = y + skip[p].to(dtype) * x
        total = y if total is None else total + y
    return total.to(u.dtype)


# --- C++

# `struct SelectiveScan` of native.cpp.
_ARGUMENTS = Struct('10q' + 'Q3q' * 4 + '4Q')


def _run(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Optional[Tensor], bias: Optional[Tensor],
         columns_first: int, backwards: int) -> Tensor:
    rows = [token_rows(x) for x in (u, delta, b, c)]
    rates = (a.float() * 1.4426950408889634).mT.contiguous()
    skip, bias = (a.new_zeros(a.shape[:2], dtype=torch.float32) if x is None else x.float().contiguous()
                  for x in (skip, bias))
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    arguments = _ARGUMENTS.pack(
        *u.shape, a.shape[2], a.shape[0], columns_first, backwards, u.dtype == torch.bfloat16, torch.get_num_threads(),
        *(number for x, *strides in rows for number in (x.data_ptr(), *strides)),
        *(x.data_ptr() for x in (rates, skip, bias, y)))
    if function('selective_scan')(arguments) != DONE:
        raise MemoryError('selective_scan: there is no memory for the outputs of a tile of channels')
    return y


def _flops(u: Sequence[int], delta: Any, a: Sequence[int], *_: Any) -> int:
    return 6 * torch.Size(u).numel() * a[0] * a[2]       # the decay, the memory and the output: two each


@node('selective_scan_native_fwd', _run, _flops)
def native_forward(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Optional[Tensor],
                   bias: Optional[Tensor], columns_first: int, backwards: int) -> Tensor:
    """u, delta, b and c: float32 or bfloat16, as `selective_scan` takes them. The last two have a bit per path."""
    return torch.empty_like(u, memory_format=torch.contiguous_format)


def _masks(paths: Sequence[str]) -> Tuple[int, int]:
    """Return a bit per path: whether columns come one after the other, and whether it is reversed."""
    columns_first, backwards = (sum(PATHS[path][n] << p for p, path in enumerate(paths)) for n in range(2))
    return columns_first, backwards


def _native(*arguments: Any) -> Tensor:
    *tensors, paths = arguments
    if needs_gradient(*tensors):
        return _by_lines('native', *arguments)
    return native_forward(*tensors, *_masks(paths))


def _portable(*arguments: Any) -> Tensor:
    # Counters on the meta device see one operator, as they would with kernels, instead of loops over tokens.
    *tensors, paths = arguments
    if arguments[0].is_meta and not needs_gradient(*tensors):
        return native_forward(*tensors, *_masks(paths))
    return _by_lines('portable', *arguments)


# --- Triton

@node('selective_scan_fwd', late(__name__, 'triton.forward'), _flops)
def _triton_forward(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor,
                    columns_first: int, backwards: int, save: bool) -> Tuple[Tensor, Tensor]:
    """The output and, with `save`, the states before every SPACING tokens: (B, P, chunks, N, D)."""
    (batch, height, width, channels), (paths, _, states) = u.shape, a.shape
    kept = (batch, paths, -(-height * width // SPACING), states, channels) if save else (0,)
    return u.new_empty(u.shape), u.new_empty(kept, dtype=torch.float32)


@node('selective_scan_bwd', late(__name__, 'triton.backward'), lambda dy, *args: 3 * _flops(*args))
def _triton_backward(dy: Tensor, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor,
                     kept: Tensor, columns_first: int, backwards: int
                     ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (u, delta, a, b, c, skip, bias))


differentiate(_triton_forward, lambda dy, *saved: _triton_backward(dy.contiguous(), *saved),
              kept=lambda outputs: outputs[1:])


def _triton(*arguments: Any) -> Tensor:
    *tensors, skip, bias, paths = arguments
    skip, bias = (tensors[2].new_zeros(tensors[2].shape[:2]) if x is None else x for x in (skip, bias))
    return _triton_forward(*tensors, skip, bias, *_masks(paths), needs_gradient(*tensors, skip, bias))[0]


OPERATORS['selective_scan'] = Operator(
    implementations={
        'reference': reference.selective_scan,
        'portable': _portable,
        'native': _native,
        'triton': _triton,
        'export': partial(_by_lines, 'export'),
    },
    native_gradient=True,
    objection=lambda u, delta, a, *_: memory_too_large(a.shape[2]),
)
