"""Data sets that timm's readers open: tar files, WebDataset, Hugging Face datasets and TensorFlow Datasets."""
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np
import timm.data
import torch
from mmengine.dist import get_dist_info
from mmengine.registry import DATASETS
from PIL import Image
from timm.data.target_transforms import MultiLabelTarget
from torch import Tensor
from torch.utils.data import IterableDataset

from ..common.cli import UserError
from ..common.images import UnreadableImage, open_image, unreadable
from .image_sets import _Transformed, left_out

# Modules that timm's readers need, by the prefix of the name, and how they are installed.
PACKAGES = {'wds': ('webdataset', 'webdataset'), 'hfds': ('datasets', 'datasets'), 'hfids': ('datasets', 'datasets'),
            'tfds': ('tensorflow_datasets', 'tensorflow tensorflow-datasets')}


@DATASETS.register_module('TimmDataset')
def timm_dataset(name: str = '', root: Optional[str] = None, split: str = 'train',
                 transform: Optional[Dict[str, Any]] = None, is_training: bool = False, multi_label: bool = False,
                 num_samples: Optional[int] = None, class_map: Any = None, input_key: Optional[str] = None,
                 target_key: Optional[str] = None, target_format: Optional[str] = None, download: bool = False,
                 seed: int = 0, strict: bool = False) -> '_Read':
    """Open a data set by `timm.data.create_dataset`.

    Args:
        name: 'wds/', 'hfds/NAME', 'hfids/NAME' or 'tfds/NAME' as timm spells them; '' for a tar file of images, in
            which folders are classes.
        root: Folder or address of the shards of 'wds/', the tar file, or the folder in which the others keep their
            data.
        split: Name of the split; for 'wds/' also shards such as 'train-{0000..0127}.tar|128000', with their images.
        transform: Arguments of timm.data.create_transform.
        is_training: Shuffle streamed data and repeat them to whole batches. `subquad train` sets it, and the seed.
        multi_label: A label is a list of classes, or a vector if target_format='multihot'; items have vectors.
        num_samples: Number of images, where the reader does not know it.
        class_map, input_key, target_key, target_format, download: As in timm.
        seed: Seed of the order of streamed data.
        strict: Raise an error for an image that cannot be read; not for streams.

    Returns:
        A data set with random access (tar, hfds), or a stream. `classes` is empty if the data do not name them.
    """
    prefix = name.partition('/')[0].lower()
    module, install = PACKAGES.get(prefix, ('timm', ''))
    if find_spec(module) is None:
        raise UserError(f'{name} needs {module}: pip install {install}')
    found = timm.data.create_dataset(
        name, root, split, search_split=False, class_map=class_map, is_training=is_training, download=download,
        num_samples=num_samples, seed=int(np.random.SeedSequence(seed).generate_state(1)[0]), input_key=input_key,
        target_key=target_key, target_format=target_format)
    streamed = isinstance(found, IterableDataset)
    if streamed and strict:
        raise UserError(f'--strict is not possible with {name}: the reader of streamed data skips damaged images')
    if streamed and not getattr(found.reader, 'num_samples', 0):
        raise UserError(f'{name} {split}: the number of images is unknown; give it as num_samples')
    source = f'{name or root} {split}'.strip()
    return (_Streamed if streamed else _Indexed)(found.reader, source, transform, multi_label, strict)


class _Read(_Transformed):
    """Images and labels of one of timm's readers."""

    def __init__(self, reader: Any, source: str, transform: Optional[Dict[str, Any]], multi_label: bool, strict: bool):
        super().__init__(transform)
        self.reader, self.source, self.multi_label, self.strict = reader, source, multi_label, strict
        numbers = getattr(reader, 'class_to_idx', None) or getattr(reader, 'class_name_to_idx', None) or {}
        names = {index: str(name) for name, index in numbers.items()}
        self.classes: List[str] = [names.get(n, str(n)) for n in range(max(names, default=-1) + 1)]

    def __deepcopy__(self, memo: Dict[int, Any]) -> '_Read':
        """Return the same object: MMEngine copies the options of a loader, and readers share counters."""
        return self

    def _label(self, target: Any) -> Union[int, Tensor]:
        if self.multi_label:
            dense = getattr(self.reader, 'dense_target', False)
            return MultiLabelTarget(len(self.classes), dense)(target)
        if np.ndim(target):
            raise UserError(f'{self.source}: an image has the labels {target!r}: set multi_label=True')
        return int(target)


class _Indexed(_Read):
    """Data with random access. An image that cannot be read is replaced by the next one, as in timm."""

    def __len__(self) -> int:
        return len(self.reader)

    def _open(self, index: int) -> Tuple[Image.Image, Union[int, Tensor]]:
        for number in chain(range(index, len(self)), range(index)):
            file, target, *_ = self.reader[number]
            try:
                return open_image(file), self._label(target)
            except UnreadableImage as error:
                name = f'{self.source}: {self.reader.filename(number)}'
                named = unreadable(name, error.__cause__ or error)
                if self.strict:
                    raise named from error
                image, ignored = left_out(name, named)
                if self.evaluated:
                    return image, torch.full((len(self.classes),), float(ignored)) if self.multi_label else ignored
        raise UserError(f'{self.source}: no image can be read')


class _Streamed(_Read, IterableDataset):
    """Data that are read from the first to the last; timm's reader decodes, shuffles and distributes them."""

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        for image, target in self.reader:
            yield dict(inputs=self.transform(image) if self.transform else image, label=self._label(target))

    def __len__(self) -> int:
        """Return the number of images: in training those of this process, rounded up to whole batches."""
        return len(self.reader) if self.reader.is_training else self.reader.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.reader.set_epoch(epoch)

    def for_loader(self, loader: Dict[str, Any]) -> Dict[str, Any]:
        """Tell the reader about its loader and processes, and return the options of the loader without samplers."""
        if loader.get('batch_sampler'):
            raise UserError(f"{self.source} is streamed, which {loader['batch_sampler']['type']} does not support")
        if (loader.get('sampler') or {}).get('type') == 'RepeatedAugmentationSampler':
            print(f'{self.source} is streamed: there is no repeated augmentation, each image is shown once',
                  file=sys.stderr)
        self.reader.dist_rank, self.reader.dist_num_replicas = get_dist_info()
        if self.reader.dist_num_replicas > 1 and not self.reader.is_training:      # timm repeats and leaves out images
            raise UserError(f'{self.source} is streamed: it can be tested by one process only; train with '
                            'val_dataloader=None val_cfg=None val_evaluator=None')
        self.reader.batch_size = loader.get('batch_size', 1)
        self.reader.set_loader_cfg(num_workers=loader.get('num_workers', 0))
        return {**loader, 'sampler': None}
