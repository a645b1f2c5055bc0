"""Data sets whose labels belong to tokens, registered for configs.

Items are dict(inputs=int64 (L,), label=int64 (L,)). Tokens with the label -100 count neither in the loss nor in the
metrics. `classes` are the names of the tokens.

    MQAR               generated multi-query associative recall
    TextFiles          bytes of text files, or numbers of token files
    StandardLibrary    bytes of the source files of Python's standard library
"""
import sysconfig
from pathlib import Path
from typing import Dict, Optional, Sequence

import numpy as np
import torch
from mmengine.registry import DATASETS
from torch import Tensor

from ..common.cli import UserError
from .image_sets import _Classified
from .recall import multi_query_recall
from .released_files import check_split
from .sequences import SPLITS, made_by_program

# Names of the parts of a data set in file names such as wiki.valid.tokens.
_PART_NAMES = {'train': ('train',), 'val': ('val', 'valid', 'validation', 'dev'), 'test': ('test',)}
# A text without parts is cut into this many pieces: one each for validation and testing, all others for training.
_PIECES = 20
_BYTES = 256


class _Tokens(_Classified):
    unit = 'sequences'


@DATASETS.register_module()
class MQAR(_Tokens):
    """Multi-query associative recall; see `multi_query_recall`. Generated when the data set is built.

    Only the queries have labels, so that the accuracy is the share of values that are found.

    Args:
        split: 'train', 'val' or 'test'.
        count: number of sequences; by default 100,000, 3,000 and 3,000.
        vocab_size, length, pairs, power, filler: as in `multi_query_recall`.
        seed: seed of the data set. Each split is a stream of its own of the seed.
    """

    def __init__(self, split: str, count: Optional[int] = None, vocab_size: int = 8192, length: int = 64,
                 pairs: int = 4, power: float = 0.01, filler: str = 'zero', seed: int = 0):
        options = made_by_program(split, count, (100_000, 3_000, 3_000), seed)
        self.recall = multi_query_recall(**options, vocab_size=vocab_size, length=length, pairs=pairs, power=power,
                                         filler=filler)
        self.label = self.recall.labels
        self.classes = [str(token) for token in range(vocab_size)]

    def __len__(self) -> int:
        return len(self.recall.tokens)

    def __getitem__(self, index: int) -> Dict[str, Tensor]:
        inputs, label = (torch.from_numpy(part[index].astype(np.int64)) for part in (self.recall.tokens, self.label))
        return dict(inputs=inputs, label=label)


class _Windows(_Tokens):
    """Consecutive windows of a stream of tokens. The label of a token is the next token."""

    def __init__(self, tokens: np.ndarray, length: int, vocab_size: int, source: str):
        if len(tokens) <= length:
            raise UserError(f'{source} has {len(tokens)} tokens, but a window needs length + 1 = {length + 1}')
        self.stream, self.length = tokens, length
        self.classes = [str(token) for token in range(vocab_size)]

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.length

    def __getitem__(self, index: int) -> Dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        window = torch.from_numpy(self.stream[start:start + self.length + 1].astype(np.int64))
        return dict(inputs=window[:-1], label=window[1:])


@DATASETS.register_module()
class TextFiles(_Windows):
    """Windows of a text, byte by byte, or of a file of token numbers.

    Args:
        root: a file, or a folder with one file for each part, such as train.txt, val.txt and test.txt or
            wiki.train.tokens and so on. A single file is cut: 90 % for training, then 5 % for validation and 5 % for
            testing. A name that ends in .npy is an array of integers (n,), one that ends in .bin has 16-bit unsigned
            integers, and any other file is text.
        split: 'train', 'val' or 'test'.
        length: number of tokens of a window.
        vocab_size: size of the vocabulary of token files; texts have 256.
    """

    def __init__(self, root: str, split: str, length: int = 512, vocab_size: Optional[int] = None):
        check_split(split, list(SPLITS))
        path = Path(root).expanduser()
        file = _part(path, split)
        tokens = _read(file)
        if path.is_file():
            tokens = _cut(tokens, split)
        if tokens.dtype == np.uint8 and vocab_size in (None, _BYTES):
            vocab_size = _BYTES
        elif vocab_size is None:
            raise UserError(f'{file} holds token numbers: vocab_size must be their number')
        elif len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise UserError(f'{file} has tokens from {tokens.min()} to {tokens.max()}, but vocab_size={vocab_size}')
        super().__init__(tokens, length, vocab_size, f'the part {split!r} of {root}')


def _part(path: Path, split: str) -> Path:
    """Return the file of a part: the path itself, or the file of a folder whose name has a name of the part."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f'no text at {path} (give a file, or a folder with train.txt, val.txt and test.txt: '
                        '--data FOLDER)')
    found = [file for file in sorted(path.iterdir()) if file.is_file()
             and not {*file.name.lower().replace('_', '.').replace('-', '.').split('.')}.isdisjoint(_PART_NAMES[split])]
    if len(found) != 1:
        names = ', '.join(file.name for file in found) or 'none'
        raise UserError(f'{path} must have one file with {" or ".join(_PART_NAMES[split])} in its name, has {names}')
    return found[0]


def _read(file: Path) -> np.ndarray:
    """Return the tokens of a file, integers (n,)."""
    try:
        if file.suffix == '.npy':
            tokens = np.load(file, mmap_mode='r', allow_pickle=False)
        else:
            tokens = np.memmap(file, np.uint16 if file.suffix == '.bin' else np.uint8, 'r')
    except (OSError, ValueError) as error:                       # an empty file is a ValueError
        raise UserError(f'cannot read {file}: {error}') from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f'{file} must be a one-dimensional array of integers, got {tokens.dtype} {tokens.shape}')
    return tokens


def _cut(tokens: np.ndarray, split: str) -> np.ndarray:
    """Return the part of a text without parts."""
    bounds = [0, *(len(tokens) * (_PIECES - left) // _PIECES for left in (2, 1, 0))]
    return tokens[bounds[SPLITS[split]]:bounds[SPLITS[split] + 1]]


@DATASETS.register_module()
class StandardLibrary(_Windows):
    """Windows of the source of Python's standard library, byte by byte: text that every machine has.

    It has the modules (not the packages) of the running Python, in alphabetical order. One in twenty is for validation,
    and one for testing. Another version of Python has other text.

    Args:
        split: 'train', 'val' or 'test'.
        length: number of bytes of a window.
        most: largest number of bytes of the part; None for all.
    """

    def __init__(self, split: str, length: int = 512, most: Optional[int] = None):
        check_split(split, list(SPLITS))
        folder = Path(sysconfig.get_path('stdlib'))
        files = sorted(folder.glob('*.py'))
        if len(files) < _PIECES:
            raise UserError(f'{folder} does not have the source files of the standard library')
        pieces: Dict[str, Sequence[Path]] = dict(val=files[_PIECES - 2::_PIECES], test=files[_PIECES - 1::_PIECES])
        pieces['train'] = [file for file in files if file not in {*pieces['val'], *pieces['test']}]
        text = b''.join(file.read_bytes() for file in pieces[split])
        super().__init__(np.frombuffer(text, np.uint8)[:most], length, _BYTES, f'the standard library in {folder}')
