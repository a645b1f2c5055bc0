"""Decay factors of PPMA, the picture of the demonstration, and what several pictures need."""
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple

import torch
from PIL import Image

from ....backbones.mixers import PolylineMixer
from ....backbones.observation import observe_inputs
from ...common.canvas import figure, save
from ...common.cli import shown


def text(name: str, longest: int = 500) -> str:
    """Escape a name for matplotlib, which reads dollar signs as formulas."""
    return '\n'.join(shown(line, longest).replace('$', r'\$') for line in name.split('\n'))


def decay_factors(model, inputs) -> Dict[str, Tuple[Any, Any]]:
    """Return the decay factors of each block of a PPMA in evaluation mode for images (B, 3, H, W), averaged over heads.

    Returns:
        The factors of a horizontal and of a vertical step, (B, h, w) each, by block ('stages.0.blocks.0', ...).

    Raises:
        ValueError: The attention of the model does not decay.
    """
    mixers = {name: mixer for name, mixer in model.mixers(PolylineMixer).items() if mixer.paths != 'none'}
    if not mixers:
        raise ValueError("the model has paths='none': its attention does not decay with distance")

    def factors(mixer, tokens) -> Tuple[Any, Any]:
        log_alpha, log_beta = mixer.decay_logs(tokens)
        return log_alpha.float().exp().mean(1), log_beta.float().exp().mean(1)

    with torch.inference_mode():
        return observe_inputs(model, mixers, inputs, factors)


def unnormalized(inputs, transform) -> Any:
    """Convert a model's inputs (B, 3, H, W) back to images of values from 0 to 1."""
    for step in getattr(transform, 'transforms', ()):
        if type(step).__name__ == 'Normalize':
            mean, std = (torch.as_tensor(x, dtype=inputs.dtype).reshape(-1, 1, 1) for x in (step.mean, step.std))
            inputs = inputs * std + mean
    return inputs.float().clamp(0, 1)


def draw_classified(path: Path, files: Sequence[Tuple[Path, int]], predictions: Sequence[str], horizontal, vertical,
                    title: str) -> None:
    """Draw a row of images with labels and predictions, then their horizontal and vertical decay factors."""
    page = figure((1.5 * len(files) + 1.4, 5.6))
    axes = page.subplots(3, len(files))
    low, high = (float(end) for end in torch.cat([horizontal, vertical]).aminmax())
    for column, ((file, label), prediction) in enumerate(zip(files, predictions)):
        axes[0, column].imshow(Image.open(file), cmap='gray')
        axes[0, column].set_title(f'label {label}, predicted {prediction}', fontsize=9,
                                  color='black' if str(label) == prediction else 'red')
        for row, factors in ((1, horizontal), (2, vertical)):
            drawn = axes[row, column].imshow(factors[column], cmap='viridis', vmin=low, vmax=high)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for row, name in enumerate(('test image', 'horizontal\ndecay factor', 'vertical\ndecay factor')):
        axes[row, 0].set_ylabel(name, fontsize=9)
    page.colorbar(drawn, ax=axes[1:, :], shrink=0.8, label='per step; 1: no decay')
    page.suptitle(title, fontsize=10)
    save(page, path, dpi=110)
