"""Gradients of decay attention in Triton. With P the weights of a line and g the gradient of y = P v:

    dv = P' g,    dP = g v',    and from dP the gradients of q, k and of the step logs.

A kernel can also add the gradient of a second product with the same weights, y_2 = P v_2, of which criss-cross
attention takes half. Lines of one tile recompute P from the inputs. For longer lines, a program takes a tile first as
queries, then as keys, and needs the log-sum-exps of the forward pass and delta[j] = sum_l P[j, l] dP[j, l].
"""
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.numerics import steps_gradient
from ..common.tiles import INF, LOG2E, dot, load_tokens, row_products, store_tokens
from .triton import LEAST_STEP, SIZES, Lines, line_exponentials, line_sums, load_line, load_steps, place


@triton.jit
def _store_sum(out, index, stride, length, x, add, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store x or, if `add`, the sum of x and the values of the output tensor."""
    if add:
        x += load_tokens(out, index, stride, length, DIM, BLOCK_D, False).to(tl.float32)
    store_tokens(out, index, stride, length, x, DIM, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def _decay_attention_bwd_line_kernel(
        q, k, v, steps, grad, dq, dk, dv, dsteps, v_2, grad_2, dv_2, add, heads, lines, length, token_line, token_j,
        s_b, s_h, s_line, s_j, q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j, v_b, v_h, v_line, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, SECOND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute all gradients of one whole line per program, from weights that are computed once.

    SECOND: add half the gradient of y_2 to those of q, k and the steps. add: add dq and dk, and with SECOND also dv, to
    the values of these tensors; with SECOND and without `add`, store half the gradient of v_2."""
    batch, line, head, _ = place(heads, lines, 1)
    j = tl.arange(0, BLOCK)
    tokens = (batch * lines * length + line * token_line) * heads + head
    first, stride = tokens * DIM_V, token_j * heads * DIM_V
    query = load_tokens(q + batch * q_b + head * q_h + line * q_line, j, q_j, length, DIM, BLOCK_D, UPCAST)
    key = load_tokens(k + batch * k_b + head * k_h + line * k_line, j, k_j, length, DIM, BLOCK_D, UPCAST)
    value = load_tokens(v + batch * v_b + head * v_h + line * v_line, j, v_j, length, DIM_V, BLOCK_V, UPCAST)
    gradient = load_tokens(grad + first, j, stride, length, DIM_V, BLOCK_V, UPCAST)
    step = load_steps(steps + batch * s_b + head * s_h + line * s_line, j, s_j, length)
    p, weights = line_exponentials(query, key, line_sums(step), j, length, MULTIPLICATIVE, PRECISION)
    share = tl.where(j < length, 1.0 / tl.sum(p, 1), 0.0)[:, None]
    p *= share
    weights = weights * share if MULTIPLICATIVE else p
    transposed = tl.trans(weights.to(gradient.dtype))
    _store_sum(dv + first, j, stride, length, dot(transposed, gradient, PRECISION), add if SECOND else 0, DIM_V,
               BLOCK_V)
    if SECOND:
        gradient_2 = load_tokens(grad_2 + first, j, stride, length, DIM_V, BLOCK_V, UPCAST) * 0.5
        if add == 0:
            store_tokens(dv_2 + first, j, stride, length, dot(transposed, gradient_2, PRECISION), DIM_V, BLOCK_V)
    dweights = dot(gradient, tl.trans(value), PRECISION)
    if SECOND:
        value_2 = load_tokens(v_2 + first, j, stride, length, DIM_V, BLOCK_V, UPCAST)
        dweights += dot(gradient_2, tl.trans(value_2), PRECISION)
    dmask = weights * dweights                                              # multiplicative: gradient of the log mask
    dlogits = dmask - p * tl.sum(dmask, 1)[:, None]
    if not MULTIPLICATIVE:
        dmask = dlogits
    # The log mask is S[l] - S[j] for l > j and S[j] - S[l] for l < j; the diagonal cancels.
    dmask = tl.where(j[None, :] > j[:, None], dmask, -dmask)
    dsum = tl.sum(dmask, 0) - tl.sum(dmask, 1)
    # A step is part of its sum and all later ones. All add up to 0, so those are minus the earlier ones.
    dstep = tl.where((step < LEAST_STEP) | (step > 0.0), 0.0, dsum - tl.cumsum(dsum, 0))
    tl.store(dsteps + tokens + j * token_j * heads, dstep, mask=j < length)
    dlogits = dlogits.to(key.dtype)
    first, stride = tokens * DIM, token_j * heads * DIM
    _store_sum(dq + first, j, stride, length, dot(dlogits, key, PRECISION), add, DIM, BLOCK_D)
    _store_sum(dk + first, j, stride, length, dot(tl.trans(dlogits), query, PRECISION), add, DIM, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def _decay_attention_transposed_line_kernel(
        q, k, steps, grad, dv, heads, lines, length, token_line, token_j, s_b, s_h, s_line, s_j,
        q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute dv = 1/2 P' grad for one whole line per program."""
    batch, line, head, _ = place(heads, lines, 1)
    j = tl.arange(0, BLOCK)
    first, stride = ((batch * lines * length + line * token_line) * heads + head) * DIM_V, token_j * heads * DIM_V
    query = load_tokens(q + batch * q_b + head * q_h + line * q_line, j, q_j, length, DIM, BLOCK_D, UPCAST)
    key = load_tokens(k + batch * k_b + head * k_h + line * k_line, j, k_j, length, DIM, BLOCK_D, UPCAST)
    gradient = load_tokens(grad + first, j, stride, length, DIM_V, BLOCK_V, UPCAST)
    sums = line_sums(load_steps(steps + batch * s_b + head * s_h + line * s_line, j, s_j, length))
    p, weights = line_exponentials(query, key, sums, j, length, MULTIPLICATIVE, PRECISION)
    weights *= (0.5 / tl.sum(p, 1))[:, None]             # gradients beyond the line are 0
    store_tokens(dv + first, j, stride, length, dot(tl.trans(weights.to(gradient.dtype)), gradient, PRECISION), DIM_V,
                 BLOCK_V)


@triton.jit
def _tile_weights(logits, distance, lse, valid, MULTIPLICATIVE: tl.constexpr):
    """Return softmax weights of a tile without a multiplicative mask, and with any mask. valid: keys in the line."""
    if MULTIPLICATIVE:
        p = tl.where(valid, tl.exp2(logits * LOG2E - lse), 0.0)
        return p, p * tl.exp2(distance * -LOG2E)
    else:
        p = tl.exp2((logits - distance) * LOG2E - lse)
        return p, p


@triton.jit
def _tile_gradients(p, weights, dweights, delta, MULTIPLICATIVE: tl.constexpr):
    """Return the gradients of a tile's logits and of its log mask."""
    dmask = weights * dweights
    if MULTIPLICATIVE:
        return dmask - p * delta, dmask
    else:
        dlogits = dmask - p * delta
        return dlogits, dlogits


@triton.jit(do_not_specialize=SIZES)
def _decay_attention_bwd_kernel(
        q, k, v, sums, grad, lse, delta, dq, dk, dv, dsums, v_2, grad_2, dv_2, add,
        heads, lines, length, token_line, token_j, s_b, s_h, s_line, s_j,
        q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j, v_b, v_h, v_line, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, SECOND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the same gradients for one tile of a long line per program, first as queries, then as keys."""
    batch, line, head, block = place(heads, lines, tl.cdiv(length, BLOCK))
    own = block * BLOCK + tl.arange(0, BLOCK)
    at_line = batch * s_b + head * s_h + line * s_line
    sums += at_line
    lse += at_line
    delta += at_line
    q += batch * q_b + head * q_h + line * q_line
    k += batch * k_b + head * k_h + line * k_line
    v += batch * v_b + head * v_h + line * v_line
    tokens = (batch * lines * length + line * token_line) * heads + head
    first, stride = tokens * DIM_V, token_j * heads * DIM_V

    query = load_tokens(q, own, q_j, length, DIM, BLOCK_D, UPCAST)
    gradient = load_tokens(grad + first, own, stride, length, DIM_V, BLOCK_V, UPCAST)
    if SECOND:
        gradient_2 = load_tokens(grad_2 + first, own, stride, length, DIM_V, BLOCK_V, UPCAST) * 0.5
    s_own = load_line(sums, own, s_j, length, 0.0)
    # Queries beyond the line have an infinite log-sum-exp, so their weights are zero.
    own_lse = load_line(lse, own, s_j, length, INF)[:, None]
    own_delta = load_line(delta, own, s_j, length, 0.0)[:, None]
    dquery = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dsum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        l = start + tl.arange(0, BLOCK)
        key = load_tokens(k, l, k_j, length, DIM, BLOCK_D, UPCAST)
        distance = tl.abs(s_own[:, None] - load_line(sums, l, s_j, length, INF)[None, :])
        p, weights = _tile_weights(dot(query, tl.trans(key), PRECISION), distance, own_lse, (l < length)[None, :],
                                   MULTIPLICATIVE)
        value = load_tokens(v, l, v_j, length, DIM_V, BLOCK_V, UPCAST)
        dweights = dot(gradient, tl.trans(value), PRECISION)
        if SECOND:
            value = load_tokens(v_2 + first, l, stride, length, DIM_V, BLOCK_V, UPCAST)
            dweights += dot(gradient_2, tl.trans(value), PRECISION)
        dlogits, dmask = _tile_gradients(p, weights, dweights, own_delta, MULTIPLICATIVE)
        dquery += dot(dlogits, key, PRECISION)
        # The log mask is S[l] - S[j] for l > j and S[j] - S[l] for l < j; the two roles cancel on the diagonal.
        dsum -= tl.sum(tl.where(l[None, :] > own[:, None], dmask, -dmask), 1)
    _store_sum(dq + tokens * DIM, own, token_j * heads * DIM, length, dquery, add, DIM, BLOCK_D)

    key = load_tokens(k, own, k_j, length, DIM, BLOCK_D, UPCAST)
    value = load_tokens(v, own, v_j, length, DIM_V, BLOCK_V, UPCAST)
    if SECOND:
        value_2 = load_tokens(v_2 + first, own, stride, length, DIM_V, BLOCK_V, UPCAST)
    s_own = load_line(sums, own, s_j, length, INF)
    dkey = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    dvalue_2 = dvalue
    for start in range(0, length, BLOCK):
        j = start + tl.arange(0, BLOCK)
        query = load_tokens(q, j, q_j, length, DIM, BLOCK_D, UPCAST)
        distance = tl.abs(s_own[:, None] - load_line(sums, j, s_j, length, 0.0)[None, :])
        p, weights = _tile_weights(dot(key, tl.trans(query), PRECISION), distance,
                                   load_line(lse, j, s_j, length, INF)[None, :], (own < length)[:, None],
                                   MULTIPLICATIVE)
        gradient = load_tokens(grad + first, j, stride, length, DIM_V, BLOCK_V, UPCAST)
        dvalue += dot(weights, gradient, PRECISION)
        dweights = dot(value, tl.trans(gradient), PRECISION)
        if SECOND:
            gradient = load_tokens(grad_2 + first, j, stride, length, DIM_V, BLOCK_V, UPCAST) * 0.5
            dweights += dot(value_2, tl.trans(gradient), PRECISION)
            dvalue_2 += dot(weights, gradient, PRECISION)
        dlogits, dmask = _tile_gradients(p, weights, dweights, load_line(delta, j, s_j, length, 0.0)[None, :],
                                         MULTIPLICATIVE)
        dkey += dot(dlogits, query, PRECISION)
        dsum += tl.sum(tl.where(own[:, None] > j[None, :], dmask, -dmask), 1)
    _store_sum(dk + tokens * DIM, own, token_j * heads * DIM, length, dkey, add, DIM, BLOCK_D)
    _store_sum(dv + first, own, stride, length, dvalue, add if SECOND else 0, DIM_V, BLOCK_V)
    if SECOND:
        if add == 0:
            store_tokens(dv_2 + first, own, stride, length, dvalue_2, DIM_V, BLOCK_V)
    tl.store(dsums + at_line + own * s_j, dsum, mask=own < length)


@triton.jit(do_not_specialize=SIZES)
def _decay_attention_transposed_kernel(
        q, k, sums, grad, lse, dv, heads, lines, length, token_line, token_j, s_b, s_h, s_line, s_j,
        q_b, q_h, q_line, q_j, k_b, k_h, k_line, k_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute dv = 1/2 P' grad for one tile of keys of a long line per program."""
    batch, line, head, block = place(heads, lines, tl.cdiv(length, BLOCK))
    own = block * BLOCK + tl.arange(0, BLOCK)
    at_line = batch * s_b + head * s_h + line * s_line
    sums += at_line
    lse += at_line
    q += batch * q_b + head * q_h + line * q_line
    k += batch * k_b + head * k_h + line * k_line
    first, stride = ((batch * lines * length + line * token_line) * heads + head) * DIM_V, token_j * heads * DIM_V
    key = load_tokens(k, own, k_j, length, DIM, BLOCK_D, UPCAST)
    s_own = load_line(sums, own, s_j, length, INF)
    dvalue = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    for start in range(0, length, BLOCK):
        j = start + tl.arange(0, BLOCK)
        query = load_tokens(q, j, q_j, length, DIM, BLOCK_D, UPCAST)
        gradient = load_tokens(grad + first, j, stride, length, DIM_V, BLOCK_V, UPCAST)
        distance = tl.abs(s_own[:, None] - load_line(sums, j, s_j, length, 0.0)[None, :])
        _, weights = _tile_weights(dot(key, tl.trans(query), PRECISION), distance,
                                   load_line(lse, j, s_j, length, INF)[None, :], (own < length)[:, None],
                                   MULTIPLICATIVE)
        dvalue += dot(weights, gradient, PRECISION)
    store_tokens(dv + first, own, stride, length, dvalue * 0.5, DIM_V, BLOCK_V)


def transposed(lines: Lines, grad: Tensor) -> Tensor:
    """Return 1/2 P' grad for the weights P of all lines. grad: (B, heads, H, W, Dv), as `launch.token_major`."""
    out = launch.token_major(grad.shape, grad)
    if lines.whole:
        _decay_attention_transposed_line_kernel[lines.programs](
            lines.q, lines.k, lines.sums, grad, out, *lines.sizes, *lines.strides,
            **lines.options('decay_attention_transposed_line'))
    else:
        _decay_attention_transposed_kernel[lines.programs](
            lines.q, lines.k, lines.sums, grad, lines.lse, out, *lines.sizes, *lines.strides,
            **lines.options('decay_attention_transposed'))
    return out


def differentiate(lines: Lines, v: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, delta: Optional[Tensor],
                  v_2: Optional[Tensor] = None, grad_2: Optional[Tensor] = None, dv_2: Optional[Tensor] = None,
                  add: bool = False) -> Tensor:
    """Write the gradients of q, k and v of y = P v, and return that of the step logs.

    All tensors but v are in the memory order of `launch.token_major`.

    Args:
        grad: the gradient of y.
        delta: sum_l P[j, l] dP[j, l] of long lines, (B, heads, H, W) or of as many elements; None for whole lines.
        v_2, grad_2: add half the gradient of y_2 = P v_2, given grad_2.
        dv_2: where half the gradient of v_2 is written, unless `add`.
        add: add to the values of dq and dk, and with v_2 also of dv, instead of replacing them.
    """
    v = launch.unit_stride(v)
    sizes = (*lines.sizes, *lines.strides, *launch.strides(v, lines.down))
    second = v_2 is not None
    dv_2 = dv if second and dv_2 is None else dv_2
    dsteps = launch.heads_last(lines.steps)
    if lines.whole:
        _decay_attention_bwd_line_kernel[lines.programs](
            lines.q, lines.k, v, lines.sums, grad, dq, dk, dv, dsteps, v_2, grad_2, dv_2, int(add), *sizes,
            SECOND=second, **lines.options('decay_attention_bwd_line'))
        return dsteps
    dsums = torch.empty_like(lines.sums)
    _decay_attention_bwd_kernel[lines.programs](
        lines.q, lines.k, v, lines.sums, grad, lines.lse, delta, dq, dk, dv, dsums, v_2, grad_2, dv_2, int(add), *sizes,
        SECOND=second, **lines.options('decay_attention_bwd'))
    return dsteps.copy_(steps_gradient(dsums, lines.steps, -2 if lines.down else -1))


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, steps: Tensor, out: Tensor, statistics: Tensor, axis: str,
             mask_mode: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the step logs."""
    lines = Lines(q, k, steps, v.shape[-1], axis, mask_mode, statistics=statistics)
    grad = launch.as_token_major(grad)
    dq, dk, dv = (launch.token_major(x.shape, x) for x in (q, k, v))
    delta = None if lines.whole else row_products(grad, out)
    return dq, dk, dv, differentiate(lines, v, grad, dq, dk, dv, delta)
