"""Draw the context scores of MobileViTv2 and the decay factors of PPMA; helpers for these and for Myo's influences."""
import warnings
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from ...common.cli import UserError, shown

_MAP = 'jet'


def overlay(image, scores):
    """Blend an image (H, W, 3) of values from 0 to 1 with a map of scores (h, w), red for the largest: (H, W, 3) array.

    The image is returned unchanged if all scores are equal.
    """
    import matplotlib
    import torch
    import torch.nn.functional as F
    if constant(scores):
        return image.numpy()
    low, high = scores.amin(), scores.amax()
    scaled = (scores - low) / (high - low)
    scaled = F.interpolate(scaled[None, None], size=image.shape[:2], mode='nearest')[0, 0]
    colors = torch.from_numpy(matplotlib.colormaps[_MAP](scaled.numpy())[..., :3]).to(image.dtype)
    return (0.45 * image + 0.55 * colors).numpy()


def constant(scores) -> bool:
    """Whether all scores of a map are equal up to rounding."""
    low, high = scores.amin(), scores.amax()
    return bool(high - low <= 1e-5 * high.abs())


def draw_overlay(axis, image, scores) -> None:
    """Draw an image blended with a map on an axis, and label a constant map."""
    axis.imshow(overlay(image, scores))
    if constant(scores):
        axis.set_xlabel('constant', fontsize=7)


def grid(rows: int, columns: int, images, title: str, width: float = 1.3, labels: float = 0.1) -> Tuple[Any, Any]:
    """Return a figure and its axes without ticks, with room for a title and a color bar.

    Each axis is `width` inches wide, and as high as the images (B, 3, H, W) and their `labels` require.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    height = rows * (width * images.shape[2] / images.shape[3] + labels)
    page, axes = plt.subplots(rows, columns, figsize=(max(width * columns + 1.5, 5), max(height, 1.2) + 0.9),
                              layout='constrained', squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    page.suptitle(text(title), fontsize=10)
    return page, axes


def overlay_bar(page, axes, what: str) -> None:
    """Add the color bar of overlays, in which each map has its own scale."""
    _bar(page, axes, _MAP).set_label(f'{what},\nscaled for each map', fontsize=8)


def _bar(page, axes, colors: str):
    """Add a color bar from the smallest to the largest value."""
    from matplotlib.cm import ScalarMappable
    bar = page.colorbar(ScalarMappable(cmap=colors), ax=axes, shrink=min(1, 2 / len(axes)), aspect=25)
    bar.set_ticks([0, 1], labels=['smallest', 'largest'], fontsize=7)
    return bar


def text(name: str, longest: int = 500) -> str:
    """Escape a name for matplotlib, which reads dollar signs as formulas."""
    return '\n'.join(shown(line, longest).replace('$', r'\$') for line in name.split('\n'))


def draw_scores(path: Path, names: Sequence[str], images, maps: Dict[str, Any], titles: Sequence[str],
                title: str) -> None:
    """Draw one row for each image: the image, then its maps of context scores.

    Args:
        path: Output file.
        names: Image names.
        images: Tensor (B, 3, H, W) of values from 0 to 1.
        maps: Scores (B, L, h, w) by layer; the mean over latent tokens is drawn.
        titles: Titles of the layers.
        title: Title of the figure.

    Raises:
        UserError: The output file cannot be written.
    """
    page, axes = grid(len(images), 1 + len(maps), images, title)
    for row, image in enumerate(images):
        pixels = image.permute(1, 2, 0)
        axes[row, 0].imshow(pixels.numpy())
        axes[row, 0].set_ylabel(text(names[row], 20), fontsize=8)
        for axis, scores in zip(axes[row, 1:], maps.values()):
            draw_overlay(axis, pixels, scores[row].mean(0))
    for axis, name in zip(axes[0], ['image', *titles]):
        axis.set_title(text(name), fontsize=8)
    overlay_bar(page, axes[:, 1:], 'context score')
    save(page, path)


def decay_factors(model, inputs) -> Dict[str, Tuple[Any, Any]]:
    """Return the decay factors of each block of a PPMA, averaged over heads.

    Args:
        model: A PPMA in evaluation mode.
        inputs: Images (B, 3, H, W).

    Returns:
        The factors of a horizontal and of a vertical step, (B, h, w) each, by block ('stages.0.blocks.0', ...).

    Raises:
        ValueError: The attention of the model does not decay.
    """
    import torch

    from ....backbones.mixers import PolylineMixer
    from ....backbones.observation import observe_inputs
    mixers = {name: mixer for name, mixer in model.mixers(PolylineMixer).items() if mixer.paths != 'none'}
    if not mixers:
        raise ValueError("the model has paths='none': its attention does not decay with distance")

    def factors(mixer, tokens) -> Tuple[Any, Any]:
        log_alpha, log_beta = mixer.decay_logs(tokens)
        return log_alpha.float().exp().mean(1), log_beta.float().exp().mean(1)

    with torch.inference_mode():
        return observe_inputs(model, mixers, inputs, factors)


def draw_decays(path: Path, names: Sequence[str], images, layers: Dict[str, Tuple[Any, Any]], titles: Sequence[str],
                title: str) -> None:
    """Draw two rows per image: horizontal, then vertical decay factors.

    Each block has its own color range, given in its title. `layers` are the factors that `decay_factors` returns; the
    other arguments are those of `draw_scores`.
    """
    page, axes = grid(2 * len(images), 1 + len(layers), images, title)
    ranges = [tuple(f(float(f(x.flatten().tolist())) for x in pair) for f in (min, max)) for pair in layers.values()]
    for n, image in enumerate(images):
        axes[2 * n, 0].imshow(image.permute(1, 2, 0).numpy())
        axes[2 * n, 0].set_ylabel(text(names[n], 20), fontsize=8)
        axes[2 * n + 1, 0].axis('off')
        for column, (pair, (low, high)) in enumerate(zip(layers.values(), ranges), 1):
            for row, factors in enumerate(pair):
                axes[2 * n + row, column].imshow(factors[n].numpy(), cmap='viridis', vmin=low, vmax=high)
        for row, name in enumerate(('horizontal', 'vertical')):
            axes[2 * n + row, 1].set_ylabel(name, fontsize=8)
    spans = [f'{low:.3f} to {high:.3f}' if f'{low:.3f}' != f'{high:.3f}' else f'{low:.3f}' for low, high in ranges]
    for axis, name in zip(axes[0], ['image', *(f'{name}\n{span}' for name, span in zip(titles, spans))]):
        axis.set_title(text(name), fontsize=8)
    bar = _bar(page, axes[:, 1:], 'viridis')
    bar.set_label('factor per step, each block by itself\n1: the path does not fade', fontsize=8)
    save(page, path)


def unnormalized(inputs, transform) -> Any:
    """Convert a model's inputs (B, 3, H, W) back to images of values from 0 to 1."""
    import torch
    for step in getattr(transform, 'transforms', ()):
        if type(step).__name__ == 'Normalize':
            mean, std = (torch.as_tensor(x, dtype=inputs.dtype).reshape(-1, 1, 1) for x in (step.mean, step.std))
            inputs = inputs * std + mean
    return inputs.float().clamp(0, 1)


def layer_titles(layers: Sequence[str]) -> List[str]:
    """Split names of layers into two lines."""
    return [name.replace('.blocks.', '\nblock ') if '.blocks.' in name else name.replace('.1.', '.1\n')
            for name in layers]


def save(figure, path: Path) -> None:
    """Write a figure and close it.

    Raises:
        UserError: The output file cannot be written.
    """
    import matplotlib.pyplot as plt
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'Glyph')       # the font lacks letters of a file name
            figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {shown(path)}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        plt.close(figure)


def draw_classified(path: Path, files: Sequence[Tuple[Path, int]], predictions: Sequence[str], horizontal, vertical,
                    title: str) -> None:
    """Draw a row of images with labels and predictions, then their horizontal and vertical decay factors."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from PIL import Image
    figure, axes = plt.subplots(3, len(files), figsize=(1.5 * len(files) + 1.4, 5.6), layout='constrained')
    low, high = (float(f(horizontal.min(), vertical.min()) if f is min else f(horizontal.max(), vertical.max()))
                 for f in (min, max))
    for column, ((file, label), prediction) in enumerate(zip(files, predictions)):
        axes[0, column].imshow(Image.open(file), cmap='gray')
        axes[0, column].set_title(f'label {label}, predicted {prediction}', fontsize=9,
                                  color='black' if str(label) == prediction else 'red')
        for row, factors in ((1, horizontal), (2, vertical)):
            shown = axes[row, column].imshow(factors[column], cmap='viridis', vmin=low, vmax=high)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    for row, name in enumerate(('test image', 'horizontal\ndecay factor', 'vertical\ndecay factor')):
        axes[row, 0].set_ylabel(name, fontsize=9)
    figure.colorbar(shown, ax=axes[1:, :], shrink=0.8, label='per step; 1: no decay')
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
