"""Triton kernels of polyline attention (PPMA, section 3): both masks from one pass over q k', without N x N matrices.

A tile of queries (i, j) is a block of ROWS x COLS of the grid, a tile of keys (k, l) one of KEY_ROWS x COLS. With Sa
and Sb the sums of step logs along rows and columns, the two masks of a tile are

    L  = e1 c    e1[i,j,l] = exp -|Sa[i,j] - Sa[i,l]|    c[i,k,l] = exp -|Sb[i,l] - Sb[k,l]|
    L~ = e2 w    e2[k,j,l] = exp -|Sa[k,j] - Sa[k,l]|    w[i,k,j] = exp -|Sb[i,j] - Sb[k,j]|

Each factor lacks one of the four indices: e1 is computed once for all key rows, and the others once for a row or a
column of the tile. So a pair takes one exponential for both masks, p = exp(q k' - r), and its weights are p e1 c and
p e2 w. The reference r is the query's own logit, q k' at (k, l) = (i, j). Both masks are 1 there, so both sums of
weights are at least 1, and there is no maximum to follow.

A weight overflows where a logit exceeds the own one by 80 or more and the mask does not take it back. A program that
meets one sets its flag, and the kernels of `triton_running.py`, launched next, replace the results of its (batch, head)
group. They return at once where no flag is set, and the host never waits for a flag.

Kernels read tensors through their strides. If columns fill the tiles better than rows, the grid is read by columns, by
exchanging the strides, Sa with Sb, and L with L~.
"""
from typing import Dict, Tuple

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import INF, LOG2E, row_products
from . import triton_running
from .triton_backward import _polyline_attention_bwd_key_kernel, _polyline_attention_bwd_query_kernel
from .triton_running import BOTH, H2V, V2H, decay, load_sums, load_vectors, rows_inside

_PATHS = {'both': 0, 'v2h': 1, 'h2v': 2}
# Queries of a tile, if not 64, by (bytes per element, channels). Each warp has whole grid rows of 16 queries, which
# share e2 in its registers.
_QUERIES = {(4, 64): 32}
# Tiles of a row per launch of the backward kernels. Each tile needs its own slice of partial sums.
SLICES = 8
# Programs of a launch that replaces flagged groups: a few for each multiprocessor, because nearly all return at once.
FALLBACK_PROGRAMS = 512
# Sums of weights from here on set the flag: 80.4 above the own logit. Products with values reach 2^128.
_LIMIT = tl.constexpr(2.0 ** 116)
_LARGEST_RATIO = tl.constexpr(2.0 ** 100)
_SIZES = ('heads', 'height', 'width', 'token_i', 'token_j')


@triton.jit
def _accumulate(x, value, ones, y, total, TOTALS: tl.constexpr, PRECISION: tl.constexpr):
    """Add the weights x of a tile to their sums `total`, and their products with values to y.

    With TOTALS columns of ones, the sums are a product too: of the rounded weights, as y is."""
    x = x.to(value.dtype)
    if TOTALS:
        total = tl.dot(x, ones, total, input_precision=PRECISION)
    else:
        total += x
    return tl.dot(x, value, y, input_precision=PRECISION), total


@triton.jit(do_not_specialize=_SIZES)
def _polyline_attention_fwd_kernel(
        q, k, v, sa, sb, out, first, lse, flags, heads, height, width, token_i, token_j,
        q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
        COLS: tl.constexpr, KEY_ROWS: tl.constexpr, BY_ROWS: tl.constexpr, TOTALS: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, PATHS: tl.constexpr, SAVE: tl.constexpr, UPCAST: tl.constexpr,
        PRECISION: tl.constexpr):
    """Compute y for one tile of queries per program, over all keys."""
    M: tl.constexpr = ROWS * COLS
    N: tl.constexpr = KEY_ROWS * COLS
    TILE: tl.constexpr = (ROWS, COLS, KEY_ROWS, COLS)           # indices i, j, k, l
    if BY_ROWS:
        token_j = 1
    tiles = tl.cdiv(height, ROWS) * tl.cdiv(width, COLS)
    tile = tl.program_id(0) % tiles
    group = (tl.program_id(0) // tiles).to(tl.int64)
    groups = (tl.num_programs(0) // tiles).to(tl.int64)
    batch, head, tokens = group // heads, group % heads, height * width
    first_i = tile // tl.cdiv(width, COLS) * ROWS
    first_j = tile % tl.cdiv(width, COLS) * COLS
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    sa += group * tokens
    sb += group * tokens

    # Tokens of the tile of queries: m over all of them, i and j along its sides.
    m_i = first_i + tl.arange(0, M) // COLS
    m_j = first_j + tl.arange(0, M) % COLS
    in_m = (m_i < height) & (m_j < width)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_V)
    query = load_vectors(q + (m_i.to(tl.int64) * q_i + m_j * q_j)[:, None] + d[None, :], in_m, d, DIM, UPCAST)
    own = load_vectors(k + (m_i.to(tl.int64) * k_i + m_j * k_j)[:, None] + d[None, :], in_m, d, DIM, UPCAST)
    reference = tl.sum(query.to(tl.float32) * own.to(tl.float32), 1) * LOG2E
    i = first_i + tl.arange(0, ROWS)
    j = first_j + tl.arange(0, COLS)
    in_i, in_j = i < height, j < width
    ij = i[:, None] * token_i + j[None, :] * token_j
    in_ij = in_i[:, None] & in_j[None, :]
    sa_ij = load_sums(sa, ij, in_ij, 0.0)[:, :, None, None]
    sb_ij = load_sums(sb, ij, in_ij, 0.0)[:, :, None, None]

    # Tokens of a tile of keys: n over all of them, k and l along its sides.
    n = tl.arange(0, N)
    n_k = n // COLS
    step = tl.full((), KEY_ROWS, tl.int64)
    k_offset = tl.arange(0, KEY_ROWS)
    y1 = tl.zeros((M, BLOCK_V), tl.float32)
    y2 = tl.zeros((M, BLOCK_V), tl.float32)
    total1 = tl.zeros((M, TOTALS if TOTALS else N), tl.float32)
    total2 = tl.zeros((M, TOTALS if TOTALS else N), tl.float32)
    for start in range(0, width, COLS):
        l = start + tl.arange(0, COLS)
        in_l = l < width
        n_l = start + n % COLS
        il = i[:, None] * token_i + l[None, :] * token_j
        in_il = in_i[:, None] & in_l[None, :]
        # An infinite sum gives keys outside of the grid a mask of 0.
        e1 = decay(sa_ij, tl.load(sa + il, mask=in_il, other=INF)[:, None, None, :])
        sb_il = load_sums(sb, il, in_il, 0.0)[:, None, None, :]
        kl = k_offset[:, None] * token_i + l[None, :] * token_j
        kj = k_offset[:, None] * token_i + j[None, :] * token_j
        keys = k + (n_k.to(tl.int64) * k_i + n_l * k_j)[:, None] + d[None, :]
        values = v + (n_k.to(tl.int64) * v_i + n_l * v_j)[:, None] + d_v[None, :]
        for row in range(0, height, KEY_ROWS):
            in_n, in_kl, in_kj = rows_inside(row, k_offset, n_k, n_l < width, in_l, in_j, height, KEY_ROWS)
            key = load_vectors(keys, in_n, d, DIM, UPCAST)
            value = load_vectors(values, in_n, d_v, DIM_V, UPCAST)
            ones = tl.full((N, TOTALS if TOTALS else 1), 1.0, value.dtype)
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            p = tl.reshape(tl.exp2(logits * LOG2E - reference[:, None]), TILE)
            if PATHS != H2V:
                c = decay(sb_il, tl.load(sb + kl, mask=in_kl, other=INF if KEY_ROWS > 1 else 0.0)[None, None, :, :])
            if PATHS != V2H:
                sa_kl = tl.load(sa + kl, mask=in_kl, other=INF)[None, None, :, :]
                e2 = decay(tl.trans(load_sums(sa, kj, in_kj, 0.0))[None, :, :, None], sa_kl)
                w = decay(sb_ij, tl.trans(tl.load(sb + kj, mask=in_kj, other=0.0))[None, :, :, None])
            if MULTIPLICATIVE:
                # The softmax has no mask: keys outside of the grid must not count.
                inside = tl.where(in_n, 1.0, 0.0)
                if TOTALS:
                    ones = tl.broadcast_to(inside[:, None], (N, TOTALS)).to(value.dtype)
                    total1 = tl.dot(tl.reshape(p, (M, N)).to(value.dtype), ones, total1, input_precision=PRECISION)
                else:
                    total1 += tl.reshape(p, (M, N)) * inside[None, :]
                if PATHS == V2H:
                    x = p * (e1 * c)
                elif PATHS == H2V:
                    x = p * (e2 * w)
                else:
                    x = p * (e1 * c + e2 * w)
                y1 = tl.dot(tl.reshape(x, (M, N)).to(value.dtype), value, y1, input_precision=PRECISION)
            else:
                if PATHS != H2V:
                    y1, total1 = _accumulate(tl.reshape(p * e1 * c, (M, N)), value, ones, y1, total1, TOTALS, PRECISION)
                if PATHS != V2H:
                    y2, total2 = _accumulate(tl.reshape(p * e2 * w, (M, N)), value, ones, y2, total2, TOTALS, PRECISION)
            kl += KEY_ROWS * token_i
            kj += KEY_ROWS * token_i
            keys += step * k_i
            values += step * v_i

    sum1 = tl.max(total1, 1) if TOTALS else tl.sum(total1, 1)   # columns of ones give equal sums
    sum2 = tl.max(total2, 1) if TOTALS else tl.sum(total2, 1)
    if PATHS == H2V and not MULTIPLICATIVE:
        sum1, y1 = sum2, y2
    m_token = m_i * token_i + m_j * token_j
    lines = ((batch * tokens + m_token) * heads + head)[:, None] * DIM_V + d_v[None, :]
    in_v = in_m[:, None] & (d_v < DIM_V)[None, :]
    y = y1 / sum1[:, None]
    fits = sum1 < _LIMIT
    if PATHS == BOTH and not MULTIPLICATIVE:
        if SAVE:
            tl.store(first + lines, y.to(first.dtype.element_ty), mask=in_v)
            tl.store(lse + (groups + group) * tokens + m_token, tl.log2(sum1) - tl.log2(sum2), mask=in_m)
        y = 0.5 * (y + y2 / sum2[:, None])
        # The backward pass has both weights from one exponential, which must not underflow for either.
        fits = fits & (sum2 < _LIMIT) & (sum1 < sum2 * _LARGEST_RATIO)
    tl.store(out + lines, y.to(out.dtype.element_ty), mask=in_v)
    # Not a number, as 0 times an overflow, does not fit either.
    fits = fits & (tl.sum((tl.abs(y) < INF).to(tl.int32), 1) == BLOCK_V)
    overflow = tl.where(in_m & (fits == 0), INF, 0.0)
    tl.store(flags + tl.program_id(0), tl.max(overflow, 0))
    if SAVE:
        SECOND: tl.constexpr = 1 if PATHS == BOTH and not MULTIPLICATIVE else 0
        tl.store(lse + group * tokens + m_token, reference + tl.log2(sum1) + SECOND, mask=in_m)
        tl.store(lse + ((1 + SECOND) * groups + group) * tokens + m_token, overflow, mask=in_m)


def _columns(height: int, width: int, mask_mode: str) -> Tuple[int, int]:
    """Return the pairs that tiles of 64 queries and 16 keys cover, and the columns of those tiles.

    Tiles have 16 columns, or 8 columns and twice the rows where these cover fewer pairs. Only grids of at most 16 x 16
    and squares that they fill may have tiles of 8 columns. Detectors see hundreds of other sizes, and would compile
    each kernel for both tiles. With the multiplicative mask, tiles of 8 columns spill in the backward pass."""
    def pairs(columns: int) -> int:
        line, query_rows, key_rows = -(-width // columns) * columns, 64 // columns, 16 // columns
        return line * (-(-height // query_rows) * query_rows) * line * (-(-height // key_rows) * key_rows)
    narrow = max(height, width) <= 16 or (height == width and height % 8 == 0)
    columns = min((16, 8), key=pairs) if narrow and mask_mode == 'additive' else 16
    return pairs(columns), columns


class _Grid:
    """Launches of a problem: whether the grid is read by rows or columns, tiles, strides and constants."""

    def __init__(self, kernel: str, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str,
                 paths: str):
        batch, heads, height, width, dim = q.shape
        self.own_reference = launch.own_logit_reference(q.dtype, dim, v.shape[-1])
        # Forward and backward pass must agree on this: saved tensors have L first and L~ second, as the grid is read.
        if self.own_reference:
            swapped = _columns(width, height, mask_mode)[0] < _columns(height, width, mask_mode)[0]
        else:
            swapped = launch.padding_ratio(height) < launch.padding_ratio(width)
        if swapped:
            height, width, sa, sb = width, height, sb, sa
            paths = {'v2h': 'h2v', 'h2v': 'v2h'}.get(paths, paths)
        self.swapped, self.height, self.width, self.groups = swapped, height, width, batch * heads
        self.q, self.k, self.v = (launch.unit_stride(x) for x in (q, k, v))
        self.sa, self.sb = sa.contiguous(), sb.contiguous()
        token_strides = (1, height) if swapped else (width, 1)
        launch.check_line(width, *(x.stride(2 if swapped else 3) for x in (self.q, self.k, self.v)),
                          token_strides[1] * heads * max(dim, v.shape[-1]))
        self.tensors = (self.q, self.k, self.v, self.sa, self.sb)
        self.sizes = (heads, height, width, *token_strides, *launch.strides(self.q, swapped),
                      *launch.strides(self.k, swapped), *launch.strides(self.v, swapped))
        self.constants = {'DIM': dim, 'DIM_V': v.shape[-1], 'BLOCK_D': launch.padded_power_of_two(dim),
                          'BLOCK_V': launch.padded_power_of_two(v.shape[-1]),
                          'MULTIPLICATIVE': mask_mode == 'multiplicative', 'PATHS': _PATHS[paths],
                          **launch.numerics(q.dtype)}
        self.side = _columns(height, width, mask_mode)[1] if self.own_reference else 0
        # One side where nearly all programs return at once: another would be another kernel to compile.
        largest = launch.largest_tile(kernel, q.dtype, dim, v.shape[-1])
        self.running_side = largest if self.own_reference else launch.tile(width, largest)
        self.columns = launch.cdiv(width, self.side or self.running_side)
        self.running_options = launch.options(kernel, q.dtype, self.running_side,
                                              launch.padded_power_of_two(max(dim, v.shape[-1])))

    def options(self, kernel: str) -> Dict[str, int]:
        """Return tile and launch options of a kernel that refers to the own logit."""
        channels = max(self.constants['BLOCK_D'], self.constants['BLOCK_V'])
        queries = _QUERIES.get((self.q.dtype.itemsize, channels), 64)
        return {'ROWS': queries // self.side, 'COLS': self.side, 'KEY_ROWS': 16 // self.side,
                'BY_ROWS': self.side == 8 and not self.swapped,
                **launch.options(kernel, self.q.dtype, queries, channels)}

    def parts(self, tiles: int) -> Tuple[int, int]:
        """Return how many programs of a running-maximum kernel share the `tiles` tiles of a group, and how many groups
        are computed at a time."""
        if not self.own_reference:
            return tiles, self.groups
        return min(tiles, max(1, FALLBACK_PROGRAMS // self.groups)), min(self.groups, FALLBACK_PROGRAMS)


def forward(q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, mask_mode: str, paths: str,
            save: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output and, if `save`, tensors for the backward pass (else empty): the output under L alone, if the
    output is a mean over both masks, and the log2-sum-exps (1 or 2, B, heads, N). sa, sb: float32, dense.

    If `launch.own_logit_reference`, one row more has the flags: infinite at queries whose weights overflow. In groups
    without a flag, log2-sum-exps of a mean over both masks are saved as the backward kernels take them: the first plus
    1, so that weights have the factor 1/2 of the mean, and its difference to the second."""
    grid = _Grid('polyline_attention_running_fwd', q, k, v, sa, sb, mask_mode, paths)
    two = mask_mode == 'additive' and paths == 'both'
    out = launch.token_major(v.shape, v)
    first = launch.token_major(v.shape, v) if save and two else v.new_empty(0)
    tokens = q.shape[2] * q.shape[3]
    lse = sa.new_empty((1 + two + grid.own_reference, *q.shape[:2], tokens) if save else 0)
    flags, count = lse, 0
    if grid.own_reference:
        options = grid.options('polyline_attention_fwd')
        count = launch.cdiv(grid.height, options['ROWS']) * launch.cdiv(grid.width, options['COLS'])
        flags = sa.new_empty(grid.groups * count)
        _polyline_attention_fwd_kernel[launch.programs(grid.groups * count)](
            *grid.tensors, out, first, lse, flags, *grid.sizes, TOTALS=8 if q.dtype.itemsize == 2 else 0, SAVE=save,
            **grid.constants, **options)
    parts, together = grid.parts(grid.height * launch.cdiv(grid.width, grid.running_side))
    triton_running._polyline_attention_running_fwd_kernel[launch.programs(parts * together)](
        *grid.tensors, out, first, lse, flags, count, grid.groups, parts, together, *grid.sizes,
        BLOCK=grid.running_side, SAVE=save, FLAGGED=grid.own_reference, **grid.constants, **grid.running_options)
    return out, first, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sa: Tensor, sb: Tensor, out: Tensor, first: Tensor,
             lse: Tensor, mask_mode: str, paths: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, sa and sb."""
    grid = _Grid('polyline_attention_running_bwd', q, k, v, sa, sb, mask_mode, paths)
    two = mask_mode == 'additive' and paths == 'both'
    grad = launch.as_token_major(grad)
    delta = row_products(grad, first, out) if two else row_products(grad, out)
    dq, dk, dv = (launch.token_major(x.shape, x) for x in (q, k, v))
    flags = lse[-1].flatten(0, 1).amax(-1) if grid.own_reference else lse
    totals = []
    for first_tile in range(0, grid.columns, SLICES):           # a few tiles of a row at a time take O(N) memory
        tiles = min(SLICES, grid.columns - first_tile)
        sums = sa.new_zeros(2, 2 * tiles + 2, grid.groups, grid.height * grid.width)
        if grid.own_reference:
            for kernel, name, outputs in ((_polyline_attention_bwd_query_kernel, 'query', (dq,)),
                                          (_polyline_attention_bwd_key_kernel, 'key', (dk, dv))):
                options = grid.options(f'polyline_attention_bwd_{name}')
                kernel[launch.programs(grid.groups * launch.cdiv(grid.height, options['ROWS']) * tiles)](
                    *grid.tensors, grad, lse, delta, flags, *outputs, sums, first_tile, tiles, tiles, *grid.sizes,
                    **grid.constants, **options)
        # Tiles of the running-maximum kernel are no narrower, so that its slices are no more.
        blocks = min(tiles, launch.cdiv(grid.width, grid.running_side) - first_tile)
        if blocks > 0:
            parts, together = grid.parts(grid.height * blocks)
            triton_running._polyline_attention_running_bwd_kernel[launch.programs(parts * together)](
                *grid.tensors, grad, lse, delta, dq, dk, dv, sums, flags, 1, grid.groups, parts, together, first_tile,
                blocks, tiles, *grid.sizes, BLOCK=grid.running_side, FLAGGED=grid.own_reference, **grid.constants,
                **grid.running_options)
        found = [x.sum(0) for x in sums]
        totals = [x + y for x, y in zip(totals, found)] if totals else found
    dsa, dsb = (x.view_as(sa) for x in totals)
    return (dq, dk, dv, dsb, dsa) if grid.swapped else (dq, dk, dv, dsa, dsb)
