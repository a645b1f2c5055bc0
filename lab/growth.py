"""How time and memory of operators grow with the grid or the line, beside what they replace."""
import math
import time
from functools import partial
from typing import Any, Callable, Dict, List, Sequence

import torch
import torch.nn.functional as F

from subquad import kernels
from subquad.kernels import eos_elementwise, eos_matmul
from subquad.kernels.eos_scan import DecayGenerator
from subquad.tools.bench.graphs import time_calls
from subquad.tools.bench.measure import interleaved, peak_memory, percentiles, time_interleaved
from subquad.tools.bench.metrics import metric, peak_memory_metrics, speedup
from subquad.tools.bench.operators import attention_inputs, operator_call, tree_inputs, with_gradients


def scan_growth(repeats: int, *, sides: Sequence[int], heads: int = 8, dim: int = 32,
                max_exponent: float) -> Dict[str, Any]:
    """Time the scan on growing square grids and fit the exponent p of time ~ tokens^p from the first to the last.

    Args:
        repeats: Rounds of timing.
        sides: Growing grid sides in tokens.
        heads: Number of heads.
        dim: Channels of a head.
        max_exponent: Target: the exponent.
    """
    scan = partial(kernels.polyline_scan, paths='both', backend='portable')
    inputs = {f'{n}x{n}': (torch.randn(1, heads, n, n, dim), *(-torch.rand(1, heads, n, n) for _ in range(2)))
              for n in sides}
    # Short and long axes take different code paths; this warm-up takes both before memory is measured.
    scan(torch.randn(1, 1, 2, 65, 1), -torch.rand(1, 1, 2, 65), -torch.rand(1, 1, 2, 65))
    calls = {name: partial(scan, *tensors) for name, tensors in inputs.items()}
    first, last = list(calls)[0], list(calls)[-1]
    with torch.no_grad():
        peaks = {last: peak_memory(calls[last], beyond_output=True)}
        times = time_interleaved(calls, repeats)
    exponent = math.log(speedup(times, first, last)) / (2 * math.log(sides[-1] / sides[0]))
    return {'times_ms': times, 'peak_mb': peaks, 'floor': None, 'metrics': [
        metric('growth exponent of time over tokens', exponent, '', at_most=max_exponent),
        *peak_memory_metrics(peaks)]}


def scan_against_mask(repeats: int, *, sides: Sequence[int], dim: int = 64, device: str = 'cpu',
                      dense_until: int = 96) -> Dict[str, Any]:
    """Time L x by the N x N mask and by Algorithm 1 on growing grids (PPMA, Figure 10).

    Args:
        repeats: Rounds of timing.
        sides: Grid sides in tokens.
        dim: Channels of the one head.
        device: 'cpu' or 'cuda'.
        dense_until: Largest side for the mask, whose memory grows as side^4.
    """
    calls = {}
    scan = 'triton' if device == 'cuda' else 'portable'
    for side in sides:
        inputs = attention_inputs(1, 1, (side, side), dim, torch.float32, device)
        for name in (scan, 'dense'):
            if name == scan or side <= dense_until:
                calls[f'{name} {side}x{side}'] = partial(operator_call('polyline_scan', name), *inputs)
    with torch.no_grad():
        for name in (scan, 'dense'):
            operator_call('polyline_scan', name)(*attention_inputs(1, 1, (2, 65), dim, torch.float32, device))
        peaks = {name: peak_memory(call, True, device) for name, call in calls.items()}
        times = time_calls(calls, repeats, device=device)
    side = max(s for s in sides if s <= dense_until)
    ratio = times.speedup(f'{scan} {side}x{side}', f'dense {side}x{side}')
    return {**times.record(), 'peak_mb': peaks, 'floor': None, 'metrics': [
        metric(f'speed-up of {scan} over dense at {side}x{side}', ratio, 'x'), *peak_memory_metrics(peaks)]}


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


def _recurrences(length: int, heads: int, keys: int, dim: int) -> Dict[str, Callable[[], Any]]:
    """Return a recurrence of each kind over one line: products of chunks, a loop over tokens, and the delta rule."""
    i = torch.randn(1, heads, length, dim)
    e, s = (F.normalize(torch.randn(1, heads, length, keys), dim=-1) for _ in range(2))
    log = -torch.rand(1, heads, length, keys)
    generator = DecayGenerator(log, torch.randn(heads, keys, dim), 'k')
    return {
        'rank one': partial(eos_elementwise, i, e, s, log_o_k=log, backend='portable'),
        'full rank': partial(eos_elementwise, i, e, s, generator=generator, backend='portable'),
        'delta rule': partial(eos_matmul, i, e, s, a=e, b=-e, backend='portable'),
    }


def line_growth(repeats: int, *, lengths: Sequence[int], heads: int = 1, keys: int = 16, dim: int = 32,
                max_exponent: float = 1.2) -> Dict[str, Any]:
    """Time the recurrences on growing lines and fit the exponent p of time ~ tokens^p from the first to the last.

    Times are the processor's for this process, so that other programs do not count.

    Args:
        repeats: Rounds of timing.
        lengths: Growing numbers of tokens.
        heads: Number of heads.
        keys: Keys of a head's memory.
        dim: Channels of a head.
        max_exponent: Target: the exponents.
    """
    calls = {f'{name} {length}': call for length in lengths
             for name, call in _recurrences(length, heads, keys, dim).items()}
    samples: Dict[str, List[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for name, call in interleaved(calls, repeats):
            start = time.process_time()
            call()
            samples[name].append((time.process_time() - start) * 1e3)
    times = {name: percentiles(found) for name, found in samples.items()}
    first, last = lengths[0], lengths[-1]
    return {'times_ms': times, 'peak_mb': {}, 'floor': None, 'metrics': [
        metric(f'{name}: growth exponent of time over tokens',
               math.log(speedup(times, f'{name} {first}', f'{name} {last}')) / math.log(last / first), '',
               at_most=max_exponent) for name in ('rank one', 'full rank', 'delta rule')]}
