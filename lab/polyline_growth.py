"""Growth of the time and memory of the polyline scan with the grid, also beside the N x N mask (PPMA, Figure 10)."""
import math
from functools import partial
from typing import Any, Dict, Sequence

import torch

from subquad import kernels
from subquad.tools.bench.graphs import time_calls
from subquad.tools.bench.measure import peak_memory, time_interleaved
from subquad.tools.bench.metrics import metric, peak_memory_metrics, speedup
from subquad.tools.bench.operators import attention_inputs, operator_call


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
