"""What an exported file says about itself: inputs, preprocessing, outputs and labels."""
import json
import math
from typing import Any, Dict, Optional, Sequence

from torch import nn

from ... import __version__
from ..common.cli import UserError


def preprocessing(transform: Dict[str, Any]) -> Dict[str, Any]:
    """Describe an image transform for programs without timm.

    Args:
        transform: Arguments of `timm.data.create_transform`: input_size, crop_pct, crop_mode, interpolation, mean, std.

    Returns:
        dict(resize, crop, scale, mean, std, normalize_in_graph). If resize.size is a number, the shorter side is
        resized to it. If it is (height, width), the image is resized to that, or with keep_ratio to the smallest size
        that covers it. The center is cropped; then pixel values from 0 to 255 are multiplied by `scale`, `mean` is
        subtracted, and the difference is divided by `std`.

    Raises:
        UserError: The transform crops in a way that this description does not cover.
    """
    height, width = transform['input_size'][-2:]
    mode, share = transform.get('crop_mode') or 'center', transform.get('crop_pct') or 1.0
    if mode not in ('center', 'squash'):
        raise UserError(f"the transform has crop_mode={mode!r}; exported files describe 'center' and 'squash'")
    scaled = [math.floor(side / share) for side in (height, width)]
    keep_ratio = mode == 'center'
    shorter_side = keep_ratio and scaled[0] == scaled[1]
    return dict(
        resize=dict(size=scaled[0] if shorter_side else scaled, interpolation=transform.get('interpolation', 'bicubic'),
                    keep_ratio=keep_ratio),
        crop=[height, width],
        scale=1 / 255,
        mean=list(transform['mean']),
        std=list(transform['std']),
        normalize_in_graph=False,
    )


def describe(
        model: str,
        task: str,
        weights: str,
        shape: Sequence[int],
        transform: Dict[str, Any],
        labels: Sequence[str] = (),
        color: Optional[str] = None,
        **entries: Any,
) -> Dict[str, Any]:
    """Return the metadata of an exported model; the pipeline adds format, precision, dynamic shapes and outputs.

    Args:
        model: Name of the model or config.
        task: 'classification', 'features', 'detection' or 'segmentation'.
        weights: Name or file of the weights, or 'random'.
        shape: Shape (1, C, H, W) of the input.
        transform: What `preprocessing` returns.
        labels: Names of the classes.
        color: 'RGB', 'BGR' or 'gray'; by default by the number of channels.
        entries: Other entries, such as the score threshold of a detector.
    """
    return {
        'subquad': __version__,
        'model': model,
        'task': task,
        'weights': weights,
        'input': {'name': 'image', 'shape': list(shape), 'dynamic': [], 'multiple_of': 1,
                  'color': color or ('gray' if shape[1] == 1 else 'RGB'), 'range': [0, 1]},
        'preprocessing': transform,
        'outputs': [],
        'labels': list(labels),
        **entries,
    }


def dumps(metadata: Dict[str, Any]) -> str:
    """Return the metadata as JSON text for a file."""
    return json.dumps(metadata, ensure_ascii=False)


class Normalize(nn.Module):
    """Put the normalization before a model: images with values from 0 to 255 -> tuple of the model's outputs.

    Args:
        model: The model.
        transform: What `preprocessing` returns.
    """

    def __init__(self, model: nn.Module, transform: Dict[str, Any]):
        super().__init__()
        import torch
        self.model = model
        mean, std = (torch.tensor(transform[key]).view(1, -1, 1, 1) for key in ('mean', 'std'))
        self.register_buffer('factor', transform['scale'] / std)
        self.register_buffer('offset', mean / std)

    def forward(self, images):
        return self.model(images * self.factor - self.offset)
