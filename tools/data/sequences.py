"""Data sets for sequence models, registered for configs.

Items are dict(inputs, label), as in image_sets.py. inputs is a float tensor (C, H, W) for images, which the model reads
as a sequence of pixels, and an int64 tensor (L,) for expressions.

    ListOps, PathfinderLike, PathXLike    generated; the last two are not the data of the benchmarks of these names
    MNIST, CIFAR10                        read from local files
    LRAListOps, LRAPathfinder             read from local files of Long Range Arena
"""
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import numpy as np
import torch
from mmengine.registry import DATASETS

from ..common.cli import UserError
from ..common.images import open_image
from .image_sets import _Classified, _Images
from .listops import EOS, PAD, VOCABULARY, Expressions, listops
from .lra import lra_listops, lra_pathfinder
from .pathfinder import PATH_X, PATHFINDER, Style, pathfinder_like
from .released_files import CIFAR10_CLASSES, check_split, cifar10_arrays, mnist_arrays

SPLITS = {'train': 0, 'val': 1, 'test': 2}


def made_by_program(split: str, count: Optional[int], sizes: Sequence[int], seed: int) -> Dict[str, Any]:
    """Return the arguments count and seed of a generator. Each split is a stream of its own of the seed."""
    check_split(split, list(SPLITS))
    return dict(count=sizes[SPLITS[split]] if count is None else count, seed=[seed, SPLITS[split]])


class _Expressions(_Classified):
    """Expressions padded at the end.

    Attributes:
        length: L, the padded length of every item.
        lengths: lengths of the expressions without padding and end token, int64 (n,).
        vocabulary: names of the tokens.
    """

    classes = [str(n) for n in range(10)]
    vocabulary = VOCABULARY

    def __init__(self, expressions: Expressions, length: Optional[int], append_eos: bool, with_length: bool):
        self.expressions, self.lengths = expressions, expressions.lengths
        longest = int(self.lengths.max()) + append_eos
        self.length = 1 << (longest - 1).bit_length() if length is None else length
        if self.length < longest:
            raise UserError(f'length must be at least {longest}, the tokens of the longest expression, got {length}')
        self.append_eos, self.with_length = append_eos, with_length

    def __len__(self) -> int:
        return len(self.expressions)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        tokens = self.expressions.sequence(index)
        inputs = torch.full((self.length,), PAD)
        inputs[:len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        if self.append_eos:
            inputs[len(tokens)] = EOS
        item = dict(inputs=inputs, label=int(self.expressions.answers[index]))
        return dict(item, length=len(tokens) + self.append_eos) if self.with_length else item


@DATASETS.register_module()
class ListOps(_Expressions):
    """Generated ListOps expressions, 10 classes; min_length=50, max_length=128 give a short version.

    Generated when the data set is built, which takes seconds. The default sizes are those of Long Range Arena: 96,000,
    2,000 and 2,000.

    Args:
        split: 'train', 'val' or 'test'.
        count: number of expressions.
        min_length, max_length: bounds of the number of tokens, both excluded.
        max_depth, max_args: as in `listops`.
        length: length L of all items, whose `inputs` are padded with 0 at the end; by default the smallest power of two
            that holds max_length.
        append_eos: append an end token to each expression, as S4 and S5 do.
        with_length: add the number of tokens without padding to the items as `length`, an int. It equals
            (inputs != 0).sum().
        seed: seed of the data set.
    """

    def __init__(self, split: str, count: Optional[int] = None, min_length: int = 500, max_length: int = 2000,
                 max_depth: int = 10, max_args: int = 10, length: Optional[int] = None, append_eos: bool = True,
                 with_length: bool = False, seed: int = 0):
        expressions = listops(min_length=min_length, max_length=max_length, max_depth=max_depth, max_args=max_args,
                              **made_by_program(split, count, (96_000, 2_000, 2_000), seed))
        # Use the bound, not the longest sample, so that all splits have the same length.
        longest = max_length - 1 + append_eos
        default = 1 << (longest - 1).bit_length()
        super().__init__(expressions, default if length is None else length, append_eos, with_length)


@DATASETS.register_module()
class LRAListOps(_Expressions):
    """ListOps from Long Range Arena's basic_train.tsv, basic_val.tsv and basic_test.tsv, 10 classes.

    Args:
        root: folder of the files, or the folder that contains listops-1000.
        split: 'train', 'val' or 'test'.
        length, append_eos, with_length: as in ListOps; 2048 holds all expressions of the release.
    """

    def __init__(self, root: str, split: str, length: Optional[int] = 2048, append_eos: bool = True,
                 with_length: bool = False):
        super().__init__(lra_listops(root, split), length, append_eos, with_length)


class _Pictures(_Images):
    """Gray or color images, prepared by timm's transform, or scaled to [0, 1] and normalized by `mean` and `std`."""

    mean: Sequence[float]
    std: Sequence[float]

    def __getitem__(self, index: int) -> Dict[str, Any]:
        if self.transform:
            return super().__getitem__(index)
        values = torch.from_numpy(np.atleast_3d(self.picture(index)).transpose(2, 0, 1).astype(np.float32) / 255)
        mean, std = (torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (self.mean, self.std))
        return dict(inputs=(values - mean) / std, label=int(self.labels[index]))


@DATASETS.register_module()
class MNIST(_Pictures):
    """MNIST from local files, 28 x 28, one channel, 10 classes; see `mnist_arrays`.

    Args:
        root: folder of the files.
        split: 'train' (54,000), 'val' (6,000), 'all' of both, or 'test' (10,000).
        transform: arguments of timm.data.create_transform.
    """

    mean, std = (0.1307,), (0.3081,)

    def __init__(self, root: str, split: str, transform: Optional[Dict[str, Any]] = None):
        super().__init__(*mnist_arrays(root, split), [str(n) for n in range(10)], transform)


@DATASETS.register_module()
class CIFAR10(_Pictures):
    """CIFAR-10 from local files, 32 x 32, three channels, 10 classes; see `cifar10_arrays`.

    Args:
        root: folder of the files.
        split: 'train' (45,000), 'val' (5,000), 'all' of both, or 'test' (10,000).
        transform: arguments of timm.data.create_transform.
    """

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(self, root: str, split: str, transform: Optional[Dict[str, Any]] = None):
        super().__init__(*cifar10_arrays(root, split), CIFAR10_CLASSES, transform)


_PATHFINDER_CLASSES = ['two curves', 'one curve']


@DATASETS.register_module()
class PathfinderLike(_Pictures):
    """Generated images of 32 x 32, one channel: do the dots mark one curve? Not the original data; see pathfinder.py.

    Generated when the data set is built, which takes a few milliseconds per image.

    Args:
        split: 'train', 'val' or 'test'.
        count: number of images; by default 20,000, 2,000 and 2,000.
        transform: arguments of timm.data.create_transform.
        seed: seed of the data set.
        dashes, distractors: length of the two curves in dashes, and number of distractors; None for those of the style.
            Shorter curves and fewer distractors are easier.
    """

    style: Style = PATHFINDER
    mean, std = (0.0801,), (0.1920,)

    def __init__(self, split: str, count: Optional[int] = None, transform: Optional[Dict[str, Any]] = None,
                 seed: int = 0, dashes: Optional[int] = None, distractors: Optional[int] = None):
        options = made_by_program(split, count, (20_000, 2_000, 2_000), seed)
        changes = {key: value for key, value in (('dashes', dashes), ('distractors', distractors)) if value is not None}
        for key, least, most in (('dashes', 4, self.style.dashes), ('distractors', 0, self.style.distractors)):
            if key in changes and not (type(changes[key]) is int and least <= changes[key] <= most):
                raise UserError(f'{key} must be an integer from {least} to {most}, got {changes[key]!r}')
        style = replace(self.style, **changes)
        super().__init__(*pathfinder_like(style=style, **options), _PATHFINDER_CLASSES, transform)


@DATASETS.register_module()
class PathXLike(PathfinderLike):
    """`PathfinderLike` at 128 x 128. Not the original Path-X."""

    style = PATH_X
    mean, std = (0.0317,), (0.1544,)


@DATASETS.register_module()
class LRAPathfinder(_Pictures):
    """Pathfinder from local files of Long Range Arena, one channel, 2 classes; Path-X with size=128.

    Files are read on access. Without a transform, images are normalized by the mean and standard deviation of 500
    training images, for every split.

    Args:
        root: folder that contains pathfinder32 and so on.
        split: 'train' (80 %), 'val' (10 %) or 'test' (10 %).
        size, difficulty: as in `lra_pathfinder`.
        transform: arguments of timm.data.create_transform.
    """

    def __init__(self, root: str, split: str, size: int = 32, difficulty: str = 'curv_contour_length_14',
                 transform: Optional[Dict[str, Any]] = None):
        files, labels = lra_pathfinder(root, split, size, difficulty)
        super().__init__(files, labels, _PATHFINDER_CLASSES, transform)
        self.size = size
        if not transform:
            known = files if split == 'train' else lra_pathfinder(root, 'train', size, difficulty)[0]
            values = np.stack([self._read(file) for file in known[::-(-len(known) // 500)]]) / 255
            self.mean, self.std = (values.mean(),), (values.std() or 1.,)

    def _read(self, file: Path) -> np.ndarray:
        image = np.asarray(open_image(file).convert('L'))
        if image.shape != (self.size, self.size):
            raise UserError(f'{file} has {image.shape[1]} x {image.shape[0]} pixels, not {self.size} x {self.size}')
        return image

    def picture(self, index: int) -> np.ndarray:
        return self._read(self.images[index])
