"""The attention units of MobileViTv2's Figure 1: how their time grows with the tokens, and what it is spent on."""
from functools import partial
from typing import Any, Callable, Dict, List, Sequence

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from subquad.backbones.mixers import LinformerSelfAttention, MultiHeadSelfAttention, SeparableSelfAttention
from subquad.tools.bench.measure import time_interleaved
from subquad.tools.bench.metrics import metric, speedup

_LISTED = 5


def units(tokens: int, dim: int = 512, heads: int = 8, projected: int = 256) -> Dict[str, nn.Module]:
    """The three attention units for `tokens` tokens of `dim` channels."""
    return {'separable': SeparableSelfAttention(dim, patch_size=1), 'mha': MultiHeadSelfAttention(dim, heads),
            'linformer': LinformerSelfAttention(dim, tokens, heads, projected)}


def slowest_operators(call: Callable[[], Any], rounds: int) -> List[Dict[str, Any]]:
    """Profile a call on the CPU.

    Returns:
        {'name', 'ms', 'share'} of the operators that take most of the time: their own milliseconds in one call, and the
        share of the call's time.
    """
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(rounds):
            call()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    return [{'name': row.key, 'ms': row.self_cpu_time_total / rounds / 1e3, 'share': row.self_cpu_time_total / total}
            for row in rows[:_LISTED]]


def attention_units(repeats: int, *, tokens: Sequence[int], profiled: int = 256, **options: int) -> Dict[str, Any]:
    """Time each unit over the number of tokens, and profile it at one number of tokens.

    Args:
        repeats: Rounds of timing.
        tokens: Numbers of tokens; one image, one group.
        profiled: The number of tokens at which operators are listed.
        options: Options of `units`.
    """
    def forward(unit: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return unit(x)

    calls, listed = {}, {}
    for count in tokens:
        for name, unit in units(count, **options).items():
            x = torch.randn(1, unit.out_proj.in_channels, 1, count).to(memory_format=torch.channels_last)
            calls[f'{name} 1x{count}'] = partial(forward, unit.eval(), x)
            if count == profiled:
                listed[name] = slowest_operators(calls[f'{name} 1x{count}'], repeats)
    times = time_interleaved(calls, repeats)
    metrics = [metric(f'speed-up of separable over {name} at {count} tokens',
                      speedup(times, f'separable 1x{count}', f'{name} 1x{count}'), 'x')
               for count in dict.fromkeys((profiled, tokens[-1])) if count in tokens for name in ('mha', 'linformer')]
    return {'times_ms': times, 'peak_mb': {}, 'floor': None, 'metrics': metrics, 'operators': listed}
