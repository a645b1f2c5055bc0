"""Read the scalars that MMEngine's Runner logs into a work folder, and draw the curves of several runs."""
import json
import math
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence

from ...common.canvas import figure, save
from ...common.cli import UserError, nearest, shown

# Entries of a line that say where it belongs or how long it took; all others are curves.
_PLACES = ('step', 'iter', 'epoch', 'time', 'data_time', 'base_lr', 'memory', 'eta')
# The file beside a log in which ProgressHook writes where its run starts.
START = 'start.json'
# Parts of the names of metrics of which less is better; of all other metrics more is.
_DOWNWARDS = ('loss', 'perplexity', 'ece', 'lr')


class Point(NamedTuple):
    """A logged value: its step and the value, which may be NaN."""
    step: float
    value: float


class Curve(NamedTuple):
    """The values of one scalar of a run, in the order of steps, which count a unit: 'iteration' or 'epoch'."""
    unit: str
    points: List[Point]

    def best(self, name: str) -> Point:
        """Return the best finite point, the first of equal ones; the last point if none is finite."""
        sign = -1 if any(word in name.split('/')[-1].lower() for word in _DOWNWARDS) else 1
        finite = [point for point in self.points if math.isfinite(point.value)]
        return max(finite, key=lambda point: sign * point.value, default=self.points[-1])


Curves = Dict[str, Curve]       # the curves of a run, by the name of the scalar


def read_runs(folders: Sequence[str]) -> Dict[str, Curves]:
    """Read the runs of work folders, by the name of the folder, or by its path if several have the same name."""
    names = [Path(folder).expanduser().resolve().name for folder in folders]
    return {name if names.count(name) == 1 else folder.rstrip('/'): read_run(folder)
            for name, folder in zip(names, folders)}


def read_run(folder: str) -> Curves:
    """Read the logs of a work folder of MMEngine's Runner, in which a resumed run has several.

    What a later log has replaces what earlier ones have from its start on: a run that was resumed from a checkpoint
    repeats the steps after it, and a run without --resume all. If an epoch has another number of steps than before, the
    earlier steps are scaled to it.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f'no folder at {shown(path)}')
    files = sorted(path.glob('*/vis_data/scalars.json'))
    if not files:
        raise UserError(f'{shown(path)} has no logs of a run (TIMESTAMP/vis_data/scalars.json)')
    curves: Curves = {}
    length = 0                                                # number of steps of an epoch of the run before
    for file in files:
        try:
            start = json.loads((file.parents[1] / START).read_text())
        except (OSError, ValueError):
            start = {}                                        # of another Runner
        for unit, points in curves.values() if start else ():
            scale = start['steps_per_epoch'] / length if unit == 'iteration' and length else 1
            points[:] = [Point(step * scale if scale != 1 else step, value)
                         for step, value in points if step * scale <= start[unit]]
        length = start.get('steps_per_epoch', length)
        for name, (unit, points) in _curves(file).items():
            known = curves.setdefault(name, Curve(unit, [])).points
            known[:] = [point for point in known if point.step < points[0].step] + points
    curves = {name: curve for name, curve in curves.items() if curve.points}
    if not curves:
        raise UserError(f'the logs in {shown(path)} hold no values yet')
    return curves


def _curves(file: Path) -> Curves:
    """Return the curves of one log; a last line that was cut short is left out.

    Lines of training count iterations. Those of validation count epochs, or iterations in runs without epochs: their
    step is then at least that of the last line of training.
    """
    texts = file.read_text(encoding='utf-8', errors='replace').splitlines()
    curves: Curves = {}
    iteration, epoch = 0, 0
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)                           # Python's NaN and Infinity, too
        except ValueError as error:
            if number == len(texts):
                break                                         # the run was killed, or is writing
            raise UserError(f'{shown(file)}, line {number} is damaged') from error
        if 'step' not in line:                                # MMEngine's first line is the config
            continue
        training = 'lr' in line
        if training:
            iteration, epoch = line['step'], line.get('epoch', 0)
        unit = 'iteration' if training or iteration and epoch != line['step'] >= iteration else 'epoch'
        for name, value in line.items():
            if name not in _PLACES and isinstance(value, (int, float)) and not isinstance(value, bool):
                curves.setdefault(name, Curve(unit, [])).points.append(Point(line['step'], value))
    return curves


def chosen(runs: Dict[str, Curves], names: Sequence[str]) -> List[str]:
    """Return the scalars to show: the given ones, or the loss, the learning rate and each run's first metric."""
    known = list(dict.fromkeys(name for curves in runs.values() for name in curves))
    for name in names:
        if name not in known:
            raise UserError(f"no run has {name!r}{nearest(name, known)} (there are {', '.join(known)})")
    metrics = [next((name for name in curves if name != 'lr' and 'loss' not in name and 'grad' not in name), None)
               for curves in runs.values()]
    return list(dict.fromkeys(names)) or [name for name in dict.fromkeys(['loss', 'lr', *metrics]) if name in known]


def rows(runs: Dict[str, Curves], names: Sequence[str]) -> List[Dict[str, Any]]:
    """Return dict(run, name, unit, last, last_step, best, best_step) of each scalar of each run that has it."""
    return [dict(run=run, name=name, unit=curves[name].unit, last=last.value, last_step=last.step,
                 best=best.value, best_step=best.step)
            for run, curves in runs.items() for name in names if name in curves
            for last, best in [(curves[name].points[-1], curves[name].best(name))]]


def draw(runs: Dict[str, Curves], names: Sequence[str], path: Path) -> None:
    """Draw one chart for each scalar, with a line for each run, into a PNG file."""
    page = figure((4.4 * len(names), 3.8))

    from matplotlib.ticker import MaxNLocator
    for axes, name in zip(page.subplots(1, len(names), squeeze=False)[0], names):
        for number, (run, curves) in enumerate(runs.items()):
            if name in curves:
                points = curves[name].points
                values = [value if math.isfinite(value) else math.nan for _, value in points]      # leaves a gap
                axes.plot([step for step, _ in points], values, color=f'C{number % 10}',
                          linestyle=('-', '--', ':')[number // 10 % 3], marker='.' if len(points) <= 30 else '',
                          label=run.replace('$', r'\$'))
        title = 'learning rate of the first layers' if name == 'lr' else name        # MMEngine logs the first group
        units = dict.fromkeys(curves[name].unit for curves in runs.values() if name in curves)
        axes.set(title=title, xlabel=' or '.join(units))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    handles = {label: line for axes in page.axes for line, label in zip(*axes.get_legend_handles_labels())}
    page.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=min(len(handles), 4), fontsize=8)
    save(page, path)
