"""Attention along grid lines in plain PyTorch: many lines at a time, weights recomputed in the backward pass.

A *line* is a row or a column. Lines come as (n, L, D), and with the cumulative sums S of their step logs as (n, L); the
log mask -|S[j] - S[l]| is made where it is needed. As in kernels/polyline_attention/portable.py the blocked loops are
custom operators with the operation counts of the definition.
"""
from typing import List, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..common.decay import compute_dtype, cumulative
from ..common.workspace import Workspace, exponentials_are_safe, ranges

# Elements of the logits of a block, 4 MB in float32: fewer and the calls cost more than the work, more and a block and
# its copies leave the caches of a CPU.
BLOCK_ELEMENTS = 1_000_000


class LineWeights:
    """Attention weights of the queries `queries` of some lines: their products now, their gradients later.

    q: (n, Lq, D), k: (n, L, D), sums: (n, L); the weights are (n, Lq, L). `name` keeps the memory of two of them
    apart in one workspace. With `plain_exponentials` the weights stay p / scale, which saves passes over p; only
    `apply` works then, and q, k must be safe (`exponentials_are_safe`)."""

    def __init__(self, q: Tensor, k: Tensor, sums: Tensor, mask: str, space: Workspace, name: str = '',
                 queries: slice = slice(None), plain_exponentials: bool = False):
        self.q, self.k, self.sums, self.queries = q, k, sums, queries
        self.plain, self.scale = None, None
        shape = (*q.shape[:2], k.shape[1])
        distance = torch.sub(*self._ends(), out=space.get(name + 'distance', shape)).abs_()
        if mask == 'product':
            logits = torch.bmm(q, k.transpose(1, 2), out=space.get('logits', shape))
            self.plain = torch.softmax(logits, -1, out=space.get(name + 'plain', shape))
            self.p = torch.mul(self.plain, distance.neg_().exp_(), out=distance)
            return
        logits = torch.baddbmm(distance, q, k.transpose(1, 2), beta=-1, out=distance)
        if plain_exponentials:
            self.p = logits.exp_()
            self.scale = self.p.sum(-1, keepdim=True)
        else:
            self.p = torch.softmax(logits, -1, out=space.get(name + 'p', shape))

    def _ends(self) -> Tuple[Tensor, Tensor]:
        return self.sums[:, self.queries, None], self.sums[:, None, :]

    def apply(self, v: Tensor) -> Tensor:
        """weights @ v. v: (n, L, Dv) -> (n, Lq, Dv)."""
        y = torch.bmm(self.p, v)
        return y if self.scale is None else y.div_(self.scale)

    def apply_transposed(self, v: Tensor) -> Tensor:
        """weights' @ v, of normalised weights. v: (n, Lq, Dv) -> (n, L, Dv)."""
        return torch.bmm(self.p.transpose(1, 2), v)

    def backward(self, dp: Tensor, dq: Tensor, dk: Tensor, dsums: Tensor) -> None:
        """Add to the gradients of q (n, Lq, D), k and sums (views into the full ones), given that of the weights."""
        dmask = self.p * dp                                  # product: d log decay; logit: softmax's first term
        shares = self.p if self.plain is None else self.plain
        dlogits = torch.addcmul(dmask, shares, dmask.sum(-1, keepdim=True), value=-1)
        if self.plain is None:
            dmask = dlogits
        dq += torch.bmm(dlogits, self.k)
        dk += torch.bmm(dlogits.transpose(1, 2), self.q)
        dmask = torch.sub(*self._ends()).sign_().mul_(dmask)
        dsums[:, self.queries] -= dmask.sum(2)
        dsums += dmask.sum(1)


def _plan(q: Tensor) -> List[Tuple[slice, List[slice]]]:
    """For each block of lines, its blocks of queries (more than one only where a single line is too long)."""
    count, length, _ = q.shape
    queries = ranges(length, BLOCK_ELEMENTS // length)
    return [(lines, queries) for lines in ranges(count, BLOCK_ELEMENTS // (length * length))]


@torch.library.custom_op('subquad::decay_attention_portable_fwd', mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, mask: str) -> Tensor:
    """q, k: (n, L, D); v: (n, L, Dv); sums: (n, L)."""
    output, space, safe = torch.empty_like(v), Workspace(q), exponentials_are_safe(q, k)
    for lines, blocks in _plan(q):
        for rows in blocks:
            weights = LineWeights(q[lines, rows], k[lines], sums[lines], mask, space, queries=rows,
                                  plain_exponentials=all(safe[lines]))
            output[lines, rows] = weights.apply(v[lines])
    return output


@torch.library.custom_op('subquad::decay_attention_portable_bwd', mutates_args=())
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor,
              mask: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsums = (torch.zeros_like(x) for x in (q, k, v, sums))
    space = Workspace(q)
    for lines, blocks in _plan(q):
        for rows in blocks:
            weights = LineWeights(q[lines, rows], k[lines], sums[lines], mask, space, queries=rows)
            dv[lines] += weights.apply_transposed(grad[lines, rows])
            dp = torch.bmm(grad[lines, rows], v[lines].transpose(1, 2))
            weights.backward(dp, dq[lines, rows], dk[lines], dsums[lines])
    return dq, dk, dv, dsums


@_forward.register_fake
def _(q, k, v, sums, mask):
    return torch.empty_like(v)


@_backward.register_fake
def _(grad, q, k, v, sums, mask):
    return tuple(torch.empty_like(x) for x in (q, k, v, sums))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.mask = inputs[-1]


_forward.register_autograd(lambda ctx, grad: (*_backward(grad.contiguous(), *ctx.saved_tensors, ctx.mask), None),
                           setup_context=_save)


@register_flop_formula(torch.ops.subquad.decay_attention_portable_fwd)
def _(q, k, v, sums, mask, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] ** 2 * (q[2] + v[2])


@register_flop_formula(torch.ops.subquad.decay_attention_portable_bwd)
def _(grad, q, k, v, sums, mask, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] ** 2 * (3 * q[2] + 2 * v[2])


def decay_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, axis: str, mask: str) -> Tensor:
    if v.numel() == 0:
        return torch.zeros_like(v)
    dtype = compute_dtype(q.dtype)
    sums = cumulative(a, -1 if axis == 'row' else -2, q.dtype)
    inputs = [x.to(dtype).transpose(2, 3) if axis == 'column' else x.to(dtype) for x in (q, k, v, sums)]
    y = _forward(*(x.flatten(0, 2).contiguous() for x in inputs), mask).view(inputs[2].shape)
    return (y.transpose(2, 3) if axis == 'column' else y).to(v.dtype)


def decay_attention_export(q: Tensor, k: Tensor, v: Tensor, a: Tensor, axis: str, mask: str) -> Tensor:
    """The dense formula without loops, every tensor but the arguments of rank 4 at most."""
    batch, heads, height, width, dim = v.shape
    dtype = compute_dtype(q.dtype)
    q, k, values, steps = (_export_lines(x.to(dtype), axis) for x in (q, k, v, a.unsqueeze(-1)))
    sums = cumulative(steps, 1, dtype)                                       # (lines, L, 1)
    decay = -(sums - sums.transpose(1, 2)).abs()                             # (lines, L, L)
    logits = q @ k.transpose(1, 2)
    weights = logits.softmax(-1) * decay.exp() if mask == 'product' else (logits + decay).softmax(-1)
    y = weights @ values
    if axis == 'column':
        y = y.reshape(batch * heads, width, height, dim).transpose(1, 2)
    return y.reshape(v.shape).to(v.dtype)


def _export_lines(x: Tensor, axis: str) -> Tensor:
    """(B, heads, H, W, D) -> (lines, L, D) through ranks 4 and 3 only."""
    batch, heads, height, width, dim = x.shape
    if axis == 'column':
        x = x.reshape(batch * heads, height, width, dim).transpose(1, 2)
        return x.reshape(batch * heads * width, height, dim)
    return x.reshape(batch * heads * height, width, dim)
