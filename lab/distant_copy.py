"""Generate images of a long-range copy: the color of a patch in one corner is asked for at the opposite corner.

A corner of a noisy image holds a patch of one of several colors, and the opposite corner a white patch. The label
belongs to the white patch and is the color of the other one. All other places have no label, so a network must carry
the color across the whole image to one place: neither pooling nor a window smaller than the image gives the answer.

The task is harder with larger images, more colors, and distractors: patches of random colors that lie in no corner.
"""
import colorsys
from typing import Any, Dict, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch
from mmengine.registry import DATASETS
from torch import Tensor

from subquad.tools.common.cli import UserError
from subquad.tools.data.generated import check_least
from subquad.tools.data.image_sets import IGNORED, _Classified
from subquad.tools.data.sequences import made_by_program

_NOISE = 60             # largest value of the background, of 255
_SHADE = 40             # largest difference between a pixel of a patch and the color of the patch


class DistantCopies(NamedTuple):
    """Images with one labeled place each."""

    images: np.ndarray    # uint8 (n, 3, size, size)
    # int64 (n, size / patch, size / patch), the color at the place that asks for it, IGNORED elsewhere
    labels: np.ndarray


def colors(count: int) -> np.ndarray:
    """Return `count` saturated colors with hues at equal distances, int (count, 3) from 0 to 255."""
    return np.array([[round(255 * part) for part in colorsys.hsv_to_rgb(n / count, 1, 1)] for n in range(count)])


def distant_copies(count: int, seed: Union[int, Sequence[int]] = 0, size: int = 64, patch: int = 4, classes: int = 8,
                   distractors: int = 0) -> DistantCopies:
    """Generate images and labels. The first k images do not depend on `count`.

    Args:
        count: number of images, at least 1.
        seed: any seed that numpy.random.SeedSequence accepts.
        size: height and width in pixels, a multiple of `patch`, at least 4 patches.
        patch: side of a patch in pixels.
        classes: number of colors, 2 to 64.
        distractors: number of patches that lie in no corner and do not matter; at most a quarter of all places.
    """
    for name, value, least in (('count', count, 1), ('patch', patch, 1), ('size', size, 4 * patch),
                               ('classes', classes, 2), ('distractors', distractors, 0)):
        check_least(name, value, least)
    side = size // patch
    if size % patch:
        raise UserError(f'size must be a multiple of patch={patch}, got {size}')
    if classes > 64 or distractors > side * side // 4:
        raise UserError(f'classes must be at most 64 and distractors at most {side * side // 4}, got {classes} and '
                        f'{distractors}')
    palette = colors(classes)
    images = np.empty((count, 3, size, size), np.uint8)
    labels = np.full((count, side, side), IGNORED, np.int64)
    corners = np.array([0, side - 1, side * (side - 1), side * side - 1])
    others = np.setdiff1d(np.arange(side * side), corners)
    for n, stream in enumerate(np.random.SeedSequence(seed).spawn(count)):
        rng = np.random.default_rng(stream)
        places = rng.choice(others, distractors, replace=False)
        corner, color = rng.integers(4), rng.integers(classes)
        image = rng.integers(0, _NOISE, (3, size, size))
        for place, shown in [*zip(places, palette[rng.integers(classes, size=distractors)]),
                             (corners[corner], palette[color]), (corners[3 - corner], np.full(3, 255))]:
            top, left = (patch * int(value) for value in divmod(place, side))
            shade = rng.integers(-_SHADE, _SHADE + 1, (3, patch, patch))
            image[:, top:top + patch, left:left + patch] = np.clip(shown[:, None, None] + shade, 0, 255)
        images[n] = image
        labels[n].flat[corners[3 - corner]] = color
    return DistantCopies(images, labels)


@DATASETS.register_module()
class DistantCopy(_Classified):
    """`distant_copies` with a label for each patch: dict(inputs=float (3, size, size), label=int64 (places,)).

    Places are in raster order. Those without a label have -100, which counts neither in the loss nor in the metrics.
    Generated when the data set is built.

    Args:
        split: 'train', 'val' or 'test'.
        count: number of images; by default 2,000, 500 and 500.
        size, patch, classes, distractors: as in `distant_copies`.
        seed: seed of the data set. Each split is a stream of its own of the seed.
    """

    def __init__(self, split: str, count: Optional[int] = None, size: int = 64, patch: int = 4, classes: int = 8,
                 distractors: int = 0, seed: int = 0):
        options: Dict[str, Any] = made_by_program(split, count, (2_000, 500, 500), seed)
        self.copies = distant_copies(**options, size=size, patch=patch, classes=classes, distractors=distractors)
        self.classes = [f'hue {360 * n // classes}' for n in range(classes)]

    def __len__(self) -> int:
        return len(self.copies.images)

    def __getitem__(self, index: int) -> Dict[str, Tensor]:
        image, label = self.copies.images[index], self.copies.labels[index]
        return dict(inputs=torch.from_numpy(image).float() / 127.5 - 1, label=torch.from_numpy(label.ravel()))
