"""Compare token mixers: the same network, recipe and budget, and another mixer. Each cell, which is a task, a mixer and
a seed, is trained in a process of its own, and its record is appended to a file of JSON lines as soon as it ends. Cells
that the file has are not run again, so a comparison can be continued. The exit code is 1 if a cell fails."""
import argparse
import json
from typing import List, Optional

from subquad.tools.common.cli import UserError
from subquad.tools.common.output import dumps
from subquad.tools.common.paths import expanded


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm)
    args = _parser().parse_args(argv)
    from .config_sweeps import setting
    from .mixer_records import Selection
    from .mixer_runs import measure_cell, plan, print_list, run_cells
    from .mixer_tables import plot_costs, score_table
    from .mixer_tasks import COMPARED, SEEDS, TASKS, Cell, check_names, check_packages
    options = {**dict(map(setting, args.set)), **({} if args.epochs is None else {'epochs': args.epochs})}
    if args.one:
        print(dumps(measure_cell(Cell(*json.loads(args.one)), options)))
        return 0
    shows = [name for name in ('list', 'table', 'plot') if getattr(args, name)]
    _check(args, shows)
    tasks, mixers, seeds = args.tasks or list(TASKS), args.mixers or list(COMPARED), args.seeds or list(SEEDS)
    check_names(tasks, mixers, seeds)
    file = expanded(args.out)
    if 'list' in shows:
        print_list(plan(tasks, mixers, seeds, options), file)
    if 'table' in shows or 'plot' in shows:
        if not file.exists():
            raise UserError(f'{file}: no such file; --out names the file of records')
        recipes = plan(tasks, mixers, seeds, options).recipes if options else None
        chosen = Selection(args.tasks, args.mixers, args.seeds, recipes)
        if args.table:
            print(score_table(file, chosen), end='')
        if args.plot:
            plot_costs(file, expanded(args.plot), chosen)
    if shows:
        return 0
    check_packages(tasks)
    failures = run_cells(plan(tasks, mixers, seeds, options), file, args.jobs or 1, args.threads or 1, args.retry)
    return 1 if failures else 0


def _check(args: argparse.Namespace, shows: List[str]) -> None:
    """Check numbers and combinations of flags."""
    for name in ('jobs', 'threads', 'epochs'):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f'--{name} must be at least 1, got {getattr(args, name)}')
    if args.plot == '':
        raise UserError('--plot must be a file, got an empty name')
    for name in ('retry', 'jobs', 'threads'):
        if shows and getattr(args, name):
            raise UserError(f'--{name} has no effect with --{shows[0]}, which runs no cell: leave one of them out')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('python -m lab.compare', description=__doc__)
    parser.add_argument('--tasks', nargs='+', metavar='TASK', help='tasks (default: all)')
    parser.add_argument('--mixers', nargs='+', metavar='MIXER', help='mixers, by the names that the option mixers= of '
                        'the networks takes (default: those of the published table)')
    parser.add_argument('--seeds', nargs='+', type=int, metavar='N', help='seeds (default: 0 1 2)')
    parser.add_argument('--out', default='compare.jsonl', metavar='FILE',
                        help='file of records, to which new ones are appended (default: compare.jsonl)')
    parser.add_argument('--list', action='store_true', help='only show what is done and how long the rest takes')
    parser.add_argument('--table', action='store_true', help='only print the table of scores: of the recipe that each '
                        'task was last run with, or that --epochs and --set name')
    parser.add_argument('--plot', metavar='PNG', help='only draw scores against time, memory and MACs, of the same '
                        'cells as --table')
    parser.add_argument('--retry', action='store_true', help='also run the cells that failed')
    parser.add_argument('--jobs', type=int, metavar='N', help='cells at the same time (default: 1)')
    parser.add_argument('--threads', type=int, metavar='N', help='CPU threads of a cell (default: 1)')
    parser.add_argument('--epochs', type=int, metavar='N', help='number of epochs (default: those of each config); the '
                        'schedule is scaled to it')
    parser.add_argument('--set', nargs='+', default=[], metavar='KEY=VALUE', help='options of the configs of all '
                        'cells, such as optim_wrapper.optimizer.lr=1e-3; the cells then belong to another recipe')
    parser.add_argument('--one', help=argparse.SUPPRESS)
    return parser


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
