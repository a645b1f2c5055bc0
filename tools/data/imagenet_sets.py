"""ImageNet's validation set and the test sets that share its classes, as image folders of ImageNet's 1,000 classes."""
import json
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch
from mmengine.registry import DATASETS
from timm.data import ImageNetInfo

from ..common.cli import UserError, shown
from ..common.imagenet import TEST_SETS
from .image_sets import ImageFolder

_VALIDATION_FILE = re.compile(r'ILSVRC2012_val_(\d{8})')


@DATASETS.register_module()
class ImageNetFolder(ImageFolder):
    """A folder with a subfolder for each class of ImageNet that it uses, named by WordNet id, such as n01440764.

    Labels are indices of ImageNet's 1,000 classes, also if subfolders are absent. ImageNet-V2 has subfolders 0 to 999,
    the indices themselves. With ReaL, the label of an image is a boolean vector (1000,) of its correct classes, and
    images without any are left out.

    Attributes:
        valid: Indices of the classes that a classifier chooses from, or None for all: 200 in ImageNet-A and -R.
        present: Number of classes that have images.

    Args:
        root: The folder.
        labels: A name of `TEST_SETS`.
        real: A file with ReaL's labels: a JSON list that has a list of classes for each of the validation images.
            None for the copy in timm.
        transform, strict: See `ImageFolder`.
    """

    def __init__(self, root: str, labels: str = 'imagenet', real: Optional[str] = None,
                 transform: Optional[Dict[str, Any]] = None, strict: bool = False):
        # Another image of the same class has other labels in ReaL and must not replace an unreadable one.
        super().__init__(root, transform, strict or labels == 'real')
        numbers = (files('timm.data') / '_info' / TEST_SETS[labels]).read_text() if TEST_SETS[labels] else ''
        self.valid = [int(line) for line in numbers.split()] or None
        folders, self.classes = self.classes, ImageNetInfo().label_names()
        self.present = len(folders)
        index = {name: number for number, name in enumerate(self.classes)}
        if labels == 'imagenet-v2' and all(name.isascii() and name.isdigit() for name in folders):
            index = {str(number): number for number in range(len(self.classes))}
        valid = set(index.values() if self.valid is None else self.valid)
        allowed = {name: number for name, number in index.items() if number in valid}
        unknown = [name for name in folders if name not in allowed]
        if unknown:
            raise UserError(f'{shown(root)}: the folder {shown(unknown[0])} is not one of the {len(allowed):,} classes '
                            f'of {labels}, whose folders are named by WordNet ids such as {next(iter(allowed))}')
        self.samples = [(file, allowed[folders[label]]) for file, label in self.samples]
        self.correct: Optional[List[List[int]]] = None
        if labels == 'real':
            classes = _real_labels(real)
            found = [classes[_image_number(file, len(classes))] for file, _ in self.samples]
            if not any(found):
                raise UserError('ReaL labels none of these images')
            if not all(found):
                print(f'{found.count([]):,} of {len(found):,} images have no label in ReaL and are left out',
                      file=sys.stderr)
            self.samples = [sample for sample, row in zip(self.samples, found) if row]
            self.correct = list(filter(None, found))

    def __getitem__(self, index: int) -> Dict[str, Any]:
        item = super().__getitem__(index)
        if self.correct is not None:
            item['label'] = torch.zeros(len(self.classes), dtype=torch.bool)
            item['label'][self.correct[index]] = True
        return item


def _real_labels(file: Optional[str]) -> List[List[int]]:
    """Return ReaL's classes of each validation image."""
    path = Path(file).expanduser() if file else files('timm.data') / '_info' / 'imagenet_real_labels.json'
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f'{shown(path)}: the labels of ReaL cannot be read ({error})') from error
    if not isinstance(found, list) or not all(
            isinstance(row, list) and all(type(item) is int and 0 <= item < 1000 for item in row) for row in found):
        raise UserError(f'{shown(path)} must hold a list of lists of classes from 0 to 999, as real.json of the '
                        'repository reassessed-imagenet')
    return found


def _image_number(file: str, count: int) -> int:
    """Return the place of a validation image in ReaL's list, from its file's name."""
    match = _VALIDATION_FILE.fullmatch(Path(file).stem)
    if not match or not 1 <= int(match[1]) <= count:
        raise UserError(f'{shown(file)} is not named like an image of ImageNet\'s validation set '
                        f'(ILSVRC2012_val_00000001 to {count:08d}), which ReaL labels')
    return int(match[1]) - 1
