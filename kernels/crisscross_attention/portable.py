"""Criss-cross attention in plain PyTorch: the weights of rows and of columns are computed once for both paths."""
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common.numerics import Workspace, compute_dtype, packed, ranges, without_autocast
from ..decay_attention import portable as decay_portable
from ..decay_attention.portable import LineWeights, line_weights_export


def _plan(q: Tensor) -> List[slice]:
    """Return blocks of (batch, head) groups. q: (G, H, W, D)."""
    groups, height, width, _ = q.shape
    return ranges(groups, decay_portable.BLOCK_ELEMENTS // (height * width * max(height, width)))


def _swap(x: Tensor) -> Tensor:
    """Transpose (G, H, W, ...) to a contiguous (G, W, H, ...)."""
    return x.transpose(1, 2).contiguous()


class _Axes:
    """Weights within rows (P_w) and within columns (P_h) of some groups. q, k: (G, H, W, D); sa, sb: (G, H, W)."""

    def __init__(self, q: Tensor, k: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, space: Workspace,
                 fast: bool = False):
        self.rows = LineWeights(q.flatten(0, 1), k.flatten(0, 1), sa.flatten(0, 1), mask_mode, space, 'rows', fast=fast)
        self.columns = LineWeights(_swap(q).flatten(0, 1), _swap(k).flatten(0, 1), _swap(sb).flatten(0, 1), mask_mode,
                                   space, 'columns', fast=fast)

    def chain(self, v: Tensor, paths: str) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Return the output (G, H, W, D), P_w v (G, H, W, D) and P_h v (G, W, H, D), or None if no path needs them."""
        if paths == 'h2v':
            along = _on_lines(self.rows.apply, v)
            return _on_lines(self.columns.apply, _swap(along)).transpose(1, 2), along, None
        down = _on_lines(self.columns.apply, _swap(v))
        if paths == 'v2h':
            return _on_lines(self.rows.apply, _swap(down)), None, down
        # One product with the weights of rows serves both paths.
        y = _on_lines(self.rows.apply, torch.cat((v, down.transpose(1, 2)), -1))
        along, down_then_along = y.split(v.shape[-1], -1)
        along_then_down = _on_lines(self.columns.apply, _swap(along)).transpose(1, 2)
        return (packed(down_then_along) + packed(along_then_down)).mul_(0.5), along, down


def _on_lines(f, x: Tensor) -> Tensor:
    """Apply f, which takes lines (G*n, L, D), to x (G, n, L, D)."""
    return f(x.flatten(0, 1)).view(x.shape)


def forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str) -> Tensor:
    """Compute the output for q, k (G, H, W, D), v (G, H, W, Dv) and sums sa, sb (G, H, W), with G = B * heads.

    q, k and v may be bfloat16, and the sums float32: then products and exponentials are bfloat16."""
    output, space = torch.empty_like(v), Workspace(q)
    fast = q.is_cpu                                    # elsewhere, reading sums of weights would wait for the device
    with without_autocast(q):
        for g in _plan(q):
            output[g] = _Axes(q[g], k[g], sa[g], sb[g], mask_mode, space, fast).chain(v[g], paths)[0]
    return output


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str,
             paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, sa and sb."""
    inputs = (q, k, v, sa, sb)
    dq, dk, dv, dsa, dsb = (torch.zeros_like(x) for x in inputs)
    space = Workspace(q)
    for g in _plan(q):
        grads = [x[g] for x in (dq, dk, dv, dsa, dsb)]
        _backward_block([x[g] for x in inputs], grad[g], mask_mode, paths, grads, space)
    return dq, dk, dv, dsa, dsb


def _backward_block(inputs, grad: Tensor, mask_mode: str, paths: str, grads, space: Workspace) -> None:
    """Recompute the weights of a block and add its share to the gradients, which are views of the full ones."""
    q, k, v, sa, sb = inputs
    dq, dk, dv, dsa, dsb = grads
    axes = _Axes(q, k, sa, sb, mask_mode, space)
    rows, columns = axes.rows, axes.columns
    _, along, down = axes.chain(v, paths)
    grad = grad * 0.5 if paths == 'both' else grad
    row_pairs, column_pairs = [], []                  # (gradient, input) of each product with an axis' weights
    if along is not None:                             # P_h (P_w v)
        dalong = _swap(_on_lines(columns.apply_transposed, _swap(grad)))
        column_pairs.append((_swap(grad), _swap(along)))
        row_pairs.append((dalong, v))
        dv += _on_lines(rows.apply_transposed, dalong)
    if down is not None:                              # P_w (P_h v)
        ddown = _swap(_on_lines(rows.apply_transposed, grad))
        row_pairs.append((grad, _swap(down)))
        column_pairs.append((ddown, _swap(v)))
        dv += _on_lines(columns.apply_transposed, ddown).transpose(1, 2)
    rows.backward(_outer(row_pairs), *(x.flatten(0, 1) for x in (dq, dk, dsa)))
    swapped = [torch.zeros_like(_swap(x)) for x in (dq, dk, dsb)]
    columns.backward(_outer(column_pairs), *(x.flatten(0, 1) for x in swapped))
    for target, extra in zip((dq, dk, dsb), swapped):
        target += extra.transpose(1, 2)


def _outer(pairs: Sequence[Tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of left right' over pairs of (G, n, L, D) as one product: (G*n, L, L)."""
    left, right = (torch.cat(x, -1).flatten(0, 1) for x in zip(*pairs))
    return torch.bmm(left, right.transpose(1, 2))


def crisscross_attention_export(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                                  paths: str) -> Tensor:
    """Compute the dense formula without loops, for q, k, v on a grid or as tokens (B, heads, H * W, D).

    For tokens, every tensor has rank 4 at most.
    """
    batch, heads, height, width = log_alpha.shape
    groups, dtype, dim = batch * heads, compute_dtype(q.dtype), v.shape[-1]

    def lines(x: Tensor) -> Tensor:
        """Rows of tokens: (B, heads, N, D) -> (G * H, W, D)."""
        return x.to(dtype).reshape(groups * height, width, x.shape[-1])

    def to_columns(x: Tensor) -> Tensor:
        """(G * H, W, D) -> (G * W, H, D)."""
        x = x.reshape(groups, height, width, x.shape[-1]).transpose(1, 2)
        return x.reshape(groups * width, height, x.shape[-1])

    def to_rows(x: Tensor) -> Tensor:
        """(G * W, H, D) -> (G * H, W, D)."""
        return x.reshape(groups, width, height, dim).transpose(1, 2).reshape(groups * height, width, dim)

    q, k, values = lines(q), lines(k), lines(v)
    log_beta = log_beta.reshape(groups, height, width).transpose(1, 2).reshape(groups * width, height)
    along = line_weights_export(q, k, log_alpha.reshape(groups * height, width), mask_mode)
    down = line_weights_export(to_columns(q), to_columns(k), log_beta, mask_mode)
    results = []
    if paths != 'v2h':
        results.append(to_rows(down @ to_columns(along @ values)))
    if paths != 'h2v':
        results.append(along @ to_rows(down @ to_columns(values)))
    y = (results[0] + results[1]) * 0.5 if paths == 'both' else results[0]
    return y.reshape(v.shape).to(v.dtype)
