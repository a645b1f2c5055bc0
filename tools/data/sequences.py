"""Data sets for sequence models and flattened images, under names for configs.

Items are dict(inputs, label), as in data.py. inputs is a float tensor (C, H, W) for images, whatever order a model then
reads the pixels in, and an int64 tensor (L,) for expressions.

    ListOps, PathfinderLike, PathXLike    made by a program; the last two are not the data of the benchmark of that name
    MNIST, CIFAR10                        the user's own files
    LRAListOps, LRAPathfinder             the user's own files of Long Range Arena
"""
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch
from mmengine.registry import DATASETS
from PIL import Image

from ..common.cli import UserError
from ..common.images import open_image
from .image_sets import _Classified, build_transform
from .listops import EOS, PAD, VOCABULARY, Expressions, listops
from .lra import lra_listops, lra_pathfinder
from .pathfinder import PATH_X, PATHFINDER, Style, pathfinder_like
from .released_files import CIFAR10_CLASSES, check_split, cifar10_arrays, mnist_arrays

SPLITS = {'train': 0, 'val': 1, 'test': 2}


def _made_by_program(split: str, count: Optional[int], sizes: Sequence[int], seed: int) -> Dict[str, Any]:
    """count and seed for a generator: the splits are different streams of one seed."""
    check_split(split, list(SPLITS))
    return dict(count=sizes[SPLITS[split]] if count is None else count, seed=[seed, SPLITS[split]])


class _Expressions(_Classified):
    """Expressions padded at the end.

    Attributes:
        length: L, of every item.
        lengths: int64 (n,), of the expressions without padding and end mark.
        vocabulary: the tokens' names.
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
    """ListOps by its grammar, 10 classes; min_length=50, max_length=128 make a short version.

    Made when the data set is, in seconds. By default in Long Range Arena's sizes: 96,000, 2,000 and 2,000.

    Args:
        split: 'train', 'val' or 'test'.
        count: how many expressions.
        min_length, max_length: tokens, both excluded.
        max_depth, max_args: as in `listops`.
        length: L of all items, `inputs` being padded with 0 at the end; by default the power of two that holds
            max_length.
        append_eos: end expressions with a token of its own, as S4 and S5 do.
        with_length: items have `length` too, the tokens that are not padding: int. (inputs != 0).sum() says the same.
        seed: of the whole data set.
    """

    def __init__(self, split: str, count: Optional[int] = None, min_length: int = 500, max_length: int = 2000,
                 max_depth: int = 10, max_args: int = 10, length: Optional[int] = None, append_eos: bool = True,
                 with_length: bool = False, seed: int = 0):
        expressions = listops(min_length=min_length, max_length=max_length, max_depth=max_depth, max_args=max_args,
                              **_made_by_program(split, count, (96_000, 2_000, 2_000), seed))
        # From the bound, not from what was drawn: the splits must agree.
        longest = max_length - 1 + append_eos
        default = 1 << (longest - 1).bit_length()
        super().__init__(expressions, default if length is None else length, append_eos, with_length)


@DATASETS.register_module()
class LRAListOps(_Expressions):
    """ListOps from Long Range Arena's basic_train.tsv, basic_val.tsv and basic_test.tsv, 10 classes.

    Args:
        root: the folder with the files, or with listops-1000.
        split: 'train', 'val' or 'test'.
        length, append_eos, with_length: as in ListOps; 2048 holds all expressions of the release.
    """

    def __init__(self, root: str, split: str, length: Optional[int] = 2048, append_eos: bool = True,
                 with_length: bool = False):
        super().__init__(lra_listops(root, split), length, append_eos, with_length)


class _Pictures(_Classified):
    """Gray or colored images: through timm's transform, or scaled by `mean` and `std`, of values from 0 to 1.

    A transform gets three channels, as in data.py, or one where its input_size is (1, H, W).
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __init__(self, images: Sequence[Any], labels: np.ndarray, classes: List[str],
                 transform: Optional[Dict[str, Any]]):
        self.images, self.labels, self.classes = images, labels, classes
        self.transform = build_transform(transform) if transform else None
        size = (transform or {}).get('input_size', 224)
        self.mode = 'L' if isinstance(size, Sequence) and len(size) == 3 and size[0] == 1 else 'RGB'
        if self.mode == 'L' and not len(transform.get('mean', ())) == len(transform.get('std', ())) == 1:
            raise UserError(f'transform: input_size {tuple(size)} wants a mean and a std of one value each')

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> np.ndarray:
        """uint8 (H, W) or (H, W, 3)."""
        return self.images[index]

    def __getitem__(self, index: int) -> Dict[str, Any]:
        image = self.picture(index)
        if self.transform:
            inputs = self.transform(Image.fromarray(image).convert(self.mode))
        else:
            values = torch.from_numpy(np.atleast_3d(image).transpose(2, 0, 1).astype(np.float32) / 255)
            mean, std = (torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (self.mean, self.std))
            inputs = (values - mean) / std
        return dict(inputs=inputs, label=int(self.labels[index]))


@DATASETS.register_module()
class MNIST(_Pictures):
    """The user's own MNIST files, 28 x 28, one channel, 10 classes; see `mnist_arrays`.

    Args:
        root: the folder with the files.
        split: 'train' (54,000), 'val' (6,000), 'all' of both, or 'test' (10,000).
        transform: for timm.data.create_transform.
    """

    mean, std = (0.1307,), (0.3081,)

    def __init__(self, root: str, split: str, transform: Optional[Dict[str, Any]] = None):
        super().__init__(*mnist_arrays(root, split), [str(n) for n in range(10)], transform)


@DATASETS.register_module()
class CIFAR10(_Pictures):
    """The user's own CIFAR-10 files, 32 x 32, three channels, 10 classes; see `cifar10_arrays`.

    Args:
        root: the folder with the files.
        split: 'train' (45,000), 'val' (5,000), 'all' of both, or 'test' (10,000).
        transform: for timm.data.create_transform.
    """

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(self, root: str, split: str, transform: Optional[Dict[str, Any]] = None):
        super().__init__(*cifar10_arrays(root, split), CIFAR10_CLASSES, transform)


_PATHFINDER_CLASSES = ['two curves', 'one curve']


@DATASETS.register_module()
class PathfinderLike(_Pictures):
    """Drawn images of 32 x 32, one channel: do the two dots mark one curve? Not the original data; see pathfinder.py.

    Made when the data set is, in some milliseconds an image.

    Args:
        split: 'train', 'val' or 'test'.
        count: how many; by default 20,000, 2,000 and 2,000.
        transform: for timm.data.create_transform.
        seed: of the whole data set.
    """

    style: Style = PATHFINDER
    mean, std = (0.0801,), (0.1920,)

    def __init__(self, split: str, count: Optional[int] = None, transform: Optional[Dict[str, Any]] = None,
                 seed: int = 0):
        options = _made_by_program(split, count, (20_000, 2_000, 2_000), seed)
        super().__init__(*pathfinder_like(style=self.style, **options), _PATHFINDER_CLASSES, transform)


@DATASETS.register_module()
class PathXLike(PathfinderLike):
    """The same at 128 x 128. Not the original Path-X."""

    style = PATH_X
    mean, std = (0.0317,), (0.1544,)


@DATASETS.register_module()
class LRAPathfinder(_Pictures):
    """The user's own Pathfinder images of Long Range Arena, one channel, 2 classes; Path-X with size=128.

    Files are read when their turn comes. Without a transform, images are scaled by the mean and standard deviation of
    500 training images, whatever the split.

    Args:
        root: the folder with pathfinder32 and so on.
        split: 'train' (80 %), 'val' (10 %) or 'test' (10 %).
        size, difficulty: as in `lra_pathfinder`.
        transform: for timm.data.create_transform.
    """

    def __init__(self, root: str, split: str, size: int = 32, difficulty: str = 'curv_contour_length_14',
                 transform: Optional[Dict[str, Any]] = None):
        files, labels = lra_pathfinder(root, split, size, difficulty)
        super().__init__(files, labels, _PATHFINDER_CLASSES, transform)
        self.size = size
        if not transform:
            known = files if split == 'train' else lra_pathfinder(root, 'train', size, difficulty)[0]
            values = np.stack([self._open(file) for file in known[::-(-len(known) // 500)]]) / 255
            self.mean, self.std = (values.mean(),), (values.std() or 1.,)

    def _open(self, file: Path) -> np.ndarray:
        image = np.asarray(open_image(file).convert('L'))
        if image.shape != (self.size, self.size):
            raise UserError(f'{file} has {image.shape[1]} x {image.shape[0]} pixels, not {self.size} x {self.size}')
        return image

    def picture(self, index: int) -> np.ndarray:
        return self._open(self.images[index])
