"""Generate a data set: coloured shapes on real photographs, to detect and to segment, without any download."""
import argparse
import re
from typing import List, Optional, Tuple

from .common.cli import UserError, nearest
from .common.paths import expanded

DATASETS = {'shapes': 'data/shapes'}            # name -> default folder


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser('subquad make-dataset', description=__doc__)
    parser.add_argument('name', help=f"which: {', '.join(DATASETS)}")
    parser.add_argument('folder', nargs='?', help='where it goes (default: data/shapes)')
    parser.add_argument('--train', type=int, default=1000, metavar='N', help='images to train on (default: 1000)')
    parser.add_argument('--val', type=int, default=200, metavar='N', help='images to test on (default: 200)')
    parser.add_argument('--size', default='128', metavar='S|HxW', help='size of the images (default: 128)')
    parser.add_argument('--seed', type=int, default=0, help='of everything random (default: 0)')
    parser.add_argument('--force', action='store_true', help='replace a data set that this tool made')
    args = parser.parse_args(argv)
    from .data.shapes_files import FORMAT, MOST_IMAGES, already_there, make_shapes
    if args.name not in DATASETS:
        raise UserError(f'unknown data set {args.name!r}{nearest(args.name, list(DATASETS))} '
                        f"(there are: {', '.join(DATASETS)})")
    for name in ('train', 'val'):
        if not 1 <= getattr(args, name) <= MOST_IMAGES:
            raise UserError(f'--{name} must be from 1 to {MOST_IMAGES}, got {getattr(args, name)}')
    if args.seed < 0:
        raise UserError(f'--seed must be at least 0, got {args.seed}')
    shown = expanded(args.folder or DATASETS[args.name])
    options = dict(train=args.train, val=args.val, size=list(parse_size(args.size)), seed=args.seed)
    try:
        folder = shown.resolve()        # a link to a folder stays one
        if already_there(folder, dict(format=FORMAT, **options), args.force):
            print(f'{shown} is there already, with these options')
            return 0
    except (OSError, RuntimeError) as error:
        raise UserError(f'cannot read {shown} ({error})') from error
    counts = make_shapes(folder, options)
    print(f'{shown}: {args.train} images with {counts["train"]} shapes to train on, {args.val} with {counts["val"]} to '
          'test on')
    return 0


def parse_size(text: str) -> Tuple[int, int]:
    """'128' or '96x128' (height x width) as (height, width).

    Raises:
        UserError: neither, or out of bounds.
    """
    from .data.shapes import SIZES
    match = re.fullmatch(r'(\d{1,6})(?:x(\d{1,6}))?', text)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not all(SIZES[0] <= n <= SIZES[1] for n in (height, width)):
        raise UserError(f'--size must be one number or HEIGHTxWIDTH, each from {SIZES[0]} to {SIZES[1]}, got {text!r}')
    return height, width


if __name__ == '__main__':
    from .common.cli import run
    run(main)
