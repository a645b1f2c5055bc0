"""Evaluate a published classifier as its authors do, and compare with the figures that they report. The exit code is 1
if a difference exceeds the tolerance."""
import argparse
import os
from typing import List, Optional

from .common.cli import UserError, add_weight_choice
from .common.output import dumps, print_rows


def main(argv: Optional[List[str]] = None) -> int:
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
    args = parser.parse_args(argv)
    if not args.tolerance >= 0:
        raise UserError(f'--tolerance must be at least 0, got {args.tolerance:g}')
    if args.batch_size < 1 or args.workers < 0:
        raise UserError('--batch-size must be at least 1 and --workers at least 0')
    from mmengine.dist import is_main_process

    from .data import registry  # noqa: F401  (registers the data sets)
    from .engine.classification.published_protocol import reproduce
    found = reproduce(args.name, args.data, args.partial, args.batch_size, args.workers,
                      args.tolerance, args.weights, args.choice)
    if is_main_process() and args.json:
        print(dumps(found, indent=2))
    elif is_main_process():
        print(f"{found['name']}: {found['images']:,} images of {found['classes']:,} classes\n{found['protocol']}")
        print_rows(['metric', 'reported', 'measured', 'difference', f'within {args.tolerance:g}'], (
            (name, f"{row['reported']:.2f} %", f"{row['measured']:.2f} %",
             f"{row['difference']:+.2f}", 'yes' if row['passed'] else 'no')
            for name, row in found['metrics'].items()))
        if not found['whole']:
            print('measured on these images only (--partial): the authors report figures of the whole validation set')
    return 0 if found['passed'] else 1
