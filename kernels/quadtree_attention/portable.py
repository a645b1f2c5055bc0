"""Quad-tree attention in plain PyTorch: the whole layer and its gradient by hand for CPUs, and a form for exporters.

The numbers of all nodes are rows of a matrix, level after level. Most steps are then one operation for all levels: on
small maps, the calls for a level cost more than its arithmetic.
"""
from functools import lru_cache, partial
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import without_autocast
from ..quadtree_solve import quadtree_solve
from ..quadtree_solve.portable import raise_for_singular_quadtree
from ..trees import Level, leaf_counts, quadtree_levels, sibling_normalized, sum_children
from ..trees.diagnose import has_nonfinite
from ..trees.edges import composed, dot_scale, scaled_dots
from ..trees.parametrize import sibling_normalized_gradient


class Options(NamedTuple):
    """Arguments of the operator that are no tensors."""
    parametrization: str
    rho: float
    shift: Sequence[int]
    max_levels: Optional[int]

    def levels(self, v: Tensor) -> List[Level]:
        """Return the levels of the tree over v (B, heads, H, W, D)."""
        return quadtree_levels(*v.shape[2:4], self.max_levels, self.shift)


class Nodes(NamedTuple):
    """The nodes of the trees over a batch as rows: level after level, and in a level image after image.

    Attributes:
        batch: number of images.
        levels: grids of the levels.
        leaves: the number of leaves.
        edges: the number of nodes with a parent.
        starts: the first row of each level, then the number of rows.
        rows: for each level, its rows.
        inner: for each level, its rows in a tensor of inner nodes.
        parents: for each row but the roots', the row of its parent, counted from the first inner node.
        places: for each row but the roots', 4 times its level plus its place among its siblings.
        counts: numbers of leaves below the inner nodes, (rows - leaves, 1).
    """
    batch: int
    levels: Sequence[Level]
    leaves: int
    edges: int
    starts: List[int]
    rows: List[slice]
    inner: List[slice]
    parents: Tensor
    places: Tensor
    counts: Tensor

    def maps(self, x: Tensor, n: int) -> Tensor:
        """Return rows of level n as maps: (B * H_n * W_n, C) -> (B, C, H_n, W_n), a view."""
        return x.unflatten(0, (self.batch, *self.levels[n][:2])).permute(0, 3, 1, 2)

    def sum_children(self, x: Tensor, n: int) -> Tensor:
        """Sum rows of level n over the children of each node of level n + 1."""
        sums = sum_children(self.maps(x, n), self.levels[n])
        return sums.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


@lru_cache(maxsize=32)
def nodes_of(batch: int, levels: Tuple[Level, ...], device: torch.device) -> Nodes:
    """Return the rows of the trees over a batch. They are kept for the last few sizes: some 20 bytes for each node."""
    starts, parents, places = [0], [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]
    for level in levels:
        starts.append(starts[-1] + batch * level.height * level.width)
    for n, (level, above) in enumerate(zip(levels, levels[1:])):
        row, column = torch.arange(level.height) + level.top, torch.arange(level.width) + level.left
        up, across = (row >> 1) - above.top, (column >> 1) - above.left
        image = torch.arange(batch)[:, None, None] * above.height * above.width + starts[n + 1] - starts[1]
        parents.append((image + up[:, None] * above.width + across).flatten())
        places.append((row[:, None] % 2 * 2 + column % 2 + 4 * n).flatten().repeat(batch))
    none = torch.empty(0, dtype=torch.float32)
    counts = [count.expand(batch, -1, -1, -1).flatten() for count in leaf_counts(levels, none)[1:]]
    first = starts[1]
    rows = [slice(start, stop) for start, stop in zip(starts, starts[1:])]
    inner = [slice(0, 0), *(slice(own.start - first, own.stop - first) for own in rows[1:])]
    return Nodes(batch, levels, first, starts[-2], starts, rows, inner, torch.cat(parents).to(device),
                 torch.cat(places).to(device), torch.cat([none, *counts])[:, None].to(device))


class _Layer:
    """The steps of a call, on rows of numbers: those of all nodes, of the inner nodes, or of the nodes with a parent.

    Args:
        v: the values, or a tensor of their shape.
        mask: padding mask (B, H, W), or None.
        options: the other arguments.
        dtype: dtype of the arithmetic.
    """

    def __init__(self, v: Tensor, mask: Optional[Tensor], options: Options, dtype: torch.dtype):
        self.options, self.dtype, self.heads, levels = options, dtype, v.shape[1], options.levels(v)
        self.nodes = nodes_of(len(v), tuple(levels), v.device)
        self.counts, self.absent = self.nodes.counts.to(dtype), None                 # `absent`: nodes without a leaf
        if mask is not None:
            counts = torch.cat([count.flatten() for count in leaf_counts(levels, v.new_empty(0, dtype=dtype), mask)])
            self.absent = (counts == 0)[:, None]
            self.counts = counts[self.nodes.leaves:, None].clamp(min=1)

    def existing(self, x: Tensor) -> Tensor:
        """Return rows, from the first leaf on, with zeros for nodes without a leaf."""
        return x if self.absent is None else x.masked_fill(self.absent[:len(x)], 0)

    def leaves(self, x: Tensor) -> Tensor:
        """(B, heads, H, W, D) -> (leaves, heads * D), a view if that is the order in memory."""
        return self.existing(self.rows(x))

    def rows(self, x: Tensor) -> Tensor:
        """The same, with the numbers of leaves that do not exist."""
        return x.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 2).to(self.dtype)

    def split(self, x: Tensor) -> Tensor:
        """(rows, heads * D) -> (rows, heads, D), a view."""
        return x.unflatten(1, (self.heads, -1))

    def above(self, x: Tensor, rows: slice) -> Tensor:
        """Return the rows of the parents of some nodes, from a tensor of inner nodes."""
        return x.index_select(0, self.nodes.parents[rows])

    def means(self, *leaves: Tensor) -> Tensor:
        """Return the means over the leaves of every inner node, those of all arguments side by side."""
        nodes, widths = self.nodes, [x.shape[1] for x in leaves]
        sums = leaves[0].new_empty(len(self.counts), sum(widths))
        for n in range(len(nodes.levels) - 1):
            if n:
                sums[nodes.inner[n + 1]] = nodes.sum_children(sums[nodes.inner[n]], n)
            else:
                for part, x in zip(sums[nodes.inner[1]].split(widths, 1), leaves):
                    part.copy_(nodes.sum_children(x, 0))
        return sums.div_(self.counts)

    def spread(self, grad: Tensor, *leaves: Tensor) -> None:
        """Add to the gradients of `leaves` what follows from that of their means, which is overwritten."""
        grad.div_(self.counts)
        for n in reversed(range(1, len(self.nodes.levels) - 1)):
            grad[self.nodes.inner[n]] += self.above(grad, self.nodes.rows[n])
        if len(grad):
            parts = self.above(grad, self.nodes.rows[0]).split([x.shape[1] for x in leaves], 1)
            for x, part in zip(leaves, parts):
                x.add_(part)

    def logits(self, q: Optional[Tensor], means: Tensor, bias: Tensor) -> Tensor:
        """Return the logits of the nodes with a parent, given q of the leaves and the means of q and of k."""
        nodes, last = self.nodes, 4 * len(bias) - 4
        places = nodes.places if len(nodes.levels) <= len(bias) + 1 else torch.where(
            nodes.places < last, nodes.places, nodes.places % 4 + last)
        logits = bias.flatten(0, 2).to(self.dtype).index_select(0, places)
        if q is None or not nodes.edges:
            return logits
        products = self.above(means[:, q.shape[1]:], slice(None))
        products[:nodes.leaves].mul_(q)
        products[nodes.leaves:].mul_(means[:nodes.edges - nodes.leaves, :q.shape[1]])
        return scaled_dots(products, dot_scale(products, q.shape[1] // self.heads)).add_(logits)

    def weights(self, logits: Tensor) -> Tensor:
        """Return the coefficients of the edges in the matrix."""
        if self.options.parametrization == 'laplacian':
            return self.existing(self.grown(F.softplus(logits)))
        if self.options.parametrization == 'symmetric':
            return self.each_level(sibling_normalized, self.existing(logits))
        return self.existing(logits)

    def weight_gradients(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of the logits given that of `weights`."""
        if self.options.parametrization == 'laplacian':
            grad = self.grown(torch.sigmoid(logits).mul_(grad))
        elif self.options.parametrization == 'symmetric':
            grad = self.each_level(sibling_normalized_gradient, grad, self.existing(logits))
        return self.existing(grad)

    def grown(self, x: Tensor) -> Tensor:
        """Multiply the rows of each level in place by 4^level."""
        for n in range(1, len(self.nodes.levels) - 1):
            x[self.nodes.rows[n]].mul_(4.0 ** n)
        return x

    def each_level(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply function(*maps, level, rho) to the maps of each level."""
        nodes, result = self.nodes, torch.empty_like(tensors[0])
        for n, level in enumerate(nodes.levels[:-1]):
            maps = function(*(nodes.maps(x[nodes.rows[n]], n) for x in tensors), level, self.options.rho)
            nodes.maps(result[nodes.rows[n]], n).copy_(maps)
        return result

    def factors(self, weights: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Return 1 / S of all nodes, and -C / S and -B / S of those with a parent (`quadtree_solve.coefficients`)."""
        nodes, laplacian = self.nodes, self.options.parametrization == 'laplacian'
        scale, up = weights.new_ones(nodes.starts[-1], weights.shape[1]), torch.empty_like(weights)
        carried = None                   # e of the Laplacian, S of the others; None for 1
        for n in range(len(nodes.levels) - 1):
            edge, inverse, factor = weights[nodes.rows[n]], scale[nodes.rows[n]], up[nodes.rows[n]]
            if laplacian:
                torch.add(edge, 1.0 if carried is None else carried, out=inverse).reciprocal_()
                torch.mul(edge, inverse, out=factor)
                added = factor if carried is None else factor * carried
            else:
                if carried is not None:
                    torch.reciprocal(carried, out=inverse)
                torch.mul(edge, inverse, out=factor)
                added = factor * edge if self.options.parametrization == 'skew' else -factor * edge
            carried = nodes.sum_children(added, n).add_(1.0)
        if carried is not None:
            torch.reciprocal(carried, out=scale[nodes.edges:])
        if laplacian:
            return scale, up, up
        return (scale, up, -up) if self.options.parametrization == 'skew' else (scale, up.neg_(), up)

    def solve(self, first: Tensor, inner: Tensor, scale: Tensor, up: Tensor, down: Tensor, out: Tensor) -> None:
        """Write x of the leaves to `out` and x of the inner nodes to `inner`, given their right-hand sides.

        first, out: (leaves, C); inner: (rows - leaves, C); the others (rows, heads)."""
        nodes, right = self.nodes, first
        for n in range(len(nodes.levels) - 1):
            pushed = (self.split(right) * up[nodes.rows[n], :, None]).flatten(1)
            right = inner[nodes.inner[n + 1]].add_(nodes.sum_children(pushed, n))
        torch.mul(self.split(first), scale[:nodes.leaves, :, None], out=self.split(out))
        self.split(inner).mul_(scale[nodes.leaves:, :, None])
        for n in reversed(range(len(nodes.levels) - 1)):
            x = inner[nodes.inner[n]] if n else out
            above = self.split(self.above(inner, nodes.rows[n]))
            self.split(x).addcmul_(down[nodes.rows[n], :, None], above)

    def edge_gradients(self, adjoint: Tensor, adjoint_inner: Tensor, x: Tensor, x_inner: Tensor) -> Tensor:
        """Return the gradients of the weights, given the adjoint and x of the leaves and of the inner nodes."""
        nodes, result = self.nodes, x.new_empty(self.nodes.edges, self.heads)
        ones = x.new_ones(x.shape[1] // self.heads)      # a product with ones is faster than a sum over a few channels
        if not nodes.edges:
            return result
        for rows, g, y in ((slice(0, nodes.leaves), adjoint, x),
                           (slice(nodes.leaves, nodes.edges), adjoint_inner, x_inner)):
            g, y = g[:rows.stop - rows.start], y[:rows.stop - rows.start]
            g_above, y_above = self.above(adjoint_inner, rows), self.above(x_inner, rows)
            if self.options.parametrization == 'laplacian':
                products = g_above.sub_(g).mul_(torch.sub(y, y_above, out=y_above))
            elif self.options.parametrization == 'skew':
                products = g_above.mul_(y).sub_(y_above.mul_(g))
            else:
                products = g_above.mul_(y).add_(y_above.mul_(g)).neg_()
            with without_autocast(products):
                torch.mv(products.view(-1, len(ones)), ones, out=result[rows].view(-1))
        return result

    def bias_gradients(self, grad: Tensor, bias: Tensor) -> Tensor:
        """Return the gradient of the biases given that of the logits: sums over the cells of a level and place."""
        result = torch.zeros_like(bias, dtype=self.dtype)
        for n, level in enumerate(self.nodes.levels[:-1]):
            cells = self.nodes.maps(grad[self.nodes.rows[n]], n).sum(0)                      # (heads, H_n, W_n)
            for row in (0, 1):
                for column in (0, 1):
                    places = cells[:, (row - level.top) % 2::2, (column - level.left) % 2::2]
                    result[min(n, len(bias) - 1), row, column].add_(places.sum((1, 2)))
        return result.to(bias.dtype)

    def product_gradients(self, grad: Tensor, q: Tensor, means: Tensor, dmeans: Tensor) -> Tensor:
        """Return the gradient of q of the leaves given that of the logits, and add those of the means to `dmeans`.

        q: (leaves, heads * E); means, dmeans: (rows - leaves, 2 heads * E), those of q, then those of k."""
        nodes, dim = self.nodes, q.shape[1]
        if not nodes.edges:
            return torch.zeros_like(q)
        grad = (grad * (dim // self.heads) ** -0.5).unsqueeze(-1)
        dqueries = self.above(means[:, dim:], slice(None))
        self.split(dqueries).mul_(grad)
        dmeans[:nodes.edges - nodes.leaves, :dim] += dqueries[nodes.leaves:]
        for n in range(len(nodes.levels) - 1):
            queries = self.split(means[nodes.inner[n], :dim] if n else q)
            dmeans[nodes.inner[n + 1], dim:] += nodes.sum_children((queries * grad[nodes.rows[n]]).flatten(1), n)
        return dqueries[:nodes.leaves]


def exact_dtype(q: Optional[Tensor], v: Tensor) -> torch.dtype:
    """The dtype of the arithmetic."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    return dtype if q is None else torch.promote_types(q.dtype, dtype)


def _as_heads(x: Tensor, like: Tensor) -> Tensor:
    """(leaves, heads * D) -> (B, heads, H, W, D), the shape of `like`, in its dtype."""
    batch, heads, height, width, dim = like.shape
    return x.view(batch, height, width, heads, dim).permute(0, 3, 1, 2, 4).to(like.dtype)


def saved_shapes(q: Optional[Tensor], v: Tensor, options: Options) -> Tuple[Sequence[int], Sequence[int]]:
    """Return the shapes of the tensors that the backward pass needs (see `forward`)."""
    batch, heads, _, _, dim = v.shape
    sizes = [batch * level.height * level.width for level in options.levels(v)]
    width = 0 if q is None else 2 * q.shape[-1]
    return (sum(sizes[1:]), heads * (dim + width)), (sum(sizes[:-1]), heads)


def forward(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor, mask: Optional[Tensor],
            options: Options) -> Tuple[Tensor, Tensor, Tensor]:
    """Return the output, what inner nodes have (x, then the means of q and of k) and the logits."""
    layer = _Layer(v, mask, options, exact_dtype(q, v))
    nodes = layer.nodes
    channels, leaves = v.shape[1] * v.shape[4], [layer.leaves(x) for x in ((v,) if q is None else (v, q, k))]
    out, inner = torch.empty_like(leaves[0], memory_format=torch.contiguous_format), layer.means(*leaves)
    logits = layer.logits(None if q is None else leaves[1], inner[:, channels:], bias)
    weights = layer.weights(logits)
    layer.solve(leaves[0], inner[:, :channels], *layer.factors(weights), out)
    if has_nonfinite(inner[nodes.inner[len(nodes.levels) - 1], :channels]):
        edges = [nodes.maps(weights[nodes.rows[n]], n) for n in range(len(nodes.levels) - 1)]
        raise_for_singular_quadtree('quadtree_attention', edges, nodes.levels, options.parametrization)
    return _as_heads(out, v), inner, logits


def backward(grad: Tensor, q: Optional[Tensor], k: Optional[Tensor], bias: Tensor, mask: Optional[Tensor], out: Tensor,
             inner: Tensor, logits: Tensor, options: Options) -> List[Tensor]:
    """Return the gradients of v, bias and, unless they are None, of q and k."""
    layer = _Layer(out, mask, options, inner.dtype)
    channels = out.shape[1] * out.shape[4]
    scale, up, down = layer.factors(layer.weights(logits))
    right = layer.rows(grad)
    dv, dinner = torch.empty_like(right, memory_format=torch.contiguous_format), torch.zeros_like(inner)
    layer.solve(right, dinner[:, :channels], scale, down, up, dv)        # the transpose exchanges up and down
    solution = layer.rows(out)
    dlogits = layer.edge_gradients(dv, dinner[:, :channels], solution, inner[:, :channels])
    dlogits = layer.weight_gradients(dlogits, logits)
    dbias, leaves = layer.bias_gradients(dlogits, bias), [dv]
    if q is not None:
        dq = layer.product_gradients(dlogits, layer.leaves(q), inner[:, channels:], dinner[:, channels:])
        leaves += [dq, torch.zeros_like(dq)]
    layer.spread(dinner, *leaves)
    dv, *dqk = (_as_heads(layer.existing(x), like) for x, like in zip(leaves, (out, q, k)))
    return [dv, dbias, *dqk]


def quadtree_attention_export(q: Optional[Tensor], k: Optional[Tensor], v: Tensor, bias: Tensor,
                              mask: Optional[Tensor], options: Options) -> Tensor:
    """Compute the operator by operations that exporters know."""
    return composed(q, k, v, bias, mask, options.parametrization, options.levels(v),
                    partial(quadtree_solve, rho=options.rho, backend='export'))
