"""Draw the curves of one or several training runs, and print their last and best values."""
import argparse
import math
from pathlib import Path
from typing import List, Optional

from .common.cli import UserError
from .common.output import dumps, print_rows


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser('subquad logs', description=__doc__)
    parser.add_argument('runs', nargs='+', metavar='RUN', help='work folder of a run, such as runs/test-ppma_digits; '
                        'the parts of a resumed run are joined')
    parser.add_argument('--out', metavar='FILE', help='the picture to write, such as curves.png')
    parser.add_argument('--keys', nargs='+', default=[], metavar='NAME', help='what to show, such as loss '
                        'accuracy/top1 (default: the loss, the learning rate and the first metric)')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    if args.out and not args.out.lower().endswith('.png'):
        raise UserError(f'--out must name a PNG file, got {args.out}')
    from .engine.training.run_logs import chosen, draw, read_runs, rows
    runs = read_runs(args.runs)
    names = chosen(runs, args.keys)
    found = rows(runs, names)
    if args.json:
        print(dumps(found, indent=2))
    else:
        print_rows(['run', '', 'last', 'at', 'best', 'at'], (
            (row['run'], row['name'], _number(row['last']), f"{row['unit']} {row['last_step']}",
             *((_number(row['best']), f"{row['unit']} {row['best_step']}") if row['name'] != 'lr' else ('', '')))
            for row in found))
    if args.out:
        draw(runs, names, Path(args.out).expanduser())
    return 0


def _number(value: float) -> str:
    return f'{value:.5g}' if math.isfinite(value) else str(value)
