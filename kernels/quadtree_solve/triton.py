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
hold the tree, the up kernel stores the sum of up_c r_c and e (or S) at the roots of tiles, which pose the same problem
on a coarser grid. The down kernel reads its tiles again when x at the roots is known. All arithmetic is float32.

All tensors of one kind are dense and have their dimensions in one ORDER in memory, the slowest first. Kernels compute
strides from it and from the size of the grid, which is not part of a kernel's compiled form: images of other sizes run
the same kernels. For the same reason, one kernel does both sweeps of tiles on top of others: it learns at run time how
many levels of its side exist, and takes all heads of up to 32 channels. These tiles are few. The tiles of leaves have
kernels of their own, whose registers do not hold pointers to the numbers of tiles below.
"""
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..trees.grid import Level, quadtree_levels
from .triton_tiles import (
    eliminate,
    load_places,
    load_tile,
    number_places,
    store_places,
    substitute,
    sum_children,
    this_program,
    tile_nodes,
    vector_places,
)

# Sides of tiles. The smaller one is used if the larger one would not save a launch.
SIDES = (8, 16)
# Channels of a tile, forward and backward. Wider heads take several blocks. The gradient of an edge is a sum over
# channels, so blocks store partial sums, which further launches add.
LARGEST_BLOCK = (32, 64)
# Least channels of tiles on top of others. These tiles are few, and heads of fewer channels leave some idle.
LEAST_UPPER_BLOCK = 32
# Numbers at a tile's first level, all channels together. With more, registers spill.
MAX_TILE_ELEMENTS = 8192
# Orders of the dimensions (batch, head, row, column, channel) that are looked for first: those of channels-last tokens,
# contiguous tensors and channels-first maps. Dimensions of size 1 fit several, so images must look in one sequence.
ORDERS = ((0, 2, 3, 1, 4), (0, 1, 2, 3, 4), (0, 1, 4, 2, 3))
# Numbers of which the compiled form of a kernel is independent.
SIZES = ('batch', 'heads', 'height', 'width', 'top', 'left', 'levels', 'has_above', 'upwards')


@triton.jit(do_not_specialize=SIZES)
def _quadtree_solve_up_kernel(
        values, edges, right_above, carried_above, batch, heads, height, width, top, left, KIND: tl.constexpr,
        TRANSPOSED: tl.constexpr, LEVELS: tl.constexpr, SIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        V_ORDER: tl.constexpr, E_ORDER: tl.constexpr):
    """Compute the sum of up_c r_c and the carried number at the last level of one tile of leaves per program.

    values, edges: of the tile's levels. right_above, carried_above: the results in float32, in the orders of values and
    of edges."""
    last: tl.constexpr = LEVELS - 1
    grid = (height, width, top, left)
    program = this_program(batch, heads, grid, DIM, SIDE, BLOCK_D)
    nodes = tile_nodes(program, grid, LEVELS, LEVELS, SIDE)
    u, edge = load_tile(values, edges, program, nodes, LEVELS, DIM, LEVELS, BLOCK_D, V_ORDER, E_ORDER)
    carried = tl.full(edge[0].shape, 1.0, tl.float32)
    _, _, _, moved, added = eliminate(u, edge, carried, KIND, TRANSPOSED, LEVELS)
    store_places(vector_places(right_above, program, nodes[last], DIM, V_ORDER, BLOCK_D), sum_children(moved))
    store_places(number_places(carried_above, program, nodes[last], E_ORDER), 1 + sum_children(added))


@triton.jit(do_not_specialize=SIZES)
def _quadtree_solve_down_kernel(
        values, edges, solution, out, edge_grads, x_above, batch, heads, height, width, top, left, has_above,
        KIND: tl.constexpr, BACKWARD: tl.constexpr, LEVELS: tl.constexpr, SIDE: tl.constexpr, DIM: tl.constexpr,
        BLOCK_D: tl.constexpr, V_ORDER: tl.constexpr, E_ORDER: tl.constexpr, S_ORDER: tl.constexpr,
        O_ORDER: tl.constexpr):
    """Compute x at all levels of one tile of leaves per program.

    has_above: whether a tile on top has stored x of the last level: in float32 in x_above, which has the order of out,
    and in out.
    BACKWARD: values are gradients of the solution, x is the adjoint, and edge_grads are the gradients of edges, of
    shape (blocks of channels, B, heads, H, W) for each level but the last, after their first dimension in the order of
    edges."""
    last: tl.constexpr = LEVELS - 1
    grid = (height, width, top, left)
    program = this_program(batch, heads, grid, DIM, SIDE, BLOCK_D)
    nodes = tile_nodes(program, grid, LEVELS, LEVELS, SIDE)
    u, edge = load_tile(values, edges, program, nodes, LEVELS, DIM, LEVELS, BLOCK_D, V_ORDER, E_ORDER)
    carried = tl.full(edge[0].shape, 1.0, tl.float32)
    rights, scales, downs, moved, added = eliminate(u, edge, carried, KIND, BACKWARD, LEVELS)
    if has_above:
        x = load_places(vector_places(x_above, program, nodes[last], DIM, O_ORDER, BLOCK_D), 0.0)
    else:
        r = load_places(vector_places(values[last], program, nodes[last], DIM, V_ORDER, BLOCK_D), 0.0)
        x = (r + sum_children(moved)) * tl.div_rn(1.0, 1 + sum_children(added))[:, None]
        store_places(vector_places(out[last], program, nodes[last], DIM, O_ORDER, BLOCK_D), x)
    substitute(x, rights, scales, downs, solution, out, edge_grads, program, nodes, LEVELS, DIM, KIND, BACKWARD, LEVELS,
               BLOCK_D, E_ORDER, S_ORDER, O_ORDER)


@triton.jit(do_not_specialize=SIZES)
def _quadtree_solve_upper_kernel(
        values, edges, solution, out, edge_grads, right_below, carried_below, x_below, right_above, carried_above,
        x_above, batch, heads, height, width, top, left, levels, has_above, upwards, dim, KIND: tl.constexpr,
        BACKWARD: tl.constexpr, LEVELS: tl.constexpr, SIDE: tl.constexpr, BLOCK_D: tl.constexpr, V_ORDER: tl.constexpr,
        E_ORDER: tl.constexpr, S_ORDER: tl.constexpr, O_ORDER: tl.constexpr):
    """Do what the up kernel (if `upwards`) or the down kernel does for one tile on top of others per program.

    The tile has the first `levels` of its LEVELS levels, and the others have any tensors. right_below, carried_below:
    results of the tiles below at its first level. x_below: x of its first level in float32, for the tiles below. They
    have the orders of values, edges and out."""
    last: tl.constexpr = LEVELS - 1
    grid = (height, width, top, left)
    program = this_program(batch, heads, grid, dim, SIDE, BLOCK_D)
    nodes = tile_nodes(program, grid, levels, LEVELS, SIDE)
    u, edge = load_tile(values, edges, program, nodes, levels, dim, LEVELS, BLOCK_D, V_ORDER, E_ORDER)
    first = u[0] + load_places(vector_places(right_below, program, nodes[0], dim, V_ORDER, BLOCK_D), 0.0)
    carried = load_places(number_places(carried_below, program, nodes[0], E_ORDER), 1.0)
    rights, scales, downs, moved, added = eliminate((first,) + u[1:], edge, carried, KIND, BACKWARD, LEVELS)
    right, carried = sum_children(moved), 1 + sum_children(added)
    if upwards:
        store_places(vector_places(right_above, program, nodes[last], dim, V_ORDER, BLOCK_D), right)
        store_places(number_places(carried_above, program, nodes[last], E_ORDER), carried)
    else:
        if has_above:
            x = load_places(vector_places(x_above, program, nodes[last], dim, O_ORDER, BLOCK_D), 0.0)
        else:
            r = load_places(vector_places(values[last], program, nodes[last], dim, V_ORDER, BLOCK_D), 0.0)
            x = (r + right) * tl.div_rn(1.0, carried)[:, None]
            store_places(vector_places(out[last], program, nodes[last], dim, O_ORDER, BLOCK_D), x)
        x = substitute(x, rights, scales, downs, solution, out, edge_grads, program, nodes, levels, dim, KIND, BACKWARD,
                       LEVELS, BLOCK_D, E_ORDER, S_ORDER, O_ORDER)
        store_places(vector_places(x_below, program, nodes[0], dim, O_ORDER, BLOCK_D), x)


def _tile(levels: int, block: int) -> Tuple[int, int]:
    """Return the side of the first tiles for a tree of so many levels, and the levels of a tile of `block` channels."""
    heights = {side: side.bit_length() - 1 for side in SIDES if side ** 2 * block <= MAX_TILE_ELEMENTS}
    most = max(heights.values())
    side = next(side for side, height in heights.items()
                if launch.cdiv(levels - 1 - height, most) < launch.cdiv(levels - 1, most))
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


class _Tree(NamedTuple):
    """A tree over leaves, or over the roots of tiles. Kernels write x to `out` and gradients of edges to `edge_grads`,
    which is empty, as the solution is, if no gradients are wanted."""
    levels: Sequence[Level]
    values: Sequence[Tensor]
    edges: Sequence[Tensor]
    solution: Sequence[Tensor]
    out: Sequence[Tensor]
    edge_grads: Sequence[Tensor]

    def top(self, first: int) -> '_Tree':
        """Return the tree of the levels from `first`."""
        return _Tree(*(x[first:] for x in self))

    def tile(self, count: int) -> Tuple[Tuple[Tensor, ...], ...]:
        """Return the tensors of `count` levels, and of their edges. The last ones stand for those that do not exist."""
        counts = (count, count - 1, count, count, count - 1)
        return tuple((*x[:n], *x[-1:] * (n - len(x))) for x, n in zip(self[1:], counts))


class _Roots(NamedTuple):
    """Float32 tensors of the roots of tiles: the sum of up_c r_c and the carried number of each, and later x."""
    right: Tensor
    carried: Tensor
    x: Tensor


class _Solve(NamedTuple):
    """What the launches of a call share. The orders are those of values, edges, solution and out."""
    kind: str
    block: int
    backward: bool
    orders: Tuple[_Order, _Order, _Order, _Order]

    def run(self, tree: _Tree) -> None:
        """Write x of every level of a tree over leaves, and the gradients of edges."""
        side, count = _tile(len(tree.levels), self.block)
        batch, heads, *_, dim = tree.values[0].shape
        programs, roots, constants = self._prepare(tree, side, count, self.block)
        constants |= {'LEVELS': count, 'DIM': dim}
        values, edges, *others = tree.tile(count)
        sizes = (batch, heads, *tree.levels[0])
        if count < len(tree.levels):
            transposed = self.backward and self.kind == 'skew'         # others have the same factors up and down
            _quadtree_solve_up_kernel[programs](
                values, edges, roots.right, roots.carried, *sizes, TRANSPOSED=transposed, **constants,
                **self._options('up', tree, side, self.block))
            self.run_upper(tree.top(count - 1), roots)
        _quadtree_solve_down_kernel[programs](
            values, edges, *others, roots.x, *sizes, int(count < len(tree.levels)), **constants,
            **self._down_constants(), **self._options('down_bwd' if self.backward else 'down_fwd', tree, side,
                                                      self.block))

    def run_upper(self, tree: _Tree, below: _Roots) -> None:
        """Do the same for a tree over the roots `below`, and write x of these roots."""
        block = max(self.block, LEAST_UPPER_BLOCK)
        side, count = _tile(len(tree.levels), block)
        batch, heads, *_, dim = tree.values[0].shape
        programs, roots, constants = self._prepare(tree, side, count, block)
        constants |= {'LEVELS': side.bit_length(), **self._down_constants()}
        options = self._options('upper', tree, side, block)

        def sweep(upwards: bool) -> None:
            _quadtree_solve_upper_kernel[programs](
                *tree.tile(side.bit_length()), *below, *roots, batch, heads, *tree.levels[0], count,
                int(count < len(tree.levels)), int(upwards), dim, **constants, **options)
        if count < len(tree.levels):
            sweep(upwards=True)
            self.run_upper(tree.top(count - 1), roots)
        sweep(upwards=False)

    def _prepare(self, tree: _Tree, side: int, count: int, block: int) -> Tuple[Tuple[int], _Roots, Dict[str, Any]]:
        """Return the launch grid, tensors for the roots of tiles, and the constants that all kernels take."""
        of_values, of_edges, _, of_out = self.orders
        like = tree.values[0]
        batch, heads, _, _, dim = like.shape
        if count < len(tree.levels):
            shape = (batch, heads, *tree.levels[count - 1][:2], dim)
            roots = _Roots(of_values.empty(like, shape)[0], of_edges.empty(like, shape[:-1])[0],
                           of_out.empty(like, shape)[0])
        else:
            roots = _Roots(*[like.new_empty(0, dtype=torch.float32)] * 3)      # of the right type, but never accessed
        programs = launch.programs(batch * heads * _tiles(tree.levels[0], side) * launch.cdiv(dim, block))
        return programs, roots, {'KIND': self.kind, 'SIDE': side, 'BLOCK_D': block, 'V_ORDER': of_values.dims,
                                 'E_ORDER': of_edges.dims}

    def _down_constants(self) -> Dict[str, Any]:
        """Return more constants of the kernels that sweep down."""
        _, _, of_solution, of_out = self.orders
        return {'BACKWARD': self.backward, 'S_ORDER': of_solution.dims, 'O_ORDER': of_out.dims}

    @staticmethod
    def _options(kernel: str, tree: _Tree, side: int, block: int) -> Dict[str, Any]:
        """Return launch options, which the table has by the numbers at a tile's first level."""
        return launch.options(f'quadtree_solve_{kernel}', tree.values[0].dtype, side * side * block, block)


def _start(values: Sequence[Tensor], edges: Sequence[Tensor], out: Sequence[Tensor], solution: Sequence[Tensor],
           edge_grads: Sequence[Tensor], kind: str, shift: Sequence[int], block: int) -> None:
    """Write x of every level to `out` and, with a solution, the gradients of edges to `edge_grads`."""
    launch.check_grid(*values, *edges, *out, *solution)
    levels = quadtree_levels(*values[0].shape[2:4], len(values), shift)
    (values, of_values), (edges, of_edges) = _ordered(values), _ordered(edges)
    solution, of_solution = _ordered(solution) if solution else (solution, of_values)
    found, of_out = _ordered(out)                    # other tensors than `out` if those have no order in common
    # The gradient of an edge is a sum over channels. Blocks of channels write partial sums one behind the other.
    blocks = launch.cdiv(values[0].shape[-1], block)
    direct = blocks == 1 and all(of_edges.fits(x) for x in edge_grads)
    parts = edge_grads if direct else [of_edges.empty(x, x.shape, blocks) for x in edge_grads]
    solve = _Solve(kind, block, bool(solution), (of_values, of_edges, of_solution, of_out))
    solve.run(_Tree(levels, values, edges, solution, found, parts))
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
        block = min(LARGEST_BLOCK[0], launch.next_power_of_2(out[0].shape[-1]))
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
    block = min(LARGEST_BLOCK[1], launch.next_power_of_2(out[0].shape[-1]))
    _start(grads, edges, out, solution, edge_grads, parametrization, shift, block)
    return out, edge_grads
