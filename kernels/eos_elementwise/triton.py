"""Triton kernels of the elementwise recurrence for oscillations of rank one, o_t = exp(log_k[t]) exp(log_d[t])'.

A tile holds the tokens of a chunk, or of several short lines. Within it the output is a product with a matrix,

    y_t = sum_j A[t, j] d[t, j] * i_j,    A[t, j] = sum_k s_t[k] c[t, j, k] e_j[k],

where c and d are the decays of rows and columns of the memory between tokens j and t. They are never split into e^x and
e^-x. Blocks of 1, 2, 4, ... tokens are joined in pairs: for tokens of the two blocks of a pair, a decay is that of one
token to the boundary between the blocks times that from the boundary to the other token. Both factors are at most 1, so
steps of any size are exact. Each pair of tokens belongs to the two blocks of one pair, so A is a sum of one masked
product for each size of blocks, and both directions share these products: their triangles do not overlap.

Lines of one chunk need no memory. For longer ones, and for lines with an initial or final memory, one kernel runs along
the chunks and stores the memory at each boundary in float32. The others then take all chunks at once.

Sums of step logs are made for each tile, in float64 if the tensors are float32 (EXACT): in float32, small steps behind
large ones lose digits, up to 3e-4 of a weight.
"""
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import LOG2E, dot
from ..eos_scan.memory_tiles import broadcast_strides, dense, strides
from ..eos_scan.problem import DIRECTIONS

# Arguments that change with the size of the problem. Strides of tokens stay specialized: loads of several channels at
# once depend on them.
SIZES = ('lines', 'chunks', 'heads', 'length', 'i_b', 'i_h', 'e_b', 'e_h', 's_b', 's_h', 'k_b', 'k_h', 'd_b', 'd_h')


@triton.jit
def place(tile, lines, chunks, heads, length, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Return batch, head and token of each row of a tile, its number among all tokens, and whether it is a token.

    tile: number of the tile, which has BLOCK rows for chunks of 2^LEVELS tokens."""
    LINE: tl.constexpr = 1 << LEVELS
    x = tl.arange(0, BLOCK)
    chunk = tile * (BLOCK // LINE) + x // LINE
    line, token = chunk // chunks, chunk % chunks * LINE + x % LINE
    inside = (line < lines) & (token < length)
    line = line.to(tl.int64)
    return line // heads, line % heads, token, line * length + token, inside


@triton.jit
def load_tile(pointer, at, c, inside, DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Load channels c of the tokens at offsets `at`, and zeros outside: (len(at), len(c)).

    UPCAST to float32 is for Triton's interpreter, whose products of bfloat16 are wrong."""
    x = tl.load(pointer + at[:, None] + c[None, :], mask=inside[:, None] & (c < DIM)[None, :], other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def store_tile(pointer, at, c, inside, x, DIM: tl.constexpr):
    tl.store(pointer + at[:, None] + c[None, :], x.to(pointer.dtype.element_ty),
             mask=inside[:, None] & (c < DIM)[None, :])


@triton.jit
def load_sums(log, at, stride, c, inside, DIM: tl.constexpr, EXACT: tl.constexpr):
    """Return the cumulative sums of the step logs of a tile, and the step logs, in units of log 2."""
    step = tl.load(log + at[:, None] + (c * stride)[None, :], mask=inside[:, None] & (c < DIM)[None, :], other=0.0)
    step = step.to(tl.float64) * LOG2E if EXACT else step * LOG2E
    return tl.cumsum(step, 0), step


@triton.jit
def exp2(x):
    return tl.exp2(x.to(tl.float32))


@triton.jit
def scaled(x, decay):
    return (x.to(tl.float32) * decay).to(x.dtype)


@triton.jit
def block_decays(sums, step, h, DIRECTION: tl.constexpr):
    """Return the decays between each token and the boundary in its pair of blocks of h tokens, as query and as key.

    The step of a token decays what it reads, not what it adds."""
    x = tl.arange(0, sums.shape[0])
    second = (x & h) != 0
    before = tl.where(second, (x & -h) - 1, x | (h - 1))                     # the last token before the boundary
    gap = sums - tl.gather(sums, tl.broadcast_to(before[:, None], sums.shape), 0)
    second = second[:, None]
    if DIRECTION == 'forward':
        query = exp2(tl.where(second, gap, -gap))
        key = query
    elif DIRECTION == 'reverse':
        query = exp2(tl.where(second, gap - step, step - gap))
        key = query
    else:
        query = exp2(tl.where(second, gap, step - gap))
        key = exp2(tl.where(second, gap - step, -gap))
    return query, key


@triton.jit
def in_direction(t, j, DIRECTION: tl.constexpr):
    """Whether token t reads what token j != t adds."""
    return t > j if DIRECTION == 'forward' else t < j if DIRECTION == 'reverse' else t != j


@triton.jit
def block_pairs(level, BLOCK: tl.constexpr, DIRECTION: tl.constexpr):
    """Whether t reads what j adds, and they belong to the two blocks of a pair of blocks of 2^level tokens: (t, j).

    One comparison of two vectors that depend on the level: the compiler would keep any other matrix in registers."""
    block = tl.arange(0, BLOCK) >> level
    second = (block & 1) != 0
    if DIRECTION == 'forward':
        t, j = tl.where(second, block, -1), tl.where(second, -2, block + 1)
    elif DIRECTION == 'reverse':
        t, j = tl.where(second, -1, block + 1), tl.where(second, block, -2)
    else:
        t, j = block ^ 1, block
    return t[:, None] == j[None, :]


@triton.jit
def diagonal(BLOCK: tl.constexpr):
    return tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]


@triton.jit
def token_matrix(q, k, log, at_q, at_k, at_log, log_c, inside, DIM: tl.constexpr, BLOCK_C: tl.constexpr,
                 BLOCK: tl.constexpr, LEVELS: tl.constexpr, DIRECTION: tl.constexpr, EXACT: tl.constexpr,
                 UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute A[t, j] = sum_c q[t, c] decay[t, j, c] k[j, c], zero against the direction and between lines."""
    a = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, DIM, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        query, key = load_tile(q, at_q, c, inside, DIM, UPCAST), load_tile(k, at_k, c, inside, DIM, UPCAST)
        if log is None:
            a += dot(query, tl.trans(key), PRECISION)
        else:
            own = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
            a += tl.where(diagonal(BLOCK), own[:, None], 0.0)
            sums, step = load_sums(log, at_log, log_c, c, inside, DIM, EXACT)
            for level in range(0, LEVELS):
                decay_q, decay_k = block_decays(sums, step, 1 << level, DIRECTION)
                product = dot(scaled(query, decay_q), tl.trans(scaled(key, decay_k)), PRECISION)
                a += tl.where(block_pairs(level, BLOCK, DIRECTION), product, 0.0)
    if log is None:
        t, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
        a = tl.where((t >> LEVELS == j >> LEVELS) & ((t == j) | in_direction(t, j, DIRECTION)), a, 0.0)
    return a


@triton.jit
def chunk_decay(sums, step, QUERY: tl.constexpr, REVERSE: tl.constexpr):
    """Return the decay of each token of a chunk, from the chunk's entry (QUERY) or to its exit."""
    if QUERY:
        decay = tl.min(sums, 0)[None, :] - sums + step if REVERSE else sums
    else:
        decay = sums - step if REVERSE else tl.min(sums, 0)[None, :] - sums
    return exp2(decay)


@triton.jit
def entry(tile, lines, chunks, DIRECTION: tl.constexpr, REVERSE: tl.constexpr):
    """Return the number of the boundary at which the memory enters the chunk of a tile, among those of all lines."""
    line, n = tile // chunks, tile % chunks
    boundary = line.to(tl.int64) * (chunks + 1) + n
    if REVERSE:
        boundary += 1
    if DIRECTION == 'both' and REVERSE:
        boundary += lines.to(tl.int64) * (chunks + 1)
    return boundary


@triton.jit
def load_memory(memory, boundary, x, x_stride, c, c_stride, DIM_X: tl.constexpr, DIM_C: tl.constexpr):
    """Load a block of the memory at a boundary of chunks, in float32: (len(x), len(c))."""
    return tl.load(memory + boundary * DIM_X * DIM_C + (x * x_stride)[:, None] + (c * c_stride)[None, :],
                   mask=(x < DIM_X)[:, None] & (c < DIM_C)[None, :], other=0.0)


@triton.jit
def through_memory(x, log, memory, at, at_log, log_c, inside, boundary, x_stride, c, c_stride, DIM_X: tl.constexpr,
                   DIM_C: tl.constexpr, BLOCK_X: tl.constexpr, QUERY: tl.constexpr, REVERSE: tl.constexpr,
                   EXACT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply the tokens x of a chunk, with their decays to a boundary, by channels c of the memory there."""
    y = tl.zeros((at.shape[0], c.shape[0]), tl.float32)
    for start in range(0, DIM_X, BLOCK_X):
        z = start + tl.arange(0, BLOCK_X)
        tile = load_tile(x, at, z, inside, DIM_X, UPCAST)
        if log is not None:
            sums, step = load_sums(log, at_log, log_c, z, inside, DIM_X, EXACT)
            tile = scaled(tile, chunk_decay(sums, step, QUERY, REVERSE))
        block = load_memory(memory, boundary, z, x_stride, c, c_stride, DIM_X, DIM_C)
        y += dot(tile, block.to(tile.dtype), PRECISION)
    return y


@triton.jit(do_not_specialize=SIZES)
def _eos_elementwise_memory_kernel(
        i, e, log_k, log_d, first, memory, lines, chunks, heads, length, i_b, i_h, i_t, e_b, e_h, e_t, k_b, k_h, k_t,
        k_c, d_b, d_h, d_t, d_c, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK: tl.constexpr, QUERY: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr, UPCAST: tl.constexpr,
        PRECISION: tl.constexpr):
    """Store a block of the memory of one line at all boundaries of chunks: (lines, chunks + 1, KEYS, DIM).

    With QUERY, tokens are queries and what they read is added up, as for the gradient of the memory."""
    parts_k: tl.constexpr = (KEYS + BLOCK_K - 1) // BLOCK_K
    parts_d: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    line = (tl.program_id(0) // (parts_k * parts_d)).to(tl.int64)
    batch, head, part = line // heads, line % heads, tl.program_id(0) % (parts_k * parts_d)
    k, d = part // parts_d * BLOCK_K + tl.arange(0, BLOCK_K), part % parts_d * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (k < KEYS)[:, None] & (d < DIM)[None, :]
    memory += line * (chunks + 1) * KEYS * DIM
    place_in_memory = k[:, None] * DIM + d[None, :]
    state = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    if first is not None:
        state = tl.load(first + line * KEYS * DIM + place_in_memory, mask=inside, other=0.0)
    BACKWARD: tl.constexpr = QUERY != REVERSE                                # runs from the last chunk to the first
    for count in range(0, chunks):
        n = chunks - 1 - count if BACKWARD else count
        boundary = n + 1 if BACKWARD else n
        tl.store(memory + boundary.to(tl.int64) * KEYS * DIM + place_in_memory, state, mask=inside)
        token = n * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        valid = token < length
        key = load_tile(e, batch * e_b + head * e_h + token * e_t, k, valid, KEYS, UPCAST)
        value = load_tile(i, batch * i_b + head * i_h + token * i_t, d, valid, DIM, UPCAST)
        if log_k is not None:
            sums, step = load_sums(log_k, batch * k_b + head * k_h + token * k_t, k_c, k, valid, KEYS, EXACT)
            key = scaled(key, chunk_decay(sums, step, QUERY, REVERSE))
            state *= exp2(tl.min(sums, 0))[:, None]
        if log_d is not None:
            sums, step = load_sums(log_d, batch * d_b + head * d_h + token * d_t, d_c, d, valid, DIM, EXACT)
            value = scaled(value, chunk_decay(sums, step, QUERY, REVERSE))
            state *= exp2(tl.min(sums, 0))[None, :]
        state += dot(tl.trans(key), value, PRECISION)
    last = chunks * 0 if BACKWARD else chunks
    tl.store(memory + last.to(tl.int64) * KEYS * DIM + place_in_memory, state, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _eos_elementwise_fwd_kernel(
        i, e, s, log_k, log_d, y, memory, lines, chunks, heads, length, i_b, i_h, i_t, e_b, e_h, e_t, s_b, s_h, s_t,
        k_b, k_h, k_t, k_c, d_b, d_h, d_t, d_c, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK_K: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, DIRECTION: tl.constexpr, CARRY: tl.constexpr,
        EXACT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute y of one tile of tokens per program, stored as (B, T, H, D).

    memory: (directions, lines, chunks + 1, KEYS, DIM) if CARRY."""
    batch, head, token, _, inside = place(tl.program_id(0), lines, chunks, heads, length, BLOCK, LEVELS)
    at_e, at_s = batch * e_b + head * e_h + token * e_t, batch * s_b + head * s_h + token * s_t
    at_k, at_d = batch * k_b + head * k_h + token * k_t, batch * d_b + head * d_h + token * d_t
    at_i = batch * i_b + head * i_h + token * i_t
    a = token_matrix(s, e, log_k, at_s, at_e, at_k, k_c, inside, KEYS, BLOCK_K, BLOCK, LEVELS, DIRECTION, EXACT,
                     UPCAST, PRECISION)
    for start in range(0, DIM, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        value = load_tile(i, at_i, d, inside, DIM, UPCAST)
        if log_d is None:
            out = dot(a, value, PRECISION)
        else:
            sums, step = load_sums(log_d, at_d, d_c, d, inside, DIM, EXACT)
            out = tl.sum(tl.where(diagonal(BLOCK), a, 0.0), 1)[:, None] * value.to(tl.float32)
            for level in range(0, LEVELS):
                decay_q, decay_k = block_decays(sums, step, 1 << level, DIRECTION)
                part = tl.where(block_pairs(level, BLOCK, DIRECTION), a, 0.0)
                out += decay_q * dot(part, scaled(value, decay_k), PRECISION)
        if CARRY:
            if DIRECTION != 'reverse':
                at = entry(tl.program_id(0), lines, chunks, DIRECTION, False)
                entered = through_memory(s, log_k, memory, at_s, at_k, k_c, inside, at, DIM, d, 1, KEYS, DIM, BLOCK_K,
                                         True, False, EXACT, UPCAST, PRECISION)
                out += entered * chunk_decay(sums, step, True, False) if log_d is not None else entered
            if DIRECTION != 'forward':
                at = entry(tl.program_id(0), lines, chunks, DIRECTION, True)
                entered = through_memory(s, log_k, memory, at_s, at_k, k_c, inside, at, DIM, d, 1, KEYS, DIM, BLOCK_K,
                                         True, True, EXACT, UPCAST, PRECISION)
                out += entered * chunk_decay(sums, step, True, True) if log_d is not None else entered
        store_tile(y, ((batch * length + token) * heads + head) * DIM, d, inside, out, DIM)


class Tiles(NamedTuple):
    """How launches divide lines (B, H, T) into chunks, and chunks into tiles.

    Attributes:
        sizes: number of lines, chunks of a line, heads and tokens of a line.
        levels: a chunk has 2^levels tokens.
        constants: of all kernels; BLOCK is the rows of a tile.
    """

    sizes: Tuple[int, int, int, int]
    levels: int
    constants: Dict[str, Any]

    @property
    def block(self) -> int:
        return self.constants['BLOCK']

    @property
    def programs(self) -> Tuple[int]:
        """The launch grid of kernels with a program for each tile."""
        return launch.programs(launch.cdiv(self.sizes[0] * self.sizes[1], self.block >> self.levels))


def tiles(i: Tensor, chunk: int, carry: bool) -> Tiles:
    """Divide the lines of i (B, H, T, D) into chunks of `chunk` tokens, or of the whole line if it is no longer.

    carry: whether a memory passes the boundaries of chunks."""
    batch, heads, length, _ = i.shape
    levels = (min(length, chunk) - 1).bit_length()
    block = max(16, 1 << levels)
    levels = block.bit_length() - 1 if carry else levels
    sizes = (batch * heads, launch.cdiv(length, 1 << levels), heads, length)
    launch.programs(sizes[0] * sizes[1])                                     # kernels count chunks in 32 bits
    return Tiles(sizes, levels, {'BLOCK': block, 'EXACT': i.dtype == torch.float32, **launch.numerics(i.dtype)})


# Channels of a block at most. Two tiles of 64 channels and the sums of their steps do not stay in registers.
WIDEST = 32


def block_of(x: Tensor) -> int:
    """Return the channels of a block of x: kernels go through wider tokens block by block."""
    return min(WIDEST, launch.padded_power_of_two(x.shape[3]))


def expanded(log: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """Return step logs as a view of the shape of x."""
    return None if log is None else log.expand(*x.shape)


def memory_like(i: Tensor, e: Tensor, directions: int, tile: Tiles) -> Tensor:
    """Return uninitialized memories at boundaries of chunks, (directions, B, H, chunks + 1, K, D)."""
    return i.new_empty(directions, *i.shape[:2], tile.sizes[1] + 1, e.shape[3], i.shape[3], dtype=torch.float32)


def memories(i: Tensor, e: Tensor, log_k: Optional[Tensor], log_d: Optional[Tensor], first: Optional[Tensor],
             tile: Tiles, query: bool, reverse: bool, out: Tensor) -> None:
    """Write the memory at the boundaries of chunks to out (B, H, chunks + 1, K, D); first: that at the line's start.

    query: e and i are shrink states and output gradients, of which the gradient of the memory is made."""
    keys, dim = e.shape[3], i.shape[3]
    block_k, block_d = block_of(e), block_of(i)
    parts = launch.cdiv(keys, block_k) * launch.cdiv(dim, block_d)
    _eos_elementwise_memory_kernel[launch.programs(tile.sizes[0] * parts)](
        i, e, log_k, log_d, dense(first), out, *tile.sizes,
        *strides(i, e), *broadcast_strides(log_k, 4), *broadcast_strides(log_d, 4), KEYS=keys, DIM=dim,
        BLOCK_K=block_k, BLOCK_D=block_d, QUERY=query, REVERSE=reverse, **tile.constants,
        **launch.options('eos_elementwise_memory', i.dtype, tile.block, max(block_k, block_d)))


def forward(i: Tensor, e: Tensor, s: Tensor, log_k: Optional[Tensor], log_d: Optional[Tensor], state: Optional[Tensor],
            direction: str, chunk: int, save: bool, last: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return what the portable function of this name does. Arguments are those of a `RealProblem`."""
    i, e, s = (launch.unit_stride(x) for x in (i, e, s))
    log_k, log_d = expanded(log_k, e), expanded(log_d, i)
    launch.check_grid(*(x for x in (i, e, s, log_k, log_d) if x is not None), first=2)
    carry = i.shape[2] > chunk or state is not None or last
    tile, names, memory = tiles(i, chunk, carry), DIRECTIONS[direction], None
    if carry:
        memory = memory_like(i, e, len(names), tile)
        for n, reverse in enumerate(names):
            memories(i, e, log_k, log_d, state, tile, False, reverse, memory[n])
    y, keys, dim = launch.token_order(i), e.shape[3], i.shape[3]
    block_k, block_d = block_of(e), block_of(i)
    _eos_elementwise_fwd_kernel[tile.programs](
        i, e, s, log_k, log_d, y, memory, *tile.sizes, *strides(i, e, s), *broadcast_strides(log_k, 4),
        *broadcast_strides(log_d, 4), KEYS=keys, DIM=dim, BLOCK_K=block_k, BLOCK_D=block_d,
        LEVELS=tile.levels, DIRECTION=direction, CARRY=carry, **tile.constants,
        **launch.options('eos_elementwise_fwd', i.dtype, tile.block, max(block_k, block_d)))
    empty = i.new_empty(0, dtype=torch.float32)
    final = memory[0, :, :, 0 if direction == 'reverse' else -1].clone() if last else empty
    return y, memory if carry and save else empty.clone(), final
