"""Read ListOps and Pathfinder from local files of Long Range Arena (Tay et al., 2021), laid out as in lra_release.

Nothing is downloaded. The splits are those of the benchmark's code (`input_pipeline.py` in `lra_benchmarks/listops` and
`lra_benchmarks/image`): one file per split for ListOps; 80, 10 and 10 % of the images, in order, for Pathfinder.
"""
import os
import re
from pathlib import Path
from typing import List, Tuple

import numpy as np

from ..common.cli import UserError
from .listops import Expressions, from_text
from .released_files import check_split, folder_with

SPLITS = ('train', 'val', 'test')
SIZES = (32, 64, 128, 256)
DIFFICULTIES = ('curv_baseline', 'curv_contour_length_9', 'curv_contour_length_14')
# 'imgs/0 sample_0.png 0 1 1.0 14 4 2 0.5 1 1'; the pattern allows no path outside of the folder.
_METADATA = re.compile(r'(imgs/\d+)\s+(\w+\.png)\s+\d+\s+([01])(?:\s.*)?')


def lra_listops(root: str, split: str) -> Expressions:
    """Read the expressions of basic_train.tsv, basic_val.tsv or basic_test.tsv in `root` or root/listops-1000.

    The files have the columns Source and Target, separated by a tab. The parentheses of Source are dropped, as the
    benchmark's tokenizer does.
    """
    check_split(split, SPLITS)
    folder = folder_with(root, ('listops-1000', '.'), 'give the one with basic_train.tsv')
    file = folder / f'basic_{split}.tsv'
    if not file.is_file():
        raise UserError(f'no {file.name} in {folder}')
    sequences: List[np.ndarray] = []
    answers: List[int] = []
    with file.open('rb') as stream:
        if stream.readline().rstrip(b'\r\n') != b'Source\tTarget':
            raise UserError(f'{file} does not begin with the column names Source and Target, separated by a tab')
        for number, line in enumerate(stream, 2):
            try:
                columns = line.rstrip(b'\r\n').split(b'\t')
                if len(columns) != 2:
                    raise ValueError(f'{len(columns)} columns, not 2')
                if len(columns[1]) != 1 or not columns[1].isdigit():
                    raise ValueError('a Target that is not a digit')
                sequences.append(from_text(columns[0]))
                answers.append(int(columns[1]))
            except ValueError as error:
                raise UserError(f'{file}, line {number} has {error}: the file is truncated or damaged') from error
    if not sequences:
        raise UserError(f'{file} has no expressions')
    starts = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])])
    return Expressions(np.concatenate(sequences), starts, np.array(answers, np.int64))


def lra_pathfinder(root: str, split: str, size: int = 32,
                   difficulty: str = 'curv_contour_length_14') -> Tuple[List[Path], np.ndarray]:
    """List the image files and labels of one split of Pathfinder.

    Images are root/pathfinder32/curv_contour_length_14/imgs/N/sample_M.png; Path-X is pathfinder128. Each line of the
    text files metadata/N.npy, beside imgs, holds the folder, name, number, label and drawing parameters of an image.
    The images are ordered by N and line and split 80 / 10 / 10. Empty files, which the release contains, are then
    skipped.

    Args:
        root: folder that contains pathfinder32, pathfinder64 and so on.
        split: 'train', 'val' or 'test'.
        size: 32, 64, 128 or 256.
        difficulty: difficulty of the contours, the name of a folder.

    Returns:
        n paths, and labels, int64 (n,): 1 if both dots are on one curve.
    """
    check_split(split, SPLITS)
    if size not in SIZES:
        raise UserError(f"size must be one of {', '.join(map(str, SIZES))}, got {size!r}")
    if difficulty not in DIFFICULTIES:
        raise UserError(f"difficulty must be one of {', '.join(DIFFICULTIES)}, got {difficulty!r}")
    outer = folder_with(root, ('.',), f'give the one with pathfinder{size}')
    folder = outer / f'pathfinder{size}' / difficulty
    if not folder.is_dir():
        raise UserError(f'no folder {folder} (give the one with pathfinder{size} as root)')
    files = sorted((file for file in (folder / 'metadata').glob('*.npy') if file.stem.isdigit()),
                   key=lambda file: int(file.stem))
    if not files:
        raise UserError(f'no metadata/0.npy, 1.npy, ... in {folder}')
    rows = [row for file in files for row in _metadata(file)]
    bounds = dict(zip(SPLITS, ((0, 80), (80, 90), (90, 100))))[split]
    images: List[Path] = []
    labels: List[int] = []
    for name, label in rows[len(rows) * bounds[0] // 100:len(rows) * bounds[1] // 100]:
        path = folder / name
        try:
            empty = os.stat(path).st_size == 0
        except OSError as error:
            raise UserError(f'no image {path}, which the metadata list: unpack the release again') from error
        if not empty:
            images.append(path)
            labels.append(label)
    if not images:
        raise UserError(f'{folder} has no images for the split {split!r}: the metadata list {len(rows)} in all')
    return images, np.array(labels, np.int64)


def _metadata(file: Path) -> List[Tuple[str, int]]:
    """Return (imgs/N/sample_M.png, label) for each line of a metadata file."""
    rows: List[Tuple[str, int]] = []
    fields = 0
    for number, line in enumerate(file.read_text('ascii', 'replace').splitlines(), 1):
        match = _METADATA.fullmatch(line)
        fields = fields or len(line.split())
        if not match or len(line.split()) != fields:
            raise UserError(f"{file}, line {number} is not 'imgs/N sample_M.png number label ...': "
                            'the file is truncated or damaged')
        rows.append((f'{match[1]}/{match[2]}', int(match[3])))
    return rows
