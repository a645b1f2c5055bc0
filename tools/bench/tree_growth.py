"""How the time and memory of a quad-tree solve grow with the grid, beside softmax attention's."""
from functools import partial
from typing import Any, Dict, Sequence

import torch
import torch.nn.functional as F

from . import baselines as field
from .measure import peak_memory, time_interleaved
from .records import figure


def tree_growth(repeats: int, *, sides: Sequence[int], tokens: int, heads: int = 2, dim: int = 32,
                attention_until: int = 112, growth: float = 1.3, autograd: float = 0.5) -> Dict[str, Any]:
    """Time of the solve at a constant number of tokens, in more and more images of smaller sides, and of softmax
    attention over the same tokens.

    Args:
        repeats: rounds of timing.
        sides: of the grids, growing.
        tokens: of all images together.
        heads, dim: of both.
        attention_until: the largest side for attention, whose time grows with it.
        growth: target, at most: the time of the largest side over that of the smallest.
        autograd: target, at most: memory of the solve with its gradient over that of the level loop with autograd's.
    """
    calls, solves = {}, {}
    for side in sides:
        batch = max(1, tokens // side ** 2)
        inputs = field.tree_inputs(batch, heads, (side, side), dim)
        name = f'{side}x{side}'
        calls[f'portable {name}'] = partial(field.operator_call('quadtree_solve', 'portable'), *inputs)
        solves[side] = inputs
        if side <= attention_until:
            q = torch.randn(batch, heads, side * side, dim)
            calls[f'sdpa {name}'] = partial(F.scaled_dot_product_attention, q, q, q)
    first, last = sides[0], sides[-1]
    with torch.no_grad():
        calls[f'portable {first}x{first}']()
        peaks = {f'portable {side}x{side}': peak_memory(calls[f'portable {side}x{side}'], True) for side in sides}
        times = time_interleaved(calls, repeats)
    trained = {name: peak_memory(field.step(field.operator_call('quadtree_solve', name), solves[last]))
               for name in ('portable', 'loop')}
    ratio = {kind: times[f'{kind} {side}x{side}']['p50'] / times[f'{kind} {first}x{first}']['p50']
             for kind, side in (('portable', last), ('sdpa', attention_until))}
    return {'times_ms': times, 'peak_mb': peaks, 'floor': None, 'figures': [
        figure(f'time of {last} x {last} over {first} x {first}, the same number of tokens', ratio['portable'], 'x',
               at_most=growth),
        figure(f'the same of attention, {attention_until} x {attention_until}', ratio['sdpa'], 'x'),
        figure('memory of the gradient over that by autograd through the levels', trained['portable'] / trained['loop'],
               'x', at_most=autograd),
        *(figure(f'peak memory, {name}', peak, 'MB') for name, peak in peaks.items())]}
