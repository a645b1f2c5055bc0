"""How the time and memory of a quad-tree solve grow with the grid, compared with softmax attention."""
from functools import partial
from typing import Any, Dict, Sequence

import torch
import torch.nn.functional as F

from subquad.tools.bench.measure import peak_memory, time_interleaved
from subquad.tools.bench.metrics import metric, peak_memory_metrics, speedup
from subquad.tools.bench.operators import operator_call, tree_inputs, with_gradients


def tree_growth(repeats: int, *, sides: Sequence[int], tokens: int, heads: int = 2, dim: int = 32,
                attention_until: int = 112, max_growth: float = 1.3, max_gradient_memory: float = 0.5
                ) -> Dict[str, Any]:
    """Time the solve for a constant number of tokens on growing grids, and softmax attention over the same tokens.

    Args:
        repeats: Rounds of timing.
        sides: Growing grid sides in tokens; the batch shrinks accordingly.
        tokens: Number of tokens of all images together.
        heads: Number of heads.
        dim: Channels of a head.
        attention_until: Largest side for attention, whose time grows with it.
        max_growth: Target: time of the largest side over the time of the smallest.
        max_gradient_memory: Target: memory of the solve with gradients over the memory of autograd through the levels.
    """
    calls, solves = {}, {}
    for side in sides:
        batch = max(1, tokens // side ** 2)
        solves[side] = tree_inputs(batch, heads, (side, side), dim)
        calls[f'portable {side}x{side}'] = partial(operator_call('quadtree_solve', 'portable'), *solves[side])
        if side <= attention_until:
            q = torch.randn(batch, heads, side * side, dim)
            calls[f'sdpa {side}x{side}'] = partial(F.scaled_dot_product_attention, q, q, q)
    first, last = sides[0], sides[-1]
    with torch.no_grad():
        calls[f'portable {first}x{first}']()
        peaks = {f'portable {side}x{side}': peak_memory(calls[f'portable {side}x{side}'], True) for side in sides}
        times = time_interleaved(calls, repeats)
    gradients = {name: peak_memory(with_gradients(operator_call('quadtree_solve', name), solves[last]))
                 for name in ('portable', 'loop')}
    growth = {name: speedup(times, f'{name} {first}x{first}', f'{name} {side}x{side}')
              for name, side in (('portable', last), ('sdpa', attention_until))}
    return {'times_ms': times, 'peak_mb': peaks, 'floor': None, 'metrics': [
        metric(f'quad-tree solve: time at {last}x{last} / time at {first}x{first}, same number of tokens',
               growth['portable'], 'x', at_most=max_growth),
        metric(f'softmax attention: time at {attention_until}x{attention_until} / time at {first}x{first}, '
               'same number of tokens', growth['sdpa'], 'x'),
        metric('memory with gradients / memory of autograd through the levels',
               gradients['portable'] / gradients['loop'], 'x', at_most=max_gradient_memory),
        *peak_memory_metrics(peaks)]}
