"""Tables and plot of the comparison of mixers: score, time, memory and MACs by mixer and task."""
import math
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from subquad.tools.common.canvas import figure
from subquad.tools.common.cli import UserError, shown

from .documents import RECORDS, markdown, read_records
from .mixer_tasks import COMPARED, SEEDS, TASKS

FILE = 'compare.jsonl'
NOT_RUN = 'not run'
# The mixers of the summary in docs/comparison.md: without a mixer, attention, and one of each kind of this package.
SUMMARY = ('identity', 'attention', 'polyline', 'separable', 'tree', 'eos', 'eos:hgrn')
# What a cell costs, by column of the plot: entry of a record, label.
COSTS = {'step_ms': 'time of a training step, ms', 'peak_mb': 'memory of a training step, MB', 'macs': 'MACs, millions'}
_REASON = 200           # characters of the reason of a failure in a table

Runs = Dict[Tuple[str, str], List[Dict[str, Any]]]


def runs(file: Path) -> Runs:
    """Return the records of each (task, mixer), one of each seed.

    A later record of a cell replaces earlier ones. A task has the records of the recipe that it was last run with.
    """
    lines = read_records(file)
    recipes = {line['task']: line['recipe'] for line in lines}
    newest = {(line['task'], line['mixer'], line['seed']): line for line in lines
              if recipes[line['task']] == line['recipe']}
    found: Runs = {}
    for (task, mixer, _), line in newest.items():
        found.setdefault((task, mixer), []).append(line)
    return found


def _succeeded(lines: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [line for line in lines if 'failed' not in line]


def mean_and_spread(values: Sequence[float]) -> Tuple[float, Optional[float]]:
    """Return the mean and the standard deviation over seeds (with n - 1), or None for a single seed."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def _score(lines: Sequence[Dict[str, Any]]) -> str:
    """Write '97.1 ± 0.3', with the number of seeds if it is not that of the comparison, and failures."""
    if not lines:
        return NOT_RUN
    done, parts = _succeeded(lines), []
    if done:
        mean, spread = mean_and_spread([line['score'] for line in done])
        parts.append(f'{mean:.1f}' + ('' if spread is None else f' ± {spread:.1f}'))
        if len(done) != len(SEEDS):
            parts[0] += f" ({len(done)} seed{'s' * (len(done) > 1)})"
    if len(done) < len(lines):
        parts.append(f'{len(lines) - len(done)} failed')
    return ', '.join(parts)


def _grid(found: Runs, write: Callable[[str, Sequence[Dict[str, Any]]], str], heads: Callable[[str], str],
          mixers: Sequence[str] = ()) -> str:
    """Write a table with a row for each mixer and a column for each task."""
    rows = [[f'`{mixer}`', *(write(task, found.get((task, mixer), [])) for task in TASKS)]
            for mixer in mixers or _mixers(found)]
    return markdown(['mixer', *map(heads, TASKS)], rows)


def _mixers(found: Runs) -> List[str]:
    """Return the mixers compared by default, and all others that have records."""
    return list(dict.fromkeys([*COMPARED, *(mixer for _, mixer in found)]))


def comparison_table(root: Path) -> str:
    """Scores: mean and spread over seeds, failures with their reasons, and the conditions of the runs."""
    return score_table(root / RECORDS / FILE)


def summary_table(root: Path) -> str:
    """Scores of a few mixers in narrow columns, without the conditions of the runs."""
    return _grid(runs(root / RECORDS / FILE), lambda task, lines: _score(lines).replace(' ± ', '±'), str, SUMMARY)


def score_table(file: Path) -> str:
    """Write the table of scores of a file; see `comparison_table`."""
    found = runs(file)
    text = _grid(found, lambda task, lines: _score(lines), lambda task: f'{task} ({TASKS[task].unit})')
    failed = [line for lines in found.values() for line in lines if 'failed' in line]
    if failed:
        text += '\nFailed cells:\n\n' + ''.join(
            f"- `{line['mixer']}` on {line['task']}, seed {line['seed']}: {_reason(line)}\n" for line in failed)
    return f'{text}\n{_conditions(found)}\n'


def _reason(line: Dict[str, Any]) -> str:
    return shown(' '.join(line['failed'].split()), _REASON).replace('|', '/').replace('<', '(').replace('>', ')')


def _conditions(found: Runs) -> str:
    """Write on what the cells ran: device, versions, commits and dates."""
    lines = [line for each in found.values() for line in each]
    if not lines:
        return 'No cell has been run.'
    places = dict.fromkeys(f"{line.get('gpu') or line['cpu']}, {line['threads']} "
                           f"thread{'s' * (line['threads'] > 1)}, torch {line['torch']}" for line in lines)
    commits = dict.fromkeys(str(line['commit'])[:7] + (' with changes' if line['modified'] else '') for line in lines)
    dates = sorted(line['date'][:10] for line in lines)
    when = dates[0] if dates[0] == dates[-1] else f'{dates[0]} to {dates[-1]}'
    return f"{len(lines)} cells. {'; '.join(places)}; commit {', '.join(commits)}; {when}."


def _median(lines: Sequence[Dict[str, Any]], key: str) -> Optional[float]:
    values = [line[key] for line in _succeeded(lines) if line.get(key) is not None]
    return statistics.median(values) if values else None


def times_table(root: Path) -> str:
    """Time of a training step, as a multiple of that without a mixer."""
    found = runs(root / RECORDS / FILE)
    bases = {task: _median(found.get((task, 'identity'), []), 'step_ms') for task in TASKS}

    def write(task: str, lines: Sequence[Dict[str, Any]]) -> str:
        own, base = _median(lines, 'step_ms'), bases[task]
        if own is None:
            return 'failed' if lines else NOT_RUN
        return f'{own:.0f} ms' if base is None else f'{own / base:.1f}'
    return _grid(found, write, lambda task: task if bases[task] is None else f'{task} (1 is {bases[task]:.0f} ms)')


def memory_table(root: Path) -> str:
    """Memory of a training step, in MB."""
    return _cost_table(root, 'peak_mb', lambda value: f'{value:.0f}')


def macs_table(root: Path) -> str:
    """Millions of multiply-adds of one input."""
    return _cost_table(root, 'macs', lambda value: f'{value / 1e6:.1f}')


def _cost_table(root: Path, key: str, write: Callable[[float], str]) -> str:
    def cell(task: str, lines: Sequence[Dict[str, Any]]) -> str:
        value = _median(lines, key)
        if value is not None:
            return write(value)
        return NOT_RUN if not lines else '-' if _succeeded(lines) else 'failed'
    return _grid(runs(root / RECORDS / FILE), cell, str)


def plot_costs(file: Path, picture: Path) -> None:
    """Draw score against time, memory and MACs: a row for each task that has records, a color for each mixer.

    Args:
        file: file of records.
        picture: PNG file.
    """
    found = {key: lines for key, each in runs(file).items() if (lines := _succeeded(each))}
    tasks = [task for task in TASKS if any(key[0] == task for key in found)]
    if not tasks:
        raise UserError(f'no cell to plot has succeeded in {file}')
    mixers = _mixers(found)
    page = figure((9, 0.6 + 2.4 * len(tasks)))
    grid = page.subplots(len(tasks), len(COSTS), squeeze=False)
    handles: Dict[str, Any] = {}
    for task, row in zip(tasks, grid):
        for key, axes in zip(COSTS, row):
            for number, mixer in enumerate(mixers):
                lines = found.get((task, mixer), [])
                cost = _median(lines, key)
                if cost is not None:
                    mean, spread = mean_and_spread([line['score'] for line in lines])
                    handles[mixer] = axes.errorbar(
                        cost / (1e6 if key == 'macs' else 1), mean, spread, fmt='osD^v<>'[number % 7], capsize=2,
                        markersize=5, color=f'C{number % 10}', label=mixer)
            axes.set(xscale='log', xlabel=COSTS[key], ylabel=f'{task}: {TASKS[task].unit}')
            _plain_ticks(axes.xaxis)
            axes.grid(alpha=0.3)
    page.legend(handles=list(handles.values()), labels=list(handles), loc='outside lower center', ncols=5, fontsize=8)
    page.savefig(picture, dpi=100)


def _plain_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain round numbers that do not run into each other."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter
    low, high = axis.get_view_interval()
    gap = math.log(high / low) / 5
    ticks: List[float] = []
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high))):
        for digits in (1, 1.5, 2, 3, 4, 5, 6, 8):
            tick = digits * 10 ** exponent
            if low <= tick <= high and (not ticks or math.log(tick / ticks[-1]) >= gap):
                ticks.append(tick)
    axis.set_major_locator(FixedLocator(ticks) if len(ticks) > 1 else MaxNLocator(3))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())
