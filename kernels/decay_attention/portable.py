"""Decay attention in plain PyTorch: many lines at a time; the backward pass recomputes the weights.

A line is a row or a column. Lines have shape (n, L, D), and the cumulative sums S of their step logs (n, L). The log
mask -|S[j] - S[l]| is computed block by block. `__init__.py` makes operators of the blocked loops,
whose operation counts are those of the definition.
"""
from typing import List, Tuple

import torch
from torch import Tensor

from ..common.numerics import (
    Workspace,
    compute_dtype,
    cumulative,
    index_signs,
    log_decay,
    packed,
    ranges,
    sums_are_safe,
    without_autocast,
)

# Elements of the logits of a block, 4 MB in float32. With smaller blocks, calls cost more than arithmetic; larger
# blocks and their copies do not fit into the caches of a CPU.
BLOCK_ELEMENTS = 1_000_000


class LineWeights:
    """Attention weights (n, Lq, L) of some queries of some lines, their products and their gradients.

    Args:
        q: (n, Lq, D), k: (n, L, D); with `fast` they may be bfloat16, and weights are bfloat16 too.
        sums: (n, L), at least float32.
        mask_mode: 'additive' or 'multiplicative'.
        space: memory for the weights. `name` separates the memory of two instances in one workspace.
        queries: positions of the queries on their lines.
        fast: in additive mode, leave the weights as p / scale and refer exponentials to no maximum, which saves passes
            over p, unless they leave the range of numbers. Only `apply` works then.
    """

    def __init__(self, q: Tensor, k: Tensor, sums: Tensor, mask_mode: str, space: Workspace, name: str = '',
                 queries: slice = slice(None), fast: bool = False):
        self.sums, self.queries, self.unmasked, self.scale = sums, queries, None, None
        shape = (*q.shape[:2], k.shape[1])
        if fast and mask_mode == 'additive':
            self.p = self._logits(q, k, space, name).exp_()
            self.scale = self.p.sum(-1, keepdim=True)               # added in float32 at least, and rounded once
            if sums_are_safe(self.scale):
                return
            self.scale = None
        self.q, self.k = q.to(sums.dtype), k.to(sums.dtype)
        if mask_mode == 'multiplicative':
            logits = torch.bmm(self.q, self.k.transpose(1, 2), out=space.get('logits', shape, sums.dtype))
            self.unmasked = torch.softmax(logits, -1, out=space.get(name + 'unmasked', shape, sums.dtype))
            distance = self._distance(space, name)
            self.p = torch.mul(self.unmasked, distance.neg_().exp_(), out=distance)
        else:
            p = space.get(name + 'p', shape, sums.dtype)
            self.p = torch.softmax(self._logits(self.q, self.k, space, name), -1, out=p)

    def _ends(self) -> Tuple[Tensor, Tensor]:
        return self.sums[:, self.queries, None], self.sums[:, None, :]

    def _distance(self, space: Workspace, name: str) -> Tensor:
        """Return minus the log mask, (n, Lq, L), with the precision of the sums."""
        left, right = self._ends()
        shape = (*left.shape[:2], right.shape[2])
        return torch.sub(left, right, out=space.get(name + 'distance', shape, self.sums.dtype)).abs_()

    def _logits(self, q: Tensor, k: Tensor, space: Workspace, name: str) -> Tensor:
        """Return the logits with the log mask, (n, Lq, L), in the dtype of q."""
        out = self._distance(space, name)
        if q.dtype != out.dtype:
            out = space.get(name + 'logits', out.shape, q.dtype).copy_(out)
        return torch.baddbmm(out, q, k.transpose(1, 2), beta=-1, out=out)

    def apply(self, v: Tensor) -> Tensor:
        """Return weights @ v: (n, L, Dv) -> (n, Lq, Dv), in the dtype of v."""
        y = torch.bmm(self.p, v.to(self.p.dtype))
        return y.to(v.dtype) if self.scale is None else y.div_(packed(self.scale.expand_as(y)))

    def apply_transposed(self, v: Tensor) -> Tensor:
        """Return weights' @ v for normalized weights: (n, Lq, Dv) -> (n, L, Dv)."""
        return torch.bmm(self.p.transpose(1, 2), v)

    def backward(self, dp: Tensor, dq: Tensor, dk: Tensor, dsums: Tensor) -> None:
        """Add to the gradients of q, k and sums (views of the full ones), given the gradient of the weights."""
        dmask = self.p * dp                                  # d log mask (multiplicative), or its first term
        shares = self.p if self.unmasked is None else self.unmasked
        dlogits = torch.addcmul(dmask, shares, dmask.sum(-1, keepdim=True), value=-1)
        if self.unmasked is None:
            dmask = dlogits
        dq += torch.bmm(dlogits, self.k)
        dk += torch.bmm(dlogits.transpose(1, 2), self.q)
        dmask.mul_(index_signs(self.sums.shape[1], dmask, self.queries))     # no longer needed for other gradients
        dsums[:, self.queries] += dmask.sum(2)
        dsums -= dmask.sum(1)


def _plan(q: Tensor) -> List[Tuple[slice, List[slice]]]:
    """Return each block of lines with its blocks of queries (several only if one line is too long)."""
    count, length, _ = q.shape
    queries = ranges(length, BLOCK_ELEMENTS // length)
    return [(lines, queries) for lines in ranges(count, BLOCK_ELEMENTS // (length * length))]


def forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, mask_mode: str) -> Tensor:
    """Compute the output (n, L, Dv) for q, k (n, L, D), v (n, L, Dv) and sums (n, L).

    q, k and v may be bfloat16, and sums float32: then products and exponentials are bfloat16."""
    output, space = torch.empty_like(v), Workspace(q)
    fast = q.is_cpu                                    # elsewhere, reading sums of weights would wait for the device
    with without_autocast(q):
        for lines, blocks in _plan(q):
            for rows in blocks:
                weights = LineWeights(q[lines, rows], k[lines], sums[lines], mask_mode, space, queries=rows, fast=fast)
                output[lines, rows] = weights.apply(v[lines])
    return output


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor,
             mask_mode: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sums."""
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
    """Compute the dense formula without loops; every tensor but the arguments has rank 4 at most."""
    batch, heads, height, width, dim = v.shape
    dtype = compute_dtype(q.dtype)
    q, k, values, steps = (_export_lines(x.to(dtype), axis) for x in (q, k, v, log_decay.unsqueeze(-1)))
    y = line_weights_export(q, k, steps.flatten(1), mask_mode) @ values
    if axis == 'column':
        y = y.reshape(batch * heads, width, height, dim).transpose(1, 2)
    return y.reshape(v.shape).to(v.dtype)


def line_weights_export(q: Tensor, k: Tensor, steps: Tensor, mask_mode: str) -> Tensor:
    """Return the attention weights (lines, L, L) of lines q, k (lines, L, D) with step logs (lines, L)."""
    log_mask = log_decay(cumulative(steps, 1, q.dtype), -1)                  # (lines, L, L)
    logits = q @ k.transpose(1, 2)
    if mask_mode == 'multiplicative':
        return logits.softmax(-1) * log_mask.exp()
    return (logits + log_mask).softmax(-1)


def _export_lines(x: Tensor, axis: str) -> Tensor:
    """Reshape (B, heads, H, W, D) to (lines, L, D) through ranks 4 and 3 only."""
    batch, heads, height, width, dim = x.shape
    if axis == 'column':
        x = x.reshape(batch * heads, height, width, dim).transpose(1, 2)
        return x.reshape(batch * heads * width, height, dim)
    return x.reshape(batch * heads * height, width, dim)
