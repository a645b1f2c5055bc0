"""Growth of the time of the recurrences with the length of their line."""
import math
import time
from functools import partial
from typing import Any, Callable, Dict, List, Sequence

import torch
import torch.nn.functional as F

from subquad.kernels import eos_elementwise, eos_matmul
from subquad.kernels.eos_scan import DecayGenerator
from subquad.tools.bench.measure import interleaved, percentiles
from subquad.tools.bench.metrics import metric, speedup


def _calls(length: int, heads: int, keys: int, dim: int) -> Dict[str, Callable[[], Any]]:
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
    calls = {f'{name} {length}': call for length in lengths for name, call in _calls(length, heads, keys, dim).items()}
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
