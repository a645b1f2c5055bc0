"""Describe how the test pipeline of a detector or segmenter prepares images, for programs without MMEngine."""
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mmcv
import numpy as np
import torch
from torch import Tensor

from ...backbones.weights.resolve import published
from ..common.cli import UserError
from ..common.images import open_image

Size = Tuple[int, int]
_SMALLEST, _LARGEST = 32, 4096
# Steps without influence on the pixels, or that only cut sides to multiples of the network's stride.
_NEUTRAL = ('ResizeToStride',)
_IGNORED = ('Load', 'Pack', 'Collect')


class PreparedImage(NamedTuple):
    """An image as the network takes it."""
    images: Tensor    # (1, 3, H, W), float32
    content: Size     # height and width of the resized image, without the padding at the right and bottom
    original: Size    # height and width of the image file


def input_size(config: Any, checkpoint: Optional[str], size: Optional[Sequence[int]]) -> Size:
    """Return height and width of the network's input.

    They are the wanted `size`, or those of the test pipeline, of the training crops or of the published weights.
    """
    size = tuple(size) if size is not None else _default_size(config, checkpoint)
    if size is None:
        raise UserError('the config does not fix the size of the images; give it as --size HEIGHTxWIDTH')
    preprocessor = config.model.get('data_preprocessor') or {}
    step = preprocessor.get('pad_size_divisor') or (preprocessor.get('test_cfg') or {}).get('size_divisor') or 1
    if any(side % step or not _SMALLEST <= side <= _LARGEST for side in size):
        multiples = f' that are multiples of {step}' if step > 1 else ''
        raise UserError(f'--size must have sides from {_SMALLEST} to {_LARGEST}{multiples} for this config, '
                        f'got {size[0]}x{size[1]}')
    return size


def _default_size(config: Any, checkpoint: Optional[str]) -> Optional[Size]:
    for kind, step in _steps(config):
        if kind == 'Resize' and step.get('scale') is not None and not step.get('keep_ratio') or (
                kind == 'Pad' and step.get('size')):
            scale = step['scale' if kind == 'Resize' else 'size']
            return tuple(int(side) for side in reversed(scale if isinstance(scale, (tuple, list)) else (scale,) * 2))
    given = config.model.get('test_cfg') or {}
    crop = given.get('crop_size') or (config.model.get('data_preprocessor') or {}).get('size')
    if crop:
        return tuple(crop)
    weights = published(checkpoint) if checkpoint else None
    return tuple(weights.input_size[-2:]) if weights else None


def preparation(config: Any, size: Size) -> Tuple[Dict[str, Any], str]:
    """Describe the test pipeline and the data preprocessor of a config, for an input of this height and width.

    Returns:
        The entry `preprocessing` of the metadata and the order of the colors, 'RGB' or 'BGR'. An image is resized to
        resize.size, or, with resize.keep_ratio, to the largest size of its own ratio that fits; without resize.enlarge
        only if it does not fit. Then it is normalized and padded at the right and bottom to pad.to with pad.value.
    """
    resize = dict(size=list(size), keep_ratio=True, enlarge=False, interpolation='bilinear', antialias=False)
    given = config.model.get('data_preprocessor') or {}
    swapped = bool(given.get('bgr_to_rgb') or given.get('rgb_to_bgr'))       # pipelines load images as BGR
    mean, std = (_three(given.get(key) or fallback) for key, fallback in (('mean', 0), ('std', 1)))
    border = _three(given.get('pad_value', given.get('pad_val', 0)))
    for kind, step in _steps(config):
        if kind == 'Resize' and step.get('scale') is None and step.get('scale_factor') in (1, (1, 1), [1, 1]):
            continue
        if kind in ('Resize', 'ResizeShortSide'):
            resize.update(keep_ratio=kind != 'Resize' or bool(step.get('keep_ratio')), enlarge=True,
                          interpolation=step.get('interpolation', 'bilinear'),
                          antialias=step.get('backend') == 'pillow')
        elif kind == 'Pad':
            pixel = step.get('pad_val', 0)
            pixel = _three(pixel.get('img', 0) if isinstance(pixel, dict) else pixel)
            border = [(p - m) / s for p, m, s in zip(pixel[::-1] if swapped else pixel, mean, std)]
        elif kind not in _NEUTRAL:
            raise UserError(f'the test pipeline has a step {kind}, which the metadata of an exported file cannot '
                            'describe')
    description = dict(resize=resize, pad=dict(to=list(size), value=border), crop=None, scale=1 / 255,
                       mean=[m / 255 for m in mean], std=[s / 255 for s in std], normalize_in_graph=False)
    return description, 'RGB' if swapped else 'BGR'


def _three(value: Any) -> List[float]:
    """Return a value for each color."""
    values = [float(v) for v in (value if isinstance(value, (tuple, list)) else [value])]
    return values * 3 if len(values) == 1 else values


def read_image(file: Path, metadata: Dict[str, Any]) -> PreparedImage:
    """Read an image file and prepare it as the metadata of an exported file say."""
    given = metadata['preprocessing']
    image = np.asarray(open_image(file))
    image = np.ascontiguousarray(image[..., ::-1] if metadata['input']['color'] == 'BGR' else image)
    original, resize = image.shape[:2], given['resize']
    content = content_size(original, resize)
    if content != original:
        image = mmcv.imresize(image, content[::-1], interpolation=resize['interpolation'],
                              backend='pillow' if resize['antialias'] else 'cv2')
    image = image.astype(np.float32)
    if not given['normalize_in_graph']:
        mean, std = (np.array(given[name], np.float32) for name in ('mean', 'std'))
        image = (image * np.float32(given['scale']) - mean) / std
    canvas = np.empty((*given['pad']['to'], 3), np.float32)
    canvas[:] = np.array(given['pad']['value'], np.float32)
    canvas[:content[0], :content[1]] = image
    return PreparedImage(torch.from_numpy(canvas.transpose(2, 0, 1).copy())[None], content, original)


def content_size(original: Size, resize: Dict[str, Any]) -> Size:
    """Return height and width of a resized image, from those of the image and the entry `resize` of the metadata."""
    if not resize['keep_ratio']:
        return tuple(resize['size'])
    factor = min(new / old for new, old in zip(resize['size'], original))
    factor = factor if resize['enlarge'] else min(factor, 1)
    return tuple(max(1, int(side * factor + 0.5)) for side in original)


def _steps(config: Any) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Yield (type, step) for the steps of the test pipeline that can change pixels."""
    for step in config.test_dataloader.dataset.get('pipeline') or ():
        kind = str(getattr(step['type'], '__name__', step['type'])).rpartition('.')[2]
        if not kind.startswith(_IGNORED):
            yield kind, step
