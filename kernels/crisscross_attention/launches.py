"""Launches of every kernel on meta tensors, for `aot`."""
from functools import partial
from typing import Callable, Iterator, Sequence, Tuple

import torch

from ..common.checks import MASK_MODES


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    for mask_mode in MASK_MODES:
        for length in (lengths[-1], 100):
            yield (f'crisscross_attention, {mask_mode}, lines of {length}',
                   partial(_launch, length, mask_mode))


def _launch(length: int, mask_mode: str, dtype: torch.dtype, dim: int) -> None:
    from . import triton
    q, k, v, grad = (torch.empty(2, 4, length, length, dim, dtype=dtype, device='meta')
                     for _ in range(4))
    steps = [torch.empty(2, 4, length, length, device='meta') for _ in range(2)]
    saved = triton.forward(q, k, v, *steps, mask_mode, 'both', True)
    triton.backward(grad, [q, k, v, *steps], list(saved), mask_mode, 'both')
