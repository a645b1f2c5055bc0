"""The attention units of MobileViTv2's Figure 1 side by side: what their time goes to, how it grows with the tokens."""
from functools import partial
from typing import Any, Callable, Dict, List, Sequence

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ...backbones.mixers import LinformerSelfAttention, MultiHeadSelfAttention, SeparableSelfAttention
from .measure import time_interleaved
from .records import figure

MOST = 5


def units(tokens: int, dim: int = 512, heads: int = 8, projected: int = 256) -> Dict[str, nn.Module]:
    """The three units for `tokens` tokens of `dim` channels."""
    return {'separable': SeparableSelfAttention(dim, patch_size=1), 'mha': MultiHeadSelfAttention(dim, heads),
            'linformer': LinformerSelfAttention(dim, tokens, heads, projected)}


def operators(call: Callable[[], Any], rounds: int) -> List[Dict[str, Any]]:
    """The operators that take most of a call's CPU time: {'name', 'ms' (a call, their own), 'share' of it}."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(rounds):
            call()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    return [{'name': row.key, 'ms': row.self_cpu_time_total / rounds / 1e3, 'share': row.self_cpu_time_total / total}
            for row in rows[:MOST]]


def figure1(repeats: int, *, tokens: Sequence[int], at: int = 256, **options: int) -> Dict[str, Any]:
    """Time of each unit over the number of tokens, and where it goes `at` one of them.

    Args:
        repeats: rounds of timing.
        tokens: numbers of tokens; one image, one group.
        at: for which of them operators are listed.
        options: for `units`.
    """
    def forward(unit: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return unit(x, folded=True)

    calls, listed = {}, {}
    for count in tokens:
        for name, unit in units(count, **options).items():
            x = torch.randn(1, unit.out_proj.in_channels, 1, count).to(memory_format=torch.channels_last)
            calls[f'{name} 1x{count}'] = partial(forward, unit.eval(), x)
            if count == at:
                listed[name] = operators(calls[f'{name} 1x{count}'], repeats)
    times = time_interleaved(calls, repeats)
    figures = [figure(f'separable faster than {name}, {count} tokens',
                      times[f'{name} 1x{count}']['p50'] / times[f'separable 1x{count}']['p50'], 'x')
               for count in dict.fromkeys((at, tokens[-1])) if count in tokens for name in ('mha', 'linformer')]
    return {'times_ms': times, 'peak_mb': {}, 'floor': None, 'figures': figures, 'operators': listed}
