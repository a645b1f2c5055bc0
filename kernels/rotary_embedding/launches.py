"""Launches of every kernel on meta tensors, for `aot`."""
from typing import Callable, Iterator, Sequence, Tuple

import torch


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    yield 'rotary_embedding, 14 x 14', _launch


def _launch(dtype: torch.dtype, dim: int) -> None:
    from . import triton
    q = torch.empty(2, 196, 4, dim, dtype=dtype, device='meta').transpose(1, 2)
    triton.forward(q, q, torch.empty(196, dim // 2, 2, device='meta'), 0.25, False)
