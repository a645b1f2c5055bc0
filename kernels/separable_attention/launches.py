"""Launches of every kernel on meta tensors, for `aot`, and what the loops of the kernels work on."""
from functools import partial
from typing import Callable, Iterator, Sequence, Tuple

import torch

ITEMS = {
    **{f'separable_attention_{name}': ('element', lambda c: c['BLOCK_N'] * c['BLOCK_D'])
       for name in ('fwd_context', 'fwd_apply', 'bwd_value')},
    **{f'separable_attention_{name}': ('logit', lambda c: c['BLOCK_Q'] * c['BLOCK_L'])
       for name in ('fwd_softmax', 'bwd_query')},
}


def launches(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    for latents in (1, 8):
        for keys in ('keys', 'mapped keys'):
            yield (f'separable_attention, {latents} latent, {keys}, 32 x 32',
                   partial(_launch, 32, latents, keys == 'mapped keys'))


def _launch(side: int, latents: int, key_map: bool, dtype: torch.dtype, dim: int) -> None:
    from . import triton, triton_backward
    x = torch.empty(2, side, side, dim, dtype=dtype, device='meta')
    query = x.new_empty(2, side, side, latents)
    weight = x.new_empty(dim, dim) if key_map else None
    _, statistics, summed = triton.forward(query, x, x, weight, None, (2, 2), 'pixel')
    triton_backward.backward(x, query, x, x, weight, None, statistics, summed, (2, 2), 'pixel')
