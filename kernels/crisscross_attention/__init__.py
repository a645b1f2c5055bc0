"""Criss-cross attention: decay attention within rows and within columns, chained (PPMA, section 3.4)."""
from typing import Callable, List, Sequence, Tuple

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
from ..decay_attention import statistics_shape
from ..dispatch import OPERATORS, Operator, choose
from ..native.attention import native_attention
from . import portable, reference


def crisscross_attention(
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
    """Compute decayed softmax attention within rows and columns in turn.

    P_w are the weights of `decay_attention` within rows (step logs log_alpha), P_h those within columns (log_beta):

        paths='v2h':   P_w (P_h v)            (the V2H polyline: down the column, then along the row)
        paths='h2v':   P_h (P_w v)
        paths='both':  1/2 P_w (P_h v) + 1/2 P_h (P_w v)

    Args:
        q, k: shape (B, heads, H, W, D), or (B, heads, H * W, D); float32, float64, float16 or
            bfloat16; any strides.
        v: shape (B, heads, H, W, Dv), or (B, heads, H * W, Dv), dtype of q.
        log_alpha, log_beta: horizontal and vertical step logs, <= 0, shape (B, heads, H, W), as for `decay_attention`.
        mask_mode: 'additive' (published weights) or 'multiplicative' (paper).
        paths: 'both', 'v2h' or 'h2v'.
        backend: 'auto', 'triton', 'native', 'portable', 'reference' or 'export'.

    Returns:
        A tensor of the shape and the dtype of v.

    Raises:
        ValueError, TypeError: as for `decay_attention`.
    """
    checks.attention('crisscross_attention', q, k, v, log_alpha=log_alpha, log_beta=log_beta, tokens=True)
    checks.one_of('crisscross_attention', 'mask_mode', mask_mode, checks.MASK_MODES)
    checks.one_of('crisscross_attention', 'paths', paths, checks.PATHS)
    run = choose('crisscross_attention', backend, q, k, v, log_alpha, log_beta)
    if q.ndim == 5 or run is portable.crisscross_attention_export:
        return run(q, k, v, log_alpha, log_beta, mask_mode, paths)
    grid = log_alpha.shape[2:]
    q, k, v = q.unflatten(2, grid), k.unflatten(2, grid), v.unflatten(2, grid)
    return run(q, k, v, log_alpha, log_beta, mask_mode, paths).flatten(2, 3)


# --- what PyTorch sees

def _pairs(q: Sequence[int]) -> int:
    """Return the number of query-key pairs of all rows and all columns. q: (..., H, W, D)."""
    *groups, height, width, _ = q
    return torch.Size(groups).numel() * height * width * (height + width)


def _flops(q, k, v, log_alpha, log_beta, mask_mode, paths, *_) -> int:
    return 2 * _pairs(q) * (q[-1] + v[-1] * (2 if paths == 'both' else 1))


@node('crisscross_attention_portable_fwd', portable.forward, _flops)
def _portable_forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str) -> Tensor:
    return torch.empty_like(v)


def _portable_backward_flops(grad, q, k, v, sa, sb, mask_mode, paths) -> int:
    return 2 * _pairs(q) * (3 * q[-1] + v[-1] * (5 if paths == 'both' else 3))


@node('crisscross_attention_portable_bwd', portable.backward, _portable_backward_flops)
def _portable_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str
                       ) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x) for x in (q, k, v, sa, sb))


differentiate(_portable_forward, lambda grad, *saved: _portable_backward(grad.contiguous(), *saved))


def _portable(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
              forward: Callable[..., Tensor] = _portable_forward) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    dtype = portable_dtype(q, k, v, log_alpha, log_beta)
    sa, sb = cumulative(log_alpha, -1, q.dtype), cumulative(log_beta, -2, q.dtype)
    inputs = [x.flatten(0, 1).contiguous() for x in (q.to(dtype), k.to(dtype), v.to(dtype), sa, sb)]
    return forward(*inputs, mask_mode, paths).view(v.shape).to(v.dtype)


native_forward, _native = native_attention(
    'crisscross_attention', portable, _portable, _flops, _portable_backward_flops)


@node('crisscross_attention_fwd', late(__name__, 'triton.forward'), _flops)
def triton_forward(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str,
                    save: bool) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output and, with `save`, what the backward pass needs (see `triton.forward`)."""
    shapes = [statistics_shape(q, v, axis, save) for axis in ('row', 'column')]
    statistics = [log_alpha.new_empty(shape, dtype=torch.float32) for shape in shapes]
    long = any(len(shape) > 1 for shape in shapes)
    needed = paths != 'h2v', paths != 'v2h', paths == 'both' and long
    down, along, first = (launch.token_major(v.shape, v) if save and x else v.new_empty(0)
                          for x in needed)
    return launch.token_major(v.shape, v), down, along, first, *statistics


def _backward_flops(grad, inputs, saved, mask_mode, paths) -> int:
    q, _, v, *_ = inputs
    return 2 * _pairs(q) * (3 * q[-1] + v[-1] * (4 if paths == 'both' else 2))


@node('crisscross_attention_bwd', late(__name__, 'triton.backward'), _backward_flops)
def _triton_backward(grad: Tensor, inputs: List[Tensor], saved: List[Tensor], mask_mode: str, paths: str
                     ) -> List[Tensor]:
    return [*(launch.token_major(x.shape, x) for x in inputs[:3]),
            *map(launch.heads_last, inputs[3:])]


def _kept(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Keep the output alive for long lines only, where the backward pass needs it."""
    out, *others, rows, columns = outputs
    return out if rows.numel() or columns.numel() else rows, *others, rows, columns


differentiate(
    triton_forward,
    lambda grad, *saved: _triton_backward(grad, saved[:5], saved[5:-2], *saved[-2:]), _kept)


def _triton(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str, paths: str) -> Tensor:
    if v.numel() == 0:
        return empty_result(v, q, k, log_alpha, log_beta)
    return triton_forward(q, k, v, log_alpha, log_beta, mask_mode, paths,
                           needs_gradient(q, k, v, log_alpha, log_beta))[0]


OPERATORS['crisscross_attention'] = Operator(
    implementations={
        'reference': reference.crisscross_attention,
        'portable': _portable,
        'native': _native,
        'triton': _triton,
        'export': portable.crisscross_attention_export,
    },
    native_gradient=True,
    objection=launch.head_too_wide,
)
