"""One tile of a quad tree in a Triton program: its nodes, where their numbers are in memory, and the two sweeps.

`triton.py` has the formulas and the kernels."""
import triton
import triton.language as tl


@triton.jit
def _every_other_bit(n):
    return (n & 1) | ((n >> 1) & 2) | ((n >> 2) & 4) | ((n >> 3) & 8)


@triton.jit
def this_program(batch, heads, grid, dim, SIDE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return image, head, row and column of the tile (counted from the tree's origin), block of channels, and the
    numbers of images and heads.

    Heads vary fastest, because those of one image share cache lines of channels-last tensors."""
    height, width, top, left = grid
    blocks = (dim + BLOCK_D - 1) // BLOCK_D
    rows = (top + height - 1) // SIDE - top // SIDE + 1
    columns = (left + width - 1) // SIDE - left // SIDE + 1
    line = tl.program_id(0) // blocks
    tile = line // heads
    row = tile // columns
    return ((row // rows).to(tl.int64), (line % heads).to(tl.int64), top // SIDE + row % rows,
            left // SIDE + tile % columns, tl.program_id(0) % blocks, batch, heads)


@triton.jit
def _level_nodes(program, grid, levels, LEVEL: tl.constexpr, SIDE: tl.constexpr):
    """Return row and column, on the level's grid, of a tile's (SIDE / 2^LEVEL)^2 nodes at LEVEL, which of them exist
    (none if LEVEL >= levels), and the size of the level's grid."""
    side: tl.constexpr = SIDE >> LEVEL
    height, width, top, left = grid
    n = tl.arange(0, side * side)
    row = program[2] * side + _every_other_bit(n >> 1) - (top >> LEVEL)
    column = program[3] * side + _every_other_bit(n) - (left >> LEVEL)
    rows = ((top + height - 1) >> LEVEL) - (top >> LEVEL) + 1
    columns = ((left + width - 1) >> LEVEL) - (left >> LEVEL) + 1
    end = tl.where(LEVEL < levels, rows, 0)
    return row, column, (row >= 0) & (row < end) & (column >= 0) & (column < columns), rows, columns


@triton.jit
def tile_nodes(program, grid, levels, LEVELS: tl.constexpr, SIDE: tl.constexpr):
    nodes = ()
    for level in tl.static_range(LEVELS):
        nodes += (_level_nodes(program, grid, levels, level, SIDE),)
    return nodes


@triton.jit
def _strides(program, nodes, dim, ORDER: tl.constexpr):
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
            channel, stride = stride, stride * dim
    return image, head, row, column, channel


@triton.jit
def number_places(pointer, program, nodes, ORDER: tl.constexpr):
    """Return pointers into (B, heads, H, W) to a level's nodes, and which nodes exist: (nodes,) each."""
    image, head, row, column, _ = _strides(program, nodes, 1, ORDER)
    return pointer + (program[0] * image + program[1] * head) + (nodes[0] * row + nodes[1] * column), nodes[2]


@triton.jit
def vector_places(pointer, program, nodes, dim, ORDER: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers into (B, heads, H, W, dim) to a program's channels of a level's nodes, and which exist:
    (nodes, BLOCK_D) each."""
    image, head, row, column, channel = _strides(program, nodes, dim, ORDER)
    d = program[4] * BLOCK_D + tl.arange(0, BLOCK_D)
    places = pointer + (program[0] * image + program[1] * head) + (nodes[0] * row + nodes[1] * column)
    return places[:, None] + (d * channel)[None, :], nodes[2][:, None] & (d < dim)[None, :]


@triton.jit
def places_if(condition, places):
    """Return the places, none of which exist if the condition, one for the program, is false."""
    return places[0], places[1] & condition


@triton.jit
def load_places(places, other):
    """Load in float32, and `other` for nodes that do not exist."""
    return tl.load(places[0], mask=places[1], other=other).to(tl.float32)


@triton.jit
def store_places(places, x):
    tl.store(places[0], x.to(places[0].dtype.element_ty), mask=places[1])


@triton.jit
def sum_children(x):
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
def load_tile(values, edges, program, nodes, levels, dim, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr,
              V_ORDER: tl.constexpr, E_ORDER: tl.constexpr):
    """Load u and the edges of all levels of a tile but its last (0 for nodes that do not exist).

    All loads start before any value is needed."""
    u, edge = (), ()
    for level in tl.static_range(LEVELS - 1):
        u += (load_places(vector_places(values[level], program, nodes[level], dim, V_ORDER, BLOCK_D), 0.0),)
        places = number_places(edges[level], program, nodes[level], E_ORDER)
        edge += (load_places(places_if(level + 1 < levels, places), 0.0),)
    return u, edge


@triton.jit
def eliminate(u, edge, carried, KIND: tl.constexpr, TRANSPOSED: tl.constexpr, LEVELS: tl.constexpr):
    """Sweep up. Return r, 1 / S and down of all levels of a tile but the last, and the summands of the last level's r
    and carried number: (4, BLOCK_D) and (4,)."""
    rights, scales, downs = (), (), ()
    r = u[0]
    for level in tl.static_range(LEVELS - 1):
        scale, up, down, added = _coefficients(carried, edge[level], KIND)
        if TRANSPOSED:
            up, down = down, up
        rights, scales, downs = rights + (r,), scales + (scale,), downs + (down,)
        moved = up[:, None] * r
        if level + 2 < LEVELS:
            r = u[level + 1] + sum_children(moved)
            carried = 1 + sum_children(added)
    return rights, scales, downs, moved, added


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
def substitute(x, rights, scales, downs, solution, out, edge_grads, program, nodes, levels, dim, KIND: tl.constexpr,
               BACKWARD: tl.constexpr, LEVELS: tl.constexpr, BLOCK_D: tl.constexpr, E_ORDER: tl.constexpr,
               S_ORDER: tl.constexpr, O_ORDER: tl.constexpr):
    """Sweep down from x of a tile's last level. Store x of the other levels and, with BACKWARD, the gradients of their
    edges; return x of the first level."""
    if BACKWARD:
        last: tl.constexpr = LEVELS - 1
        solved = load_places(vector_places(solution[last], program, nodes[last], dim, S_ORDER, BLOCK_D), 0.0)
    for level in tl.static_range(LEVELS - 2, -1, -1):
        # Trees of a forest have no node in common, through which a NaN of one would reach the others.
        parent = _repeat_to_children(tl.where(level + 1 < levels, x, 0.0))
        x = rights[level] * scales[level][:, None] + downs[level][:, None] * parent
        store_places(vector_places(out[level], program, nodes[level], dim, O_ORDER, BLOCK_D), x)
        if BACKWARD:
            solved_parent = _repeat_to_children(solved)
            solved = load_places(vector_places(solution[level], program, nodes[level], dim, S_ORDER, BLOCK_D), 0.0)
            part = program[4].to(tl.int64) * program[5] * program[6] * nodes[level][3] * nodes[level][4]
            places = number_places(edge_grads[level] + part, program, nodes[level], E_ORDER)
            store_places(places_if(level + 1 < levels, places), _edge_gradient(x, solved, parent, solved_parent, KIND))
    return x
