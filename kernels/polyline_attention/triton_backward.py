"""Triton kernels of the backward pass of polyline attention, for groups without a flag (see `triton.py`).

With the log-sum-exps lse1 and lse2 of the forward pass, a pair takes one exponential p = exp(q k' - lse1) for the
normalized weights under both masks, x1 = p L and x2 = p L~ exp(lse1 - lse2). With dw the products of gradients and
values, the gradients of the two log masks are

    g1 = x1 (dw - delta1)    g2 = x2 (dw - delta2)    delta: sum over keys of x dw, which is gradient times output

and their sum is that of the logits. One kernel takes tiles of queries (dq), the other tiles of keys (dk, dv). Both also
sum g1 and g2 to gradients of Sa and Sb. With d = sign(l - j) and e = sign(k - i),

    dSa[i,l] += d g1    dSa[i,j] -= d g1    dSb[k,l] += e g1    dSb[i,l] -= e g1
    dSa[k,l] += d g2    dSa[k,j] -= d g2    dSb[k,j] += e g2    dSb[i,j] -= e g2

The kernel of queries has the sums at row i, that of keys those at row k. There are no atomics. `sums` holds partial
sums, shape (2, 2 slices + 2, groups, tokens): for Sa and Sb, a slice for each column of tiles in either role, which has
the gradients at all other columns of its rows, and one for each role, which has those at the tile's own tokens.
"""
import triton
import triton.language as tl

from ..common.tiles import INF, LOG2E, index_sign
from .triton_running import BOTH, H2V, V2H, decay, load_sums, load_vectors, rows_inside

SIZES = ('heads', 'height', 'width', 'token_i', 'token_j', 'first_tile', 'tiles', 'slices')


@triton.jit
def _second_decay(x, y, difference):
    """Return exp(-|x - y|) 2^difference: what the weights under L~ have in place of the normalization of those under L,
    which is in the exponential of both."""
    return tl.exp2(tl.abs(x - y) * -LOG2E + difference)


@triton.jit
def _direction(x, y):
    """Return sign(x - y) of indices in float32, in fewer instructions than comparisons take."""
    return tl.clamp(x.to(tl.float32) - y.to(tl.float32), -1.0, 1.0)


@triton.jit
def _sum_over_columns(x):
    """Begin a sum over the last index of a tile: add the values that one thread holds."""
    I: tl.constexpr = x.shape[0]
    J: tl.constexpr = x.shape[1]
    K: tl.constexpr = x.shape[2]
    L: tl.constexpr = x.shape[3]
    if L == 16:
        return tl.sum(tl.sum(tl.reshape(x, (I, J, K, 2, 4, 2)), 5), 3)
    else:
        return tl.sum(tl.reshape(x, (I, J, K, 4, 2)), 4)


@triton.jit
def _sum_over_rows(x):
    """Begin a sum over the second index of a tile, as `_sum_over_columns` does over the last."""
    I: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[2]
    L: tl.constexpr = x.shape[3]
    if x.shape[1] == 16:
        return tl.sum(tl.reshape(x, (I, 2, 8, K, L)), 1)
    else:
        return x


@triton.jit(do_not_specialize=SIZES)
def _polyline_attention_bwd_query_kernel(
        q, k, v, sa, sb, grad, lse, delta, flags, dq, sums, first_tile, tiles, slices, heads, height, width, token_i,
        token_j, q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
        COLS: tl.constexpr, KEY_ROWS: tl.constexpr, BY_ROWS: tl.constexpr, MULTIPLICATIVE: tl.constexpr,
        PATHS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute dq and the sums of one tile of queries (i, j) per program, over all keys (k, l).

    A launch takes `tiles` tiles of each row, from `first_tile` on. Groups with a flag are left to others."""
    M: tl.constexpr = ROWS * COLS
    N: tl.constexpr = KEY_ROWS * COLS
    TILE: tl.constexpr = (ROWS, COLS, KEY_ROWS, COLS)           # indices i, j, k, l
    SECOND: tl.constexpr = PATHS == BOTH and not MULTIPLICATIVE
    if BY_ROWS:
        token_j = 1
    in_group = tl.cdiv(height, ROWS) * tiles
    program, part = tl.program_id(0), tl.program_id(0) % tiles
    group = (program // in_group).to(tl.int64)
    groups = (tl.num_programs(0) // in_group).to(tl.int64)
    if tl.load(flags + group) == INF:
        return
    batch, head, tokens = group // heads, group % heads, height * width
    first_i = program % in_group // tiles * ROWS
    first_j = (first_tile + part) * COLS
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    sa += group * tokens
    sb += group * tokens
    lse += group * tokens
    delta += group * tokens
    second = groups * tokens if SECOND else groups * 0
    sums += group * tokens

    m_i = first_i + tl.arange(0, M) // COLS
    m_j = first_j + tl.arange(0, M) % COLS
    m_token = m_i * token_i + m_j * token_j
    in_m = (m_i < height) & (m_j < width)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_V)
    line = (batch * tokens + m_token) * heads + head
    query = load_vectors(q + (m_i.to(tl.int64) * q_i + m_j * q_j)[:, None] + d[None, :], in_m, d, DIM, UPCAST)
    gradient = load_vectors(grad + line[:, None] * DIM_V + d_v[None, :], in_m, d_v, DIM_V, UPCAST)
    # An infinite sum gives queries outside of the grid no weights.
    m_lse = tl.load(lse + m_token, mask=in_m, other=INF)
    i = first_i + tl.arange(0, ROWS)
    j = first_j + tl.arange(0, COLS)
    in_i = i < height
    in_j = j < width
    ij = i[:, None] * token_i + j[None, :] * token_j
    in_ij = in_i[:, None] & in_j[None, :]
    sa_ij = load_sums(sa, ij, in_ij, 0.0)[:, :, None, None]
    sb_ij = tl.load(sb + ij, mask=in_ij, other=0.0)[:, :, None, None]
    difference = tl.zeros((ROWS, COLS, 1, 1), tl.float32)
    if SECOND:
        difference = tl.load(lse + second + ij, mask=in_ij, other=0.0)[:, :, None, None]
    delta1 = tl.load(delta + ij, mask=in_ij, other=0.0)[:, :, None, None]
    delta2 = tl.load(delta + second + ij, mask=in_ij, other=0.0)[:, :, None, None]

    n = tl.arange(0, N)
    n_k = n // COLS
    k_offset = tl.arange(0, KEY_ROWS)
    step = tl.full((), KEY_ROWS, tl.int64)
    dq_tile = tl.zeros((M, BLOCK_D), tl.float32)
    dsa = tl.zeros((ROWS, COLS), tl.float32)
    signed2 = tl.zeros((ROWS, COLS, KEY_ROWS, 4), tl.float32)   # g2 times sign(k - i), summed over l
    for start in range(0, width, COLS):
        l = start + tl.arange(0, COLS)
        in_l = l < width
        n_l = start + n % COLS
        il = i[:, None] * token_i + l[None, :] * token_j
        in_il = in_i[:, None] & in_l[None, :]
        e1 = decay(sa_ij, tl.load(sa + il, mask=in_il, other=INF)[:, None, None, :])
        sb_il = load_sums(sb, il, in_il, 0.0)[:, None, None, :]
        sum1 = tl.zeros((ROWS, COLS, COLS), tl.float32)         # g1, summed over key rows
        signed1 = tl.zeros((ROWS, 8, KEY_ROWS, COLS), tl.float32)       # g1 times sign(k - i), summed over j
        kl = k_offset[:, None] * token_i + l[None, :] * token_j
        kj = k_offset[:, None] * token_i + j[None, :] * token_j
        keys = k + (n_k.to(tl.int64) * k_i + n_l * k_j)[:, None] + d[None, :]
        values = v + (n_k.to(tl.int64) * v_i + n_l * v_j)[:, None] + d_v[None, :]
        for row in range(0, height, KEY_ROWS):
            in_n, in_kl, in_kj = rows_inside(row, k_offset, n_k, n_l < width, in_l, in_j, height, KEY_ROWS)
            key = load_vectors(keys, in_n, d, DIM, UPCAST)
            value = load_vectors(values, in_n, d_v, DIM_V, UPCAST)
            logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            p = tl.reshape(tl.exp2(logits * LOG2E - m_lse[:, None]), TILE)
            dweights = tl.reshape(tl.dot(gradient, tl.trans(value), input_precision=PRECISION), TILE)
            sign = _direction(row + k_offset[None, :], i[:, None])[:, None, :, None]
            dlogits = tl.zeros(TILE, tl.float32)
            if MULTIPLICATIVE:
                dlogits = -p * delta1
            if PATHS != H2V:
                c = decay(sb_il, tl.load(sb + kl, mask=in_kl, other=INF if KEY_ROWS > 1 else 0.0)[None, None, :, :])
                g1 = p * e1 * c * (dweights if MULTIPLICATIVE else dweights - delta1)
                dlogits += g1
                sum1 += tl.sum(g1, 2)
                signed1 += sign * _sum_over_rows(g1)
            if PATHS != V2H:
                sa_kl = tl.load(sa + kl, mask=in_kl, other=INF)[None, None, :, :]
                e2 = decay(tl.trans(load_sums(sa, kj, in_kj, 0.0))[None, :, :, None], sa_kl)
                sb_kj = tl.trans(tl.load(sb + kj, mask=in_kj, other=0.0))[None, :, :, None]
                w = _second_decay(sb_ij, sb_kj, difference)
                g2 = p * e2 * w * (dweights if MULTIPLICATIVE else dweights - delta2)
                dlogits += g2
                signed2 += sign * _sum_over_columns(g2)
            dq_tile = tl.dot(tl.reshape(dlogits, (M, N)).to(key.dtype), key, dq_tile, input_precision=PRECISION)
            kl += KEY_ROWS * token_i
            kj += KEY_ROWS * token_i
            keys += step * k_i
            values += step * v_i
        if PATHS != H2V:
            sum1 *= index_sign((l * token_j)[None, :], (j * token_j)[:, None])[None, :, :]
            dsa -= tl.sum(sum1, 2)
            tl.store(sums + part * groups * tokens + il, tl.sum(sum1, 1), mask=in_il)
            tl.store(sums + (2 * slices + 2 + part) * groups * tokens + il, -tl.sum(tl.sum(signed1, 2), 1), mask=in_il)
    tl.store(dq + line[:, None] * DIM + d[None, :], dq_tile.to(dq.dtype.element_ty),
             mask=in_m[:, None] & (d < DIM)[None, :])
    tl.store(sums + 2 * slices * groups * tokens + ij, dsa, mask=in_ij)
    tl.store(sums + (4 * slices + 2) * groups * tokens + ij, -tl.sum(tl.sum(signed2, 3), 2), mask=in_ij)


@triton.jit(do_not_specialize=SIZES)
def _polyline_attention_bwd_key_kernel(
        q, k, v, sa, sb, grad, lse, delta, flags, dk, dv, sums, first_tile, tiles, slices, heads, height, width,
        token_i, token_j, q_b, q_h, q_i, q_j, k_b, k_h, k_i, k_j, v_b, v_h, v_i, v_j,
        DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
        COLS: tl.constexpr, KEY_ROWS: tl.constexpr, BY_ROWS: tl.constexpr, MULTIPLICATIVE: tl.constexpr,
        PATHS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Compute dk, dv and the sums of one tile of keys (k, l) per program, over all queries (i, j), in tiles of KEY_ROWS
    rows. A launch takes tiles as that of `_polyline_attention_bwd_query_kernel` does."""
    M: tl.constexpr = ROWS * COLS
    N: tl.constexpr = KEY_ROWS * COLS
    TILE: tl.constexpr = (ROWS, COLS, KEY_ROWS, COLS)           # indices k, l, i, j
    SECOND: tl.constexpr = PATHS == BOTH and not MULTIPLICATIVE
    if BY_ROWS:
        token_j = 1
    in_group = tl.cdiv(height, ROWS) * tiles
    program, part = tl.program_id(0), tl.program_id(0) % tiles
    group = (program // in_group).to(tl.int64)
    groups = (tl.num_programs(0) // in_group).to(tl.int64)
    if tl.load(flags + group) == INF:
        return
    batch, head, tokens = group // heads, group % heads, height * width
    first_k = program % in_group // tiles * ROWS
    first_l = (first_tile + part) * COLS
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    sa += group * tokens
    sb += group * tokens
    lse += group * tokens
    delta += group * tokens
    second = groups * tokens if SECOND else groups * 0
    sums += group * tokens

    m_k = first_k + tl.arange(0, M) // COLS
    m_l = first_l + tl.arange(0, M) % COLS
    in_m = (m_k < height) & (m_l < width)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_V)
    key = load_vectors(k + (m_k.to(tl.int64) * k_i + m_l * k_j)[:, None] + d[None, :], in_m, d, DIM, UPCAST)
    value = load_vectors(v + (m_k.to(tl.int64) * v_i + m_l * v_j)[:, None] + d_v[None, :], in_m, d_v, DIM_V, UPCAST)
    rows = first_k + tl.arange(0, ROWS)
    l = first_l + tl.arange(0, COLS)
    in_rows = rows < height
    in_l = l < width
    kl = rows[:, None] * token_i + l[None, :] * token_j
    in_kl = in_rows[:, None] & in_l[None, :]
    sa_kl = load_sums(sa, kl, in_kl, INF)[:, :, None, None]
    sb_kl = load_sums(sb, kl, in_kl, 0.0)[:, :, None, None]

    n = tl.arange(0, N)
    n_i = n // COLS
    i_offset = tl.arange(0, KEY_ROWS)
    step = tl.full((), KEY_ROWS, tl.int64)
    dk_tile = tl.zeros((M, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((M, BLOCK_V), tl.float32)
    dsa = tl.zeros((ROWS, COLS), tl.float32)
    signed1 = tl.zeros((ROWS, COLS, KEY_ROWS, 4), tl.float32)   # g1 times sign(k - i), summed over j
    for start in range(0, width, COLS):
        j = start + tl.arange(0, COLS)
        in_j = j < width
        n_j = start + n % COLS
        kj = rows[:, None] * token_i + j[None, :] * token_j
        in_kj = in_rows[:, None] & in_j[None, :]
        e2 = decay(sa_kl, tl.load(sa + kj, mask=in_kj, other=0.0)[:, None, None, :])
        sb_kj = tl.load(sb + kj, mask=in_kj, other=0.0)[:, None, None, :]
        sum2 = tl.zeros((ROWS, COLS, COLS), tl.float32)         # g2, summed over query rows
        signed2 = tl.zeros((ROWS, 8, KEY_ROWS, COLS), tl.float32)       # g2 times sign(k - i), summed over l
        queries = q + (n_i.to(tl.int64) * q_i + n_j * q_j)[:, None] + d[None, :]
        ij = i_offset[:, None] * token_i + j[None, :] * token_j
        il = i_offset[:, None] * token_i + l[None, :] * token_j
        n_line = (batch * tokens + n_i * token_i + n_j * token_j) * heads + head
        gradients = grad + n_line[:, None] * DIM_V + d_v[None, :]
        for row in range(0, height, KEY_ROWS):
            in_n, in_ij, in_il = rows_inside(row, i_offset, n_i, n_j < width, in_j, in_l, height, KEY_ROWS)
            query = load_vectors(queries, in_n, d, DIM, UPCAST)
            gradient = load_vectors(gradients, in_n, d_v, DIM_V, UPCAST)
            # Queries outside of the grid need no care: their products with values and their deltas are 0.
            n_lse = tl.load(lse + ij, mask=in_ij, other=0.0)[None, None, :, :]
            logits = tl.reshape(tl.dot(key, tl.trans(query), input_precision=PRECISION), TILE)
            p = tl.exp2(logits * LOG2E - n_lse)
            dweights = tl.reshape(tl.dot(value, tl.trans(gradient), input_precision=PRECISION), TILE)
            sign = _direction(rows[:, None], row + i_offset[None, :])[:, None, :, None]
            weights = tl.zeros(TILE, tl.float32)
            dlogits = tl.zeros(TILE, tl.float32)
            delta1 = tl.load(delta + ij, mask=in_ij, other=0.0)[None, None, :, :]
            if MULTIPLICATIVE:
                dlogits = -p * delta1
            if PATHS != H2V:
                sa_ij = tl.load(sa + ij, mask=in_ij, other=0.0)[None, None, :, :]
                e1 = decay(tl.trans(load_sums(sa, il, in_il, 0.0))[None, :, :, None], sa_ij)
                c = decay(sb_kl, tl.trans(tl.load(sb + il, mask=in_il, other=0.0))[None, :, :, None])
                x1 = p * e1 * c
                g1 = x1 * (dweights if MULTIPLICATIVE else dweights - delta1)
                weights += x1
                dlogits += g1
                signed1 += sign * _sum_over_columns(g1)
            if PATHS != V2H:
                delta2 = tl.load(delta + second + ij, mask=in_ij, other=0.0)[None, None, :, :]
                difference = tl.zeros((1, 1, KEY_ROWS, COLS), tl.float32)
                if SECOND:
                    difference = tl.load(lse + second + ij, mask=in_ij, other=0.0)[None, None, :, :]
                w = _second_decay(tl.load(sb + ij, mask=in_ij, other=0.0)[None, None, :, :], sb_kj, difference)
                x2 = p * e2 * w
                g2 = x2 * (dweights if MULTIPLICATIVE else dweights - delta2)
                weights += x2
                dlogits += g2
                sum2 += tl.sum(g2, 2)
                signed2 += sign * _sum_over_rows(g2)
            dv_tile = tl.dot(tl.reshape(weights, (M, N)).to(gradient.dtype), gradient, dv_tile,
                             input_precision=PRECISION)
            dk_tile = tl.dot(tl.reshape(dlogits, (M, N)).to(query.dtype), query, dk_tile, input_precision=PRECISION)
            ij += KEY_ROWS * token_i
            il += KEY_ROWS * token_i
            queries += step * q_i
            gradients += step * token_i * heads * DIM_V
        if PATHS != V2H:
            sum2 *= index_sign((l * token_j)[:, None], (j * token_j)[None, :])[None, :, :]
            dsa += tl.sum(sum2, 2)
            tl.store(sums + (slices + part) * groups * tokens + kj, -tl.sum(sum2, 1), mask=in_kj)
            tl.store(sums + (3 * slices + 2 + part) * groups * tokens + kj, tl.sum(tl.sum(signed2, 2), 1), mask=in_kj)
    line = (batch * tokens + m_k * token_i + m_l * token_j) * heads + head
    tl.store(dk + line[:, None] * DIM + d[None, :], dk_tile.to(dk.dtype.element_ty),
             mask=in_m[:, None] & (d < DIM)[None, :])
    tl.store(dv + line[:, None] * DIM_V + d_v[None, :], dv_tile.to(dv.dtype.element_ty),
             mask=in_m[:, None] & (d_v < DIM_V)[None, :])
    tl.store(sums + (2 * slices + 1) * groups * tokens + kl, dsa, mask=in_kl)
    tl.store(sums + (4 * slices + 3) * groups * tokens + kl, tl.sum(tl.sum(signed1, 3), 2), mask=in_kl)
