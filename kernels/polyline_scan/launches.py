"""Launches of every kernel on meta tensors, for `aot`, and what the loops of the kernels work on."""
from functools import partial
from typing import Callable, Iterator, Sequence, Tuple

import torch

# `row_products`, which the scan shares with attention, is in `common/tiles.py`.
ITEMS = {name: ('element', lambda c: c['BLOCK'] * c['BLOCK_D'])
         for name in ('polyline_scan_fwd', 'polyline_scan_bwd', 'row_products')}


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    for length in (*lengths, 100, 256, 600):
        yield f'polyline_scan, lines of {length}', partial(_launch, length)


def _launch(length: int, dtype: torch.dtype, dim: int) -> None:
    from . import triton
    x = torch.empty(2, 4, length, 3, dim, dtype=dtype, device='meta')
    steps = torch.empty(2, 4, length, 3, device='meta')
    triton.backward(triton.forward(x, steps, 2, torch.float32), x, steps, 2)
