"""Launches of every kernel on meta tensors, for `aot`."""
from functools import partial
from typing import Callable, Iterator, Sequence, Tuple

import torch


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    for form in ('no step logs', 'states', 'both directions'):
        yield f'eos_matmul, {form}', partial(_launch, form)


def _launch(form: str, dtype: torch.dtype, keys: int) -> None:
    from . import triton
    i, grad = (torch.empty(2, 4, 56, max(32, keys), dtype=dtype, device='meta') for _ in range(2))
    e, s, a, b = (torch.empty(2, 4, 56, keys, dtype=dtype, device='meta') for _ in range(4))
    gk = None if form == 'no step logs' else torch.empty(2, 4, 56, keys, device='meta')
    state = torch.empty(2, 4, keys, max(32, keys), device='meta') if form == 'states' else None
    direction = 'both' if form == 'both directions' else 'forward'
    _, read, last = triton.forward(i, e, s, a, b, gk, state, direction, True, state is not None)
    triton.backward(grad, None if state is None else last, i, e, s, a, b, gk, state, read,
                    direction)
