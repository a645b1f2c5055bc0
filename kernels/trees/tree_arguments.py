"""Argument checks of the tree solves, and masks of each node's block."""
from typing import List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common import checks
from .grid import Level, quadtree_levels
from .topology import Tree

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_blocks(op: str, tree: Tree, given: Mapping[str, Tensor]) -> None:
    """Check a tree, its blocks a, b, c and right-hand sides u (or `noise`): types, dtypes, devices and shapes."""
    if not isinstance(tree, Tree):
        raise TypeError(f'{op}: tree must be a Tree, got {type(tree).__name__}')
    right = ('u', 'noise')
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f'{op}: {name} must be a float32, float64, complex64 or complex128 tensor, got {came}')
        checks.dense(op, name, x)
        expected = (len(tree), tree.block, x.shape[-1] if name in right and x.ndim else tree.block)
        if x.ndim < 3 or tuple(x.shape[-3:]) != expected:
            last = 'r' if name in right else tree.block
            raise ValueError(f'{op}: {name} must be (..., {len(tree)}, {tree.block}, {last}) for {len(tree)} nodes '
                             f'with blocks of {tree.block}, got {tuple(x.shape)}')
    tensors = list(given.values())
    checks.same_dtype(op, **given)
    if any(x.device != tensors[0].device for x in tensors):
        raise ValueError(f"{op}: {', '.join(given)} must share a device, got "
                         f"{', '.join(str(x.device) for x in tensors)}")
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        raise ValueError(f"{op}: the leading dimensions of {', '.join(given)} must broadcast, got "
                         f"{', '.join(str(tuple(x.shape[:-3])) for x in tensors)}") from None
    for name, x in given.items():
        checks.fits(op, f'{name}, with the leading dimensions of all arguments,', x, (*batch, *x.shape[-3:]))


def own_parts(tree: Tree, a: Optional[Tensor], b: Tensor, c: Tensor, u: Tensor
              ) -> Tuple[Optional[Tensor], Tensor, Tensor, Tensor]:
    """Return the arguments in broadcast shapes, with zeros outside of each node's block (ones on a's diagonal)."""
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (a, b, c, u) if x is not None))
    if tree.sizes is not None:
        own = tree.block_mask(u.device)
        above = own[tree.parents.clamp(min=0).to(u.device)]
        b = b.masked_fill(~(own[:, :, None] & above[:, None]), 0)
        c = c.masked_fill(~(above[:, :, None] & own[:, None]), 0)
        u = u.masked_fill(~own[..., None], 0)
        if a is not None:
            rest = torch.diag_embed((~own).to(a.dtype))
            a = a.masked_fill(~(own[:, :, None] & own[:, None]), 0) + rest
    u = u.expand(*batch, *u.shape[-3:])
    if tree.block > 1:        # division by blocks of size 1 broadcasts over a batch
        a, b, c = (None if x is None else x.expand(*batch, *x.shape[-3:]) for x in (a, b, c))
    else:
        shared = torch.broadcast_shapes(*(x.shape[:-3] for x in (a, b, c) if x is not None))
        a, b, c = (None if x is None else x.expand(*shared, *x.shape[-3:]) for x in (a, b, c))
    return a, b, c, u


def check_levels(op: str, values: List[Tensor], edges: List[Tensor], shift: Sequence[int]) -> List[Level]:
    """Check values and edges of a quad tree, and return its levels."""
    if not values:
        raise ValueError(f'{op}: values must have at least one level, got none')
    named = {**{f'values[{n}]': x for n, x in enumerate(values)}, **{f'edges[{n}]': x for n, x in enumerate(edges)}}
    checks.tensors(op, {name: 5 if name[0] == 'v' else 4 for name in named}, **named)
    checks.same_dtype(op, **{name: x for name, x in named.items() if name[0] == 'v'})
    batch, heads, height, width, dim = values[0].shape
    if 0 in (height, width):
        raise ValueError(f'{op}: values[0] must have at least one leaf, got shape {tuple(values[0].shape)}')
    levels = quadtree_levels(height, width, None, shift)
    if len(values) > len(levels):
        raise ValueError(f'{op}: a tree over {height} x {width} leaves has {len(levels)} levels, got {len(values)}')
    if len(edges) != len(values) - 1:
        raise ValueError(f'{op}: edges must have one tensor for each level except the last ({len(values) - 1}), got '
                         f'{len(edges)}')
    for n, (level, x) in enumerate(zip(levels, values)):
        checks.shapes(op, (f'values[{n}]', x, (batch, heads, *level[:2], dim), f'level {n} of this tree'))
        if n < len(edges):
            checks.shapes(op, (f'edges[{n}]', edges[n], (batch, heads, level.height, level.width), f'level {n}'))
    return levels[:len(values)]
