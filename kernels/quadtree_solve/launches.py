"""Launches of every kernel on meta tensors, for `aot`, and what the loops of the kernels work on."""
from functools import partial
from typing import Callable, Iterator, Sequence, Tuple

import torch

from ..trees import quadtree_levels

ITEMS = {f'quadtree_solve_{part}': ('element', lambda c: c['SIDE'] ** 2 * c['BLOCK_D'])
         for part in ('up', 'upper', 'down')}


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    """Trees of one tile, and trees of tiles of either side."""
    for side, parametrization in ((7, 'symmetric'), (14, 'laplacian'), (28, 'skew'),
                                  (200, 'laplacian')):
        yield (f'quadtree_solve, {parametrization}, {side} x {side}',
               partial(_launch, side, parametrization))


def _launch(side: int, parametrization: str, dtype: torch.dtype, dim: int) -> None:
    from . import triton
    levels, heads = quadtree_levels(side, side), 4
    values = [torch.empty(2, x.height, x.width, heads, dim, dtype=dtype, device='meta')
              .permute(0, 3, 1, 2, 4) for x in levels]
    edges = [torch.empty(2, x.height, x.width, heads, device='meta').permute(0, 3, 1, 2)
             for x in levels[:-1]]
    solution = triton.forward(values, edges, parametrization, (0, 0))
    triton.backward(values, solution, edges, parametrization, (0, 0))
