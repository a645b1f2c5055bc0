"""Draw what a model looks at over images: the context scores of MobileViTv2's layers (appendix D of its paper), the
factors by which attention fades with each step in PPMA's blocks, or which tokens reach one of them in Myo's layers,
over what height of the tree, and the edges on the way."""
import argparse
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from .common.cli import UserError, nearest, shown
from .common.images import LeftOut
from .engine.drawing import pictures

TITLES = {'influences': 'influence on the token under the cross, mean over heads',
          'context_scores': 'context scores, mean over latent tokens',
          'decay_factors': 'how attention paths fade with each step, mean over heads'}


def _chosen(layers: Sequence[str], wanted: Optional[List[str]]) -> List[str]:
    """The layers that are asked for, by whole names or parts of them.

    Raises:
        UserError: one that fits none.
    """
    for text in wanted or []:
        if not any(text in layer for layer in layers):
            raise UserError(f"--layers {text}: no such layer{nearest(text, list(layers)) or '; there are '}"
                            f"{'' if nearest(text, list(layers)) else ', '.join(layers)}")
    return [layer for layer in layers if not wanted or any(text in layer for text in wanted)]


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import subquad  # noqa: F401  (before timm and torchvision)
    parser = argparse.ArgumentParser('subquad visualize', description=__doc__)
    parser.add_argument('checkpoint', help='weights of subquad train (.safetensors), or other weights with --model')
    parser.add_argument('images', nargs='+', help='image files or folders')
    parser.add_argument('--model', metavar='NAME', help='timm name, for a checkpoint that does not know its model')
    parser.add_argument('--allow-nonfinite', action='store_true', help='take weights that hold NaN or infinities')
    parser.add_argument('--layers', nargs='+', metavar='TEXT',
                        help='only layers whose name holds one of these, such as stages.2 or transformer.0')
    parser.add_argument('--most', type=int, default=8, metavar='N', help='draw N images at most (default: 8)')
    parser.add_argument('--at', nargs=2, type=float, metavar=('Y', 'X'),
                        help='of Myo: the token that is looked at, as shares of height and width (default: 0.5 0.5)')
    parser.add_argument('--out', metavar='FILE', help='the picture (default: context_scores.png, decay_factors.png or '
                        'influences.png)')
    parser.add_argument('--strict', action='store_true', help='stop at an image that cannot be read (default: it is '
                        'named on stderr and left out, and the exit code is 1)')
    args = parser.parse_args(argv)
    if args.most < 1:
        raise UserError(f'--most must be at least 1, got {args.most}')
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError('pictures need matplotlib: pip install "subquad[demo]"') from error
    import torch

    from .common.paths import expanded, writable_folder
    from .predict import image_files, load_classifier, load_images
    files = image_files(args.images)[:args.most]
    model, transform, _ = load_classifier(args.checkpoint, args.model, args.allow_nonfinite)
    what = _drawable(model)
    if args.at and what != 'influences':
        raise UserError(f'--at chooses a token of Myo; {type(model).__name__} is drawn for all tokens')
    out = expanded(args.out or f'{what}.png')
    if out.suffix.lower() not in ('.png', '.jpg', '.jpeg', '.pdf', '.svg'):
        raise UserError(f'--out must end in .png, .jpg, .pdf or .svg, got {args.out!r}')
    left_out = LeftOut(len(files), args.strict)
    read = list(load_images(files, transform, left_out))
    code = left_out.code()
    inputs = torch.stack([image for _, image in read])
    try:
        maps, draw = _maps(what, model, inputs, tuple(args.at or (0.5, 0.5)))
    except ValueError as error:
        raise UserError(str(error)) from error
    maps = {layer: maps[layer] for layer in _chosen(list(maps), args.layers)}
    writable_folder(str(out.parent))
    name = getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__
    draw(out, [file.stem for file, _ in read], pictures.unnormalized(inputs, transform), maps,
         pictures.layer_titles(list(maps)), f'{name}: {TITLES[what]}')
    print(f'drew {shown(out)}: {len(read)} image(s), {len(maps)} layer(s)')
    return code


def _drawable(model: Any) -> str:
    """What is drawn of a model, a key of TITLES.

    Raises:
        UserError: it is of none of our families.
    """
    from ..backbones import PPMA
    for what in ('influences', 'context_scores'):
        if hasattr(model, what):
            return what
    if isinstance(model, PPMA):
        return 'decay_factors'
    raise UserError(f'{type(model).__name__} has nothing to draw here: MobileViTv2 has context scores, Myo influences, '
                    'PPMA decay factors')


def _maps(what: str, model: Any, inputs: Any, at: Tuple[float, ...]) -> Tuple[Dict[str, Any], Callable[..., None]]:
    """What is drawn, by layer, and the function that draws it."""
    if what == 'influences':
        from .engine.drawing import influences
        return model.influences(inputs, at), influences.draw
    if what == 'context_scores':
        return model.context_scores(inputs), pictures.draw_scores
    return pictures.decay_factors(model, inputs), pictures.draw_decays


if __name__ == '__main__':
    from .common.cli import run
    run(main)
