"""Polyline attention in plain PyTorch, by blocks of query rows, so that memory never holds an N x N matrix.

For the queries of grid row i, the two log masks are sums of two small tables, row[i, j, l] and column[i, k, l] of
`common/numerics.py`, with O(N^1.5) numbers in all:

    log L  [(i, j), (k, l)] = row[i, j, l] + column[i, k, l]
    log L~ [(i, j), (k, l)] = row[k, j, l] + column[i, k, j]

A block of the forward pass is computed in one of three ways:

    _block_weights     additive mode on a CPU: one exponential of q k' for both masks, referred to no maximum
    _product_weights   the same in bfloat16 on grids of at most SMALL_GRID rows and columns together
    _exact_block       multiplicative mode, other devices, and blocks whose exponentials leave the range of numbers

The backward pass computes the softmaxes of `_exact_block` again. `__init__.py` makes operators of the blocked loops. A
flop counter sees the operations of the definition, without those that are repeated to save passes over memory.
"""
from typing import Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from ..common.numerics import Workspace, compute_dtype, cumulative, log_decay, ranges, sums_are_safe, without_autocast

# Elements of a block's logits, 10 MB in float32: the fastest at 50 x 80, and as fast as smaller blocks at 14 x 14.
BLOCK_ELEMENTS = 2_500_000
# The largest sum of height and width at which products add the masks of bfloat16. At 14 x 14 that takes 4.2 ms instead
# of 7.2, at 25 x 40 3.7 ms instead of 2.9 (measured on two cores with avx512_bf16).
SMALL_GRID = 40


def _plan(q: Tensor) -> List[Tuple[slice, List[slice]]]:
    """Return each block of (batch, head) groups with its blocks of grid rows of queries."""
    groups, height, width, _ = q.shape
    per_row = width * height * width
    group_step = max(1, min(groups, BLOCK_ELEMENTS // (per_row * height)))
    rows = ranges(height, BLOCK_ELEMENTS // (per_row * group_step))
    return [(g, rows) for g in ranges(groups, group_step)]


def _block_masks(row: Tensor, column: Tensor, rows: slice, paths: str) -> List[Tuple[Tensor, Tensor]]:
    """Return for each path the two tables whose broadcast sum (G, i, j, k, l) is its log mask."""
    masks = []
    if paths in ('both', 'v2h'):
        masks.append((row[:, rows, :, None, :], column[:, rows, None, :, :]))
    if paths in ('both', 'h2v'):
        masks.append((row.transpose(1, 2)[:, None], column[:, rows].transpose(2, 3)[..., None]))
    return masks


def _block_parts(q: Tensor, k: Tensor, masks, mask_mode: str, space: Workspace) -> List[Tensor]:
    """Return the tensors (G, i, j, k, l) that the weights of a block are computed from.

    Additive mode: the softmax under each mask; the weights are their mean. Multiplicative mode: the unmasked softmax
    and each mask; the weights are the softmax times the sum of the masks."""
    groups, rows, width, _ = q.shape
    flat, shape = (groups, rows * width, k.shape[1] * width), (groups, rows, width, k.shape[1], width)
    logits = torch.bmm(q.flatten(1, 2), k.flatten(1, 2).transpose(1, 2), out=space.get('logits', flat))
    if mask_mode == 'multiplicative':
        unmasked = torch.softmax(logits, -1, out=space.get('unmasked', flat)).view(shape)
        return [unmasked] + [torch.add(first, second, out=space.get(f'mask{n}', shape)).exp_()
                             for n, (first, second) in enumerate(masks)]
    parts = []
    for n, (first, second) in enumerate(masks):
        masked = torch.add(logits.view(shape), first, out=space.get('masked', shape)).add_(second)
        parts.append(torch.softmax(masked.view(flat), -1, out=space.get(f'part{n}', flat)).view(shape))
    return parts


def _combined(parts: List[Tensor], mask_mode: str, space: Workspace) -> Tuple[Tensor, float]:
    """Return the weights of a block, (G, i*j, k*l), and the factor by which their products must be multiplied."""
    first, *others = parts
    groups, rows, width, height, _ = first.shape
    out = space.get('logits', first.shape)                                        # the logits are no longer needed
    if mask_mode == 'multiplicative':
        total = others[0] if len(others) == 1 else torch.add(*others, out=out)
        weights = torch.mul(first, total, out=out)
    else:
        weights = torch.add(*parts, out=out) if others else first
    return weights.view(groups, rows * width, height * width), 0.5 if mask_mode == 'additive' and others else 1.0


def _block_weights(q: Tensor, k: Tensor, row: Tensor, column: Tensor, rows: slice, paths: str, space: Workspace
                   ) -> Iterator[Tensor]:
    """Yield the weights (G, i*j, k*l) of a block under each mask in additive mode, before their division by their sums.

    Both masks share exp(q k'), and are themselves products: of two tables of exponentials each."""
    q = q[:, rows]
    groups, count, width, _ = q.shape
    flat, shape = (groups, count * width, k.shape[1] * width), (groups, count, width, k.shape[1], width)
    shared = torch.bmm(q.flatten(1, 2), k.flatten(1, 2).transpose(1, 2), out=space.get('logits', flat)).exp_()
    for first, second in _block_masks(row, column, rows, paths):
        yield torch.mul(shared.view(shape), first, out=space.get('masked', shape)).mul_(second).view(flat)


def _product_weights(q: Tensor, k: Tensor, row: Tensor, column: Tensor, rows: slice, paths: str, space: Workspace
                     ) -> Iterator[Tensor]:
    """Yield the same for all rows of a small grid, given the tables of logs.

    Products add the masks: one-hot channels of queries or keys select from the tables in the channels of the others.
    Operations on blocks (G, i, j, k, l) whose last side is short are slower in bfloat16: they work through single
    numbers."""
    groups, height, width, _ = q.shape
    tokens = height * width
    one_hot_column = torch.eye(width, dtype=q.dtype).repeat(height, 1).expand(groups, tokens, width)
    one_hot_row = torch.eye(height, dtype=q.dtype).repeat_interleave(width, 0).expand(groups, tokens, height)
    for path in ('v2h', 'h2v') if paths == 'both' else (paths,):
        if path == 'v2h':                                              # row[(i, j), l] and column[(k, l), i]
            left = row.reshape(groups, tokens, width), one_hot_row
            right = one_hot_column, column.flatten(2).transpose(1, 2)
        else:                                                          # row[(k, l), j] and column[(i, j), k]
            left = one_hot_column, column.transpose(2, 3).reshape(groups, tokens, height)
            right = row.transpose(2, 3).reshape(groups, tokens, width), one_hot_row
        left, right = torch.cat((q.flatten(1, 2), *left), -1), torch.cat((k.flatten(1, 2), *right), -1)
        weights = space.get('logits', (groups, tokens, tokens))
        yield torch.bmm(left, right.transpose(1, 2), out=weights).exp_()


def _fast_block(weights_of_masks: Iterator[Tensor], v: Tensor, masks: int) -> Optional[Tensor]:
    """Return the output of the queries of a block in additive mode, (G, i*j, Dv), given its weights under each mask, or
    None if the sums tell that exponentials left the range of numbers. v: (G, N, Dv)."""
    output = None
    for weights in weights_of_masks:
        total = weights.sum(-1, keepdim=True)          # added in float32 at least, and rounded once
        if not sums_are_safe(total):
            return None
        share = torch.bmm(weights, v).div_(total * masks)
        output = share if output is None else output.add_(share)
    return output


def _exact_block(q: Tensor, k: Tensor, v: Tensor, masks, mask_mode: str, space: Workspace) -> Tensor:
    """Return the output of the queries of a block for any logits, (G, i*j, Dv), by softmaxes under each mask."""
    q, k, v = (x.to(space.like.dtype) for x in (q, k, v))
    weights, factor = _combined(_block_parts(q, k, masks, mask_mode, space), mask_mode, space)
    return torch.bmm(weights, v).mul_(factor)


def forward(q: Tensor, k: Tensor, v: Tensor, row: Tensor, column: Tensor, mask_mode: str, paths: str) -> Tensor:
    """Compute the output for q, k (G, H, W, D), v (G, H, W, Dv), row (G, H, W, W), column (G, H, H, W).

    q, k and v may be bfloat16, and row and column float32: then products and exponentials are bfloat16."""
    output, space, exact = torch.empty_like(v), Workspace(q), Workspace(row)
    fast = mask_mode == 'additive' and q.is_cpu            # elsewhere, reading the sums would wait for the device
    small = fast and q.dtype == torch.bfloat16 and q.shape[1] + q.shape[2] <= SMALL_GRID
    first, second = row, column
    if fast:
        first, second = (row.to(q.dtype), column.to(q.dtype)) if small else (row.exp().to(q.dtype),
                                                                             column.exp().to(q.dtype))
    weights_of_masks = _product_weights if small else _block_weights
    with without_autocast(q):
        for g, row_blocks in _plan(q):
            value = v[g].flatten(1, 2)
            for rows in [slice(0, q.shape[1])] if small else row_blocks:
                y = None
                if fast:
                    y = _fast_block(weights_of_masks(q[g], k[g], first[g], second[g], rows, paths, space), value,
                                    2 if paths == 'both' else 1)
                if y is None:
                    masks = _block_masks(row[g], column[g], rows, paths)
                    y = _exact_block(q[g, rows], k[g], value, masks, mask_mode, exact)
                output[g, rows] = y.view_as(output[g, rows])
    return output


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, row: Tensor, column: Tensor, mask_mode: str,
             paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, row and column."""
    inputs = (q, k, v, row, column)
    dq, dk, dv, drow, dcolumn = (torch.zeros_like(x) for x in inputs)
    space = Workspace(q)
    for g, row_blocks in _plan(q):
        for rows in row_blocks:
            _backward_block([x[g] for x in inputs], grad[g, rows].flatten(1, 2), rows, mask_mode, paths,
                            [x[g] for x in (dq, dk, dv, drow, dcolumn)], space)
    return dq, dk, dv, drow, dcolumn


def _backward_block(inputs, grad: Tensor, rows: slice, mask_mode: str, paths: str, grads, space: Workspace) -> None:
    """Recompute the weights of a block and add its share to the gradients, which are views of the full ones."""
    q, k, v, row, column = inputs
    dq, dk, dv, drow, dcolumn = grads
    masks = _block_masks(row, column, rows, paths)
    parts = _block_parts(q[:, rows], k, masks, mask_mode, space)
    weights, factor = _combined(parts, mask_mode, space)
    grad = grad * factor
    dv += torch.bmm(weights.transpose(1, 2), grad).view_as(dv)
    dweights = torch.bmm(grad, v.flatten(1, 2).transpose(1, 2), out=space.get('dweights', weights.shape))
    dweights = dweights.view_as(parts[0])

    if mask_mode == 'multiplicative':
        unmasked, *factors = parts
        common = dweights * unmasked
        dmasks = [common * factor for factor in factors]
        dlogits = sum(dmasks[1:], dmasks[0])
        dlogits = torch.addcmul(dlogits, unmasked, dlogits.sum((-1, -2), keepdim=True), value=-1)
    else:
        dmasks = [part * dweights for part in parts]
        dmasks = [d.addcmul_(part, d.sum((-1, -2), keepdim=True), value=-1) for d, part in zip(dmasks, parts)]
        dlogits = sum(dmasks[1:], dmasks[0])

    dmasks = dict(zip(('v2h', 'h2v') if paths == 'both' else (paths,), dmasks))
    if 'v2h' in dmasks:
        drow[:, rows] += dmasks['v2h'].sum(3)
        dcolumn[:, rows] += dmasks['v2h'].sum(2)
    if 'h2v' in dmasks:
        drow += dmasks['h2v'].sum(1).transpose(1, 2)
        dcolumn[:, rows] += dmasks['h2v'].sum(4).transpose(2, 3)
    flat = dlogits.flatten(3).flatten(1, 2)
    dq[:, rows] += torch.bmm(flat, k.flatten(1, 2)).view_as(dq[:, rows])
    dk += torch.bmm(flat.transpose(1, 2), q[:, rows].flatten(1, 2)).view_as(dk)


def polyline_attention_export(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor, mask_mode: str,
                                paths: str) -> Tensor:
    """Compute the dense formula without loops, for q, k, v on a grid or as tokens (B, heads, H * W, D).

    For tokens, every tensor has rank 4 at most.
    """
    batch, heads, height, width = log_alpha.shape
    groups, tokens, dtype = batch * heads, height * width, compute_dtype(q.dtype)
    q, k, values = (x.to(dtype).reshape(groups, tokens, x.shape[-1]) for x in (q, k, v))
    sa, sb = (cumulative(x.reshape(groups, height, width), dim, dtype) for x, dim in ((log_alpha, 2), (log_beta, 1)))
    row = log_decay(sa, -1).reshape(groups * height, width, 1, width)                                  # (G*i, j, 1, l)
    column = log_decay(sb, -2).reshape(groups * height, 1, height, width)                              # (G*i, 1, k, l)
    v2h = (row + column).reshape(groups, tokens, tokens)
    chosen = [m for p, m in (('v2h', v2h), ('h2v', v2h.transpose(1, 2))) if paths in (p, 'both')]
    logits = q @ k.transpose(1, 2)
    if mask_mode == 'multiplicative':
        weights = logits.softmax(-1) * sum((m.exp() for m in chosen[1:]), chosen[0].exp())
    else:
        weights = [(logits + m).softmax(-1) for m in chosen]
        weights = (weights[0] + weights[1]) * 0.5 if len(weights) == 2 else weights[0]
    return (weights @ values).reshape(v.shape).to(v.dtype)
