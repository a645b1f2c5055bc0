"""Sweeps of the tree solve: by generations for general trees, and cyclic reduction for paths.

Row of node v, with parent p and children ch(v):  A_v x_v + B_v x_p + sum over ch(v) of C_c x_c = u_v.

    up    S_v = A_v - sum C_c W_c,   r_v = u_v - sum C_c y_c,   W_v = S_v^-1 B_v,   y_v = S_v^-1 r_v
    down  x_root = y_root,           x_v = y_v - W_v x_p

This is section 3 of Myosotis (arXiv 2509.20503) with the signs of its equations 9 and 10. Its algorithm 1 drops a sign.
"""
from typing import Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ..common.checks import exporting, transforming
from .topology import Generation, Tree


def product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply blocks (..., m, m) and (..., m, r)."""
    return x * y if x.shape[-1] == 1 else x @ y


def divide(blocks: Tensor, *right: Tensor) -> List[Tensor]:
    """Return blocks^-1 y for each y of `right`."""
    if blocks.shape[-1] == 1:
        inverse = blocks.reciprocal()
        return [inverse * y for y in right]
    right, sizes = torch.cat(right, -1), [y.shape[-1] for y in right]
    # In PyTorch 2.13, `solve` has wrong gradients of tangents, and `lu_solve` right ones.
    if not exporting() and transforming():
        return list(torch.linalg.lu_solve(*torch.linalg.lu_factor(blocks), right).split(sizes, -1))
    return list(torch.linalg.solve(blocks, right).split(sizes, -1))


def correlated(blocks: Tensor, noise: Tensor) -> Tensor:
    """Return samples with precision `blocks` = L L^H from white noise: L^-H noise."""
    return torch.linalg.solve_triangular(dagger(torch.linalg.cholesky(blocks)), noise, upper=True)


def dagger(x: Tensor) -> Tensor:
    """Return the conjugate transpose of blocks."""
    return x.mT.conj()


class Eliminated(NamedTuple):
    """Pivots S, W (`down`; None for roots) and y (`local`) of each generation, roots first."""
    pivots: List[Tensor]
    down: List[Optional[Tensor]]
    local: List[Tensor]


def eliminate(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor,
              check: Optional[Callable[[Generation, Tensor], None]] = None) -> Eliminated:
    """Sweep up; `check` is called with each generation's pivots before the division by them."""
    pivots, down, local = [], [], []
    m = b.shape[-1]
    below = None
    for depth in reversed(range(len(tree.generations))):
        generation = tree.generations[depth]
        if a is None:
            pivot = torch.eye(m, dtype=b.dtype, device=b.device).expand(*b.shape[:-3], len(generation.nodes), m, m)
        else:
            pivot = generation.of(a)
        right = generation.of(u)
        if below is not None:
            push = -below.of(c)
            pivot = below.add_to_parents(pivot, product(push, down[-1]))
            right = below.add_to_parents(right, product(push, local[-1]))
        if check is not None:
            check(generation, pivot)
        if depth:
            w, y = divide(pivot, generation.of(b), right)
        else:
            (y,), w = divide(pivot, right), None
        for kept, value in ((pivots, pivot), (down, w), (local, y)):
            kept.append(value)
        below = generation
    return Eliminated(pivots[::-1], down[::-1], local[::-1])


def substitute(tree: Tree, down: List[Optional[Tensor]], local: List[Tensor]) -> Tensor:
    """Sweep down, and return x (..., V, m, r)."""
    x = [local[0]]
    for generation, w, y in zip(tree.generations[1:], down[1:], local[1:]):
        x.append(y - product(w, generation.of_parents(x[-1])))
    return tree.in_order(x)


def reduce_path(a: Tensor, lower: Tensor, upper: Tensor, u: Tensor, pivots: Optional[List[Tensor]] = None,
                sample: bool = False) -> Tensor:
    """Solve lower[k] x[k-1] + a[k] x[k] + upper[k] x[k+1] = u[k] by cyclic reduction.

    Each step eliminates every second unknown, so there are log2 L steps and O(L) operations. Blocks are (..., L, m, m),
    u is (..., L, m, r), and lower[0] and upper[L-1] are zero. The blocks that are inverted are appended to `pivots`.
    With `sample`, u is white noise and x has precision T: given its neighbors, an unknown has the inverted block as
    precision."""
    if pivots is not None:
        pivots.append(a[..., ::2, :, :])
    if u.shape[-3] == 1:
        return correlated(a, u) if sample else divide(a, u)[0]
    low, up, local = divide(*(x[..., ::2, :, :] for x in (a, lower, upper, u)))        # unknowns 0, 2, 4, ...
    if sample:
        local = correlated(a[..., ::2, :, :], u[..., ::2, :, :])
    count = u.shape[-3] // 2
    before, after = slice(0, count), slice(1, count + 1)

    def around(x: Tensor) -> Tuple[Tensor, Tensor]:
        """Return x of the even neighbors of each odd unknown; zero if the last has none after it."""
        if x.shape[-3] == count:
            x = torch.cat([x, torch.zeros_like(x[..., :1, :, :])], -3)
        return x[..., before, :, :], x[..., after, :, :]

    a, lower, upper, u = (x[..., 1::2, :, :] for x in (a, lower, upper, u))
    (low0, low1), (up0, up1), (local0, local1) = around(low), around(up), around(local)
    odd = reduce_path(a - product(lower, up0) - product(upper, low1), -product(lower, low0), -product(upper, up1),
                      u if sample else u - product(lower, local0) - product(upper, local1), pivots, sample)
    nothing = torch.zeros_like(odd[..., :1, :, :])
    evens = local.shape[-3]
    left = torch.cat([nothing, odd], -3)[..., :evens, :, :]
    right = odd if evens == count else torch.cat([odd, nothing], -3)
    even = local - product(low, left) - product(up, right)
    both = torch.stack([even[..., :count, :, :], odd], -3).flatten(-4, -3)
    return both if evens == count else torch.cat([both, even[..., count:, :, :]], -3)


def as_path(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return diagonal, lower and upper blocks of a tree without branches in path order, and that order."""
    order = tree.chain.to(b.device)
    root = (tree.parents[tree.chain] < 0).to(b.device)[:, None, None]
    m = b.shape[-1]
    if a is None:
        a = torch.eye(m, dtype=b.dtype, device=b.device).expand(*b.shape[:-3], len(tree), m, m)
    else:
        a = a.index_select(-3, order)
    upper, to_parent = (x.index_select(-3, order).masked_fill(root, 0) for x in (b, c))
    # C belongs to the child: it multiplies x of node k in the row of node k+1.
    lower = torch.cat([torch.zeros_like(to_parent[..., :1, :, :]), to_parent[..., :-1, :, :]], -3)
    return a, lower, upper, order
