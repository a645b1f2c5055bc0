"""Triton kernels of the quad-tree solve (Myosotis, section 3): a program sweeps its part of the tree in registers.

With u the values, w or b a node's edge to its parent p, sums over children c, and e = S - w for the Laplacian,

    laplacian:        e = 1 + sum w_c e_c / S_c,   up = down = w / S
    symmetric, skew:  S = 1 + sum up_c b_c,        down = -b / S,   up = down (symmetric) or b / S (skew)

    r = u + sum up_c r_c,    x = r / S + down x_p

These are the sweeps of `trees/sweeps.py` for blocks of size 1. The gradient's solve exchanges up and down; from its
solution l and from x follow

    laplacian: dw = sum_d (l_p - l) (x - x_p),    symmetric: db = -sum_d (l x_p + l_p x),    skew: + l_p x.

A tile is a square of cells of the tree with all nodes above them up to the tile's last level, for one head and at most
BLOCK_D channels. Odd sizes and shifts become masks. Within a tile, the nodes of a level are numbered along a Morton
curve: the children of node n are 4 n to 4 n + 3, so sums over children are sums over a dimension. If one tile does not
hold the tree, up kernels store r and e (or S) at the roots of tiles, which pose the same problem on a coarser grid.
Down kernels read their tiles again when x at the roots is known. All arithmetic is float32.
"""
from typing import List, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..trees.grid import Level, quadtree_levels

# Sides of tiles. The smaller one is used if the larger one would not save a launch.
SIDES = (8, 16)
# Channels of a tile, forward and backward. Wider heads take several blocks. The gradient of an edge is a sum over
# channels, so blocks store partial sums, which further launches add.
LARGEST_BLOCK = (32, 64)
# Numbers at a tile's first level, all channels together. With more, registers spill.
MAX_TILE_ELEMENTS = 8192


@triton.jit
def _every_other_bit(n):
    return (n & 1) | ((n >> 1) & 2) | ((n >> 2) & 4) | ((n >> 3) & 8)


@triton.jit
def _program(grid, heads, SIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return batch, head, row and column of the tile (counted from the tree's origin), and block of channels.

    Heads vary fastest, because those of one image share cache lines of channels-last tensors."""
    height, width, top, left = grid
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    rows = (top + height - 1) // SIDE - top // SIDE + 1
    columns = (left + width - 1) // SIDE - left // SIDE + 1
    line = tl.program_id(0) // blocks
    tile = line // heads
    row = tile // columns
    return ((row // rows).to(tl.int64), (line % heads).to(tl.int64), top // SIDE + row % rows,
            left // SIDE + tile % columns, tl.program_id(0) % blocks)


@triton.jit
def _level_nodes(program, grid, LEVEL: tl.constexpr, SIDE: tl.constexpr):
    """Return row and column, on the level's grid, of a tile's (SIDE / 2^LEVEL)^2 nodes at LEVEL, and which exist."""
    side: tl.constexpr = SIDE >> LEVEL
    height, width, top, left = grid
    n = tl.arange(0, side * side)
    row = program[2] * side + _every_other_bit(n >> 1) - (top >> LEVEL)
    column = program[3] * side + _every_other_bit(n) - (left >> LEVEL)
    last_row = ((top + height - 1) >> LEVEL) - (top >> LEVEL)
    last_column = ((left + width - 1) >> LEVEL) - (left >> LEVEL)
    return row, column, (row >= 0) & (row <= last_row) & (column >= 0) & (column <= last_column)


@triton.jit
def _tile_nodes(program, grid, LEVELS: tl.constexpr, SIDE: tl.constexpr):
    nodes = ()
    for level in tl.static_range(LEVELS):
        nodes += (_level_nodes(program, grid, level, SIDE),)
    return nodes


@triton.jit
def _number_places(pointer, strides, program, nodes):
    """Return pointers into (B, heads, H, W) to a level's nodes, and which nodes exist: (nodes,) each."""
    row, column, there = nodes
    first = pointer + (program[0] * strides[0] + program[1] * strides[1])
    return first + (row * strides[2] + column * strides[3]), there


@triton.jit
def _vector_places(pointer, strides, program, nodes, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers into (B, heads, H, W, DIM) to a program's channels of a level's nodes, and which exist:
    (nodes, BLOCK_D) each."""
    places, there = _number_places(pointer, strides, program, nodes)
    d = program[4] * BLOCK_D + tl.arange(0, BLOCK_D)
    return places[:, None] + (d * strides[4])[None, :], there[:, None] & (d < DIM)[None, :]


@triton.jit
def _load(places, other):
    """Load in float32, and `other` for nodes that do not exist."""
    return tl.load(places[0], mask=places[1], other=other).to(tl.float32)


@triton.jit
def _store(places, x):
    tl.store(places[0], x.to(places[0].dtype.element_ty), mask=places[1])


@triton.jit
def _sum_children(x):
    """Sum over the children of each node: (4 n,) -> (n,) or (4 n, BLOCK_D) -> (n, BLOCK_D)."""
    if len(x.shape) == 1:
        return tl.sum(tl.reshape(x, (x.shape[0] // 4, 4)), 1)
    else:
        return tl.sum(tl.reshape(x, (x.shape[0] // 4, 4, x.shape[1])), 1)


@triton.jit
def _repeat_to_children(x):
    """Repeat each node's numbers for its children: (n, BLOCK_D) -> (4 n, BLOCK_D)."""
    nodes: tl.constexpr = x.shape[0]
    channels: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (nodes, 4, channels)), (4 * nodes, channels))


@triton.jit
def _coefficients(carried, edge, KIND: tl.constexpr):
    """Return 1 / S, up and down of each node, and its summand of the parent's e (or S without Laplacian).

    Divisions are exact: rows of the Laplacian's inverse sum to 1 if e / S + w / S does."""
    if KIND == 'laplacian':
        scale = tl.div_rn(1.0, carried + edge)
        up = edge * scale
        return scale, up, up, up * carried
    else:
        scale = tl.div_rn(1.0, carried)
        down = -edge * scale
        if KIND == 'skew':
            return scale, -down, down, -down * edge
        else:
            return scale, down, down, down * edge


@triton.jit
def _load_tile(values, edges, carried, v_strides, e_strides, c_strides, program, nodes, LEVELS: tl.constexpr,
               DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load u of all levels of a tile, the edges of all but its last (0 for nodes that do not exist), and the number
    carried up to its first level (1 at leaves). All loads start before any value is needed."""
    u, edge = (), ()
    for level in tl.static_range(LEVELS):
        u += (_load(_vector_places(values[level], v_strides[level], program, nodes[level], DIM, BLOCK_D), 0.0),)
        if level + 1 < LEVELS:
            edge += (_load(_number_places(edges[level], e_strides[level], program, nodes[level]), 0.0),)
    if carried is None:
        start = tl.full(nodes[0][0].shape, 1.0, tl.float32)
    else:
        start = _load(_number_places(carried, c_strides, program, nodes[0]), 1.0)
    return u, edge, start


@triton.jit
def _eliminate(u, edge, carried, KIND: tl.constexpr, TRANSPOSED: tl.constexpr, LEVELS: tl.constexpr):
    """Sweep up. Return r, 1 / S and down of all levels of a tile but the last, and the last's r and carried number."""
    rights, scales, downs = (), (), ()
    r = u[0]
    for level in tl.static_range(LEVELS - 1):
        scale, up, down, added = _coefficients(carried, edge[level], KIND)
        if TRANSPOSED:
            up, down = down, up
        rights, scales, downs = rights + (r,), scales + (scale,), downs + (down,)
        r = u[level + 1] + _sum_children(up[:, None] * r)
        carried = 1 + _sum_children(added)
    return rights, scales, downs, r, carried


@triton.jit
def _edge_gradient(l, x, l_parent, x_parent, KIND: tl.constexpr):
    """Sum the gradient of each edge over a program's channels: (nodes,)."""
    if KIND == 'laplacian':
        return tl.sum((l_parent - l) * (x - x_parent), 1)
    elif KIND == 'skew':
        return tl.sum(l_parent * x - l * x_parent, 1)
    else:
        return -tl.sum(l * x_parent + l_parent * x, 1)


@triton.jit
def _quadtree_solve_up_kernel(
        values, edges, carried, right_out, carried_out, v_strides, e_strides, c_strides, r_strides, o_strides, grid,
        heads, KIND: tl.constexpr, TRANSPOSED: tl.constexpr, LEVELS: tl.constexpr, SIDE: tl.constexpr,
        DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute r and the carried number at the last level of one tile per program, in float32.

    values, edges, strides: of the tile's levels."""
    program = _program(grid, heads, SIDE, DIM, BLOCK_D)
    nodes = _tile_nodes(program, grid, LEVELS, SIDE)
    u, edge, start = _load_tile(values, edges, carried, v_strides, e_strides, c_strides, program, nodes, LEVELS, DIM,
                                BLOCK_D)
    _, _, _, r, pivot = _eliminate(u, edge, start, KIND, TRANSPOSED, LEVELS)
    _store(_vector_places(right_out, r_strides, program, nodes[LEVELS - 1], DIM, BLOCK_D), r)
    _store(_number_places(carried_out, o_strides, program, nodes[LEVELS - 1]), pivot)


@triton.jit
def _quadtree_solve_down_kernel(
        values, edges, carried, above, solution, out, edge_grads, v_strides, e_strides, c_strides, a_strides, s_strides,
        o_strides, g_strides, grid, heads, KIND: tl.constexpr, BACKWARD: tl.constexpr, LEVELS: tl.constexpr,
        SIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute x at all levels of one tile per program. above: x at its last level in float32, or None for a whole tree.

    BACKWARD: values are gradients of the solution, x is the adjoint, and edge_grads are the gradients of edges, of
    shape (blocks of channels, B, heads, H, W) for each level but the last."""
    last: tl.constexpr = LEVELS - 1
    program = _program(grid, heads, SIDE, DIM, BLOCK_D)
    nodes = _tile_nodes(program, grid, LEVELS, SIDE)
    u, edge, start = _load_tile(values, edges, carried, v_strides, e_strides, c_strides, program, nodes, LEVELS, DIM,
                                BLOCK_D)
    rights, scales, downs, r, pivot = _eliminate(u, edge, start, KIND, BACKWARD, LEVELS)
    if above is None:
        x = r * tl.div_rn(1.0, pivot)[:, None]
    else:
        x = _load(_vector_places(above, a_strides, program, nodes[last], DIM, BLOCK_D), 0.0)
    _store(_vector_places(out[last], o_strides[last], program, nodes[last], DIM, BLOCK_D), x)
    if BACKWARD:
        solved = _load(_vector_places(solution[last], s_strides[last], program, nodes[last], DIM, BLOCK_D), 0.0)
    for level in tl.static_range(LEVELS - 2, -1, -1):
        parent = _repeat_to_children(x)
        x = rights[level] * scales[level][:, None] + downs[level][:, None] * parent
        _store(_vector_places(out[level], o_strides[level], program, nodes[level], DIM, BLOCK_D), x)
        if BACKWARD:
            solved_parent = _repeat_to_children(solved)
            solved = _load(_vector_places(solution[level], s_strides[level], program, nodes[level], DIM, BLOCK_D), 0.0)
            part = edge_grads[level] + program[4].to(tl.int64) * g_strides[level][0]
            _store(_number_places(part, g_strides[level][1:], program, nodes[level]),
                   _edge_gradient(x, solved, parent, solved_parent, KIND))


def _tile(levels: int, block: int) -> Tuple[int, int]:
    """Return the side of the first tiles for a tree of so many levels, and the levels of a tile of `block` channels."""
    heights = {side: side.bit_length() - 1 for side in SIDES if side ** 2 * block <= MAX_TILE_ELEMENTS}
    most = max(heights.values())
    side = next(side for side, height in heights.items()
                if triton.cdiv(levels - 1 - height, most) < triton.cdiv(levels - 1, most))
    return side, min(levels, heights[side] + 1)


def _tiles(level: Level, side: int) -> int:
    rows, columns = ((origin + size - 1) // side - origin // side + 1
                     for size, origin in ((level.height, level.top), (level.width, level.left)))
    return rows * columns


def _strides(x):
    """Return the strides of a tensor, of each of several, or None for None."""
    return x if x is None else x.stride() if isinstance(x, Tensor) else tuple(y.stride() for y in x)


def _solve(levels: Sequence[Level], values: Sequence[Tensor], edges: Sequence[Tensor], carried: Optional[Tensor],
           out: Sequence[Tensor], solution: Sequence[Tensor], edge_grads: Sequence[Tensor], kind: str, block: int
           ) -> None:
    """Write x of every level to `out`; with a solution, as BACKWARD. carried: the number at the first level."""
    batch, heads, _, _, dim = values[0].shape
    side, count = _tile(len(levels), block)
    programs = launch.programs(batch * heads * _tiles(levels[0], side) * triton.cdiv(dim, block))
    options = {'KIND': kind, 'LEVELS': count, 'SIDE': side, 'DIM': dim, 'BLOCK_D': block,
               **launch.options('quadtree_solve', values[0].dtype, side * side * block)}
    given, above = (tuple(values[:count]), tuple(edges[:count - 1]), carried), None
    strides = tuple(_strides(x) for x in given)
    if count < len(levels):
        last = count - 1
        right, above = (values[0].new_empty((batch, heads, levels[last].height, levels[last].width, dim),
                                            dtype=torch.float32) for _ in range(2))
        pivot = right.new_empty(right.shape[:-1])
        _quadtree_solve_up_kernel[programs](*given, right, pivot, *strides, right.stride(), pivot.stride(),
                                            tuple(levels[0]), heads, TRANSPOSED=bool(solution), **options)
        _solve(levels[last:], [right, *values[count:]], edges[last:], pivot, [above, *out[count:]], solution[last:],
               edge_grads[last:], kind, block)
    found = (above, tuple(solution[:count]), tuple(out[:count]), tuple(edge_grads[:count - 1]))
    _quadtree_solve_down_kernel[programs](*given, *found, *strides, *(_strides(x) for x in found), tuple(levels[0]),
                                          heads, BACKWARD=bool(solution), **options)


def _start(values: Sequence[Tensor], edges: Sequence[Tensor], out: Sequence[Tensor], solution: Sequence[Tensor],
           edge_grads: Sequence[Tensor], kind: str, shift: Sequence[int], block: int) -> None:
    launch.check_grid(*values, *edges, *out, *solution)
    _solve(quadtree_levels(*values[0].shape[2:4], len(values), shift), values, edges, None, out, solution, edge_grads,
           kind, block)


def forward(values: List[Tensor], edges: List[Tensor], parametrization: str, shift: Sequence[int]) -> List[Tensor]:
    """Return x of every level, (B, heads, H_l, W_l, D), in the dtype of values; edges (B, heads, H_l, W_l)."""
    if not edges:
        return [x.clone() for x in values]
    out = [torch.empty_like(x) for x in values]
    if out[0].numel():
        block = min(LARGEST_BLOCK[0], triton.next_power_of_2(out[0].shape[-1]))
        _start(values, edges, out, (), (), parametrization, shift, block)
    return out


def backward(grads: List[Tensor], solution: List[Tensor], edges: List[Tensor], parametrization: str,
             shift: Sequence[int]) -> Tuple[List[Tensor], List[Tensor]]:
    """Return the gradients of values and of edges."""
    if not edges:
        return [x.clone() for x in grads], []
    out = [torch.empty_like(g, dtype=x.dtype) for g, x in zip(grads, solution)]
    if not out[0].numel():
        return out, [torch.zeros_like(x) for x in edges]
    dim, products = out[0].shape[-1], [torch.empty_like(x) for x in edges]
    block = min(LARGEST_BLOCK[1], triton.next_power_of_2(dim))
    if dim <= block:
        parts = [x[None] for x in products]
    else:
        parts = [x.new_empty((triton.cdiv(dim, block), *x.shape), dtype=torch.float32) for x in edges]
    _start(grads, edges, out, solution, parts, parametrization, shift, block)
    return out, products if dim <= block else [x.copy_(part.sum(0)) for x, part in zip(products, parts)]
