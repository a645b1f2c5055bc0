"""What a Runner trains and tests for a detection or segmentation config: the data, the model and its metadata."""
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, HOOKS, MODELS
from torch import nn

from ....backbones.mm.checkpoints import (
    NewHeadsHook,
    compare_weights,
    make_loading_strict,
    mismatch_message,
    options_of,
)
from ....backbones.weights import WeightsError, check_finite, read_file, some
from ....backbones.weights.metadata import class_difference
from ....backbones.weights.resolve import SCHEME, published, resolve
from ...common.cli import UserError
from ..training.building import build, check_batch_size
from ..weights.starting_weights import say
from .channels import check_channels
from .inputs import accept_tiny_images, build_dataset, check_evaluator, use_steps
from .photographs import with_photographs

# Heads whose `num_classes` is the data set's.
_HEADS = ('bbox_head', 'mask_head', 'decode_head', 'auxiliary_head')
# Size in bytes from which an annotation file is not read a second time (COCO's has 450 MB).
_LARGE = 100_000_000
# Number of label maps that are checked before training.
_CHECKED_MAPS = 20


def build_data(config: Config, parts: Sequence[str]) -> Tuple[Dict[str, Any], List[str]]:
    """Return the Runner's data loaders of these parts, with data sets already built, and the names of the classes.

    Images are read with `open_image`. One that cannot be read is reported and replaced by another one in training, by
    a black image elsewhere; `strict_images=True` makes it an error.
    """
    arguments = {}
    for part in parts:
        unreadable = 'raise' if config.get('strict_images') else 'replace' if part == 'train' else 'blank'
        # A copy: the config is written to the work folder, as other tools expect it.
        loader = with_photographs(config[f'{part}_dataloader'], unreadable)
        dataset = build_dataset(loader.dataset, f'{part}_dataloader.dataset')
        check_dataset(dataset, config, part)
        check_batch_size(loader, dataset, part)
        if config.get(f'{part}_evaluator') is not None:
            check_evaluator(config[f'{part}_evaluator'], [loader.dataset])
        if part == 'train' and loader.get('num_workers'):
            # New workers for each epoch, seeded by torch, which SeedHook seeds. MMEngine's own function gives workers
            # the same seeds in every epoch, and persistent workers cannot be resumed.
            loader.setdefault('worker_init_fn', dict(type='keep_torch_worker_seeds'))
            loader['persistent_workers'] = False
        use_steps(dataset)
        arguments[f'{part}_dataloader'] = {**loader.to_dict(), 'dataset': dataset}
    return arguments, classes_of(config[f'{parts[0]}_dataloader'].dataset)


def build_model(config: Config, classes: Sequence[str], training: bool) -> nn.Module:
    """Build the model and, in training, check that `load_from` matches it; report on stderr what it loads.

    `classes` are those of the data. The config's `load_from` receives the scheme of published weights.
    """
    model = build(MODELS, config.model, 'model')
    check_channels(model)
    accept_tiny_images(model)
    if training and config.get('load_from'):
        _check_weights(config, model, classes)
    return model if torch.cuda.is_available() else revert_sync_batchnorm(model)      # CPUs have none


def _check_weights(config: Config, model: nn.Module, classes: Sequence[str]) -> None:
    path = config.load_from
    try:
        content = read_file(resolve(path))
        check_finite(content.weights, str(path))
        entry = published(path)
    except WeightsError as error:
        raise UserError(f'load_from: {error}') from error
    if entry is not None:
        config.load_from = f'{SCHEME}{entry.name}'       # other tools that read the written config need the scheme
    make_loading_strict(model)                         # models of other libraries load as strictly as subquad's
    given = next((hook for hook in config.get('custom_hooks') or () if isinstance(hook, dict)
                  and hook.get('type') in ('NewHeadsHook', NewHeadsHook)), None)
    allowed = None                                     # keys that the file may lack
    if given is not None and not config.get('resume'):
        allowed = build(HOOKS, given, 'custom_hooks').missing
    found = compare_weights(model, content.weights, allowed)
    if found.problems:
        raise UserError(mismatch_message(str(path), model, content.weights, found))
    if not config.get('resume'):
        say(f'load_from: {type(model).__name__}: {found.summary(str(path))}')
        other = class_difference(content.classes, classes)
        if other:
            say(f'load_from: {path} {other}')


def check_dataset(dataset: Any, config: Config, part: str) -> None:
    """Refuse a data set whose classes differ from the model's."""
    parts = getattr(dataset, 'datasets', [dataset])              # of a ConcatDataset
    for piece in parts:
        piece = getattr(piece, 'dataset', piece)                 # of a RepeatDataset and its like
        classes = list(piece.metainfo.get('classes') or ())
        if not len(piece):
            raise UserError(f'{part}_dataloader.dataset: no images found; check data_root and data_prefix '
                            f'({getattr(piece, "data_root", None)!r}, {dict(getattr(piece, "data_prefix", {}))})')
        for path, count in heads(config.model):
            if classes and count != len(classes):
                raise UserError(f'{path}.num_classes is {count}, the data set has {len(classes)} classes '
                                f'({some(classes, 6)})')
        if hasattr(piece, 'cat_ids'):
            _check_categories(piece, classes, config.get('allow_other_classes', False), annotated=part != 'test')
        elif hasattr(piece, 'reduce_zero_label'):
            _check_labels(piece, len(classes))


def _check_categories(dataset: Any, classes: List[str], others_allowed: bool, annotated: bool) -> None:
    """Refuse an annotation file whose categories differ from the classes, or without annotations if it needs them.

    MMDetection drops unknown categories, counts classes wrongly if one is missing, and orders labels as the file does.
    """
    path = Path(dataset.ann_file)
    if len(dataset.cat_ids) == len(classes) and path.stat().st_size > _LARGE:
        return
    content = json.loads(path.read_bytes())
    if annotated and not content.get('annotations'):
        raise UserError(f'{path} has no annotations')
    known = [category['name'] for category in content['categories']]
    missing = [name for name in classes if name not in known]
    if missing:
        raise UserError(f"{path} has no category {missing[0]!r}; it has {some(known, 8)}")
    surplus = [name for name in known if name not in classes]
    if surplus and not others_allowed:
        raise UserError(f"{path} has a category {surplus[0]!r} that metainfo.classes ({some(classes, 8)}) do not name; "
                        'allow_other_classes=True in the config leaves its objects out')
    ordered = [name for name in known if name in classes]
    if ordered != classes:
        raise UserError(f'{path} lists {some(ordered, 8)}, metainfo.classes are {some(classes, 8)}: MMDetection labels '
                        'objects in the order of the file, so give the classes in that order')


def _check_labels(dataset: Any, classes: int) -> None:
    """Check the labels of a few label maps across the data set: a label out of range would stop training later."""
    load = next((step for step in getattr(dataset.pipeline, 'transforms', ())
                 if type(step).__name__ == 'LoadAnnotations'), None)
    if load is None:
        return
    for n in sorted({round(k * (len(dataset) - 1) / (_CHECKED_MAPS - 1)) for k in range(_CHECKED_MAPS)}):
        loaded = load({**dataset.get_data_info(n), 'seg_fields': []})        # with the labels of training
        labels = np.unique(loaded['gt_seg_map']).astype(int)
        labels = labels[labels != dataset.ignore_index]
        if labels.size and labels.max() >= classes:
            raise UserError(f"{loaded['seg_map_path']} has label {labels.max()}, the data set has {classes} classes: "
                            f'labels are 0 to {classes - 1}, and {dataset.ignore_index} for what is left out')


def heads(model: Any, path: str = 'model') -> Iterator[Tuple[str, int]]:
    """Yield (path in the config, num_classes) of every head that predicts the classes of the data set."""
    items = model.items() if isinstance(model, dict) else enumerate(model) if isinstance(model, (list, tuple)) else ()
    for key, value in items:
        if isinstance(value, dict) and key in _HEADS and isinstance(value.get('num_classes'), int):
            yield f'{path}.{key}', value['num_classes']
        elif key != 'auxiliary_head':                    # several auxiliary heads can have other tasks
            parts = value if key in _HEADS and isinstance(value, (list, tuple)) else ()      # of a cascade
            yield from ((f'{path}.{key}.{n}', part['num_classes']) for n, part in enumerate(parts)
                        if isinstance(part.get('num_classes'), int))
            yield from heads(value, f'{path}.{key}')


def metadata(config: Config, arguments: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Return what is stored with the weights: config name, classes, and options that no shape of a weight reveals."""
    loader = next(loader for key in ('test_dataloader', 'val_dataloader', 'train_dataloader')
                  if (loader := config.get(key)) is not None)
    return dict(config=Path(config.filename or '').stem, classes=classes_of(loader.dataset),
                network=network_options(config))


def network_options(config: Config) -> Dict[str, Any]:
    """Return the options of backbone and preprocessor that change the computation: {path in the model: value}."""
    return options_of(config.model.get('module', config.model))  # module: of test-time augmentation


def classes_of(dataset: Any) -> List[str]:
    """Return the class names that a data set's config gives or its type defines."""
    return list(known_metainfo(dataset)['classes'])


def known_metainfo(dataset: Any) -> Dict[str, Any]:
    """Return the metainfo (classes, palette) of a data set from its config and type, without building it."""
    while 'metainfo' not in dataset and ('dataset' in dataset or 'datasets' in dataset):
        dataset = dataset['dataset'] if 'dataset' in dataset else dataset['datasets'][0]
    with DATASETS.switch_scope_and_registry(None) as registry:
        kind = registry.get(dataset['type'])
    if not hasattr(kind, '_load_metainfo'):
        raise UserError(f"no data set of type {dataset['type']!r} that knows its classes")
    own = dict(dataset.get('metainfo') or {})
    metainfo = kind._load_metainfo(own)                  # MMEngine accepts a file of names as classes
    if not metainfo.get('classes'):
        raise UserError(f"the data set {dataset['type']} has no classes: metainfo=dict(classes=(...))")
    # The palette of the type belongs to its own classes.
    return {**metainfo, 'palette': own.get('palette') if 'classes' in own else metainfo.get('palette')}
