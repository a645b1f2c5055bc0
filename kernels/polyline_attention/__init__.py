"""Softmax attention over a whole grid under the polyline path mask (PPMA, section 3, and the published code)."""
from typing import Callable, Sequence, Tuple

import torch
from torch import Tensor

from ..common import checks, launch
from ..common.declare import differentiate, late, node
from ..common.numerics import (
    column_log_decay,
    empty_result,
    needs_gradient,
    portable_dtype,
    rounded_sums,
    row_log_decay,
)
from ..dispatch import OPERATORS, Operator, choose
from ..native.attention import native_attention
from . import portable, reference


def polyline_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        log_beta: Tensor,
        *,
        mask_mode: str = 'additive',
        paths: str = 'both',
        backend: str = 'auto',
) -> Tensor:
    """Compute softmax attention between all tokens of an H x W grid, decayed along polyline paths.

    With L the V2H mask, `log L[(i,j),(k,l)] = -|Sa[i,j] - Sa[i,l]| - |Sb[i,l] - Sb[k,l]|` (Sa, Sb: inclusive
    cumulative sums of log_alpha along rows and of log_beta along columns) and L~ its transpose (H2V):

        'additive', paths='both':        1/2 softmax(q k' + log L) v + 1/2 softmax(q k' + log L~) v  (published code)
        'multiplicative', paths='both':  (softmax(q k') * (L + L~)) v                                (paper, eq. 10)

    With paths='v2h' or 'h2v' only that mask remains, without the factor 1/2. The operator does not scale q k'.

    Four implementations run on a CPU. Networks use `native`, C++ that keeps a block of the mask in registers, where
    it is built, and `portable`, which works through blocks of query rows, otherwise; torch.compile calls either as
    one operator. `export` is the dense formula, for the graphs of torch.export and
    torch.jit.trace and for transforms of torch.func. `reference` computes the definition in float64, for tests.

    Args:
        q, k: shape (B, heads, H, W, D), or (B, heads, H * W, D); float32, float64, float16 or
            bfloat16; any strides.
        v: shape (B, heads, H, W, Dv), or (B, heads, H * W, Dv), dtype of q.
        log_alpha: horizontal step logs, <= 0, shape (B, heads, H, W); log_alpha[..., 0] is not used. They are clamped
            to [-80, 0] (positive ones raise an error where they can be read), and clamped values have no gradient.
        log_beta: vertical step logs, <= 0, shape (B, heads, H, W); log_beta[..., 0, :] is not used.
        mask_mode: 'additive' or 'multiplicative'.
        paths: 'both', 'v2h' or 'h2v'.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of the shape and the dtype of v.

    Raises:
        ValueError: a shape, device, mask mode, path or backend is not allowed, or the tensors exceed the memory. On a
            CPU, outside of graphs, also a positive step log.
        TypeError: a dtype is not allowed, or a tensor is not dense.
    """
    checks.attention('polyline_attention', q, k, v, log_alpha=log_alpha, log_beta=log_beta, tokens=True)
    checks.one_of('polyline_attention', 'mask_mode', mask_mode, checks.MASK_MODES)
    checks.one_of('polyline_attention', 'paths', paths, checks.PATHS)
    run = choose('polyline_attention', backend, q, k, v, log_alpha, log_beta)
    if q.ndim == 5 or run is portable.polyline_attention_export:
        return run(q, k, v, log_alpha, log_beta, mask_mode, paths)
    grid = log_alpha.shape[2:]
    q, k, v = q.unflatten(2, grid), k.unflatten(2, grid), v.unflatten(2, grid)
    return run(q, k, v, log_alpha, log_beta, mask_mode, paths).flatten(2, 3)


# --- what PyTorch sees

def _products(q: Sequence[int], v: Sequence[int]) -> int:
    """Return the operations of one product with K and one with V. q: (..., H, W, D)."""
    *groups, height, width, dim = q
    return 2 * torch.Size(groups).numel() * (height * width) ** 2 * (dim + v[-1])


def _flops(q, k, v, *_) -> int:
    return _products(q, v)


def _backward_flops(grad, q, k, v, *_) -> int:
    # As torch counts attention: the logits are computed again.
    return 2 * _products(q, v) + _products(q, [0])


Five = Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@node('polyline_attention_portable_fwd', portable.forward, _flops)
def _portable_forward(q: Tensor, k: Tensor, v: Tensor, row: Tensor, column: Tensor, mask_mode: str, paths: str
                      ) -> Tensor:
    return torch.empty_like(v)


@node('polyline_attention_portable_bwd', portable.backward, _backward_flops)
def _portable_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, row: Tensor, column: Tensor, mask_mode: str,
                       paths: str) -> Five:
    return tuple(torch.empty_like(x) for x in (q, k, v, row, column))


differentiate(_portable_forward, lambda grad, *saved: _portable_backward(grad.contiguous(), *saved))


def _portable(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
              forward: Callable[..., Tensor] = _portable_forward) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    row, column = row_log_decay(log_alpha, q.dtype), column_log_decay(log_beta, q.dtype)
    dtype = portable_dtype(q, k, v, log_alpha, log_beta)
    inputs = [x.flatten(0, 1).contiguous() for x in (q.to(dtype), k.to(dtype), v.to(dtype), row, column)]
    return forward(*inputs, mask_mode, paths).view(v.shape).to(v.dtype)


native_forward, _native = native_attention('polyline_attention', portable, _portable, _flops, _backward_flops)


@node('polyline_attention_fwd', late(__name__, 'triton.forward'), _flops)
def triton_forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str, save: bool
                    ) -> Tuple[Tensor, Tensor, Tensor]:
    """The output and, with `save`, what the backward pass needs (see `triton.forward`)."""
    two = mask_mode == 'additive' and paths == 'both'
    first = launch.token_major(v.shape, v) if save and two else v.new_empty(0)
    rows = 1 + two + launch.own_logit_reference(q.dtype, q.shape[-1], v.shape[-1])
    lse = sa.new_empty((rows, *q.shape[:2], q.shape[2] * q.shape[3]) if save else (0,))
    return launch.token_major(v.shape, v), first, lse


@node('polyline_attention_bwd', late(__name__, 'triton.backward'), _backward_flops)
def _triton_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, out: Tensor, first: Tensor,
                     lse: Tensor, mask_mode: str, paths: str) -> Five:
    return (*(launch.token_major(x.shape, x) for x in (q, k, v)),
            *(torch.empty_like(x) for x in (sa, sb)))


differentiate(triton_forward, _triton_backward, kept=lambda outputs: outputs)


def _triton(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    sums = rounded_sums(log_alpha, -1), rounded_sums(log_beta, -2)
    save = needs_gradient(q, k, v, log_alpha, log_beta)
    return triton_forward(q, k, v, *sums, mask_mode, paths, save)[0]


OPERATORS['polyline_attention'] = Operator(
    implementations={
        'reference': reference.polyline_attention,
        'portable': _portable,
        'native': _native,
        'triton': _triton,
        'export': portable.polyline_attention_export,
    },
    native_gradient=True,
    objection=launch.head_too_wide,
)
