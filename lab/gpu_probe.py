"""Profile operators and models on a GPU: `python -m lab.gpu_probe`, a step of `lab.gpu_plan`.

The last line of the output is JSON: the kernels that take most of the time of each call.
"""
from typing import Any, Callable, Dict, List

import torch

from subquad.tools.bench import networks
from subquad.tools.common.output import dumps

from .tuning import PROBLEMS

_KERNELS = 12          # of a profile, those that take most of the time


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


if __name__ == '__main__':
    print(dumps(profile()))
