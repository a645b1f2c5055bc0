"""Generate a dataset of colored shapes on real photographs for detection and segmentation; nothing is downloaded."""
import argparse
from typing import List, Optional

from .common.cli import UserError, nearest
from .common.paths import expanded
from .common.sizes import parse_size

DATASETS = {'shapes': 'data/shapes'}            # name -> default folder


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser('subquad make-dataset', description=__doc__)
    parser.add_argument('name', help=f"name of the dataset: {', '.join(DATASETS)}")
    parser.add_argument('folder', nargs='?', help='folder to write (default: data/shapes)')
    parser.add_argument('--train', type=int, default=1000, metavar='N',
                        help='number of training images (default: 1000)')
    parser.add_argument('--val', type=int, default=200, metavar='N', help='number of validation images (default: 200)')
    parser.add_argument('--size', default='128', metavar='SIZE',
                        help='size of the images, one number or HEIGHTxWIDTH (default: 128)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the generator (default: 0)')
    parser.add_argument('--force', action='store_true', help='replace a dataset that this command wrote')
    args = parser.parse_args(argv)
    from .data.shapes import SIZES
    from .data.shapes_files import FORMAT, MOST_IMAGES, already_there, make_shapes
    if args.name not in DATASETS:
        raise UserError(f'unknown dataset {args.name!r}{nearest(args.name, list(DATASETS))} '
                        f"(allowed: {', '.join(DATASETS)})")
    for name in ('train', 'val'):
        if not 1 <= getattr(args, name) <= MOST_IMAGES:
            raise UserError(f'--{name} must be from 1 to {MOST_IMAGES}, got {getattr(args, name)}')
    if args.seed < 0:
        raise UserError(f'--seed must be at least 0, got {args.seed}')
    shown = expanded(args.folder or DATASETS[args.name])
    options = dict(train=args.train, val=args.val, size=list(parse_size(args.size, (), *SIZES)), seed=args.seed)
    try:
        folder = shown.resolve()        # a link to a folder stays one
        if already_there(folder, dict(format=FORMAT, **options), args.force):
            print(f'{shown} exists already with these options')
            return 0
    except (OSError, RuntimeError) as error:
        raise UserError(f'cannot read {shown} ({error})') from error
    counts = make_shapes(folder, options)
    print(f'{shown}: {args.train} training images with {counts["train"]} shapes, {args.val} validation images with '
          f'{counts["val"]} shapes')
    return 0


if __name__ == '__main__':
    from .common.cli import run
    run(main)
