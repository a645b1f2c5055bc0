"""Triton kernels of separable attention (MobileViTv2, section 3.2), which read and write the grid without unfolding it.

With s[l, n] = softmax of the logits q[n, l] over the n tokens of a group and w[n] = mean of s[l, n] over latent tokens,

    c = sum_n w[n] k[n],    y[n] = relu(v[n]) * c,

and for the gradient dy, with dc = sum_n dy[n] * relu(v[n]) and g[n] = <dc, k[n]> / L,

    dv[n] = dy[n] * c where v[n] > 0,   dk[n] = w[n] dc,   dq[n, l] = s[l, n] (g[n] - sum_m s[l, m] g[m]).

One kernel does the forward pass if groups are small or many. Otherwise other kernels sum the contexts of chunks of
tokens first. Keys and values are read once in both cases. All sums are float32.
"""
from typing import Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.patches import Patch

BLOCK_N = 64
BLOCK_D = 64
# Tokens of a program that sums or applies a context.
CHUNK = 512
# Arguments that follow from the size of an image: kernels are not compiled again for other sizes. Strides of logits are
# among them, because a thread loads logits one by one.
SIZES = ('height', 'width', 'v_height', 'v_width', 'chunks', 'q_b', 'q_h', 'q_w')
# Tiles of a loop that are loaded ahead.
STAGES = tl.constexpr(2)
# Enough programs to fill a GPU with one group each, two for each of 132 multiprocessors.
MANY_PROGRAMS = 264


@triton.jit
def _group(group, height, width, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, PIXEL: tl.constexpr):
    """Return a group's place, which is its first row and column, their steps and its columns (at least 1, a divisor),
    and the number of its tokens.

    Without a height the tokens of the image are one group in one row, and its place is the row alone: no token's place
    takes a division."""
    if height is None:
        place, count = (0,), width
    else:
        i, j = group // PATCH_W, group % PATCH_W
        if PIXEL:
            rows, columns = (height - i + PATCH_H - 1) // PATCH_H, (width - j + PATCH_W - 1) // PATCH_W
            row, column, row_step, column_step = i, j, PATCH_H, PATCH_W
        else:
            side_h, side_w = (height + PATCH_H - 1) // PATCH_H, (width + PATCH_W - 1) // PATCH_W
            row, column, row_step, column_step = i * side_h, j * side_w, 1, 1
            rows = tl.maximum(tl.minimum(side_h, height - row), 0)
            columns = tl.maximum(tl.minimum(side_w, width - column), 0)
        place, count = (row, column, row_step, column_step, tl.maximum(columns, 1)), rows * columns
    return place, count


@triton.jit
def _offset(n, place, stride_h, stride_w):
    """Return the offset of token n of a group."""
    if len(place) == 1:
        offset = n * stride_w
    else:
        row, column, row_step, column_step, columns = place
        offset = (row + n // columns * row_step) * stride_h + (column + n % columns * column_step) * stride_w
    return offset


@triton.jit
def _tokens(height, width):
    """Return the tokens of an image."""
    if height is None:
        tokens = width
    else:
        tokens = height * width
    return tokens


@triton.jit
def _load_logits(query, offset, n, count, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """Load logits (len(n), BLOCK_L) in float32: -inf beyond the group's end, 0 for latent tokens that pad the block."""
    latent = tl.arange(0, BLOCK_L)
    x = tl.load(query + offset[:, None] + latent[None, :], mask=(n < count)[:, None] & (latent < L)[None, :],
                other=-float('inf')).to(tl.float32)
    return tl.where((latent < L)[None, :], x, 0.0)


@triton.jit
def _scores(logits, largest, total):
    """Compute s[l, n] (len(n), BLOCK_L) from logits, their maximum and the sum of their exponentials, which stay apart:
    a log-sum-exp would lose digits of large logits."""
    return tl.exp(logits - largest[None, :]) / total[None, :]


@triton.jit
def _weights(logits, largest, total, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """Compute w[n], (len(n),), from logits (len(n), BLOCK_L)."""
    return tl.sum(tl.where((tl.arange(0, BLOCK_L) < L)[None, :], _scores(logits, largest, total), 0.0), 1) / L


@triton.jit
def _softmax(query, stride_h, stride_w, place, count, L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Compute the maximum of a group's logits and the sum of exp(logit - maximum), (BLOCK_L,) each."""
    largest = tl.full((BLOCK_L,), -float('inf'), tl.float32)
    total = tl.zeros((BLOCK_L,), tl.float32)
    for start in range(0, count, BLOCK_Q):
        n = start + tl.arange(0, BLOCK_Q)
        offset = _offset(n, place, stride_h, stride_w)
        logits = _load_logits(query, offset, n, count, L, BLOCK_L)
        new = tl.maximum(largest, tl.max(logits, 0))
        finite = tl.where(new == -float('inf'), 0.0, new)           # all logits so far may be -inf
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(logits - finite[None, :]), 0)
        largest = new
    return largest, total


@triton.jit
def _load_statistics(statistics, line, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """Load the result of `_softmax` for a group from (B, groups, 2, L)."""
    latent = tl.arange(0, BLOCK_L)
    first = statistics + line.to(tl.int64) * 2 * L + latent
    return tl.load(first, mask=latent < L, other=0.0), tl.load(first + L, mask=latent < L, other=1.0)


@triton.jit
def _summed_keys(query, key, q_h, q_w, k_h, k_w, place, start, stop, largest, total, d, L: tl.constexpr,
                 BLOCK_L: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum w[n] k[n] over tokens start to stop of a group: (BLOCK_D,). Threads add up their own before they meet."""
    summed = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        logits = _load_logits(query, _offset(n, place, q_h, q_w), n, stop, L, BLOCK_L)
        offset = _offset(n, place, k_h, k_w)
        k = tl.load(key + offset[:, None] + d[None, :], mask=(n < stop)[:, None] & (d < DIM)[None, :], other=0.0)
        summed += _weights(logits, largest, total, L, BLOCK_L)[:, None] * k.to(tl.float32)
    return tl.sum(summed, 0)


@triton.jit
def _apply(value, out, v_h, v_w, o_h, o_w, place, start, stop, context, d, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store relu(v[n]) * context for tokens start to stop of a group."""
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        mask = (n < stop)[:, None] & (d < DIM)[None, :]
        offset = _offset(n, place, v_h, v_w)
        v = tl.load(value + offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        offset = _offset(n, place, o_h, o_w)
        tl.store(out + offset[:, None] + d[None, :],
                 (tl.maximum(v, 0.0) * context[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _separable_attention_fwd_kernel(
        query, key, value, out, statistics, summed, q_b, q_h, q_w, k_b, k_h, k_w, v_b, v_h, v_w, o_b, o_h, o_w,
        height, width, v_height, v_width, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr, PIXEL: tl.constexpr,
        L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr):
    """Compute y for BLOCK_D channels of one group per program."""
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    line = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    batch, group = (line // (PATCH_H * PATCH_W)).to(tl.int64), line % (PATCH_H * PATCH_W)
    place, count = _group(group, height, width, PATCH_H, PATCH_W, PIXEL)
    largest, total = _softmax(query + batch * q_b, q_h, q_w, place, count, L, BLOCK_L, BLOCK_Q)
    context = _summed_keys(query + batch * q_b, key + batch * k_b, q_h, q_w, k_h, k_w, place, 0, count,
                           largest, total, d, L, BLOCK_L, DIM, BLOCK_N, BLOCK_D)
    latent = tl.arange(0, BLOCK_L)
    first = (latent < L) & (tl.program_id(0) % blocks == 0)
    tl.store(statistics + line.to(tl.int64) * 2 * L + latent, largest, mask=first)
    tl.store(statistics + line.to(tl.int64) * 2 * L + L + latent, total, mask=first)
    tl.store(summed + line.to(tl.int64) * DIM + d, context, mask=d < DIM)
    place, count = _group(group, v_height, v_width, PATCH_H, PATCH_W, PIXEL)
    _apply(value + batch * v_b, out + batch * o_b, v_h, v_w, o_h, o_w, place, 0, count, context, d, DIM, BLOCK_N)


@triton.jit(do_not_specialize=SIZES)
def _separable_attention_fwd_softmax_kernel(
        query, statistics, q_b, q_h, q_w, height, width, PATCH_H: tl.constexpr, PATCH_W: tl.constexpr,
        PIXEL: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Reduce the logits of one group per program."""
    line = tl.program_id(0)
    batch = (line // (PATCH_H * PATCH_W)).to(tl.int64)
    place, count = _group(line % (PATCH_H * PATCH_W), height, width, PATCH_H, PATCH_W, PIXEL)
    largest, total = _softmax(query + batch * q_b, q_h, q_w, place, count, L, BLOCK_L, BLOCK_Q)
    latent = tl.arange(0, BLOCK_L)
    tl.store(statistics + line.to(tl.int64) * 2 * L + latent, largest, mask=latent < L)
    tl.store(statistics + line.to(tl.int64) * 2 * L + L + latent, total, mask=latent < L)


@triton.jit(do_not_specialize=SIZES)
def _separable_attention_fwd_context_kernel(
        query, key, statistics, partial, q_b, q_h, q_w, k_b, k_h, k_w, height, width, chunks, PATCH_H: tl.constexpr,
        PATCH_W: tl.constexpr, PIXEL: tl.constexpr, L: tl.constexpr, BLOCK_L: tl.constexpr, DIM: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    """Sum BLOCK_D channels of the keys of one chunk of a group per program. partial: (B, groups, chunks, DIM)."""
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    piece = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    line = piece // chunks
    batch = (line // (PATCH_H * PATCH_W)).to(tl.int64)
    place, count = _group(line % (PATCH_H * PATCH_W), height, width, PATCH_H, PATCH_W, PIXEL)
    largest, total = _load_statistics(statistics, line, L, BLOCK_L)
    start = piece % chunks * CHUNK
    part = _summed_keys(query + batch * q_b, key + batch * k_b, q_h, q_w, k_h, k_w, place, start,
                        tl.minimum(start + CHUNK, count), largest, total, d, L, BLOCK_L, DIM, BLOCK_N, BLOCK_D)
    tl.store(partial + piece.to(tl.int64) * DIM + d, part, mask=d < DIM)


@triton.jit(do_not_specialize=SIZES)
def _separable_attention_fwd_apply_kernel(
        value, context_in, out, v_b, v_h, v_w, o_b, o_h, o_w, height, width, chunks, PATCH_H: tl.constexpr,
        PATCH_W: tl.constexpr, PIXEL: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
        CHUNK: tl.constexpr):
    """Compute y for BLOCK_D channels of one chunk of a group per program. context_in: (B, groups, DIM)."""
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    piece = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    line = piece // chunks
    batch = (line // (PATCH_H * PATCH_W)).to(tl.int64)
    place, count = _group(line % (PATCH_H * PATCH_W), height, width, PATCH_H, PATCH_W, PIXEL)
    context = tl.load(context_in + line.to(tl.int64) * DIM + d, mask=d < DIM, other=0.0)
    start = piece % chunks * CHUNK
    _apply(value + batch * v_b, out + batch * o_b, v_h, v_w, o_h, o_w, place, start, tl.minimum(start + CHUNK, count),
           context, d, DIM, BLOCK_N)


def _grid(patch: Patch, *tensors: Tensor) -> Tuple[Optional[int], int]:
    """Return height and width of the grid, or None and the number of tokens if the image is one group and all tensors
    have their rows one behind the other."""
    height, width = tensors[0].shape[1:3]
    if patch == (1, 1) and all(height == 1 or x.stride(1) == width * x.stride(2) for x in tensors):
        return None, height * width
    return height, width


class _Problem:
    """Sizes of a call and constants of its launches, which run over groups, over chunks of groups, or over blocks of
    channels of either."""

    def __init__(self, patch: Patch, sampling: str, keys: Sequence[Tensor], values: Sequence[Tensor]):
        """keys, values: tensors (B, H, W, ...) on the grid of keys, of which queries are the first, and of values."""
        query = keys[0]
        self.key_grid, self.value_grid = _grid(patch, *keys), _grid(patch, *values)
        self.places = patch[0] * patch[1]
        self.groups = len(query) * self.places
        self.patch = {'PATCH_H': patch[0], 'PATCH_W': patch[1], 'PIXEL': sampling == 'pixel'}
        latents = query.shape[3]
        self.latents = {'L': latents, 'BLOCK_L': launch.next_power_of_2(latents)}
        self.largest_keys, self.largest_values = (
            -(-x.shape[1] // patch[0]) * -(-x.shape[2] // patch[1]) for x in (query, values[0]))
        self.key_chunks, self.value_chunks = (launch.cdiv(n, CHUNK) for n in (self.largest_keys, self.largest_values))

    def logits(self) -> dict:
        """Constants of a kernel that reads all logits of a group, fewer tokens at a time for more latents."""
        return {**self.latents, 'BLOCK_Q': max(16, CHUNK // self.latents['BLOCK_L'])}

    def channels(self, dim: int) -> dict:
        """Constants of a kernel that works on blocks of channels."""
        return {'DIM': dim, 'BLOCK_N': BLOCK_N, 'BLOCK_D': min(BLOCK_D, launch.padded_power_of_two(dim))}


def _blocks(dim: int) -> int:
    return launch.cdiv(dim, min(BLOCK_D, launch.padded_power_of_two(dim)))


def _context(summed: Tensor, key_weight: Optional[Tensor], key_bias: Optional[Tensor]) -> Tensor:
    """Compute c (B, P, D) in float32 from the summed keys (B, P, C)."""
    if key_weight is None:
        return summed
    context = summed @ key_weight.float().T
    return context if key_bias is None else context + key_bias.float()


def forward(query: Tensor, key: Tensor, value: Tensor, key_weight: Optional[Tensor], key_bias: Optional[Tensor],
            patch: Patch, sampling: str) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output (B, Hv, Wv, D), the softmax statistics (B, P, 2, L) and the summed keys (B, P, C)."""
    query, key, value = (launch.unit_stride(x) for x in (query, key, value))
    out = launch.dense_like(value)
    call = _Problem(patch, sampling, (query, key), (value, out))
    launch.check_grid(query, key, value, out)
    statistics = query.new_empty(len(query), call.places, 2, query.shape[3], dtype=torch.float32)
    summed = key.new_empty(len(key), call.places, key.shape[3], dtype=torch.float32)
    dim = value.shape[3]
    options = launch.options('separable_attention', value.dtype, BLOCK_N, BLOCK_D)
    largest = max(call.largest_keys, call.largest_values)
    if key_weight is None and (largest <= CHUNK or call.groups * _blocks(dim) >= MANY_PROGRAMS):
        _separable_attention_fwd_kernel[launch.programs(call.groups * _blocks(dim))](
            query, key, value, out, statistics, summed, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *out.stride()[:3], *call.key_grid, *call.value_grid, **call.patch, **call.logits(), **call.channels(dim),
            **options)
        return out, statistics, summed
    _separable_attention_fwd_softmax_kernel[launch.programs(call.groups)](
        query, statistics, *query.stride()[:3], *call.key_grid, **call.patch, **call.logits(), **options)
    sums = summed.new_empty(len(key), call.places, call.key_chunks, key.shape[3])
    _separable_attention_fwd_context_kernel[launch.programs(call.groups * call.key_chunks * _blocks(key.shape[3]))](
        query, key, statistics, sums, *query.stride()[:3], *key.stride()[:3], *call.key_grid, call.key_chunks,
        **call.patch, **call.latents, **call.channels(key.shape[3]), CHUNK=CHUNK, **options)
    torch.sum(sums, 2, out=summed)
    _separable_attention_fwd_apply_kernel[launch.programs(call.groups * call.value_chunks * _blocks(dim))](
        value, _context(summed, key_weight, key_bias), out, *value.stride()[:3], *out.stride()[:3], *call.value_grid,
        call.value_chunks, **call.patch, **call.channels(dim), CHUNK=CHUNK, **options)
    return out, statistics, summed
