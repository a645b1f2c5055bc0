"""Read MNIST and CIFAR-10 from local files in the format of their release.

Nothing is downloaded. The pickle of a CIFAR-10 batch may hold arrays and plain values, and no other objects.
"""
import codecs
import gzip
import math
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, Sequence, Tuple

import numpy as np

from ..common.cli import UserError, one_line

_IDX_NAMES = {'train': 'train', 'test': 't10k'}


def folder_with(root: str, subfolders: Sequence[str], what: str) -> Path:
    """Return the first of root/subfolder that exists, or root if none does; '.' stands for root itself.

    `what` is a hint for the error if root is no folder.
    """
    path = Path(root).expanduser()
    if not path.is_dir():
        raise UserError(f'no folder {path} ({what})')
    return next((path / name for name in subfolders if (path / name).is_dir()), path)


def part_of(count: int, split: str) -> slice:
    """Return the slice of `count` training images, in file order, that a split takes.

    'train' is the first 90 %, 'val' the last 10 %, and 'all' everything: 45,000 and 5,000 of CIFAR-10's 50,000 images,
    54,000 and 6,000 of MNIST's 60,000.
    """
    train = count * 9 // 10
    return {'train': slice(0, train), 'val': slice(train, count), 'all': slice(0, count)}[split]


def check_split(split: str, splits: Sequence[str]) -> None:
    """Raise a UserError unless split is one of splits."""
    if split not in splits:
        raise UserError(f"split must be one of {', '.join(map(repr, splits))}, got {split!r}")


def mnist_arrays(root: str, split: str) -> Tuple[np.ndarray, np.ndarray]:
    """Read MNIST, or another data set of digits in its format.

    The files are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte,
    plain or .gz, in `root` or where torchvision puts them (root/MNIST/raw).

    Args:
        root: folder of the files.
        split: 'train' (the first 90 %: 54,000), 'val' (the last 10 %: 6,000), 'all' of both, or 'test' (10,000).

    Returns:
        images, uint8 (n, 28, 28), where ink is 255, and labels, int64 (n,), from 0 to 9.
    """
    check_split(split, ('train', 'val', 'all', 'test'))
    folder = folder_with(root, ('MNIST/raw', 'raw', '.'), 'give the one with train-images-idx3-ubyte')
    name = _IDX_NAMES['test' if split == 'test' else 'train']
    images_file, labels_file = (_idx_file(folder, name, kind) for kind in ('images-idx3', 'labels-idx1'))
    images, labels = _read_idx(images_file, 3), _read_idx(labels_file, 1)
    if len(images) != len(labels):
        raise UserError(f'{images_file} has {len(images)} images, but {labels_file.name} {len(labels)} labels')
    if labels.max() > 9:
        raise UserError(f'{labels_file} has the label {labels.max()}: digits are 0 to 9')
    chosen = slice(None) if split == 'test' else part_of(len(images), split)
    return images[chosen], labels[chosen].astype(np.int64)


def _idx_file(folder: Path, name: str, kind: str) -> Path:
    """Find folder/train-images-idx3-ubyte under any of its usual file names."""
    stems = (f'{name}-{kind}-ubyte', f"{name}-{kind.replace('-', '.')}-ubyte")
    for file in (folder / (stem + ending) for stem in stems for ending in ('', '.gz')):
        if file.is_file():
            return file
    raise UserError(f'no {stems[0]} or {stems[0]}.gz in {folder}')


def _read_idx(file: Path, dimensions: int) -> np.ndarray:
    """Read the uint8 array of an idx file.

    The file holds two zero bytes, the type (8: uint8), the number of dimensions, their sizes as big-endian 32-bit
    integers, and the values.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == '.gz' else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f'{file} cannot be read ({one_line(error)}): download it again') from error
    start = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < start:
        raise UserError(f'{file} is not an idx file of bytes in {dimensions} dimensions, or is truncated: it begins '
                        f"with {content[:4].hex() or 'nothing'}, not 00000{800 + dimensions}")
    shape = struct.unpack(f'>{dimensions}I', content[4:start])
    if len(content) - start != math.prod(shape):
        raise UserError(f"{file} has {len(content) - start} values but declares {' x '.join(map(str, shape))}: "
                        'download it again')
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


CIFAR10_CLASSES = ['airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck']


def cifar10_arrays(root: str, split: str) -> Tuple[np.ndarray, np.ndarray]:
    """Read the Python version of CIFAR-10: data_batch_1 to 5 and test_batch, in `root` or root/cifar-10-batches-py.

    Args:
        root: folder of the files.
        split: 'train' (the first 45,000), 'val' (the last 5,000: the second half of data_batch_5), 'all' of both, or
            'test' (10,000).

    Returns:
        RGB images, uint8 (n, 32, 32, 3), and labels, int64 (n,), indices into CIFAR10_CLASSES.
    """
    check_split(split, ('train', 'val', 'all', 'test'))
    folder = folder_with(root, ('cifar-10-batches-py', '.'), 'give the one with data_batch_1 to 5 and test_batch')
    names = ['test_batch'] if split == 'test' else [f'data_batch_{n}' for n in range(1, 6)]
    batches = [_read_cifar_batch(folder / name) for name in names]
    images, labels = (np.concatenate(parts) for parts in zip(*batches))
    chosen = slice(None) if split == 'test' else part_of(len(images), split)
    return np.ascontiguousarray(images[chosen].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels[chosen]


def _read_cifar_batch(file: Path) -> Tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 (n, 3072), as planes of red, green and blue, and labels, int64 (n,)."""
    if not file.is_file():
        raise UserError(f'no {file.name} in {file.parent} (unpack cifar-10-python.tar.gz there)')
    try:
        with file.open('rb') as stream:
            batch = _ArrayUnpickler(stream, encoding='latin1').load()
    except UserError as error:
        raise UserError(f'{file} {error}') from error
    except Exception as error:                      # a damaged pickle can raise anything
        raise UserError(f'{file} is truncated or not a CIFAR-10 batch ({one_line(error)}): '
                        'download it again') from error
    batch = batch if isinstance(batch, dict) else {}
    # Keys are bytes if the batch was loaded with encoding='bytes' and saved again.
    pixels, labels = (batch.get(key, batch.get(key.encode())) for key in ('data', 'labels'))
    if (getattr(pixels, 'dtype', None) != np.uint8 or pixels.shape[1:] != (3072,) or not isinstance(labels, list)
            or not all(type(n) is int and 0 <= n <= 9 for n in labels)):
        raise UserError(f'{file} is not a CIFAR-10 batch: expected `data`, uint8 (n, 3072), and `labels`, n integers '
                        'from 0 to 9')
    if len(pixels) != len(labels):
        raise UserError(f'{file} has {len(pixels)} images, but {len(labels)} labels')
    return pixels, np.array(labels, np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of NumPy arrays and plain values; it refuses everything else."""

    _CORE = [f'numpy.{core}.{module}' for core in ('core', '_core') for module in ('multiarray', 'numeric')]
    _KNOWN = {('numpy', 'ndarray'): np.ndarray, ('numpy', 'dtype'): np.dtype, ('_codecs', 'encode'): codecs.encode,
              **{(module, '_reconstruct'): np.zeros(0).__reduce__()[0] for module in _CORE},
              **{(module, '_frombuffer'): np.zeros(0).__reduce_ex__(5)[0] for module in _CORE}}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise UserError(f'is a pickle that could run code ({module}.{name}): refused') from None
