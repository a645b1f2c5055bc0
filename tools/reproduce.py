"""Evaluate a published classifier as its authors do, and compare with the figures that they report. The exit code is 1
if a difference exceeds the tolerance."""
import argparse
import os
from typing import Any, List, Optional

from .common.cli import UserError, add_weight_choice
from .common.output import dumps, print_rows


def main(argv: Optional[List[str]] = None) -> int:
    args = _parser().parse_args(argv)
    if not args.tolerance >= 0:
        raise UserError(f'--tolerance must be at least 0, got {args.tolerance:g}')
    if args.batch_size < 1 or args.workers < 0:
        raise UserError('--batch-size must be at least 1 and --workers at least 0')
    from mmengine.dist import is_main_process

    from .data import registry  # noqa: F401  (registers the data sets)
    from .engine.classification.published_protocol import (
        check_complete,
        compare,
        describe,
        protocol,
        published_classifier,
    )
    entry = published_classifier(args.name)
    config = protocol(entry, args.data, args.batch_size, args.workers)
    found = check_complete(config, args.partial)
    rows = compare(entry, config, args.weights, args.tolerance, args.choice)
    if is_main_process():
        whole = args.data is None or not args.partial
        _show(args, dict(name=entry.name, protocol=describe(entry), **found, whole=whole), list(rows.values()))
    return 0 if all(row.passed for row in rows.values()) else 1


def _show(args: argparse.Namespace, result: dict, rows: List[Any]) -> None:
    if args.json:
        print(dumps({**result, 'passed': all(row.passed for row in rows), 'tolerance': args.tolerance, 'metrics': {
            row.metric: dict(reported=row.reported, measured=row.measured, difference=row.difference,
                             passed=row.passed) for row in rows}}, indent=2))
        return
    print(f"{result['name']}: {result['images']:,} images of {result['classes']:,} classes\n{result['protocol']}")
    print_rows(['metric', 'reported', 'measured', 'difference', f'within {args.tolerance:g}'], (
        (row.metric, f'{row.reported:.2f} %', f'{row.measured:.2f} %', f'{row.difference:+.2f}',
         'yes' if row.passed else 'no') for row in rows))
    if not result['whole']:
        print('measured on these images only (--partial): the authors report figures of the whole validation set')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('subquad reproduce', description=__doc__)
    parser.add_argument('name', help='name of the weights, such as ppma_tiny.in1k (subquad weights list --task '
                        'classification)')
    parser.add_argument('--data', metavar='FOLDER', help='ImageNet: a folder with val/WNID/*.JPEG or WNID/*.JPEG; not '
                        'for the package\'s own classifiers of digits')
    parser.add_argument('--weights', metavar='FILE', help='weights to evaluate in place of the published file')
    add_weight_choice(parser)
    parser.add_argument('--tolerance', type=float, default=0.1, metavar='POINTS',
                        help='largest difference that passes, in percentage points (default: 0.1)')
    parser.add_argument('--partial', action='store_true', help='accept a part of ImageNet\'s validation set')
    parser.add_argument('--batch-size', type=int, default=64, metavar='N', help='images in a batch (default: 64)')
    parser.add_argument('--workers', type=int, default=min(4, os.cpu_count() or 1), metavar='N',
                        help='processes that load images (default: one for each CPU, and at most 4)')
    parser.add_argument('--json', action='store_true', help='print JSON')
    return parser
