"""Generate a dataset: colored shapes on real photographs, or associative recall (mqar); nothing is downloaded."""
import argparse
from pathlib import Path
from typing import Any, Dict, List, Optional

from .common.cli import UserError, nearest
from .common.sizes import parse_size

MOST = 100_000                     # largest number of images or sequences of a part
DATASETS = {'shapes': 'data/shapes', 'mqar': 'data/mqar'}           # name -> default folder
# Options of one dataset, by the name of the argument, with their defaults.
_COUNTS = {'shapes': dict(train=1000, val=200), 'mqar': dict(train=100_000, val=3_000)}
_OWN: Dict[str, Dict[str, Any]] = {'shapes': dict(size='128'), 'mqar': dict(vocab_size=8192, length=64, pairs=4)}


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser('subquad make-dataset', description=__doc__)
    parser.add_argument('name', help=f"name of the dataset: {', '.join(DATASETS)}")
    parser.add_argument('folder', nargs='?', help='folder to write (default: data/NAME)')
    parser.add_argument('--train', type=int, metavar='N',
                        help='number of training images or sequences (default: 1000 or 100000)')
    parser.add_argument('--val', type=int, metavar='N',
                        help='number of validation images or sequences (default: 200 or 3000)')
    parser.add_argument('--size', metavar='SIZE',
                        help='shapes: size of the images, one number or HEIGHTxWIDTH (default: 128)')
    parser.add_argument('--vocab-size', type=int, metavar='N', help='mqar: size of the vocabulary (default: 8192)')
    parser.add_argument('--length', type=int, metavar='N', help='mqar: tokens of a sequence (default: 64)')
    parser.add_argument('--pairs', type=int, metavar='N', help='mqar: pairs of key and value (default: 4)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the generator (default: 0)')
    parser.add_argument('--force', action='store_true', help='replace a dataset that this command wrote')
    args = parser.parse_args(argv)
    if args.name not in DATASETS:
        raise UserError(f'unknown dataset {args.name!r}{nearest(args.name, list(DATASETS))} '
                        f"(allowed: {', '.join(DATASETS)})")
    for owner, options in _OWN.items():
        for name in options:
            if owner != args.name and getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} is for {owner}, not for {args.name}")
    for name, value in {**_COUNTS[args.name], **_OWN[args.name]}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ('train', 'val'):
        if not 1 <= getattr(args, name) <= MOST:
            raise UserError(f'--{name} must be from 1 to {MOST}, got {getattr(args, name)}')
    if args.seed < 0:
        raise UserError(f'--seed must be at least 0, got {args.seed}')
    shown = Path(args.folder or DATASETS[args.name]).expanduser()
    try:
        folder = shown.resolve()        # a link to a folder stays one
        written = {'shapes': _shapes, 'mqar': _mqar}[args.name](args, folder)
    except (OSError, RuntimeError) as error:
        raise UserError(f'cannot read {shown} ({error})') from error
    print(f'{shown}: {written}' if written else f'{shown} exists already with these options')
    return 0


def _shapes(args: argparse.Namespace, folder: Path) -> Optional[str]:
    from .data.shapes import SIZES
    from .data.shapes_files import make_shapes
    options = dict(train=args.train, val=args.val, size=list(parse_size(args.size, (), *SIZES)), seed=args.seed)
    counts = make_shapes(folder, options, args.force)
    return counts and (f'{args.train} training images with {counts["train"]} shapes, {args.val} validation images with '
                       f'{counts["val"]} shapes')


def _mqar(args: argparse.Namespace, folder: Path) -> Optional[str]:
    from .data.recall import write_recall
    options = {name: getattr(args, name) for name in ('train', 'val', 'seed', *_OWN['mqar'])}
    if write_recall(folder, options, args.force):
        return f'{args.train} training sequences, {args.val} validation sequences'
    return None
