"""Launches of every kernel on meta tensors, for `aot`, and what the loops of the kernels work on."""
from functools import partial
from typing import Callable, Iterator, Sequence, Tuple

import torch

from ..eos_scan.chunks import triton_chunk
from ..eos_scan.problem import RealProblem

ITEMS = {f'eos_elementwise_{part}': ('token', lambda c: c['BLOCK'])
         for part in ('fwd', 'bwd', 'memory')}


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    for form in ('sigmoid', 'exponential', 'constant'):
        yield f'eos_elementwise, full rank, {form}', partial(_launch_full_rank, form)
    for length, direction, steps in (
            *((length, 'both', 'rows') for length in lengths), (100, 'forward', 'rows'),
            *((length, 'both', 'rows and columns') for length in (lengths[-1], 100))):
        yield (f'eos_elementwise, {direction}, steps of {steps}, lines of {length}',
               partial(_launch, length, direction, steps))


def _launch(length: int, direction: str, steps: str, dtype: torch.dtype, dim: int) -> None:
    from . import triton, triton_backward
    i, e = (torch.empty(2, length, 4, n, dtype=dtype, device='meta').transpose(1, 2)
            for n in (dim, max(16, dim // 2)))
    logs = [torch.empty(x.shape, device='meta') if name in steps else None
            for x, name in ((e, 'rows'), (i, 'columns'))]
    chunk = triton_chunk(dtype, length, 64)
    _, states, _ = triton.forward(i, e, e, *logs, None, direction, chunk, True, False)
    triton_backward.backward(i, None, i, e, e, *logs, None, states, direction, chunk)


def _launch_full_rank(form: str, dtype: torch.dtype, keys: int) -> None:
    """sigmoid: z along K. exponential: z along D, with states. constant: o, e and s (H, K, D)."""
    from . import triton_full_rank
    i, grad = (torch.empty(2, 4, 56, max(32, keys), dtype=dtype, device='meta') for _ in range(2))
    e, weight = i.new_empty(2, 4, 56, keys), torch.empty(4, keys, i.shape[3], device='meta')
    state = torch.empty(2, *weight.shape, device='meta')
    z, s, state = {'sigmoid': (e.unsqueeze(-1), e, None),
                   'exponential': (i.unsqueeze(-2), e, state),
                   'constant': (weight.new_empty((1,) * 5), weight.to(dtype), None)}[form]
    expand = e if form != 'constant' else s
    problem = RealProblem(i, expand, s, None, None, z, weight, 'k',
                          'exponential' if form != 'sigmoid' else form, 16.0, state)
    _, states, last = triton_full_rank.forward(problem, 'forward', True, state is not None)
    dfinal = last if state is not None else None
    triton_full_rank.backward(grad, dfinal, problem, states, 'forward')
