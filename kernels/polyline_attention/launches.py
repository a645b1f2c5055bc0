"""Launches of every kernel on meta tensors, for `aot`, and what the loops of the kernels work on."""
from functools import partial
from typing import Callable, Iterator, Mapping, Sequence, Tuple

import torch

from ..common.checks import MASK_MODES


def _grid_pairs(constants: Mapping[str, int]) -> int:
    """Pairs of a tile of ROWS x COLS queries and one of KEY_ROWS x COLS keys, blocks of a grid both."""
    return constants['ROWS'] * constants['COLS'] * constants['KEY_ROWS'] * constants['COLS']


ITEMS = {
    **{f'polyline_attention_{part}': ('pair', _grid_pairs)
       for part in ('fwd', 'bwd_query', 'bwd_key')},
    **{f'polyline_attention_running_{part}': ('pair', lambda c: c['BLOCK'] ** 2 * c.get('ROWS', 1))
       for part in ('fwd', 'bwd')},
}


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    for length in lengths:
        for mask_mode, paths in (*((name, 'both') for name in MASK_MODES), ('additive', 'v2h'),
                                 ('additive', 'h2v')):
            form = mask_mode if paths == 'both' else paths
            yield (f'polyline_attention, {form}, {length} x {length}',
                   partial(_launch, length, mask_mode, paths))


def _launch(length: int, mask_mode: str, paths: str, dtype: torch.dtype, dim: int) -> None:
    from . import triton
    q, k, v, grad = (torch.empty(2, 4, length, length, dim, dtype=dtype, device='meta')
                     for _ in range(4))
    sa, sb = (torch.empty(2, 4, length, length, device='meta') for _ in range(2))
    triton.forward(q, k, v, sa, sb, mask_mode, paths, False)
    saved = triton.forward(q, k, v, sa, sb, mask_mode, paths, True)
    triton.backward(grad, q, k, v, sa, sb, *saved, mask_mode, paths)
