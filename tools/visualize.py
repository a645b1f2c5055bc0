"""Draw what a model's layers attend to over images: context scores (MobileViTv2, Appendix D of its paper), the decay
factor of each step (PPMA), the influence of every token on one token, with the tree edges that carry it (Myo), or how
fast the memories of the recurrence decay and how long they last (LCSM)."""
import argparse
from typing import List, Optional

from .common.cli import UserError, shown
from .common.images import LeftOut, image_files
from .common.paths import expanded


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad visualize', description=__doc__)
    parser.add_argument('checkpoint', help='weights of subquad train (.safetensors), published weights by name, '
                        'such as ppma_tiny.in1k, or other weights with --model')
    parser.add_argument('images', nargs='+', help='image files or folders')
    parser.add_argument('--model', metavar='NAME',
                        help='timm name of the model, for a checkpoint that does not contain it')
    parser.add_argument('--allow-nonfinite', action='store_true', help='accept weights that hold NaN or infinities')
    parser.add_argument('--layers', nargs='+', metavar='TEXT',
                        help='draw only layers whose names contain one of these strings, such as stages.2')
    parser.add_argument('--max-images', '--most', dest='most', type=int, default=8, metavar='N',
                        help='maximum number of images to draw (default: 8)')
    parser.add_argument('--at', nargs=2, type=float, metavar=('Y', 'X'),
                        help='for Myo: position of the token on which the influences are drawn, as fractions of '
                        'height and width (default: 0.5 0.5)')
    parser.add_argument('--heads', action='store_true', help='for LCSM: draw each head, not each layer')
    parser.add_argument('--own-size', action='store_true', help='draw the images at their own size, which must be the '
                        'same for all, and not at the input size of the model')
    parser.add_argument('--out', metavar='FILE', help='output image (default: context_scores.png, decay_factors.png, '
                        'influences.png or state_decays.png)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read (default: report '
                        'it on stderr and exit with code 1 after the others)')
    args = parser.parse_args(argv)
    if args.most < 1:
        raise UserError(f'--max-images must be at least 1, got {args.most}')
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError('pictures need matplotlib: pip install matplotlib') from error
    from .engine.classification.prediction import load_images
    from .engine.classification.weight_files import classifier_from_file
    from .engine.drawing.maps import at_own_size, draw_maps, map_kind
    files = image_files(args.images)[:args.most]
    model, transform, _ = classifier_from_file(args.checkpoint, args.model, args.allow_nonfinite)
    what = map_kind(model)
    if args.at and what != 'influences':
        raise UserError(f'--at is for Myo: the maps of {type(model).__name__} show all tokens')
    if args.heads and what != 'state_decays':
        raise UserError(f'--heads is for LCSM, and {type(model).__name__} has no state decays')
    out = expanded(args.out or f'{what}.png')
    if out.suffix.lower() not in ('.png', '.jpg', '.jpeg', '.pdf', '.svg'):
        raise UserError(f'--out must end in .png, .jpg, .pdf or .svg, got {args.out!r}')
    left_out = LeftOut(len(files), args.strict)
    transform = at_own_size(transform) if args.own_size else transform
    images = list(load_images(files, transform, left_out))
    code = left_out.code()
    layers = draw_maps(out, what, model, transform, images, args.layers, tuple(args.at or (0.5, 0.5)),
                       args.heads)
    print(f'drew {shown(out)}: {len(images)} image(s), {layers} layer(s)')
    return code


if __name__ == '__main__':
    from .common.cli import run
    run(main)
