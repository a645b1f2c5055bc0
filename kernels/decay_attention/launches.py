"""Launches of every kernel on meta tensors, for `aot`, and what the loops of the kernels work on."""
from functools import partial
from typing import Callable, Iterator, Sequence, Tuple

import torch

from ..common.checks import MASK_MODES

ITEMS = {f'decay_attention_{part}{line}': ('pair', lambda c: c['BLOCK'] ** 2 * c.get('ROWS', 1))
         for part in ('fwd', 'bwd', 'transposed') for line in ('', '_line')}


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    for length in (*lengths, 100):
        for mask_mode in MASK_MODES:
            yield (f'decay_attention, {mask_mode}, lines of {length}',
                   partial(_launch, length, mask_mode))


def _launch(length: int, mask_mode: str, dtype: torch.dtype, dim: int) -> None:
    from . import triton, triton_backward
    q, k, v, grad = (torch.empty(2, 4, length, length, dim, dtype=dtype, device='meta')
                     for _ in range(4))
    steps = torch.empty(2, 4, length, length, device='meta')
    saved = triton.forward(q, k, v, steps, 'row', mask_mode, True)
    triton_backward.backward(grad, q, k, v, steps, *saved, 'row', mask_mode)
