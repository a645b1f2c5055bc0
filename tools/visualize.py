"""Draw what a model computes for images, as a picture or as a web page in one file.

Panels of layers: horizontal-decay, vertical-decay, attention, mask and masked-attention (PPMA, RMT); context
(MobileViTv2); levels, edges and deviation (Myo); decay, length and heads (LCSM); influence (all families).
Panels of the whole model: receptive-field (any timm model) and activation (most timm classifiers)."""
import argparse
from pathlib import Path
from typing import List, Optional

from .common.cli import UserError, shown
from .common.images import LeftOut, image_files

_MAX_SIDE, _MOST_DPI = 640, 600
_SUFFIXES = ('.png', '.jpg', '.jpeg', '.pdf', '.svg', '.html')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('subquad visualize', description=__doc__)
    parser.add_argument('checkpoint', help='weights of subquad train (.safetensors), published weights by name, '
                        'such as ppma_tiny.in1k, other weights with --model, or the timm name of a model with --random')
    parser.add_argument('images', nargs='+', help='image files or folders')
    parser.add_argument('--model', metavar='NAME',
                        help='timm name of the model, for a checkpoint that does not contain it')
    parser.add_argument('--random', action='store_true', help='draw a model with random weights')
    parser.add_argument('--allow-nonfinite', action='store_true', help='accept weights that hold NaN or infinities')
    parser.add_argument('--panels', nargs='+', metavar='NAME', help='what to draw (default: the panels of the family)')
    parser.add_argument('--layers', nargs='+', metavar='TEXT', help='draw all layers whose names contain one of these '
                        'strings, such as stages.2 (default: the last layer of each map size)')
    parser.add_argument('--at', nargs=2, type=float, metavar=('Y', 'X'), help='pixel whose influences are drawn, as '
                        'fractions of height and width (default: 0.5 0.5)')
    parser.add_argument('--heads', action='store_true', help='draw each head, not their mean')
    parser.add_argument('--target', metavar='CLASS', help='class of the panel activation (default: the likeliest)')
    parser.add_argument('--max-images', type=int, default=8, metavar='N',
                        help='maximum number of images to draw (default: 8)')
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument('--own-size', action='store_true', default=None, help='draw images at their own size (default: '
                       'those that are at least as large as the input size of the model)')
    sizes.add_argument('--no-own-size', action='store_false', dest='own_size', default=None,
                       help='draw images as the model prepares them for classification')
    parser.add_argument('--max-side', type=int, metavar='N',
                        help='reduce larger images at their own size to this longest side, but no side below 32 '
                        f'(default: {_MAX_SIDE})')
    parser.add_argument('--dpi', type=int, default=120, metavar='N',
                        help=f'resolution of the figure, at most {_MOST_DPI} (default: 120)')
    parser.add_argument('--out', metavar='FILE', default='visualization.png', help='output image, or a self-contained '
                        'page (.html), whose maps follow a pixel that you choose (default: visualization.png)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read or drawn (default: '
                        'report it on stderr and exit with code 1 after the others)')
    return parser


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    args = _parser().parse_args(argv)
    for name, value, least in (('--max-images', args.max_images, 1), ('--max-side', args.max_side, 32),
                               ('--dpi', args.dpi, 20)):
        if value is not None and value < least:
            raise UserError(f'{name} must be at least {least}, got {value}')
    if args.dpi > _MOST_DPI:
        raise UserError(f'--dpi must be at most {_MOST_DPI}, got {args.dpi}')
    if args.max_side is not None and args.own_size is False:
        raise UserError('--max-side has no effect with --no-own-size')
    out = Path(args.out).expanduser()
    if out.suffix.lower() not in _SUFFIXES:
        raise UserError(f"--out must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}, got {shown(out)}")
    import matplotlib  # noqa: F401  (its absence is an error before minutes of computation)

    from .engine.drawing import subjects, visualization
    from .engine.drawing.image_sizes import load_photographs
    found = image_files(args.images)
    files = found[:args.max_images]
    subject = subjects.load(args.checkpoint, args.model, args.random, args.allow_nonfinite)
    left_out = LeftOut(len(files), args.strict)
    own_size = False if args.own_size is None and subject.fixed_size else args.own_size
    if args.max_side is not None and own_size is False:
        raise UserError(f'--max-side has no effect: {type(subject.model).__name__} takes images of its input size only')
    images = load_photographs(files, subject.transform, left_out, own_size, args.max_side or _MAX_SIDE)
    code = left_out.code()
    wish = visualization.Wish(args.panels, args.layers, tuple(args.at) if args.at else None, args.heads, args.target,
                              args.dpi, args.strict)
    drawn, layers, panels = visualization.visualize(out, subject, images, wish)
    print(f"drew {shown(out)}: {drawn} image(s), {layers} layer(s), {', '.join(panels)}")
    if len(files) < len(found):
        print(f'{len(found) - len(files)} of {len(found)} images were left out; --max-images draws more')
    if subject.note:
        print(subject.note)
    return code or int(drawn < len(images))
