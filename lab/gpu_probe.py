"""What `python -m lab.gpu_plan` reads from a GPU: `python -m lab.gpu_probe WHAT`.

WHAT is `machine` (versions, clocks, rates of a copy and of matrix products), `timings` (operators by captured graphs)
or `profile` (the kernels that take most of the time of operators and of a training step). The last line of the output
is JSON.
"""
import sys
from typing import Any, Callable, Dict, List

import torch

from subquad.tools.bench import networks
from subquad.tools.bench.graphs import time_calls
from subquad.tools.bench.measure import COPY_BYTES, copy, gemm, gemm_flops
from subquad.tools.bench.operators import OPERATORS, bytes_moved
from subquad.tools.common.output import dumps
from subquad.tools.engine.records import environment

from .tuning import PROBLEMS

_KERNELS = 12          # of a profile, those that take most of the time


def machine() -> Dict[str, Any]:
    """Versions, clocks, the bandwidth of a copy (10^9 bytes/s) and rates of matrix products (10^12 operations/s)."""
    times = time_calls({'copy': copy('cuda'), **{str(dtype): gemm('cuda', dtype) for dtype in
                                                 (torch.float32, torch.bfloat16)}}, 10, device='cuda').ms
    rates = {name: gemm_flops('cuda') / t['p50'] / 1e9 for name, t in times.items() if name != 'copy'}
    return {**environment('cuda'), 'copy_gbs': 2 * COPY_BYTES['cuda'] / times['copy']['p50'] / 1e6,
            'gemm_tflops': rates, 'memory_gb': torch.cuda.get_device_properties(0).total_memory / 1e9}


def timings() -> Dict[str, Any]:
    """Times of the operators at sizes of networks, with the bytes that they must move, or why one failed."""
    found: Dict[str, Any] = {}
    for problem in PROBLEMS:
        try:
            times = time_calls({'call': problem.call()}, 10, device='cuda')
            inputs = OPERATORS[problem.op].inputs(problem.batch, problem.heads, problem.grid, problem.dim,
                                                  problem.dtype, 'meta')
            moved = bytes_moved(problem.op, inputs, problem.backward)
            found[problem.name] = {'ms': times.ms['call'], 'eager_ms': times.eager_ms['call'],
                                   'graph': times.graphs['call'], 'bytes': moved,
                                   'gbs': moved / times.ms['call']['p50'] / 1e6}
        except Exception as error:                       # a kernel that fails must not end the step
            found[problem.name] = {'failed': f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'}
    return found


def _profiled() -> Dict[str, Callable[[], Any]]:
    """Functions that create the calls to profile."""
    calls: Dict[str, Callable[[], Any]] = {problem.name: problem.call for problem in PROBLEMS[:6]}
    for train in (False, True):
        calls[f"ppma_tiny, 224 x 224, batch 128, bfloat16{', a training step' if train else ''}"] = (
            lambda train=train: networks.model_call(
                'ppma_tiny', torch.randn(128, 3, 224, 224, device='cuda').bfloat16(), train)[0])
    return calls


def profile() -> Dict[str, List[Dict[str, Any]]]:
    """The kernels of each call by their time in microseconds, with the number of launches."""
    found: Dict[str, Any] = {}
    for name, create in _profiled().items():
        try:
            call = create()
            call()
            call()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
                call()
                torch.cuda.synchronize()
            events = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
            found[name] = {'us': sum(event.self_device_time_total for event in events),
                           'launches': sum(event.count for event in events),
                           'kernels': [{'name': event.key[:100], 'us': event.self_device_time_total,
                                        'launches': event.count} for event in events[:_KERNELS]]}
        except Exception as error:
            found[name] = {'failed': f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'}
    return found


PROBES: Dict[str, Callable[[], Dict[str, Any]]] = {'machine': machine, 'timings': timings, 'profile': profile}

if __name__ == '__main__':
    print(dumps(PROBES[sys.argv[1]]()))
