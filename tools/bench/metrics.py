"""Metrics of a benchmark record: values with targets, medians over processes, and rows for tables."""
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.table import Table
from rich.text import Text

from ..common.cli import UserError
from ..common.output import add_row

FILES = {'cpu': 'cpu.jsonl', 'cuda': 'gpu.jsonl'}


def prepare(out: Path, device: str) -> Path:
    """Create the results file of a device and its folder.

    This runs before anything is measured, so that an unwritable folder costs no time.
    """
    path = out / FILES[device]
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.open('ab').close()
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}; choose another folder with --out') \
            from error
    return path


def metric(name: str, value: Optional[float], unit: str, at_least: Optional[float] = None,
           at_most: Optional[float] = None) -> Dict[str, Any]:
    """Return a metric of a record: {'name', 'value', 'unit', 'bound', 'target', 'met'}.

    A value of None was not measured. The target is a lower or an upper bound, so `bound` is 'at least', 'at most' or
    None. `met` is None without a value or a target.
    """
    bound, target = ('at least', at_least) if at_least is not None else ('at most', at_most)
    met = None
    if value is not None and target is not None:
        met = value >= target if bound == 'at least' else value <= target
    return {'name': name, 'value': value, 'unit': unit, 'bound': None if target is None else bound, 'target': target,
            'met': met}


def speedup(times: Dict[str, Dict[str, float]], fast: str, slow: str) -> float:
    """Ratio of two median times."""
    return times[slow]['p50'] / times[fast]['p50']


def ratio(x: Optional[float], y: Optional[float]) -> Optional[float]:
    """x / y, or None if one of them was not measured or y is 0."""
    return x / y if x is not None and y else None


def peak_memory_metrics(peaks: Dict[str, Optional[float]], at_most: Optional[Dict[str, Optional[float]]] = None
                        ) -> List[Dict[str, Any]]:
    """The metric 'NAME: peak memory' of every measured peak (MB), with targets by name."""
    return [metric(f'{name}: peak memory', peak, 'MB', at_most=(at_most or {}).get(name))
            for name, peak in peaks.items()]


def medians(records: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Merge records of one preset from several processes.

    Returns:
        One record with the medians of all times and metrics; each metric also has the `values` of the processes.
    """
    last = records[-1]
    if len(records) == 1:
        return last
    middle = {field: {name: {p: _median([record[field][name][p] for record in records]) for p in percentiles}
                      for name, percentiles in last[field].items()}
              for field in ('times_ms', 'eager_ms') if field in last}
    results = []
    for n, m in enumerate(last['metrics']):
        values = [record['metrics'][n]['value'] for record in records]
        target = {m['bound'].replace(' ', '_'): m['target']} if m['bound'] else {}
        results.append({**metric(m['name'], _median(values), m['unit'], **target), 'values': values})
    floors = sorted((record['floor'] for record in records), key=lambda low: low['ms']) if last['floor'] else [None]
    return {**last, **middle, 'metrics': results, 'floor': floors[len(floors) // 2],
            'processes': len(records), 'other_cpus': max(record['other_cpus'] or 0 for record in records)}


def _median(values: Sequence[Optional[float]]) -> Optional[float]:
    """The median, or None if one of the values was not measured."""
    return None if None in values else median(values)


def number(value: Optional[float]) -> str:
    """A value with three significant digits."""
    return 'not measured' if value is None else f'{value:.3g}' if value < 1000 else f'{value:.0f}'


def disturbed(record: Dict[str, Any]) -> bool:
    """Whether other programs left too few CPUs for the threads, so that the times mean little."""
    return record['threads'] + (record['other_cpus'] or 0) > max(record['cpus'], record['threads']) + 0.1


def _spread(times: Dict[str, float]) -> str:
    spread = f" ({number(times['p20'])} to {number(times['p80'])})" if 'p20' in times else ''
    return f"{number(times['p50'])} ms{spread}"


def time_rows(record: Dict[str, Any]) -> List[Tuple[str, str, str, str]]:
    """Rows (metric, value, '', '') of the median times with their 20th and 80th percentiles, and of the floor.

    On a GPU, times are those of captured graphs, and eager times stand beside them.
    """
    rows = []
    for name, t in record['times_ms'].items():
        rows.append((f'{name}: time', _spread(t), '', ''))
        if 'graphs' in record:
            how = record['graphs'][name]
            rows.append((f'{name}: eager time', _spread(record['eager_ms'][name]), '', ''))
            if not how.startswith('captured'):
                rows.append((f'{name}: graph', f'{how}; its time is eager', '', ''))
    if record['floor']:
        low = record['floor']
        parts = [f"{low['macs'] / 1e9:.3g} GMACs at {number(low['gemm_gflops'])} GFLOP/s"]
        if 'bytes' in low:
            parts += [f"{low['bytes'] / 1e6:.3g} MB at {number(low['copy_gbs'])} GB/s", f"{low['binds']}-bound"]
        rows.append(('floor', f"{number(low['ms'])} ms ({'; '.join(parts)})", '', ''))
    for unit, operators in record.get('operators', {}).items():
        shares = ', '.join(f"{x['name']} {number(x['ms'])} ms ({x['share']:.0%})" for x in operators)
        rows.append((f'{unit}: slowest operators', shares, '', ''))
    return rows


def metric_rows(record: Dict[str, Any]) -> List[Tuple[str, str, str, str]]:
    """Rows (metric, value, target, met) of the metrics."""
    rows = []
    for m in record['metrics']:
        target = '' if m['target'] is None else f"{m['bound']} {m['target']:g} {m['unit']}".rstrip()
        met = '' if m['target'] is None else {True: 'yes', False: 'no', None: '?'}[m['met']]
        rows.append((m['name'], f"{number(m['value'])} {m['unit']}".rstrip(), target, met))
    return rows


def conditions(record: Dict[str, Any]) -> str:
    """Device and versions in one line."""
    if record.get('device', 'cpu') == 'cuda':
        return '{gpu} ({clocks}), torch {torch}, CUDA {cuda}, Triton {triton}'.format(**record)
    return '{cpu}, {threads} thread{s}, torch {torch}'.format(s='s' * (record['threads'] != 1), **record)


def table(records: Sequence[Dict[str, Any]]) -> Table:
    """The records as a table for a terminal; records that other programs disturbed are marked."""
    result = Table('preset', 'metric', 'value', 'target', 'met', title=Text(conditions(records[0])))
    for record in records:
        rows = [*time_rows(record), *metric_rows(record)]
        if disturbed(record):
            note = f"other programs used {record['other_cpus']:.2g} of {record['cpus']} CPUs: measure again"
            rows.append(('disturbed', note, '', ''))
        for n, row in enumerate(rows):
            add_row(result, record['preset'] if n == 0 else '', *row)
        result.add_section()
    return result
