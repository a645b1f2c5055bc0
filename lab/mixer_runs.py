"""Run the cells of the comparison of mixers in processes of their own, and say what is done and what is missing."""
import json
import signal
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence

import torch

from subquad.tools.common.cli import UserError
from subquad.tools.common.output import add_row, print_table
from subquad.tools.engine.records import append, environment

from .mixer_cells import recipe, train_cell
from .mixer_records import cell_records
from .mixer_tasks import TASKS, Cell
from .processes import KILLED, ProcessFailed, run_in_fresh_process

# Seconds that a process takes to start and to write its data, for estimates.
_START = 15


class Plan(NamedTuple):
    """The cells that a command line names.

    Attributes:
        cells: all cells.
        options: options of all cells, as of `cell_config`.
        recipes: digest of the recipe of each task.
    """

    cells: List[Cell]
    options: Dict[str, Any]
    recipes: Dict[str, str]


def plan(tasks: Sequence[str], mixers: Sequence[str], seeds: Sequence[int], options: Dict[str, Any]) -> Plan:
    """Plan the cells: all tasks and mixers with the first seed, then with the next one, and so on.

    Raises:
        UserError: the config of a task or an option is wrong.
    """
    cells = [Cell(task, mixer, seed) for seed in dict.fromkeys(seeds) for task in dict.fromkeys(tasks)
             for mixer in dict.fromkeys(mixers)]
    return Plan(cells, options, {task: recipe(task, options) for task in dict.fromkeys(tasks)})


def known(chosen: Plan, file: Path) -> Dict[Cell, Dict[str, Any]]:
    """Return the newest record of each cell of the plan with the same recipe.

    Raises:
        UserError: the file cannot be read or is not one of records.
    """
    found = {Cell(line['task'], line['mixer'], line['seed']): line for line in cell_records(file)
             if chosen.recipes.get(line['task']) == line['recipe']}
    return {cell: found[cell] for cell in chosen.cells if cell in found}


def measure_cell(cell: Cell, options: Dict[str, Any]) -> Dict[str, Any]:
    """Train a cell in this process and return its record."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    return {**train_cell(cell, options), **environment(device)}


def _record(cell: Cell, chosen: Plan, argv: List[str], threads: int) -> Dict[str, Any]:
    """Run a cell in a new process; the record of a cell that failed has `failed`, the reason.

    Raises:
        KeyboardInterrupt: the process was interrupted, which is no failure of the cell.
    """
    start = time.monotonic()
    try:
        found = run_in_fresh_process('lab.compare', [*argv, '--one', json.dumps(cell)], threads)
    except UserError as error:
        found = {'failed': str(error), **environment()}
    except ProcessFailed as error:
        if error.code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM):
            raise KeyboardInterrupt from error
        last = (error.messages.strip().splitlines() or ['no message'])[-1]
        found = {'failed': KILLED if error.code < 0 else last, **environment()}
    task = TASKS[cell.task]
    return {**cell._asdict(), 'recipe': chosen.recipes[cell.task], 'config': task.config, 'options': chosen.options,
            'metric': task.metric, **found, 'cell_seconds': round(time.monotonic() - start, 1)}


def run_cells(chosen: Plan, file: Path, jobs: int, threads: int, retry: bool) -> int:
    """Run the cells that the file lacks, and append each record as soon as the cell ends.

    Args:
        chosen: the cells.
        file: file of JSON lines.
        jobs: cells that run at the same time.
        threads: CPU threads of each.
        retry: also run the cells that failed.

    Returns:
        the number of cells that failed.

    Raises:
        UserError: the file cannot be read or written.
    """
    done = known(chosen, file)
    todo = [cell for cell in chosen.cells if cell not in done or retry and 'failed' in done[cell]]
    print(f'{len(chosen.cells)} cells: {len(chosen.cells) - len(todo)} are in {file}, {len(todo)} to run, about '
          f'{_hours(estimate(todo, chosen, file) / jobs)}', file=sys.stderr, flush=True)
    argv = _argv(chosen.options)
    failures = 0
    with ThreadPoolExecutor(jobs) as pool:
        waiting, running = list(todo), set()
        while waiting or running:                    # at most `jobs` at a time, so that an interruption ends it soon
            while waiting and len(running) < jobs:
                running.add(pool.submit(_record, waiting.pop(0), chosen, argv, threads))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                record = each.result()
                append(file, record)
                failures += 'failed' in record
                print(_line(record), flush=True)
    return failures


def _argv(options: Dict[str, Any]) -> List[str]:
    """Return the command line that gives these options."""
    changes = [f'{key}={json.dumps(value)}' for key, value in options.items() if key != 'epochs']
    epochs = ['--epochs', str(options['epochs'])] if 'epochs' in options else []
    return [*(['--set', *changes] if changes else []), *epochs]


def _line(record: Dict[str, Any]) -> str:
    name = f"{record['task']:12s} {record['mixer']:24s} seed {record['seed']}  "
    if 'failed' in record:
        return f"{name}failed: {record['failed']}"
    return (f"{name}{record['score']:6.2f} {TASKS[record['task']].unit}  {record['step_ms']:.4g} ms a step  "
            f"{record['cell_seconds']:.0f} s")


def estimate(cells: Sequence[Cell], chosen: Plan, file: Path) -> float:
    """Return the seconds that the cells take, one after the other.

    The time of a cell is the median of its mixer with other seeds, else of its task, else that of `TASKS`.
    """
    done = known(chosen, file)
    times: Dict[Any, List[float]] = {}
    for cell, line in done.items():
        if 'failed' not in line:
            for key in (cell.task, (cell.task, cell.mixer)):
                times.setdefault(key, []).append(line['cell_seconds'])
    return sum(statistics.median(times.get((cell.task, cell.mixer)) or times.get(cell.task)
                                 or [TASKS[cell.task].seconds + _START]) for cell in cells)


def print_list(chosen: Plan, file: Path) -> None:
    """Print how many seeds of each task and mixer are done, and how long the missing ones take.

    Raises:
        UserError: the file cannot be read or is not one of records.
    """
    from rich.table import Table
    done = known(chosen, file)
    tasks = list(chosen.recipes)
    table = Table('mixer', *tasks)
    for mixer in dict.fromkeys(cell.mixer for cell in chosen.cells):
        add_row(table, mixer, *(_state([done.get(cell) for cell in chosen.cells if cell[:2] == (task, mixer)])
                                for task in tasks))
    print_table(table)
    missing = [cell for cell in chosen.cells if cell not in done]
    print(f'{len(missing)} of {len(chosen.cells)} cells are missing in {file}: about '
          f'{_hours(estimate(missing, chosen, file))}, one after the other')


def _state(lines: Sequence[Any]) -> str:
    failed = sum(line is not None and 'failed' in line for line in lines)
    done = sum(line is not None for line in lines) - failed
    return f"{done}/{len(lines)}{f', {failed} failed' if failed else ''}"


def _hours(seconds: float) -> str:
    return f'{seconds / 3600:.1f} h' if seconds >= 5400 else f'{seconds / 60:.0f} min'
