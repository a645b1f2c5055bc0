"""Decay attention in plain PyTorch: many lines at a time; the backward pass recomputes the weights.

A line is a row or a column. Lines have shape (n, L, D), and the cumulative sums S of their step logs (n, L). The log
mask -|S[j] - S[l]| is computed block by block. `custom_op.py` wraps the blocked loops as operators, whose operation
counts are those of the definition.
"""
from typing import List, Tuple

import torch
from torch import Tensor

from ..common.decay import compute_dtype, cumulative
from ..common.workspace import Workspace, exponentials_are_safe, ranges

# Elements of the logits of a block, 4 MB in float32. With smaller blocks, calls cost more than arithmetic; larger
# blocks and their copies do not fit into the caches of a CPU.
BLOCK_ELEMENTS = 1_000_000


class LineWeights:
    """Attention weights (n, Lq, L) of some queries of some lines, their products and their gradients.

    Args:
        q: (n, Lq, D), k: (n, L, D), sums: (n, L).
        mask_mode: 'additive' or 'multiplicative'.
        space: memory for the weights. `name` separates the memory of two instances in one workspace.
        queries: positions of the queries on their lines.
        skip_maximum: leave the weights as p / scale, which saves passes over p. Only `apply` works then, and q and k
            must be safe (`exponentials_are_safe`).
    """

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
        """Return weights @ v: (n, L, Dv) -> (n, Lq, Dv)."""
        y = torch.bmm(self.p, v)
        return y if self.scale is None else y.div_(self.scale)

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
        dmask = torch.sub(*self._ends()).sign_().mul_(dmask)
        dsums[:, self.queries] -= dmask.sum(2)
        dsums += dmask.sum(1)


def _plan(q: Tensor) -> List[Tuple[slice, List[slice]]]:
    """Return each block of lines with its blocks of queries (several only if one line is too long)."""
    count, length, _ = q.shape
    queries = ranges(length, BLOCK_ELEMENTS // length)
    return [(lines, queries) for lines in ranges(count, BLOCK_ELEMENTS // (length * length))]


def forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, mask_mode: str) -> Tensor:
    """Compute the output (n, L, Dv) for q, k (n, L, D), v (n, L, Dv) and sums (n, L)."""
    output, space, safe = torch.empty_like(v), Workspace(q), exponentials_are_safe(q, k)
    for lines, blocks in _plan(q):
        for rows in blocks:
            weights = LineWeights(q[lines, rows], k[lines], sums[lines], mask_mode, space, queries=rows,
                                  skip_maximum=all(safe[lines]))
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
    y = line_weights_export(q, k, steps, mask_mode) @ values
    if axis == 'column':
        y = y.reshape(batch * heads, width, height, dim).transpose(1, 2)
    return y.reshape(v.shape).to(v.dtype)


def line_weights_export(q: Tensor, k: Tensor, steps: Tensor, mask_mode: str) -> Tensor:
    """Return the attention weights (lines, L, L) of lines q, k (lines, L, D) with step logs (lines, L, 1)."""
    sums = cumulative(steps, 1, q.dtype)                                     # (lines, L, 1)
    log_mask = -(sums - sums.transpose(1, 2)).abs()                          # (lines, L, L)
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
