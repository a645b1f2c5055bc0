"""Triton kernels of polyline attention with a running maximum for each mask, which hold for logits of any size.

They take what the kernels of `triton.py` and `triton_backward.py` leave: float16, whose weights would overflow there;
heads too wide for the registers; and (batch, head) groups whose flags those kernels have set. A tile stays inside one
grid row of queries and one of keys. A program takes a part of the tiles of a group, and with flags several groups.
"""
import triton
import triton.language as tl

from ..common.tiles import INF, LOG2E, dot, index_sign, load_tokens, running_softmax, store_tokens

BOTH, V2H, H2V = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Integers that change with the image: a value of 1 or a multiple of 16 must not compile another variant.
SIZES = ('heads', 'height', 'width', 'token_i', 'token_j', 'groups', 'parts', 'together', 'flag_count', 'first_block',
         'blocks', 'slices')


@triton.jit
def _is_flagged(flags, count):
    """Whether one of `count` flags is set, that is infinite."""
    largest = tl.zeros((64,), tl.float32)
    for first in range(0, count, 64):
        n = first + tl.arange(0, 64)
        largest = tl.maximum(largest, tl.load(flags + n, mask=n < count, other=0.0))
    return tl.max(largest, 0) == INF


@triton.jit
def load_sums(pointer, offsets, valid, other):
    """Load sums of step logs in units of log 2."""
    return tl.load(pointer + offsets, mask=valid, other=other) * LOG2E


@triton.jit
def decay(x, y):
    """Return exp -|x - y|, with x in units of log 2 and y in units of log e: the product of y and log2 e is fused."""
    return tl.exp2(-tl.abs(x - y * LOG2E))


@triton.jit
def load_vectors(pointers, inside, dimension, DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Load vectors of tokens (N, BLOCK_D), and zeros outside; UPCAST as for `load_tokens`."""
    x = tl.load(pointers, mask=inside[:, None] & (dimension < DIM)[None, :], other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def rows_inside(row, offset, n_row, in_n, in_column, in_other, height, ROWS: tl.constexpr):
    """Return which tokens of a tile of ROWS rows from `row` on are inside of the grid: all of its tokens, and those of
    its rows at two sets of columns. n_row and offset are the rows within the tile, the others what its columns are."""
    in_column = in_column[None, :]
    in_other = in_other[None, :]
    if ROWS > 1:
        in_n = in_n & (row + n_row < height)
        in_column = in_column & (row + offset < height)[:, None]
        in_other = in_other & (row + offset < height)[:, None]
    return in_n, in_column, in_other


@triton.jit
def _log_masks(sa, sb, along_row, sb_own, sb_other, own_tokens, other_tokens, in_own, in_other, OWN: tl.constexpr,
               OTHER: tl.constexpr):
    """Return the log masks of a tile of pairs (own, other) between its row and another row, whose tokens at the columns
    of the tile are own_tokens and other_tokens: along the tile's row first, and along the other row first.

    The first is L for queries (own) and keys (other), and L~ for keys (own) and queries (other).

    Args:
        along_row: log decay between own and other columns along the tile's row.
        sb_own, sb_other: sums at these columns of the tile's row.
        OWN, OTHER: what stands for sums along rows beyond their end: infinite for keys, 0 for queries.
    """
    down_other = tl.abs(sb_other - load_sums(sb, other_tokens, in_other, 0.0))
    down_own = tl.abs(sb_own - load_sums(sb, own_tokens, in_own, 0.0))
    sa_own = load_sums(sa, own_tokens, in_own, OWN)
    sa_other = load_sums(sa, other_tokens, in_other, OTHER)
    return along_row - down_other[None, :], -tl.abs(sa_own[:, None] - sa_other[None, :]) - down_own[:, None]


@triton.jit
def _outputs_of_a_tile(
        q, k, v, sa, sb, out, first, lse, group, tile, groups, heads, height, width, token_i, token_j,
        q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, PATHS: tl.constexpr, SAVE: tl.constexpr, UPCAST: tl.constexpr,
        PRECISION: tl.constexpr):
    """Compute y for the queries (i, j) of one tile of one grid row, over all keys."""
    blocks = tl.cdiv(width, BLOCK)
    i = tile // blocks
    batch, head, tokens = group // heads, group % heads, height * width
    j = tile % blocks * BLOCK + tl.arange(0, BLOCK)
    in_j = j < width
    sa += group * tokens
    sb += group * tokens
    q += batch * q_b + head * q_h + i.to(tl.int64) * q_i
    query = load_tokens(q, j, q_j, width, DIM, BLOCK_D, UPCAST)
    sa_ij = load_sums(sa, i * token_i + j * token_j, in_j, 0.0)
    sb_ij = load_sums(sb, i * token_i + j * token_j, in_j, 0.0)

    top1 = tl.full((BLOCK,), -INF, tl.float32)
    top2 = tl.full((BLOCK,), -INF, tl.float32)
    total1 = tl.zeros((BLOCK,), tl.float32)
    total2 = tl.zeros((BLOCK,), tl.float32)
    y1 = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    y2 = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    for start in range(0, width, BLOCK):
        l = start + tl.arange(0, BLOCK)
        in_l = l < width
        # An infinite sum gives keys beyond the row a log mask of -inf.
        sa_il = load_sums(sa, i * token_i + l * token_j, in_l, INF)
        sb_il = load_sums(sb, i * token_i + l * token_j, in_l, 0.0)
        along_query_row = -tl.abs(sa_ij[:, None] - sa_il[None, :])
        key_row = k + batch * k_b + head * k_h
        value_row = v + batch * v_b + head * v_h
        for row in range(0, height):
            key = load_tokens(key_row, l, k_j, width, DIM, BLOCK_D, UPCAST)
            value = load_tokens(value_row, l, v_j, width, DIM_V, BLOCK_V, UPCAST)
            logits = dot(query, tl.trans(key), PRECISION) * LOG2E
            mask1, mask2 = _log_masks(sa, sb, along_query_row, sb_ij, sb_il, row * token_i + j * token_j,
                                      row * token_i + l * token_j, in_j, in_l, 0.0, INF)
            if MULTIPLICATIVE:
                logits = tl.where(in_l[None, :], logits, -INF)
                new_top = tl.maximum(top1, tl.max(logits, 1))
                scale = tl.exp2(top1 - new_top)
                p = tl.exp2(logits - new_top[:, None])
                total1 = total1 * scale + tl.sum(p, 1)
                if PATHS == BOTH:
                    p *= tl.exp2(mask1) + tl.exp2(mask2)
                else:
                    p *= tl.exp2(mask1 if PATHS == V2H else mask2)
                y1 = y1 * scale[:, None] + dot(p, value, PRECISION)
                top1 = new_top
            else:
                if PATHS != H2V:
                    top1, total1, y1 = running_softmax(logits + mask1, value, top1, total1, y1, PRECISION)
                if PATHS != V2H:
                    top2, total2, y2 = running_softmax(logits + mask2, value, top2, total2, y2, PRECISION)
            key_row += k_i
            value_row += v_i

    if PATHS == H2V and not MULTIPLICATIVE:
        top1, total1, y1 = top2, total2, y2
    y = y1 / total1[:, None]
    line = ((batch * tokens + i * token_i) * heads + head) * DIM_V
    if SAVE:
        tl.store(lse + group * tokens + i * token_i + j * token_j, top1 + tl.log2(total1), mask=in_j)
    if PATHS == BOTH and not MULTIPLICATIVE:
        if SAVE:
            store_tokens(first + line, j, token_j * heads * DIM_V, width, y, DIM_V, BLOCK_V)
            tl.store(lse + (groups + group) * tokens + i * token_i + j * token_j, top2 + tl.log2(total2), mask=in_j)
        y = 0.5 * (y + y2 / total2[:, None])
    store_tokens(out + line, j, token_j * heads * DIM_V, width, y, DIM_V, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def _polyline_attention_running_fwd_kernel(
        q, k, v, sa, sb, out, first, lse, flags, flag_count, groups, parts, together, heads, height, width, token_i,
        token_j, q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, PATHS: tl.constexpr, SAVE: tl.constexpr, FLAGGED: tl.constexpr,
        UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute y for every `parts`-th tile of every `together`-th group per program. With FLAGGED, only for groups of
    which a flag is set."""
    tiles = height * tl.cdiv(width, BLOCK)
    first_group = tl.program_id(0) // parts
    for step in range(0, groups - first_group, together):
        group = (first_group + step).to(tl.int64)
        taken = not FLAGGED
        if FLAGGED:
            taken = _is_flagged(flags + group * flag_count, flag_count)
        if taken:
            for tile in range(tl.program_id(0) % parts, tiles, parts):
                _outputs_of_a_tile(q, k, v, sa, sb, out, first, lse, group, tile, groups.to(tl.int64),
                                   heads, height, width, token_i, token_j,
                                   q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j, DIM, DIM_V, BLOCK_D,
                                   BLOCK_V, BLOCK, MULTIPLICATIVE, PATHS, SAVE, UPCAST, PRECISION)


@triton.jit
def _tile_gradients(logits, dweights, mask1, mask2, lse1, lse2, delta1, delta2, valid, MULTIPLICATIVE: tl.constexpr,
                    PATHS: tl.constexpr):
    """Recompute a tile's weights; return them and the gradients of its logits and of both log masks.

    Tiles have either orientation: lse and delta broadcast along keys, `valid` (keys inside the row) along queries."""
    if MULTIPLICATIVE:
        unmasked = tl.where(valid, tl.exp2(logits - lse1), 0.0)
        weights = tl.zeros_like(logits)
        grad1 = tl.zeros_like(logits)
        grad2 = tl.zeros_like(logits)
        if PATHS != H2V:
            p1 = unmasked * tl.exp2(mask1)
            grad1 = p1 * dweights
            weights += p1
        if PATHS != V2H:
            p2 = unmasked * tl.exp2(mask2)
            grad2 = p2 * dweights
            weights += p2
        return weights, grad1 + grad2 - unmasked * delta1, grad1, grad2
    else:
        weights = tl.zeros_like(logits)
        grad1 = tl.zeros_like(logits)
        grad2 = tl.zeros_like(logits)
        if PATHS != H2V:
            p1 = tl.exp2(logits + mask1 - lse1)
            grad1 = p1 * (dweights - delta1)
            weights += p1
        if PATHS != V2H:
            p2 = tl.exp2(logits + mask2 - lse2)
            grad2 = p2 * (dweights - delta2)
            weights += p2
        return weights, grad1 + grad2, grad1, grad2


@triton.jit
def _as_queries(q, k, v, sa, sb, grad, lse1, lse2, delta1, delta2, cross_a, cross_b, r, own, height, width, token_i,
                token_j, q_i, q_j, k_i, k_j, v_i, v_j, grad_i, grad_j,
                DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
                BLOCK: tl.constexpr, MULTIPLICATIVE: tl.constexpr, PATHS: tl.constexpr, FACTOR: tl.constexpr,
                UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Take the tile as queries (r, j), j = own, over keys (row, l). Return dq and the gradients of the tile's own sums;
    add the gradients of the sums at other columns of its row to cross_a and cross_b. Pointers are the group's."""
    in_own = own < width
    own_tokens = r * token_i + own * token_j
    query = load_tokens(q + r.to(tl.int64) * q_i, own, q_j, width, DIM, BLOCK_D, UPCAST)
    gradient = load_tokens(grad + r.to(tl.int64) * grad_i, own, grad_j, width, DIM_V, BLOCK_V, UPCAST)
    sa_ij = load_sums(sa, own_tokens, in_own, 0.0)
    sb_ij = load_sums(sb, own_tokens, in_own, 0.0)
    # Queries beyond the row have an infinite log-sum-exp, so their weights are zero.
    lse1 = tl.load(lse1 + own_tokens, mask=in_own, other=INF)[:, None]
    lse2 = tl.load(lse2 + own_tokens, mask=in_own, other=INF)[:, None]
    delta1 = tl.load(delta1 + own_tokens, mask=in_own, other=0.0)[:, None] * FACTOR
    delta2 = tl.load(delta2 + own_tokens, mask=in_own, other=0.0)[:, None] * FACTOR
    dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dsa = tl.zeros((BLOCK,), tl.float32)
    dsb = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        l = start + tl.arange(0, BLOCK)
        in_l = l < width
        sa_il = load_sums(sa, r * token_i + l * token_j, in_l, INF)
        sb_il = load_sums(sb, r * token_i + l * token_j, in_l, 0.0)
        along_query_row = -tl.abs(sa_ij[:, None] - sa_il[None, :])
        sum1 = tl.zeros((BLOCK, BLOCK), tl.float32)         # gradient of log L, summed over key rows
        signed1 = tl.zeros((BLOCK, BLOCK), tl.float32)      # the same, times sign(row - r)
        signed2 = tl.zeros((BLOCK, BLOCK), tl.float32)      # gradient of log L~, times that sign
        key_row, value_row = k, v
        for row in range(0, height):
            key = load_tokens(key_row, l, k_j, width, DIM, BLOCK_D, UPCAST)
            value = load_tokens(value_row, l, v_j, width, DIM_V, BLOCK_V, UPCAST)
            mask1, mask2 = _log_masks(sa, sb, along_query_row, sb_ij, sb_il, row * token_i + own * token_j,
                                      row * token_i + l * token_j, in_own, in_l, 0.0, INF)
            logits = dot(query, tl.trans(key), PRECISION) * LOG2E
            dweights = dot(gradient, tl.trans(value), PRECISION) * FACTOR
            _, dlogits, grad1, grad2 = _tile_gradients(logits, dweights, mask1, mask2, lse1, lse2, delta1, delta2,
                                                       in_l[None, :], MULTIPLICATIVE, PATHS)
            dq += dot(dlogits, key, PRECISION)
            sign = tl.where(row > r, 1.0, 0.0) - tl.where(row < r, 1.0, 0.0)
            if PATHS != H2V:
                sum1 += grad1
                signed1 += sign * grad1
            if PATHS != V2H:
                signed2 += sign * grad2
            key_row += k_i
            value_row += v_i
        if PATHS != H2V:
            sum1 *= index_sign(l[None, :], own[:, None])
            dsa -= tl.sum(sum1, 1)
            tl.store(cross_a + l * token_j, tl.sum(sum1, 0), mask=in_l)
            tl.store(cross_b + l * token_j, -tl.sum(signed1, 0), mask=in_l)
        if PATHS != V2H:
            dsb -= tl.sum(signed2, 1)
    return dq, dsa, dsb


@triton.jit
def _as_keys(q, k, v, sa, sb, grad, lse1, lse2, delta1, delta2, cross_a, cross_b, r, own, height, width, token_i,
             token_j, q_i, q_j, k_i, k_j, v_i, v_j, grad_i, grad_j,
             DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
             BLOCK: tl.constexpr, MULTIPLICATIVE: tl.constexpr, PATHS: tl.constexpr, FACTOR: tl.constexpr,
             UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Take the tile as keys (r, l), l = own, over queries (row, j). Return dk, dv and the gradients of sums as
    `_as_queries` does. Tiles are (keys, queries)."""
    in_own = own < width
    own_tokens = r * token_i + own * token_j
    key = load_tokens(k + r.to(tl.int64) * k_i, own, k_j, width, DIM, BLOCK_D, UPCAST)
    value = load_tokens(v + r.to(tl.int64) * v_i, own, v_j, width, DIM_V, BLOCK_V, UPCAST)
    sa_kl = load_sums(sa, own_tokens, in_own, INF)
    sb_kl = load_sums(sb, own_tokens, in_own, 0.0)
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    dsa = tl.zeros((BLOCK,), tl.float32)
    dsb = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        j = start + tl.arange(0, BLOCK)
        in_j = j < width
        sa_kj = load_sums(sa, r * token_i + j * token_j, in_j, 0.0)
        sb_kj = load_sums(sb, r * token_i + j * token_j, in_j, 0.0)
        along_key_row = -tl.abs(sa_kl[:, None] - sa_kj[None, :])
        sum2 = tl.zeros((BLOCK, BLOCK), tl.float32)         # gradient of log L~, summed over query rows
        signed2 = tl.zeros((BLOCK, BLOCK), tl.float32)      # the same, times sign(r - row)
        signed1 = tl.zeros((BLOCK, BLOCK), tl.float32)      # gradient of log L, times that sign
        query_row, grad_row = q, grad
        for row in range(0, height):
            row_tokens = row * token_i + j * token_j
            query = load_tokens(query_row, j, q_j, width, DIM, BLOCK_D, UPCAST)
            gradient = load_tokens(grad_row, j, grad_j, width, DIM_V, BLOCK_V, UPCAST)
            mask2, mask1 = _log_masks(sa, sb, along_key_row, sb_kl, sb_kj, row * token_i + own * token_j, row_tokens,
                                      in_own, in_j, INF, 0.0)
            logits = dot(key, tl.trans(query), PRECISION) * LOG2E
            dweights = dot(value, tl.trans(gradient), PRECISION) * FACTOR
            weights, dlogits, grad1, grad2 = _tile_gradients(
                logits, dweights, mask1, mask2,
                tl.load(lse1 + row_tokens, mask=in_j, other=INF)[None, :],
                tl.load(lse2 + row_tokens, mask=in_j, other=INF)[None, :],
                tl.load(delta1 + row_tokens, mask=in_j, other=0.0)[None, :] * FACTOR,
                tl.load(delta2 + row_tokens, mask=in_j, other=0.0)[None, :] * FACTOR, in_own[:, None], MULTIPLICATIVE,
                PATHS)
            dv += dot(weights, gradient, PRECISION)
            dk += dot(dlogits, query, PRECISION)
            sign = tl.where(r > row, 1.0, 0.0) - tl.where(r < row, 1.0, 0.0)
            if PATHS != H2V:
                signed1 += sign * grad1
            if PATHS != V2H:
                sum2 += grad2
                signed2 += sign * grad2
            query_row += q_i
            grad_row += grad_i
        if PATHS != H2V:
            dsb += tl.sum(signed1, 1)
        if PATHS != V2H:
            sum2 *= index_sign(own[:, None], j[None, :])
            dsa += tl.sum(sum2, 1)
            tl.store(cross_a + j * token_j, -tl.sum(sum2, 0), mask=in_j)
            tl.store(cross_b + j * token_j, tl.sum(signed2, 0), mask=in_j)
    return dk, dv * FACTOR, dsa, dsb


@triton.jit
def _gradients_of_a_tile(
        q, k, v, sa, sb, grad, lse, delta, dq, dk, dv, sums, group, tile, groups, first_block, blocks,
        slices, heads, height, width, token_i, token_j, q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, PATHS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the gradients of one tile of one grid row r, first as queries (dq), then as keys (dk, dv).

    There are no atomics: `sums` holds partial sums as `triton_backward.py` describes them."""
    r = tile // blocks
    part = tile % blocks
    batch, head, tokens = group // heads, group % heads, height * width
    own = (first_block + part) * BLOCK + tl.arange(0, BLOCK)
    FACTOR: tl.constexpr = 0.5 if PATHS == BOTH and not MULTIPLICATIVE else 1.0
    SECOND: tl.constexpr = PATHS == BOTH and not MULTIPLICATIVE
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    sa += group * tokens
    sb += group * tokens
    grad += (batch * tokens * heads + head) * DIM_V
    lse += group * tokens
    delta += group * tokens
    second = groups * tokens if SECOND else 0
    slice_size = groups * tokens
    sums += group * tokens + r * token_i
    cross_a = sums + part * slice_size
    cross_b = cross_a + (2 * slices + 2) * slice_size
    line = (batch * tokens + r * token_i) * heads + head

    dq_tile, dsa, dsb = _as_queries(
        q, k, v, sa, sb, grad, lse, lse + second, delta, delta + second, cross_a, cross_b, r, own, height, width,
        token_i, token_j, q_i, q_j, k_i, k_j, v_i, v_j, token_i * heads * DIM_V, token_j * heads * DIM_V,
        DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK, MULTIPLICATIVE, PATHS, FACTOR, UPCAST, PRECISION)
    store_tokens(dq + line * DIM, own, token_j * heads * DIM, width, dq_tile, DIM, BLOCK_D)
    dk_tile, dv_tile, more_dsa, more_dsb = _as_keys(
        q, k, v, sa, sb, grad, lse, lse + second, delta, delta + second, cross_a + slices * slice_size,
        cross_b + slices * slice_size, r, own, height, width, token_i, token_j, q_i, q_j, k_i, k_j, v_i, v_j,
        token_i * heads * DIM_V, token_j * heads * DIM_V, DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK, MULTIPLICATIVE, PATHS,
        FACTOR, UPCAST, PRECISION)
    store_tokens(dk + line * DIM, own, token_j * heads * DIM, width, dk_tile, DIM, BLOCK_D)
    store_tokens(dv + line * DIM_V, own, token_j * heads * DIM_V, width, dv_tile, DIM_V, BLOCK_V)
    sums += 2 * slices * slice_size + own * token_j
    tl.store(sums, dsa + more_dsa, mask=own < width)
    tl.store(sums + (2 * slices + 2) * slice_size, dsb + more_dsb, mask=own < width)


@triton.jit(do_not_specialize=SIZES)
def _polyline_attention_running_bwd_kernel(
        q, k, v, sa, sb, grad, lse, delta, dq, dk, dv, sums, flags, flag_count, groups, parts, together, first_block,
        blocks, slices, heads, height, width, token_i, token_j,
        q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
        MULTIPLICATIVE: tl.constexpr, PATHS: tl.constexpr, FLAGGED: tl.constexpr, UPCAST: tl.constexpr,
        PRECISION: tl.constexpr):
    """Compute the gradients of every `parts`-th tile of every `together`-th group, as the forward kernel takes them.

    A launch takes `blocks` tiles of each row, from `first_block` on."""
    first_group = tl.program_id(0) // parts
    for step in range(0, groups - first_group, together):
        group = (first_group + step).to(tl.int64)
        taken = not FLAGGED
        if FLAGGED:
            taken = _is_flagged(flags + group * flag_count, flag_count)
        if taken:
            for tile in range(tl.program_id(0) % parts, height * blocks, parts):
                _gradients_of_a_tile(q, k, v, sa, sb, grad, lse, delta, dq, dk, dv, sums, group, tile,
                                     groups.to(tl.int64), first_block, blocks, slices, heads, height, width, token_i,
                                     token_j, q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
                                     DIM, DIM_V, BLOCK_D, BLOCK_V, BLOCK, MULTIPLICATIVE, PATHS, UPCAST, PRECISION)
