"""Triton kernels of the gradients of separable attention: the last two lines of equations in `triton`."""
from typing import Optional, Tuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.patches import Patch
from . import triton as forward
from .triton import (
    SIZES,
    STAGES,
    _blocks,
    _context,
    _group,
    _load_logits,
    _load_statistics,
    _offset,
    _Problem,
    _scores,
    _tokens,
    _weights,
)


@triton.jit(do_not_specialize=SIZES)
def _separable_attention_bwd_value_kernel(
        grad, value, context_in, dvalue, partial, g_b, g_h, g_w, v_b, v_h, v_w, o_b, o_h, o_w, height, width, chunks,
        PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, PIXEL: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    """Compute dv and a summand of dc for BLOCK_D channels of one chunk per program. partial: as above."""
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    piece = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    line = piece // chunks
    batch = (line // (PATCH_H * PATCH_W)).to(tl.int64)
    place, count = _group(line % (PATCH_H * PATCH_W), height, width, PATCH_H, PATCH_W, PIXEL)
    context = tl.load(context_in + line.to(tl.int64) * DIM + d, mask=d < DIM, other=0.0)
    start = piece % chunks * CHUNK
    stop = tl.minimum(start + CHUNK, count)
    dcontext = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        mask = (n < stop)[:, None] & (d < DIM)[None, :]
        offset = _offset(n, place, v_h, v_w)
        v = tl.load(value + batch * v_b + offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        offset = _offset(n, place, g_h, g_w)
        dy = tl.load(grad + batch * g_b + offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dcontext += dy * tl.maximum(v, 0.0)
        offset = _offset(n, place, o_h, o_w)
        tl.store(dvalue + batch * o_b + offset[:, None] + d[None, :],
                 tl.where(v > 0, dy * context[None, :], 0.0).to(dvalue.dtype.element_ty), mask=mask)
    tl.store(partial + piece.to(tl.int64) * DIM + d, tl.sum(dcontext, 0), mask=d < DIM)


@triton.jit(do_not_specialize=SIZES)
def _separable_attention_bwd_key_kernel(
        query, key, statistics, dsummed, dkey, products, q_b, q_h, q_w, k_b, k_h, k_w, o_b, o_h, o_w, height, width,
        chunks, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, PIXEL: tl.constexpr, L: tl.constexpr,
        BLOCK_L: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    """Compute dk and g for one chunk of a group per program. products: g, (B, height, width), dense, float32."""
    line = tl.program_id(0) // chunks
    batch = (line // (PATCH_H * PATCH_W)).to(tl.int64)
    place, count = _group(line % (PATCH_H * PATCH_W), height, width, PATCH_H, PATCH_W, PIXEL)
    largest, total = _load_statistics(statistics, line, L, BLOCK_L)
    start = tl.program_id(0) % chunks * CHUNK
    stop = tl.minimum(start + CHUNK, count)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        logits = _load_logits(query + batch * q_b, _offset(n, place, q_h, q_w), n, stop, L, BLOCK_L)
        weights = _weights(logits, largest, total, L, BLOCK_L)
        k_offset = _offset(n, place, k_h, k_w)
        offset = _offset(n, place, o_h, o_w)
        g = tl.zeros((BLOCK_N,), tl.float32)
        for part in range(0, DIM, BLOCK_D):
            d = part + tl.arange(0, BLOCK_D)
            mask = (n < stop)[:, None] & (d < DIM)[None, :]
            dc = tl.load(dsummed + line.to(tl.int64) * DIM + d, mask=d < DIM, other=0.0)
            k = tl.load(key + batch * k_b + k_offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
            g += tl.sum(k * dc[None, :], 1)
            tl.store(dkey + batch * o_b + offset[:, None] + d[None, :],
                     (weights[:, None] * dc[None, :]).to(dkey.dtype.element_ty), mask=mask)
        token = _offset(n, place, width, 1)
        tl.store(products + batch * _tokens(height, width) + token, g / L, mask=n < stop)


@triton.jit(do_not_specialize=SIZES)
def _separable_attention_bwd_query_kernel(
        query, statistics, products, dquery, q_b, q_h, q_w, height, width, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr,
        PIXEL: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Compute dq for one group per program from its g. dquery: (B, height, width, L), dense."""
    line = tl.program_id(0)
    batch = (line // (PATCH_H * PATCH_W)).to(tl.int64)
    place, count = _group(line % (PATCH_H * PATCH_W), height, width, PATCH_H, PATCH_W, PIXEL)
    latent = tl.arange(0, BLOCK_L)
    largest, total = _load_statistics(statistics, line, L, BLOCK_L)
    mean = tl.zeros((BLOCK_L,), tl.float32)
    for start in range(0, count, BLOCK_Q):
        n = start + tl.arange(0, BLOCK_Q)
        logits = _load_logits(query + batch * q_b, _offset(n, place, q_h, q_w), n, count, L, BLOCK_L)
        token = _offset(n, place, width, 1)
        g = tl.load(products + batch * _tokens(height, width) + token, mask=n < count, other=0.0)
        mean += tl.sum(tl.where((n < count)[:, None], _scores(logits, largest, total) * g[:, None], 0.0), 0)
    for start in range(0, count, BLOCK_Q):
        n = start + tl.arange(0, BLOCK_Q)
        logits = _load_logits(query + batch * q_b, _offset(n, place, q_h, q_w), n, count, L, BLOCK_L)
        token = _offset(n, place, width, 1)
        g = tl.load(products + batch * _tokens(height, width) + token, mask=n < count, other=0.0)
        dq = _scores(logits, largest, total) * (g[:, None] - mean[None, :])
        tl.store(dquery + (batch * _tokens(height, width) + token)[:, None] * L + latent[None, :],
                 dq.to(dquery.dtype.element_ty), mask=(n < count)[:, None] & (latent < L)[None, :])


def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor],
             key_bias: Optional[Tensor], statistics: Tensor, summed: Tensor, patch: Patch, sampling: str
             ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dense gradients of query, key and value, and the gradient of the context (B, P, D) in float32."""
    grad, query, key, value = (launch.unit_stride(x) for x in (grad, query, key, value))
    dquery, dkey, dvalue = (launch.dense_like(x) for x in (query, key, value))
    call, dim = _Problem(patch, sampling, (query, key, dkey), (value, grad, dvalue)), value.shape[3]
    launch.check_grid(grad, query, key, value, dquery, dkey, dvalue)
    options = launch.options('separable_attention', value.dtype, forward.BLOCK_N, forward.BLOCK_D)
    parts = summed.new_empty(len(value), call.places, call.value_chunks, dim)
    _separable_attention_bwd_value_kernel[launch.programs(call.groups * call.value_chunks * _blocks(dim))](
        grad, value, _context(summed, key_weight, key_bias), dvalue, parts, *grad.stride()[:3], *value.stride()[:3],
        *dvalue.stride()[:3], *call.value_grid, call.value_chunks, **call.patch, **call.channels(dim),
        CHUNK=forward.CHUNK, **options)
    dcontext = parts.sum(2)
    dsummed = dcontext if key_weight is None else dcontext @ key_weight.float()
    products = summed.new_empty(query.shape[:3])
    _separable_attention_bwd_key_kernel[launch.programs(call.groups * call.key_chunks)](
        query, key, statistics, dsummed, dkey, products, *query.stride()[:3], *key.stride()[:3], *dkey.stride()[:3],
        *call.key_grid, call.key_chunks, **call.patch, **call.latents, **call.channels(key.shape[3]),
        CHUNK=forward.CHUNK, **options)
    _separable_attention_bwd_query_kernel[launch.programs(call.groups)](
        query, statistics, products, dquery, *query.stride()[:3], *call.key_grid, **call.patch, **call.logits(),
        **options)
    return dquery, dkey, dvalue, dcontext
