"""Triton kernels of quad-tree attention without gradients: the means of all levels, and the edges of all levels.

With sums over the leaves below a node, its parent p, and the place i, j of a node among its siblings,

    v, q, k of a node = sum / number of leaves,
    z = q . k_p / sqrt(E) + bias[level, i, j],    edge = 4^level softplus(z) (laplacian) or z (symmetric, skew).

The numbers of the inner levels lie one behind the other in one tensor, and so do the edges: a level of (B, H, W, heads,
channels) after another. A program of the means kernel sums over a tile of the tree, as `quadtree_solve` does, for some
channels of all heads together. If one tile does not hold the tree, it also stores the sums at the roots of tiles in
float32, over which the next launch sums. A program of the edges kernel takes nodes of one level of one image.
"""
from itertools import accumulate
from typing import Iterator, List, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.tiles import softplus
from ..quadtree_solve import triton as quadtree_solve
from ..quadtree_solve.portable import raise_for_singular_quadtree
from ..quadtree_solve.triton_tiles import (
    load_places,
    places_if,
    store_places,
    sum_children,
    this_program,
    tile_nodes,
    vector_places,
)
from ..trees import Level, quadtree_levels, sibling_normalized
from ..trees.diagnose import has_nonfinite

# Sides of tiles, channels of a tile, and warps by the side: a thread holds 32 numbers.
SIDES, BLOCK_C, WARPS = (8, 16), 32, {8: 2, 16: 8}
# Numbers of queries that a program of the edges kernel loads, and its warps.
QUERIES, EDGE_WARPS = 2048, 4
TOKEN_MAJOR = tl.constexpr((0, 2, 3, 1, 4))
# Numbers of which the compiled form of a kernel is independent.
SIZES = ('batch', 'heads', 'height', 'width', 'top', 'left', 'all_height', 'all_width', 'all_top', 'all_left', 'first',
         'levels', 'has_above', 'start', 'blocks', 'biases')


@triton.jit
def _leaves_along(cell, level, length, origin):
    """Return how many of `length` leaves along an axis cells of a level cover, at least 1."""
    return tl.maximum(tl.minimum((cell + 1) << level, origin + length) - tl.maximum(cell << level, origin), 1)


@triton.jit(do_not_specialize=SIZES)
def _quadtree_means_fwd_kernel(
        xs, strides, means, sums_above, channels, start, first, batch, height, width, top, left, all_height, all_width,
        all_top, all_left, levels, has_above, blocks, LEVELS: tl.constexpr, SIDE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Compute the means at the levels of one tile but its first, and with `has_above` the sums at its last level.

    xs: tensors (B, H, W, channels) of the tile's first level, which is level `first` of the tree: leaves, or float32
    sums over leaves. means: all inner levels; the first one that is written starts after `start` nodes. The tile has
    the first `levels` of its LEVELS levels. A program takes block `program[4]` of the blocks of all tensors."""
    grid = (height, width, top, left)
    program = this_program(batch, 1, grid, blocks * BLOCK_C, SIDE, BLOCK_C)
    block = program[4]
    for n in tl.static_range(len(xs)):
        if (block >= 0) & (block * BLOCK_C < channels[n]):
            own = (program[0], program[1], program[2], program[3], block, batch, 1)
            nodes = tile_nodes(own, grid, levels, LEVELS, SIDE)
            c = block * BLOCK_C + tl.arange(0, BLOCK_C)
            at = nodes[0][0] * strides[n][1] + nodes[0][1] * strides[n][2]
            places = xs[n] + program[0] * strides[n][0] + at[:, None] + c[None, :]
            total = load_places((places, nodes[0][2][:, None] & (c < channels[n])[None, :]), 0.0)
            before = tl.cast(start, tl.int64)
            for level in tl.static_range(1, LEVELS):
                total = sum_children(total)
                rows = _leaves_along(nodes[level][0] + (top >> level), first + level, all_height, all_top)
                columns = _leaves_along(nodes[level][1] + (left >> level), first + level, all_width, all_left)
                places = vector_places(means[n] + before * channels[n], own, nodes[level], channels[n], TOKEN_MAJOR,
                                       BLOCK_C)
                store_places(places, total * tl.div_rn(1.0, (rows * columns).to(tl.float32))[:, None])
                before += tl.cast(batch, tl.int64) * nodes[level][3] * nodes[level][4]
            places = vector_places(sums_above[n], own, nodes[LEVELS - 1], channels[n], TOKEN_MAJOR, BLOCK_C)
            store_places(places_if(has_above > 0, places), total)
        block -= (channels[n] + BLOCK_C - 1) // BLOCK_C


@triton.jit(do_not_specialize=SIZES)
def _quadtree_edges_fwd_kernel(
        q, q_strides, q_means, k_means, bias, edges, batch, heads, height, width, top, left, biases, scale,
        LAPLACIAN: tl.constexpr, DIM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK edges of one image, whose heads vary fastest, at one level.

    q: (B, H, W, heads, DIM) of the leaves. q_means, k_means: of all inner levels. bias: (biases, 2, 2, heads).
    edges: of all levels but the last. DIM is 0 for edges from biases only."""
    leaves = tl.cast(batch, tl.int64) * height * width
    start, level, factor = tl.cast(0, tl.int64), 0, 1.0                # `start` counts the nodes of finer levels
    program, blocks = tl.program_id(0), (height * width * heads + BLOCK - 1) // BLOCK
    while program >= batch * blocks:
        program -= batch * blocks
        start += tl.cast(batch, tl.int64) * height * width
        height, top = ((top + height - 1) >> 1) - (top >> 1) + 1, top >> 1
        width, left = ((left + width - 1) >> 1) - (left >> 1) + 1, left >> 1
        level, factor = level + 1, factor * 4
        blocks = (height * width * heads + BLOCK - 1) // BLOCK
    image = tl.cast(program // blocks, tl.int64)
    n = program % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = n < height * width * heads
    head, row, column = n % heads, n // heads // width, n // heads % width
    sibling = (row + top) % 2 * 2 + (column + left) % 2
    z = tl.load(bias + (tl.minimum(level, biases - 1) * 4 + sibling) * heads + head, mask=inside, other=0.0)
    z = z.to(tl.float32)
    if DIM > 0:
        e = tl.arange(0, BLOCK_E)
        mask = inside[:, None] & (e < DIM)[None, :]
        if level == 0:
            at = row * q_strides[1] + column * q_strides[2] + head * DIM
            query = tl.load(q + image * q_strides[0] + at[:, None] + e[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            q_means += (start - leaves + image * height * width) * heads * DIM
            query = tl.load(q_means + n[:, None] * DIM + e[None, :], mask=mask, other=0.0)
        rows = ((top + height - 1) >> 1) - (top >> 1) + 1              # the parents' grid
        columns = ((left + width - 1) >> 1) - (left >> 1) + 1
        parent = (((row + top) >> 1) - (top >> 1)) * columns + ((column + left) >> 1) - (left >> 1)
        k_means += (start - leaves + tl.cast(batch, tl.int64) * height * width + image * rows * columns) * heads * DIM
        key = tl.load(k_means + (parent * heads + head)[:, None] * DIM + e[None, :], mask=mask, other=0.0)
        z += tl.sum(query * key, 1) * scale
    edge = softplus(z) * factor if LAPLACIAN else z
    tl.store(edges + (start + image * height * width) * heads + n, edge, mask=inside)


def _merged(x: Tensor) -> Tensor:
    """Return x (B, heads, H, W, D), copied unless the channels of all heads of a token are dense."""
    heads, dim = x.shape[1], x.shape[4]
    dense = (dim == 1 or x.stride(4) == 1) and (heads == 1 or x.stride(1) == dim)
    return x if dense else launch.as_token_major(x)


def _token_strides(x: Tensor) -> Tuple[int, int, int]:
    """Return the strides of image, row and column of (B, heads, H, W, D)."""
    image, _, row, column, _ = x.stride()
    return image, row, column


def _views(x: Tensor, levels: Sequence[Level], starts: Sequence[int], batch: int, heads: int, *dim: int
           ) -> Iterator[Tensor]:
    """Yield each level of x, (B, heads, H, W, *dim); levels start after numbers of nodes in `starts`."""
    inner = (*dim, 1)[0]
    for level, start in zip(levels, starts):
        height, width, channels = level.height, level.width, heads * inner
        yield x.as_strided((batch, heads, height, width, *dim),
                           (height * width * channels, inner, width * channels, channels, *[1] * len(dim)),
                           start * channels)


def _write_means(xs: Sequence[Tensor], means: Sequence[Tensor], levels: Sequence[Level], starts: Sequence[int]) -> None:
    """Write the means of tensors (B, heads, H, W, D) at the inner levels, which start after `starts` nodes."""
    batch, leaves, first = xs[0].shape[0], levels[0], 0
    channels = tuple(x.shape[1] * x.shape[4] for x in xs)
    blocks = sum(launch.cdiv(n, BLOCK_C) for n in channels)
    strides = tuple(_token_strides(x) for x in xs)
    sums = means[-1:] * len(xs)                        # float32 with queries, but not accessed
    while first < len(levels) - 1:
        above = len(levels) - 1 - first
        side = SIDES[above >= SIDES[1].bit_length() - 1]               # the larger side only for its additional level
        count = min(above + 1, side.bit_length())
        grid, roots = levels[first], levels[first + count - 1]
        has_above = first + count < len(levels)
        if has_above:
            sums = [x.new_empty(batch * roots.height * roots.width * n, dtype=torch.float32)
                    for x, n in zip(xs, channels)]
        tiles = (((grid.top + grid.height - 1) // side - grid.top // side + 1)
                 * ((grid.left + grid.width - 1) // side - grid.left // side + 1))
        _quadtree_means_fwd_kernel[launch.programs(batch * tiles * blocks)](
            tuple(xs), strides, tuple(means), tuple(sums), channels, starts[first], first, batch, *grid, *leaves, count,
            int(has_above), blocks, LEVELS=side.bit_length(), SIDE=side, BLOCK_C=BLOCK_C, num_warps=WARPS[side])
        xs, first = sums, first + count - 1
        strides = tuple((roots.height * roots.width * n, roots.width * n, n) for n in channels)


def forward(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, parametrization: str, rho: float,
            shift: Sequence[int], max_levels: Optional[int]) -> Tensor:
    """Return the operator's result, (B, heads, H, W, D), in the memory order of `launch.token_major`."""
    levels = quadtree_levels(*v.shape[2:4], max_levels, shift)
    v = launch.as_token_major(v)
    if len(levels) == 1:
        return v.clone()
    batch, heads, *_, dim = v.shape
    products = () if q is None else (_merged(q), _merged(k))
    launch.check_grid(v, *products)
    nodes = [batch * level.height * level.width for level in levels]
    starts = [*accumulate(nodes[1:], initial=0)]                       # of the inner levels, then their number of nodes
    means = [x.new_empty(starts[-1] * heads * x.shape[4], dtype=dtype)
             for x, dtype in zip((v, *products), (v.dtype, torch.float32, torch.float32))]
    edges = v.new_empty((starts[-1] + nodes[0] - nodes[-1]) * heads, dtype=torch.float32)
    _write_means((v, *products), means, levels, starts)
    edge_dim = products[0].shape[4] if products else 0
    block_e = launch.next_power_of_2(max(edge_dim, 1))
    block = max(QUERIES // block_e, 16)
    programs = batch * sum(launch.cdiv(level.height * level.width * heads, block) for level in levels[:-1])
    query, query_means, key_means = (products[0], *means[1:]) if products else (v, edges, edges)
    _quadtree_edges_fwd_kernel[launch.programs(programs)](
        query, _token_strides(query), query_means, key_means, bias.contiguous(), edges, batch, heads, *levels[0],
        len(bias), max(edge_dim, 1) ** -0.5, LAPLACIAN=parametrization == 'laplacian', DIM=edge_dim, BLOCK_E=block_e,
        BLOCK=block, num_warps=EDGE_WARPS)
    values = [v, *_views(means[0], levels[1:], starts, batch, heads, dim)]
    weights: List[Tensor] = [*_views(edges, levels[:-1], [0, *(nodes[0] + n for n in starts)], batch, heads)]
    if parametrization == 'symmetric':
        weights = [sibling_normalized(edge, level, rho) for edge, level in zip(weights, levels)]
    x = quadtree_solve.forward(values, weights, parametrization, shift)
    if has_nonfinite(x[-1]):
        raise_for_singular_quadtree('quadtree_solve', weights, levels, parametrization)
    return x[0]
