"""Benchmark records: a JSON line each, added to a file, and shown as a table or a plot."""
import os
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.table import Table
from rich.text import Text

from ..common.cli import UserError
from ..common.output import add_row, dumps

FILES = {'cpu': 'cpu.jsonl', 'cuda': 'gpu.jsonl'}


def prepare(out: Path, device: str) -> Path:
    """Make the folder and the results file of a device, so that what cannot be written is known before measuring.

    Raises:
        UserError: the folder cannot be made or the file not written.
    """
    path = out / FILES[device]
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.open('ab').close()
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}; choose another folder with --out, or --no-save') \
            from error
    return path


def append(path: Path, record: Dict[str, Any]) -> None:
    """Add a record as one line, in one write: whoever else appends or reads sees whole lines.

    Raises:
        UserError: the disk did not take it.
    """
    line = dumps(record).encode() + b'\n'
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        with os.fdopen(os.dup(descriptor), 'rb') as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b'\n':
                line = b'\n' + line                              # a write that was cut short: leave it on its own line
        if os.write(descriptor, line) != len(line):
            raise UserError(f'{path}: the disk is full; the last line is incomplete')
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from error
    finally:
        os.close(descriptor)


def figure(name: str, value: Optional[float], unit: str, at_least: Optional[float] = None,
           at_most: Optional[float] = None) -> Dict[str, Any]:
    """One line of the table: a value (None: not measured), its target, if it has one, and whether that is met."""
    bound, target = ('at least', at_least) if at_least is not None else ('at most', at_most)
    met = None
    if value is not None and target is not None:
        met = value >= target if bound == 'at least' else value <= target
    return {'name': name, 'value': value, 'unit': unit, 'bound': None if target is None else bound, 'target': target,
            'met': met}


def medians(records: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """One record of several measurements of the same in processes of their own: medians of times and figures, with each
    process' value beside a figure's."""
    last = records[-1]
    if len(records) == 1:
        return last
    middle = {name: {p: _median([record['times_ms'][name][p] for record in records]) for p in taken}
              for name, taken in last['times_ms'].items()}
    results = []
    for n, f in enumerate(last['figures']):
        values = [record['figures'][n]['value'] for record in records]
        bound = {f['bound'].replace(' ', '_'): f['target']} if f['bound'] else {}
        value = _median(values)
        results.append({**figure(f['name'], value, f['unit'], **bound), 'values': values})
    floors = sorted((record['floor'] for record in records), key=lambda low: low['ms']) if last['floor'] else [None]
    return {**last, 'times_ms': middle, 'figures': results, 'floor': floors[len(floors) // 2],
            'processes': len(records), 'other_cpus': max(record['other_cpus'] or 0 for record in records)}


def _median(values: Sequence[Optional[float]]) -> Optional[float]:
    """The median, or None where one of the values was not measured."""
    return None if None in values else median(values)


def _number(value: Optional[float]) -> str:
    return 'not measured' if value is None else f'{value:.3g}' if value < 1000 else f'{value:.0f}'


def disturbed(record: Dict[str, Any]) -> bool:
    """Whether other programs left too few CPUs for the threads, so that the times mean little."""
    return record['threads'] + (record['other_cpus'] or 0) > max(record['cpus'], record['threads']) + 0.1


def figures(record: Dict[str, Any]) -> List[Tuple[str, str, str, str]]:
    """(figure, value, target, met) of a record: median times with their 20th and 80th percentiles, floor, figures."""
    rows = [(f'time, {name}', '{} ms ({} to {})'.format(*(_number(t[p]) for p in ('p50', 'p20', 'p80'))), '', '')
            for name, t in record['times_ms'].items()]
    if record['floor']:
        low = record['floor']
        what = f"{low['macs'] / 1e9:.3g} GMACs at {_number(low['gemm_gflops'])} GFLOP/s"
        if 'bytes' in low:
            what += f", {low['bytes'] / 1e6:.3g} MB at {_number(low['copy_gbs'])} GB/s: {low['binds']} binds"
        rows.append(('floor', f"{_number(low['ms'])} ms ({what})", '', ''))
    for unit, operators in record.get('operators', {}).items():
        rows.append((f'most time, {unit}', ', '.join(f"{x['name']} {_number(x['ms'])} ms ({x['share']:.0%})"
                                                     for x in operators), '', ''))
    for f in record['figures']:
        target = '' if f['target'] is None else f"{f['bound']} {f['target']:g} {f['unit']}".rstrip()
        met = '' if f['target'] is None else {True: 'yes', False: 'no', None: '?'}[f['met']]
        rows.append((f['name'], f"{_number(f['value'])} {f['unit']}".rstrip(), target, met))
    return rows


def conditions(record: Dict[str, Any]) -> str:
    """Device and versions, in a line."""
    if record.get('device', 'cpu') == 'cuda':
        return ('{gpu} ({clocks}), torch {torch}, CUDA {cuda}, Triton {triton}').format(**record)
    return '{cpu}, {threads} threads, torch {torch}'.format(**record)


def table(records: Sequence[Dict[str, Any]]) -> Table:
    """The figures of the records for a screen; what other programs disturbed is marked."""
    result = Table('preset', 'figure', 'value', 'target', 'met', title=Text(conditions(records[0])))
    for record in records:
        rows = figures(record)
        if disturbed(record):
            rows.append(('disturbed', f"others used {record['other_cpus']:.2g} of {record['cpus']} CPUs: measure again",
                         '', ''))
        for n, row in enumerate(rows):
            add_row(result, record['preset'] if n == 0 else '', *row)
        result.add_section()
    return result


_LABELS = {'dense': 'L x, N x N mask', 'portable': 'L x, portable scan', 'triton': 'L x, Triton scan',
           'separable': 'separable self-attention', 'mha': 'multi-head attention', 'linformer': 'Linformer, p = 256'}


def plot(record: Dict[str, Any], path: Path) -> None:
    """Time and, where it was measured, memory over the number of tokens, a line a contestant, from times named
    'CONTESTANT HxW'.

    Raises:
        UserError: the picture cannot be written, or matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('the plot needs matplotlib: pip install "subquad[demo]"') from error
    charts = 1 + bool(record['peak_mb'])
    page = Figure(figsize=(5.2 if charts == 1 else 9, 3.6), layout='constrained')
    FigureCanvasAgg(page)
    time_axes, *memory_axes = page.subplots(1, charts, squeeze=False)[0]
    points: Dict[str, List[Tuple[int, float, Optional[float]]]] = {}
    for name, taken in record['times_ms'].items():
        contestant, size = name.split()
        height, width = map(int, size.split('x'))
        points.setdefault(contestant, []).append((height * width, taken['p50'], record['peak_mb'].get(name)))
    for contestant, line in points.items():
        tokens, times, peaks = zip(*sorted(line))
        label = _LABELS.get(contestant, contestant)
        time_axes.plot(tokens, times, marker='o', label=label)
        for axes in memory_axes:
            axes.plot(tokens, [float('nan') if peak is None else max(peak, 0.01) for peak in peaks], marker='o',
                      label=label)
    for axes, title, unit in zip((time_axes, *memory_axes), ('time', 'memory beyond input and output'), ('ms', 'MB')):
        axes.set(xscale='log', yscale='log', xlabel='tokens', ylabel=unit, title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    page.suptitle(conditions(record), fontsize=9)
    try:
        page.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from error
