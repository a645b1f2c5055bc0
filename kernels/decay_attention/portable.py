"""Attention along grid lines in plain PyTorch: many lines at a time, weights recomputed in the backward pass.

A *line* is a row or a column. Lines come as (n, L, D), and with the cumulative sums S of their step logs as (n, L); the
log mask -|S[j] - S[l]| is made where it is needed. As in kernels/polyline_attention/portable.py the blocked loops are
custom operators with the operation counts of the definition.
"""
from typing import List, Tuple

import torch
from torch import Tensor

from ..common.decay import compute_dtype, cumulative
from ..common.workspace import Workspace, exponentials_are_safe, ranges

# Elements of the logits of a block, 4 MB in float32: fewer and the calls cost more than the work, more and a block and
# its copies leave the caches of a CPU.
BLOCK_ELEMENTS = 1_000_000


class LineWeights:
    """Attention weights of the queries `queries` of some lines: their products now, their gradients later.

    q: (n, Lq, D), k: (n, L, D), sums: (n, L); the weights are (n, Lq, L). `name` keeps the memory of two of them
    apart in one workspace. With `skip_maximum` the weights stay p / scale, which saves passes over p; only
    `apply` works then, and q, k must be safe (`exponentials_are_safe`)."""

    def __init__(self, q: Tensor, k: Tensor, sums: Tensor, mask_mode: str, space: Workspace, name: str = '',
                 queries: slice = slice(None), skip_maximum: bool = False):
        self.q, self.k, self.sums, self.queries = q, k, sums, queries
        self.unmasked, self.scale = None, None
        shape = (*q.shape[:2], k.shape[1])
        distance = torch.sub(*self._ends(), out=space.get(name + 'distance', shape)).abs_()
        if mask_mode == 'multiplicative':
            logits = torch.bmm(q, k.transpose(1, 2), out=space.get('logits', shape))
            self.unmasked = torch.softmax(logits, -1, out=space.get(name + 'unmasked', shape))
            self.p = torch.mul(self.unmasked, distance.neg_().exp_(), out=distance)
            return
        logits = torch.baddbmm(distance, q, k.transpose(1, 2), beta=-1, out=distance)
        if skip_maximum:
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
        shares = self.p if self.unmasked is None else self.unmasked
        dlogits = torch.addcmul(dmask, shares, dmask.sum(-1, keepdim=True), value=-1)
        if self.unmasked is None:
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


def forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, mask_mode: str) -> Tensor:
    """q, k: (n, L, D); v: (n, L, Dv); sums: (n, L)."""
    output, space, safe = torch.empty_like(v), Workspace(q), exponentials_are_safe(q, k)
    for lines, blocks in _plan(q):
        for rows in blocks:
            weights = LineWeights(q[lines, rows], k[lines], sums[lines], mask_mode, space, queries=rows,
                                  skip_maximum=all(safe[lines]))
            output[lines, rows] = weights.apply(v[lines])
    return output


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor,
             mask_mode: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsums = (torch.zeros_like(x) for x in (q, k, v, sums))
    space = Workspace(q)
    for lines, blocks in _plan(q):
        for rows in blocks:
            weights = LineWeights(q[lines, rows], k[lines], sums[lines], mask_mode, space, queries=rows)
            dv[lines] += weights.apply_transposed(grad[lines, rows])
            dp = torch.bmm(grad[lines, rows], v[lines].transpose(1, 2))
            weights.backward(dp, dq[lines, rows], dk[lines], dsums[lines])
    return dq, dk, dv, dsums


def decay_attention_export(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, axis: str, mask_mode: str) -> Tensor:
    """The dense formula without loops, every tensor but the arguments of rank 4 at most."""
    batch, heads, height, width, dim = v.shape
    dtype = compute_dtype(q.dtype)
    q, k, values, steps = (_export_lines(x.to(dtype), axis) for x in (q, k, v, log_decay.unsqueeze(-1)))
    sums = cumulative(steps, 1, dtype)                                       # (lines, L, 1)
    log_mask = -(sums - sums.transpose(1, 2)).abs()                          # (lines, L, L)
    logits = q @ k.transpose(1, 2)
    weights = logits.softmax(-1) * log_mask.exp() if mask_mode == 'multiplicative' else (logits + log_mask).softmax(-1)
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
