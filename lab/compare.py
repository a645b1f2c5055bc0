"""Compare token mixers: the same network, recipe and budget, and another mixer. Each cell, which is a task, a mixer and
a seed, is trained in a process of its own, and its record is appended to a file of JSON lines as soon as it ends. Cells
that have succeeded are not run again, so a comparison can be continued. The exit code is 1 if a cell fails."""
import argparse
import json
import signal
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from subquad.tools.common.cli import UserError
from subquad.tools.common.output import add_row, dumps, print_table
from subquad.tools.engine.records import append, environment

from .config_sweeps import setting
from .documents import read_records
from .mixer_cells import recipe, train_cell
from .mixer_tables import plot_costs, score_table
from .mixer_tasks import COMPARED, SEEDS, TASKS, Cell, check_names
from .processes import KILLED, ProcessFailed, run_in_fresh_process


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
    """Plan the cells: all tasks and mixers with the first seed, then with the next one, and so on."""
    check_names(tasks, mixers, seeds)
    cells = [Cell(task, mixer, seed) for seed in seeds for task in tasks for mixer in mixers]
    return Plan(list(dict.fromkeys(cells)), options, {task: recipe(task, options) for task in tasks})


def known(chosen: Plan, file: Path) -> Dict[Cell, Dict[str, Any]]:
    """Return the newest record of each cell of the plan with the same recipe."""
    found = {Cell(line['task'], line['mixer'], line['seed']): line for line in read_records(file)
             if chosen.recipes.get(line['task']) == line['recipe']}
    return {cell: found[cell] for cell in chosen.cells if cell in found}


def _record(cell: Cell, chosen: Plan, threads: int) -> Dict[str, Any]:
    """Run a cell in a new process; the record of a cell that failed has `failed`, the reason."""
    start = time.monotonic()
    try:
        found = run_in_fresh_process('lab.compare', ['--one', json.dumps([cell, chosen.options])], threads)
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


def run_cells(chosen: Plan, file: Path, jobs: int, threads: int) -> int:
    """Run the cells that have not succeeded, and append each record as soon as the cell ends.

    Args:
        chosen: the cells.
        file: file of JSON lines.
        jobs: cells that run at the same time.
        threads: CPU threads of each.

    Returns:
        the number of cells that failed.
    """
    done = known(chosen, file)
    waiting = [cell for cell in chosen.cells if 'failed' in done.get(cell, {'failed': ''})]
    print(f'{len(chosen.cells) - len(waiting)} of {len(chosen.cells)} cells are in {file}', flush=True)
    failures, running = 0, set()
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:                    # at most `jobs` at a time, so that an interruption ends it soon
            while waiting and len(running) < jobs:
                running.add(pool.submit(_record, waiting.pop(0), chosen, threads))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                record = each.result()
                append(file, record)
                failures += 'failed' in record
                print(_line(record), flush=True)
    return failures


def _line(record: Dict[str, Any]) -> str:
    name = f"{record['task']:12s} {record['mixer']:24s} seed {record['seed']}  "
    if 'failed' in record:
        return f"{name}failed: {record['failed']}"
    return (f"{name}{record['score']:6.2f} {TASKS[record['task']].unit}  {record['step_ms']:.4g} ms a step  "
            f"{record['cell_seconds']:.0f} s")


def print_list(chosen: Plan, file: Path) -> None:
    """Print how many seeds of each task and mixer are done."""
    from rich.table import Table
    done = known(chosen, file)
    table = Table('mixer', *chosen.recipes)
    for mixer in dict.fromkeys(cell.mixer for cell in chosen.cells):
        seeds = [[cell for cell in chosen.cells if cell[:2] == (task, mixer)] for task in chosen.recipes]
        add_row(table, mixer, *(f"{sum('failed' not in done.get(cell, {'failed': ''}) for cell in cells)}/{len(cells)}"
                                for cells in seeds))
    print_table(table)


def main(argv: Optional[List[str]] = None) -> int:
    import subquad  # noqa: F401  (before timm)
    parser = argparse.ArgumentParser('python -m lab.compare', description=__doc__)
    parser.add_argument('--tasks', nargs='+', metavar='TASK', default=list(TASKS), help='tasks (default: all)')
    parser.add_argument('--mixers', nargs='+', metavar='MIXER', default=COMPARED, help='mixers, by the names that the '
                        'option mixers= of the networks has (default: those of the published table)')
    parser.add_argument('--seeds', nargs='+', type=int, metavar='N', default=SEEDS, help='seeds (default: 0 1 2)')
    parser.add_argument('--out', type=Path, default='compare.jsonl', metavar='FILE',
                        help='file of records, to which new ones are appended (default: compare.jsonl)')
    parser.add_argument('--list', action='store_true', help='only show which cells are done')
    parser.add_argument('--table', action='store_true', help='only print the table of scores of the file')
    parser.add_argument('--plot', type=Path, metavar='PNG', help='only draw scores against time, memory and MACs')
    parser.add_argument('--jobs', type=int, default=1, metavar='N', help='cells at the same time (default: 1)')
    parser.add_argument('--threads', type=int, default=1, metavar='N', help='CPU threads of a cell (default: 1)')
    parser.add_argument('--epochs', type=int, metavar='N', help='number of epochs (default: those of each config); the '
                        'schedule is scaled to it')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE',
                        help='options of the configs of all cells, such as optim_wrapper.optimizer.lr=1e-3; '
                        'the cells then belong to another recipe')
    parser.add_argument('--one', help=argparse.SUPPRESS)                  # train this cell here and print JSON
    args = parser.parse_args(argv)
    if args.one:
        import torch
        cell, options = json.loads(args.one)
        print(dumps({**train_cell(Cell(*cell), options),
                     **environment('cuda' if torch.cuda.is_available() else 'cpu')}))
        return 0
    if args.table:
        print(score_table(args.out), end='')
        return 0
    if args.plot:
        plot_costs(args.out, args.plot)
        return 0
    options = {**dict(map(setting, args.cfg_options)), **({} if args.epochs is None else {'epochs': args.epochs})}
    chosen = plan(args.tasks, args.mixers, args.seeds, options)
    if args.list:
        print_list(chosen, args.out)
        return 0
    return int(run_cells(chosen, args.out, args.jobs, args.threads) > 0)


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
