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

All tensors of one kind are dense and have their dimensions in one ORDER in memory, the slowest first. Kernels compute
strides from it and from the size of the grid, which is not part of a kernel's compiled form: images of other sizes run
the same kernels.
"""
from typing import List, NamedTuple, Optional, Sequence, Tuple

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
# Orders of the dimensions (batch, head, row, column, channel) that are looked for first: those of channels-last tokens,
# contiguous tensors and channels-first maps. Dimensions of size 1 fit several, so images must look in one sequence.
ORDERS = ((0, 2, 3, 1, 4), (0, 1, 2, 3, 4), (0, 1, 4, 2, 3))
SIZES = ('batch', 'heads', 'height', 'width', 'top', 'left')


@triton.jit
def _every_other_bit(n):
    return (n & 1) | ((n >> 1) & 2) | ((n >> 2) & 4) | ((n >> 3) & 8)


@triton.jit
def _program(batch, heads, grid, SIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return image, head, row and column of the tile (counted from the tree's origin), block of channels, and the
    numbers of images and heads.

    Heads vary fastest, because those of one image share cache lines of channels-last tensors."""
    height, width, top, left = grid
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    rows = (top + height - 1) // SIDE - top // SIDE + 1
    columns = (left + width - 1) // SIDE - left // SIDE + 1
    line = tl.program_id(0) // blocks
    tile = line // heads
    row = tile // columns
    return ((row // rows).to(tl.int64), (line % heads).to(tl.int64), top // SIDE + row % rows,
            left // SIDE + tile % columns, tl.program_id(0) % blocks, batch, heads)


@triton.jit
def _level_nodes(program, grid, LEVEL: tl.constexpr, SIDE: tl.constexpr):
    """Return row and column, on the level's grid, of a tile's (SIDE / 2^LEVEL)^2 nodes at LEVEL, which of them exist,
    and the size of the level's grid."""
    side: tl.constexpr = SIDE >> LEVEL
    height, width, top, left = grid
    n = tl.arange(0, side * side)
    row = program[2] * side + _every_other_bit(n >> 1) - (top >> LEVEL)
    column = program[3] * side + _every_other_bit(n) - (left >> LEVEL)
    rows = ((top + height - 1) >> LEVEL) - (top >> LEVEL) + 1
    columns = ((left + width - 1) >> LEVEL) - (left >> LEVEL) + 1
    return row, column, (row >= 0) & (row < rows) & (column >= 0) & (column < columns), rows, columns


@triton.jit
def _tile_nodes(program, grid, LEVELS: tl.constexpr, SIDE: tl.constexpr):
    nodes = ()
    for level in tl.static_range(LEVELS):
        nodes += (_level_nodes(program, grid, level, SIDE),)
    return nodes


@triton.jit
def _strides(program, nodes, ORDER: tl.constexpr, DIM: tl.constexpr):
    """Return the strides of image, head, row, column and channel of a dense level."""
    image, head, row, column, channel, stride = 0, 0, 0, 0, 0, 1
    for n in tl.static_range(4, -1, -1):
        if ORDER[n] == 0:
            image, stride = stride, stride * program[5]
        elif ORDER[n] == 1:
            head, stride = stride, stride * program[6]
        elif ORDER[n] == 2:
            row, stride = stride, stride * nodes[3]
        elif ORDER[n] == 3:
            column, stride = stride, stride * nodes[4]
        else:
            channel, stride = stride, stride * DIM
    return image, head, row, column, channel


@triton.jit
def _number_places(pointer, program, nodes, ORDER: tl.constexpr):
    """Return pointers into (B, heads, H, W) to a level's nodes, and which nodes exist: (nodes,) each."""
    image, head, row, column, _ = _strides(program, nodes, ORDER, 1)
    return pointer + (program[0] * image + program[1] * head) + (nodes[0] * row + nodes[1] * column), nodes[2]


@triton.jit
def _vector_places(pointer, program, nodes, ORDER: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers into (B, heads, H, W, DIM) to a program's channels of a level's nodes, and which exist:
    (nodes, BLOCK_D) each."""
    image, head, row, column, channel = _strides(program, nodes, ORDER, DIM)
    d = program[4] * BLOCK_D + tl.arange(0, BLOCK_D)
    places = pointer + (program[0] * image + program[1] * head) + (nodes[0] * row + nodes[1] * column)
    return places[:, None] + (d * channel)[None, :], nodes[2][:, None] & (d < DIM)[None, :]


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
def _load_tile(values, edges, carried, program, nodes, LEVELS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
               V_ORDER: tl.constexpr, E_ORDER: tl.constexpr):
    """Load u of all levels of a tile, the edges of all but its last (0 for nodes that do not exist), and the number
    carried up to its first level (1 at leaves). All loads start before any value is needed."""
    u, edge = (), ()
    for level in tl.static_range(LEVELS):
        u += (_load(_vector_places(values[level], program, nodes[level], V_ORDER, DIM, BLOCK_D), 0.0),)
        if level + 1 < LEVELS:
            edge += (_load(_number_places(edges[level], program, nodes[level], E_ORDER), 0.0),)
    if carried is None:
        start = tl.full(nodes[0][0].shape, 1.0, tl.float32)
    else:
        start = _load(_number_places(carried, program, nodes[0], E_ORDER), 1.0)
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


@triton.jit(do_not_specialize=SIZES)
def _quadtree_solve_up_kernel(
        values, edges, carried, right_out, carried_out, batch, heads, height, width, top, left, KIND: tl.constexpr,
        TRANSPOSED: tl.constexpr, LEVELS: tl.constexpr, SIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        V_ORDER: tl.constexpr, E_ORDER: tl.constexpr):
    """Compute r and the carried number at the last level of one tile per program, in float32.

    values, edges: of the tile's levels. right_out has the order of values, carried and carried_out that of edges."""
    grid = (height, width, top, left)
    program = _program(batch, heads, grid, SIDE, DIM, BLOCK_D)
    nodes = _tile_nodes(program, grid, LEVELS, SIDE)
    u, edge, start = _load_tile(values, edges, carried, program, nodes, LEVELS, DIM, BLOCK_D, V_ORDER, E_ORDER)
    _, _, _, r, pivot = _eliminate(u, edge, start, KIND, TRANSPOSED, LEVELS)
    _store(_vector_places(right_out, program, nodes[LEVELS - 1], V_ORDER, DIM, BLOCK_D), r)
    _store(_number_places(carried_out, program, nodes[LEVELS - 1], E_ORDER), pivot)


@triton.jit(do_not_specialize=SIZES)
def _quadtree_solve_down_kernel(
        values, edges, carried, above, solution, out, edge_grads, batch, heads, height, width, top, left,
        KIND: tl.constexpr, BACKWARD: tl.constexpr, LEVELS: tl.constexpr, SIDE: tl.constexpr, DIM: tl.constexpr,
        BLOCK_D: tl.constexpr, V_ORDER: tl.constexpr, E_ORDER: tl.constexpr, S_ORDER: tl.constexpr,
        O_ORDER: tl.constexpr):
    """Compute x at all levels of one tile per program. above: x at its last level in float32, or None for a whole tree.

    BACKWARD: values are gradients of the solution, x is the adjoint, and edge_grads are the gradients of edges, of
    shape (blocks of channels, B, heads, H, W) for each level but the last. above has the order of out, edge_grads
    after their first dimension that of edges."""
    last: tl.constexpr = LEVELS - 1
    grid = (height, width, top, left)
    program = _program(batch, heads, grid, SIDE, DIM, BLOCK_D)
    nodes = _tile_nodes(program, grid, LEVELS, SIDE)
    u, edge, start = _load_tile(values, edges, carried, program, nodes, LEVELS, DIM, BLOCK_D, V_ORDER, E_ORDER)
    rights, scales, downs, r, pivot = _eliminate(u, edge, start, KIND, BACKWARD, LEVELS)
    if above is None:
        x = r * tl.div_rn(1.0, pivot)[:, None]
    else:
        x = _load(_vector_places(above, program, nodes[last], O_ORDER, DIM, BLOCK_D), 0.0)
    _store(_vector_places(out[last], program, nodes[last], O_ORDER, DIM, BLOCK_D), x)
    if BACKWARD:
        solved = _load(_vector_places(solution[last], program, nodes[last], S_ORDER, DIM, BLOCK_D), 0.0)
    for level in tl.static_range(LEVELS - 2, -1, -1):
        parent = _repeat_to_children(x)
        x = rights[level] * scales[level][:, None] + downs[level][:, None] * parent
        _store(_vector_places(out[level], program, nodes[level], O_ORDER, DIM, BLOCK_D), x)
        if BACKWARD:
            solved_parent = _repeat_to_children(solved)
            solved = _load(_vector_places(solution[level], program, nodes[level], S_ORDER, DIM, BLOCK_D), 0.0)
            part = program[4].to(tl.int64) * batch * heads * nodes[level][3] * nodes[level][4]
            _store(_number_places(edge_grads[level] + part, program, nodes[level], E_ORDER),
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


class _Order(NamedTuple):
    dims: Tuple[int, ...]

    def fits(self, x: Tensor) -> bool:
        """Whether x (B, heads, H, W[, D]) is dense in this order; dimensions of size 1 may have any stride."""
        stride = 1
        for dim in reversed(self.dims):
            if dim < x.ndim and x.shape[dim] != 1:
                if x.stride(dim) != stride:
                    return False
                stride *= x.shape[dim]
        return True

    def empty(self, like: Tensor, shape: Sequence[int], count: int = 1) -> Tensor:
        """Return `count` uninitialized float32 tensors (B, heads, H, W[, D]), one behind the other: (count, *shape)."""
        dims = [dim for dim in self.dims if dim < len(shape)]
        x = like.new_empty([count, *(shape[dim] for dim in dims)], dtype=torch.float32)
        return x.permute(0, *(1 + dims.index(dim) for dim in range(len(shape))))


def _order(tensors: Sequence[Tensor]) -> Optional[_Order]:
    """Return an order in which all tensors (B, heads, H, W[, D]) are dense, or None."""
    for dims in ORDERS:
        if all(_Order(dims).fits(x) for x in tensors):
            return _Order(dims)
    x = tensors[0]
    order = _Order((*sorted(range(x.ndim), key=x.stride, reverse=True), *range(x.ndim, 5)))
    return order if all(order.fits(x) for x in tensors) else None


def _ordered(tensors: Sequence[Tensor]) -> Tuple[Sequence[Tensor], _Order]:
    """Return the tensors, copied if they have no order in common, and their order."""
    order = _order(tensors)
    if order is None:
        tensors = [x.contiguous() for x in tensors]
        order = _order(tensors)
    return tensors, order


class _Solve(NamedTuple):
    """What the launches of a call share. The orders are those of values, edges, solution and out."""
    kind: str
    block: int
    backward: bool
    orders: Tuple[_Order, _Order, _Order, _Order]

    def run(self, levels: Sequence[Level], values: Sequence[Tensor], edges: Sequence[Tensor], carried: Optional[Tensor],
            out: Sequence[Tensor], solution: Sequence[Tensor], edge_grads: Sequence[Tensor]) -> None:
        """Write x of every level to `out`, and the gradients of edges. carried: the number at the first level."""
        batch, heads, _, _, dim = values[0].shape
        of_values, of_edges, of_solution, of_out = self.orders
        side, count = _tile(len(levels), self.block)
        programs = launch.programs(batch * heads * _tiles(levels[0], side) * triton.cdiv(dim, self.block))
        options = {'KIND': self.kind, 'LEVELS': count, 'SIDE': side, 'DIM': dim, 'BLOCK_D': self.block,
                   'V_ORDER': of_values.dims, 'E_ORDER': of_edges.dims,
                   **launch.options('quadtree_solve', values[0].dtype, side * side * self.block, self.block)}
        given, above = (tuple(values[:count]), tuple(edges[:count - 1]), carried), None
        sizes = (batch, heads, *levels[0])
        if count < len(levels):
            last = count - 1
            shape = (batch, heads, *levels[last][:2], dim)
            right, above = of_values.empty(values[0], shape)[0], of_out.empty(values[0], shape)[0]
            pivot = of_edges.empty(values[0], shape[:-1])[0]
            transposed = self.backward and self.kind == 'skew'         # others have the same factors up and down
            _quadtree_solve_up_kernel[programs](*given, right, pivot, *sizes, TRANSPOSED=transposed, **options)
            self.run(levels[last:], [right, *values[count:]], edges[last:], pivot, [above, *out[count:]],
                     solution[last:], edge_grads[last:])
        _quadtree_solve_down_kernel[programs](
            *given, above, tuple(solution[:count]), tuple(out[:count]), tuple(edge_grads[:count - 1]), *sizes,
            BACKWARD=self.backward, S_ORDER=of_solution.dims, O_ORDER=of_out.dims, **options)


def _start(values: Sequence[Tensor], edges: Sequence[Tensor], out: Sequence[Tensor], solution: Sequence[Tensor],
           edge_grads: Sequence[Tensor], kind: str, shift: Sequence[int], block: int) -> None:
    """Write x of every level to `out` and, with a solution, the gradients of edges to `edge_grads`."""
    launch.check_grid(*values, *edges, *out, *solution)
    levels = quadtree_levels(*values[0].shape[2:4], len(values), shift)
    (values, of_values), (edges, of_edges) = _ordered(values), _ordered(edges)
    solution, of_solution = _ordered(solution) if solution else (solution, of_values)
    found, of_out = _ordered(out)                    # other tensors than `out` if those have no order in common
    # The gradient of an edge is a sum over channels. Blocks of channels write partial sums one behind the other.
    blocks = triton.cdiv(values[0].shape[-1], block)
    direct = blocks == 1 and all(of_edges.fits(x) for x in edge_grads)
    parts = edge_grads if direct else [of_edges.empty(x, x.shape, blocks) for x in edge_grads]
    solve = _Solve(kind, block, bool(solution), (of_values, of_edges, of_solution, of_out))
    solve.run(levels, values, edges, None, found, solution, parts)
    if found is not out:
        for x, y in zip(out, found):
            x.copy_(y)
    if not direct:
        for x, part in zip(edge_grads, parts):
            x.copy_(part.sum(0))


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
    edge_grads = [torch.empty_like(x) for x in edges]
    block = min(LARGEST_BLOCK[1], triton.next_power_of_2(out[0].shape[-1]))
    _start(grads, edges, out, solution, edge_grads, parametrization, shift, block)
    return out, edge_grads
