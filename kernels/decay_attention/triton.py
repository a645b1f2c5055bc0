"""Triton kernels of decay attention (PPMA, section 3.4), on all lines of a grid at once:

    additive:        y[j] = sum_l softmax_l(q[j] k[l]' + D[j, l]) v[l]
    multiplicative:  y[j] = sum_l softmax_l(q[j] k[l]') exp(D[j, l]) v[l],       D[j, l] = -|S[j] - S[l]|

A line is a row or a column of the grid. Kernels find its tokens by strides, so they read columns without a copy. A line
of at most one tile (64 tokens; fewer for wide heads) is computed whole: the backward pass computes its weights once and
needs no tensor saved by the forward pass. Longer lines run tile by tile with a running softmax, and their backward pass
takes each tile first as queries, then as keys.
"""
from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import INF, LOG2E, dot, index_sign, load_tokens, row_products, running_softmax, store_tokens


@triton.jit
def _load_line(pointer, index, stride, limit, other):
    return tl.load(pointer + index * stride, mask=index < limit, other=other)


@triton.jit
def _decay_attention_fwd_kernel(
        q, k, v, sums, out, lse, heads, lines, length, token_line, token_j,
        q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j, v_b, v_h, v_line, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, SAVE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute y for one tile of queries of one line per program, over all keys of the line."""
    blocks = tl.cdiv(length, BLOCK)
    line = (tl.program_id(0) // blocks % lines).to(tl.int64)
    group = (tl.program_id(0) // blocks // lines).to(tl.int64)
    batch, head, tokens = group // heads, group % heads, lines * length
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    sums += group * tokens + line * token_line
    k += batch * k_b + head * k_h + line * k_line
    v += batch * v_b + head * v_h + line * v_line
    query = load_tokens(q + batch * q_b + head * q_h + line * q_line, j, q_j, length, DIM, BLOCK_D, UPCAST)
    s_j = _load_line(sums, j, token_j, length, 0.0) * LOG2E
    top = tl.full((BLOCK,), -INF, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    y = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    for start in range(0, length, BLOCK):
        l = start + tl.arange(0, BLOCK)
        key = load_tokens(k, l, k_j, length, DIM, BLOCK_D, UPCAST)
        value = load_tokens(v, l, v_j, length, DIM_V, BLOCK_V, UPCAST)
        # An infinite sum gives keys beyond the line a log mask of -inf.
        decay = -tl.abs(s_j[:, None] - (_load_line(sums, l, token_j, length, INF) * LOG2E)[None, :])
        logits = dot(query, tl.trans(key), PRECISION) * LOG2E
        if MULTIPLICATIVE:
            logits = tl.where((l < length)[None, :], logits, -INF)
            new_top = tl.maximum(top, tl.max(logits, 1))
            scale = tl.exp2(top - new_top)
            p = tl.exp2(logits - new_top[:, None])
            total = total * scale + tl.sum(p, 1)
            y = y * scale[:, None] + dot(p * tl.exp2(decay), value, PRECISION)
            top = new_top
        else:
            top, total, y = running_softmax(logits + decay, value, top, total, y, PRECISION)
    y = y / total[:, None]
    first = (batch * tokens + line * token_line) * heads + head
    store_tokens(out + first * DIM_V, j, token_j * heads * DIM_V, length, y, DIM_V, BLOCK_V)
    if SAVE:
        tl.store(lse + group * tokens + line * token_line + j * token_j, top + tl.log2(total), mask=j < length)


@triton.jit
def _decay_attention_bwd_line_kernel(
        q, k, v, sums, grad, dq, dk, dv, dsums, heads, lines, length, token_line, token_j,
        q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j, v_b, v_h, v_line, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute all gradients of one whole line per program, from weights that are computed once."""
    line = (tl.program_id(0) % lines).to(tl.int64)
    group = (tl.program_id(0) // lines).to(tl.int64)
    batch, head, tokens = group // heads, group % heads, lines * length
    j = tl.arange(0, BLOCK)
    sums += group * tokens + line * token_line
    query = load_tokens(q + batch * q_b + head * q_h + line * q_line, j, q_j, length, DIM, BLOCK_D, UPCAST)
    key = load_tokens(k + batch * k_b + head * k_h + line * k_line, j, k_j, length, DIM, BLOCK_D, UPCAST)
    value = load_tokens(v + batch * v_b + head * v_h + line * v_line, j, v_j, length, DIM_V, BLOCK_V, UPCAST)
    first = (batch * tokens + line * token_line) * heads + head
    gradient = load_tokens(grad + first * DIM_V, j, token_j * heads * DIM_V, length, DIM_V, BLOCK_V, UPCAST)
    s_j = _load_line(sums, j, token_j, length, 0.0) * LOG2E
    decay = -tl.abs(s_j[:, None] - (_load_line(sums, j, token_j, length, INF) * LOG2E)[None, :])
    logits = dot(query, tl.trans(key), PRECISION) * LOG2E
    if MULTIPLICATIVE:
        logits = tl.where((j < length)[None, :], logits, -INF)
    else:
        logits += decay
    p = tl.exp2(logits - tl.max(logits, 1)[:, None])
    p = tl.where((j < length)[:, None], p / tl.sum(p, 1)[:, None], 0.0)
    weights = p * tl.exp2(decay) if MULTIPLICATIVE else p
    dv_tile = dot(tl.trans(weights.to(gradient.dtype)), gradient, PRECISION)
    dweights = weights * dot(gradient, tl.trans(value), PRECISION)          # multiplicative: d log mask
    dlogits = dweights - p * tl.sum(dweights, 1)[:, None]
    ddecay = (dweights if MULTIPLICATIVE else dlogits) * index_sign(j[None, :], j[:, None])
    dsum = tl.sum(ddecay, 0) - tl.sum(tl.trans(ddecay), 0)
    tl.store(dsums + group * tokens + line * token_line + j * token_j, dsum, mask=j < length)
    store_tokens(dv + first * DIM_V, j, token_j * heads * DIM_V, length, dv_tile, DIM_V, BLOCK_V)
    dlogits = dlogits.to(key.dtype)
    store_tokens(dq + first * DIM, j, token_j * heads * DIM, length, dot(dlogits, key, PRECISION), DIM, BLOCK_D)
    store_tokens(dk + first * DIM, j, token_j * heads * DIM, length, dot(tl.trans(dlogits), query, PRECISION), DIM,
                 BLOCK_D)


@triton.jit
def _tile_gradients(logits, dweights, decay, lse, delta, valid, MULTIPLICATIVE: tl.constexpr):
    """Recompute a tile's weights; return them and the gradients of its logits and log mask. valid: keys in the line."""
    if MULTIPLICATIVE:
        p = tl.where(valid, tl.exp2(logits - lse), 0.0)
        weights = p * tl.exp2(decay)
        ddecay = weights * dweights
        return weights, ddecay - p * delta, ddecay
    else:
        weights = tl.exp2(logits + decay - lse)
        dlogits = weights * (dweights - delta)
        return weights, dlogits, dlogits


@triton.jit
def _decay_attention_bwd_kernel(
        q, k, v, sums, grad, lse, delta, dq, dk, dv, dsums, heads, lines, length, token_line, token_j,
        q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j, v_b, v_h, v_line, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the gradients of one tile of a long line per program, first as queries, then as keys."""
    blocks = tl.cdiv(length, BLOCK)
    line = (tl.program_id(0) // blocks % lines).to(tl.int64)
    group = (tl.program_id(0) // blocks // lines).to(tl.int64)
    batch, head, tokens = group // heads, group % heads, lines * length
    own = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    sums += group * tokens + line * token_line
    lse += group * tokens + line * token_line
    delta += group * tokens + line * token_line
    q += batch * q_b + head * q_h + line * q_line
    k += batch * k_b + head * k_h + line * k_line
    v += batch * v_b + head * v_h + line * v_line
    first = (batch * tokens + line * token_line) * heads + head
    grad += first * DIM_V
    grad_j = token_j * heads * DIM_V

    query = load_tokens(q, own, q_j, length, DIM, BLOCK_D, UPCAST)
    gradient = load_tokens(grad, own, grad_j, length, DIM_V, BLOCK_V, UPCAST)
    s_own = _load_line(sums, own, token_j, length, 0.0) * LOG2E
    # Queries beyond the line have an infinite log-sum-exp, so their weights are zero.
    own_lse = _load_line(lse, own, token_j, length, INF)[:, None]
    own_delta = _load_line(delta, own, token_j, length, 0.0)[:, None]
    dquery = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dsum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        l = start + tl.arange(0, BLOCK)
        key = load_tokens(k, l, k_j, length, DIM, BLOCK_D, UPCAST)
        value = load_tokens(v, l, v_j, length, DIM_V, BLOCK_V, UPCAST)
        decay = -tl.abs(s_own[:, None] - (_load_line(sums, l, token_j, length, INF) * LOG2E)[None, :])
        _, dlogits, ddecay = _tile_gradients(
            dot(query, tl.trans(key), PRECISION) * LOG2E, dot(gradient, tl.trans(value), PRECISION), decay,
            own_lse, own_delta, (l < length)[None, :], MULTIPLICATIVE)
        dquery += dot(dlogits, key, PRECISION)
        dsum -= tl.sum(ddecay * index_sign(l[None, :], own[:, None]), 1)
    store_tokens(dq + first * DIM, own, token_j * heads * DIM, length, dquery, DIM, BLOCK_D)

    key = load_tokens(k, own, k_j, length, DIM, BLOCK_D, UPCAST)
    value = load_tokens(v, own, v_j, length, DIM_V, BLOCK_V, UPCAST)
    s_own = _load_line(sums, own, token_j, length, INF) * LOG2E
    dkey = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    for start in range(0, length, BLOCK):
        j = start + tl.arange(0, BLOCK)
        query = load_tokens(q, j, q_j, length, DIM, BLOCK_D, UPCAST)
        gradient = load_tokens(grad, j, grad_j, length, DIM_V, BLOCK_V, UPCAST)
        decay = -tl.abs(s_own[:, None] - (_load_line(sums, j, token_j, length, 0.0) * LOG2E)[None, :])
        weights, dlogits, ddecay = _tile_gradients(
            dot(key, tl.trans(query), PRECISION) * LOG2E, dot(value, tl.trans(gradient), PRECISION), decay,
            _load_line(lse, j, token_j, length, INF)[None, :], _load_line(delta, j, token_j, length, 0.0)[None, :],
            (own < length)[:, None], MULTIPLICATIVE)
        dvalue += dot(weights, gradient, PRECISION)
        dkey += dot(dlogits, query, PRECISION)
        dsum += tl.sum(ddecay * index_sign(own[:, None], j[None, :]), 1)
    store_tokens(dk + first * DIM, own, token_j * heads * DIM, length, dkey, DIM, BLOCK_D)
    store_tokens(dv + first * DIM_V, own, grad_j, length, dvalue, DIM_V, BLOCK_V)
    tl.store(dsums + group * tokens + line * token_line + own * token_j, dsum, mask=own < length)


class _Lines:
    """Launch of a problem: its lines, tile, strides and constants."""

    def __init__(self, kernel: str, q: Tensor, k: Tensor, v: Tensor, axis: str, mask_mode: str):
        batch, heads, height, width, dim = q.shape
        down = axis == 'column'
        lines, length = (width, height) if down else (height, width)
        self.q, self.k, self.v = (launch.unit_stride(x) for x in (q, k, v))
        launch.check_line(length, *(x.stride(2 if down else 3) for x in (self.q, self.k, self.v)),
                          (width if down else 1) * heads * max(dim, v.shape[-1]))
        largest = launch.largest_tile('decay_attention', q.dtype, dim, v.shape[-1])
        self.whole = length <= largest
        self.side = launch.padded_power_of_two(length) if self.whole else min(largest, launch.LONG_LINE_TILE)
        self.programs = launch.programs(batch * heads * lines * triton.cdiv(length, self.side))
        self.sizes = (heads, lines, length, *((1, width) if down else (width, 1)), *launch.strides(self.q, down),
                      *launch.strides(self.k, down), *launch.strides(self.v, down))
        self.constants = {'DIM': dim, 'DIM_V': v.shape[-1], 'BLOCK_D': launch.padded_power_of_two(dim),
                          'BLOCK_V': launch.padded_power_of_two(v.shape[-1]), 'BLOCK': self.side,
                          'MULTIPLICATIVE': mask_mode == 'multiplicative',
                          **launch.numerics(q.dtype), **launch.options(kernel, q.dtype, self.side)}


def forward(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, axis: str, mask_mode: str,
            save: bool) -> Tuple[Tensor, Tensor]:
    """Return the output and the log2-sum-exps (1, B, heads, N), which are empty unless `save` and lines exceed a tile.

    sums: (B, heads, H, W), float32, dense."""
    lines, sums = _Lines('decay_attention_fwd', q, k, v, axis, mask_mode), sums.contiguous()
    save = save and not lines.whole
    out = launch.token_major(v.shape, v)
    lse = sums.new_empty((1, *q.shape[:2], q.shape[2] * q.shape[3]) if save else 0)
    _decay_attention_fwd_kernel[lines.programs](
        lines.q, lines.k, lines.v, sums, out, lse, *lines.sizes, SAVE=save, **lines.constants)
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, out: Tensor, lse: Tensor, axis: str,
             mask_mode: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sums."""
    lines, sums = _Lines('decay_attention_bwd', q, k, v, axis, mask_mode), sums.contiguous()
    grad = launch.as_token_major(grad)
    dq, dk, dv = (launch.token_major(x.shape, x) for x in (q, k, v))
    dsums = torch.empty_like(sums)
    if lines.whole:
        _decay_attention_bwd_line_kernel[lines.programs](
            lines.q, lines.k, lines.v, sums, grad, dq, dk, dv, dsums, *lines.sizes, **lines.constants)
    else:
        _decay_attention_bwd_kernel[lines.programs](
            lines.q, lines.k, lines.v, sums, grad, lse, row_products(grad, out), dq, dk, dv, dsums, *lines.sizes,
            **lines.constants)
    return dq, dk, dv, dsums
