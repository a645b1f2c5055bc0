"""Generate a dataset: colored shapes on real photographs, or associative recall (mqar); nothing is downloaded."""
import argparse
from pathlib import Path
from typing import List, Optional

from .common.cli import UserError, parse_size

MOST = 100_000                     # largest number of images or sequences of a part


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    args = _parser().parse_args(argv)
    for name in ('train', 'val'):
        if not 1 <= getattr(args, name) <= MOST:
            raise UserError(f'--{name} must be from 1 to {MOST}, got {getattr(args, name)}')
    if args.seed < 0:
        raise UserError(f'--seed must be at least 0, got {args.seed}')
    shown = Path(args.folder or f'data/{args.name}').expanduser()
    try:
        written = args.write(args, shown.resolve())        # a link to a folder stays one
    except (OSError, RuntimeError) as error:
        raise UserError(f'cannot read {shown} ({error})') from error
    print(f'{shown}: {written}' if written else f'{shown} exists already with these options')
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('subquad make-dataset', description=__doc__)
    datasets = parser.add_subparsers(dest='name', metavar='NAME', required=True)
    shapes = datasets.add_parser('shapes', help='colored shapes with boxes, masks and label maps')
    shapes.add_argument('--size', default='128', help='size of the images, one number or HEIGHTxWIDTH (default: 128)')
    mqar = datasets.add_parser('mqar', help='sequences of multi-query associative recall')
    mqar.add_argument('--vocab-size', type=int, default=8192, metavar='N',
                      help='size of the vocabulary (default: 8192)')
    mqar.add_argument('--length', type=int, default=64, metavar='N',
                      help='tokens of a sequence (default: 64)')
    mqar.add_argument('--pairs', type=int, default=4, metavar='N',
                      help='pairs of key and value (default: 4)')
    for dataset, items, train, val, write in ((shapes, 'images', 1000, 200, _shapes),
                                              (mqar, 'sequences', 100_000, 3000, _mqar)):
        dataset.set_defaults(write=write)
        dataset.add_argument('folder', nargs='?', help='folder to write (default: data/NAME)')
        dataset.add_argument('--train', type=int, default=train, metavar='N',
                             help=f'number of training {items} (default: {train})')
        dataset.add_argument('--val', type=int, default=val, metavar='N',
                             help=f'number of validation {items} (default: {val})')
        dataset.add_argument('--seed', type=int, default=0,
                             help='seed of the generator (default: 0)')
        dataset.add_argument('--force', action='store_true',
                             help='replace a dataset that this command wrote')
    return parser


def _shapes(args: argparse.Namespace, folder: Path) -> Optional[str]:
    from .data.shapes import SIZES
    from .data.shapes_files import make_shapes
    options = dict(train=args.train, val=args.val, size=list(parse_size(args.size, (), *SIZES)), seed=args.seed)
    counts = make_shapes(folder, options, args.force)
    return counts and (f'{args.train} training images with {counts["train"]} shapes, {args.val} validation images with '
                       f'{counts["val"]} shapes')


def _mqar(args: argparse.Namespace, folder: Path) -> Optional[str]:
    from .data.recall import write_recall
    options = {name: getattr(args, name)
               for name in ('train', 'val', 'seed', 'vocab_size', 'length', 'pairs')}
    if write_recall(folder, options, args.force):
        return f'{args.train} training sequences, {args.val} validation sequences'
    return None
