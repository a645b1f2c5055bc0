"""Plots of benchmark records over the number of tokens."""
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from subquad.tools.bench.metrics import conditions
from subquad.tools.common.canvas import figure

_LABELS = {'dense': 'L x, N x N mask', 'portable': 'L x, portable scan', 'triton': 'L x, Triton scan',
           'separable': 'separable self-attention', 'mha': 'multi-head attention', 'linformer': 'Linformer, p = 256'}


def plot(record: Dict[str, Any], path: Path) -> None:
    """Plot time and, if measured, memory over the number of tokens.

    Args:
        record: A record whose times are named 'IMPLEMENTATION HEIGHTxWIDTH'; each implementation is one line.
        path: The PNG file.
    """
    charts = 1 + bool(record['peak_mb'])
    page = figure((5.2 if charts == 1 else 9, 3.6))
    time_axes, *memory_axes = page.subplots(1, charts, squeeze=False)[0]
    for name, line in _lines(record).items():
        tokens, times, peaks = zip(*sorted(line))
        label = _LABELS.get(name, name)
        time_axes.plot(tokens, times, marker='o', label=label)
        for axes in memory_axes:
            visible = [float('nan') if peak is None else max(peak, 0.01) for peak in peaks]
            axes.plot(tokens, visible, marker='o', label=label)
    titles = (('time', 'ms'), ('memory beyond input and output', 'MB'))
    for axes, (title, unit) in zip((time_axes, *memory_axes), titles):
        axes.set(xscale='log', yscale='log', xlabel='tokens', ylabel=unit, title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    page.suptitle(conditions(record), fontsize=9)
    page.savefig(path, dpi=120)


def _lines(record: Dict[str, Any]) -> Dict[str, List[Tuple[int, float, Optional[float]]]]:
    """(tokens, milliseconds, MB) of every point, by implementation."""
    lines: Dict[str, List[Tuple[int, float, Optional[float]]]] = {}
    for key, percentiles in record['times_ms'].items():
        name, size = key.split()
        height, width = map(int, size.split('x'))
        lines.setdefault(name, []).append((height * width, percentiles['p50'], record['peak_mb'].get(key)))
    return lines
