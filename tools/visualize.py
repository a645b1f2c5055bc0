"""Draw what a model looks at over images: the context scores of MobileViTv2's layers (appendix D of its paper), or
which tokens reach one of them in Myo's layers, over what height of the tree, and the edges on the way."""
import argparse
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from .cli import UserError, nearest


def overlay(image, scores):
    """An image (H, W, 3) of 0 to 1 under a map of scores (h, w), red where they are largest: (H, W, 3) array. The image
    alone where all scores are the same."""
    import matplotlib
    import torch
    import torch.nn.functional as F
    low, high = scores.amin(), scores.amax()
    if high - low <= 1e-5 * high:
        return image.numpy()
    scaled = (scores - low) / (high - low)
    scaled = F.interpolate(scaled[None, None], size=image.shape[:2], mode='nearest')[0, 0]
    colours = torch.from_numpy(matplotlib.colormaps['jet'](scaled.numpy())[..., :3]).to(image.dtype)
    return (0.45 * image + 0.55 * colours).numpy()


def draw(path: Path, names: Sequence[str], images, maps: Dict[str, 'object'], titles: Sequence[str]) -> None:
    """A row for each image: the image, then its maps.

    Args:
        path: of the picture.
        names: of the images.
        images: (B, 3, H, W) tensor of 0 to 1.
        maps: by layer, (B, L, h, w); the mean over latent tokens is drawn.
        titles: of the layers.

    Raises:
        UserError: the picture cannot be written.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    columns = 1 + len(maps)
    figure, axes = plt.subplots(len(images), columns, figsize=(1.25 * columns + 0.6, 1.35 * len(images) + 0.5),
                                layout='constrained', squeeze=False)
    for row, image in enumerate(images):
        pixels = image.permute(1, 2, 0)
        axes[row, 0].imshow(pixels.numpy())
        axes[row, 0].set_ylabel(names[row], fontsize=8)
        for column, scores in enumerate(maps.values(), 1):
            axes[row, column].imshow(overlay(pixels, scores[row].mean(0)))
    for column, title in enumerate(['image', *titles]):
        axes[0, column].set_title(title, fontsize=8)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    save(figure, path)


def save(figure, path: Path) -> None:
    """Write a picture, and let go of the figure.

    Raises:
        UserError: it cannot be written.
    """
    import matplotlib.pyplot as plt
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror or error}') from error
    finally:
        plt.close(figure)


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
    parser.add_argument('--layers', nargs='+', metavar='TEXT',
                        help='only layers whose name holds one of these, such as stages.2 or transformer.0')
    parser.add_argument('--most', type=int, default=8, metavar='N', help='draw N images at most (default: 8)')
    parser.add_argument('--at', nargs=2, type=float, default=(0.5, 0.5), metavar=('Y', 'X'),
                        help='of Myo: the token that is looked at, as shares of height and width (default: 0.5 0.5)')
    parser.add_argument('--out', metavar='FILE', help='the picture (default: context_scores.png or influences.png)')
    args = parser.parse_args(argv)
    if args.most < 1:
        raise UserError(f'--most must be at least 1, got {args.most}')
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError('pictures need matplotlib: pip install "subquad[demo]"') from error
    import torch

    from . import influences
    from .config import expanded, writable_folder
    from .predict import image_files, load_classifier, load_images
    files = image_files(args.images)[:args.most]
    model, transform, _ = load_classifier(args.checkpoint, args.model)
    trees = hasattr(model, 'influences')
    if not trees and not hasattr(model, 'context_scores'):
        raise UserError(f'{type(model).__name__} has nothing to draw here: MobileViTv2 has context scores, Myo '
                        'influences')
    out = expanded(args.out or ('influences.png' if trees else 'context_scores.png'))
    if out.suffix.lower() not in ('.png', '.jpg', '.jpeg', '.pdf', '.svg'):
        raise UserError(f'--out must end in .png, .jpg, .pdf or .svg, got {args.out!r}')
    inputs = torch.stack(load_images(files, transform))
    try:
        maps = model.influences(inputs, tuple(args.at)) if trees else model.context_scores(inputs)
    except ValueError as error:
        raise UserError(str(error)) from error
    maps = {layer: maps[layer] for layer in _chosen(list(maps), args.layers)}
    writable_folder(str(out.parent))
    low, high = inputs.amin((1, 2, 3), keepdim=True), inputs.amax((1, 2, 3), keepdim=True)
    titles = [name.replace('.blocks.', '\nblock ') if trees else name.replace('.1.', '.1\n') for name in maps]
    drawn = influences.draw if trees else draw
    drawn(out, [file.stem for file in files], (inputs - low) / (high - low).clamp(min=1e-6), maps, titles)
    print(f'drew {out}: {len(files)} image(s), {len(maps)} layer(s)')
    return 0


if __name__ == '__main__':
    from .cli import run
    run(main)
