"""Rotary position embedding of queries and keys (Su et al., "RoFormer", arXiv 2104.09864)."""
from struct import Struct
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..common import checks
from ..common.declare import late, node
from ..common.launch import dense_like, token_order, unit_stride
from ..dispatch import OPERATORS, Operator, choose
from ..native import function
from . import angles, reference


def rotary_embedding(
        q: Tensor,
        k: Tensor,
        table: Optional[Tensor] = None,
        scale: float = 1.0,
        *,
        backend: str = 'auto',
) -> Tuple[Tensor, Tensor]:
    """Rotate the pairs (x[2m], x[2m+1]) of queries and keys by an angle for each token and pair, and scale the keys.

        y[2m] = cos a[n, m] x[2m] - sin a[n, m] x[2m+1],    y[2m+1] = sin a[n, m] x[2m] + cos a[n, m] x[2m+1]

    The arithmetic is in float32, or in float64 for float64 tensors; the result is rounded once.

    Args:
        q, k: shape (B, heads, N, D) with an even D; float32, float64, float16 or bfloat16; any strides.
        table: cosines and sines of the angles a[n, m], shape (N, D / 2, 2); float64 for float64 q and k, and float32
            otherwise. It has no gradient. None for the angles n * 10000^(-linspace(0, 1, D / 2)) of token n.
        scale: factor of k.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        Rotated q and k, (B, heads, N, D) each, in the dtype of q.

    Raises:
        ValueError: a shape, device, scale or backend is not allowed.
        TypeError: a dtype is not allowed, a tensor is not dense, or the scale is not a number.
    """
    op = 'rotary_embedding'
    given = {} if table is None else {'table': table}
    checks.tensors(op, dict(q=4, k=4, table=3), 'q', 'k', q=q, k=k, **given)
    checks.shapes(op, ('k', k, q.shape, 'as q'))
    if q.shape[3] < 2 or q.shape[3] % 2:
        raise ValueError(f'{op}: q must have an even number of channels, got shape {tuple(q.shape)}')
    if given:
        kind = torch.float64 if q.dtype == torch.float64 else torch.float32
        if table.dtype != kind:
            raise TypeError(f'{op}: table must have dtype {kind} for q of dtype {q.dtype}, got {table.dtype}')
        checks.shapes(op, ('table', table, (q.shape[2], q.shape[3] // 2, 2),
                     'cosine and sine for each token and pair of q'))
    checks.number(op, 'scale', scale)
    run = choose(op, backend, q, k, *given.values())
    if table is None and run is not angles.rotary_embedding_export:
        # Tables are kept, but not by a graph: a tensor of a trace or of the memory of a CUDA graph must not outlive it.
        fresh = checks.is_traced_or_wrapped(q) or q.is_cuda and torch.cuda.is_current_stream_capturing()
        make = angles.rotary_table if fresh else angles.kept_table
        table = make(q.shape[2], q.shape[3], q.device, torch.float64 if q.dtype == torch.float64 else torch.float32)
    return run(q, k, table, float(scale))


def _portable(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """Multiply complex numbers, or real ones in graphs, because compilers do not support complex ones."""
    if checks.is_traced_or_wrapped(q):
        return angles.rotate_real(q, k, table, scale)
    factors = torch.view_as_complex(table)                      # (N, D / 2)
    return _multiply_pairs(q, factors), _multiply_pairs(k, factors * scale)


def _multiply_pairs(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply the pairs of x (B, heads, N, D), read as complex numbers, by factors (N, D / 2)."""
    numbers = x.to(factors.real.dtype)
    batch, head, token, channel = numbers.stride()
    if channel != 1 or (numbers.storage_offset() | batch | head | token) % 2:
        numbers = numbers.contiguous()                          # complex numbers are aligned pairs
    pairs = torch.view_as_complex(numbers.unflatten(-1, (-1, 2)))
    # In inference the result is contiguous for each head, the layout that the operators need. This saves a pass.
    eager = x.is_cpu and not torch.is_grad_enabled()
    out = pairs.new_empty(pairs.shape) if eager else None
    return torch.view_as_real(torch.mul(pairs, factors, out=out)).flatten(-2).to(x.dtype)


# --- C++ and Triton: the gradient is the rotation back

def _differentiate(forward: Any) -> Any:
    def save(ctx, inputs, output) -> None:
        _, _, table, ctx.scale, ctx.inverse = inputs
        ctx.save_for_backward(table)

    def gradient(ctx, dq: Tensor, dk: Tensor):
        return *forward(dq, dk, ctx.saved_tensors[0], ctx.scale, not ctx.inverse), None, None, None

    forward.register_autograd(gradient, setup_context=save)
    return forward


# `struct Rotation` of native.cpp.
_ARGUMENTS = Struct('5Q4q3q3q3q3qd')


def _run(q: Tensor, k: Tensor, table: Tensor, scale: float, inverse: bool) -> Tuple[Tensor, Tensor]:
    q, k, table = unit_stride(q), unit_stride(k), table.contiguous()
    q_out, k_out = _results(q, k, inverse)
    function('rotary_embedding')(_ARGUMENTS.pack(
        q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), table.data_ptr(), *q.shape,
        *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], q.dtype == torch.bfloat16, inverse,
        torch.get_num_threads(), scale))
    return q_out, k_out


def _results(q: Tensor, k: Tensor, inverse: bool) -> Tuple[Tensor, Tensor]:
    """Return tensors that are dense for each head, as attention reads them, and with `inverse`, for each token, as
    the products read the gradients of q and k."""
    return (token_order(q), token_order(k)) if inverse else (dense_like(q), dense_like(k))


# No operations, like torch's counter, which leaves elementwise ones out.
@_differentiate
@node('rotary_embedding_native_fwd', _run, lambda *_: 0)
def _native_forward(q: Tensor, k: Tensor, table: Tensor, scale: float, inverse: bool) -> Tuple[Tensor, Tensor]:
    """Rotate q and k, or with `inverse` rotate them back; k is scaled in both cases."""
    return _results(q, k, inverse)


def _native(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    # Compilers fuse the rotation with what surrounds it.
    if torch.compiler.is_compiling():
        return angles.rotate_real(q, k, table, scale)
    return _native_forward(q, k, table, scale, False)


@_differentiate
@node('rotary_embedding_fwd', late(__name__, 'triton.forward'), lambda *_: 0)
def _forward(q: Tensor, k: Tensor, table: Tensor, scale: float, inverse: bool) -> Tuple[Tensor, Tensor]:
    """Do the same on a GPU. The heads of a token of the results lie side by side."""
    return token_order(q), token_order(k)


def _triton(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    return _forward(q, k, table.contiguous(), scale, False) if q.numel() else (q.clone(), k.clone())


OPERATORS['rotary_embedding'] = Operator(
    implementations={
        'reference': reference.rotary_embedding,
        'portable': _portable,
        'native': _native,
        'triton': _triton,
        'export': angles.rotary_embedding_export,
    },
    plain=True,
    native_gradient=True,
)
