"""What a Runner trains and tests for a classification config: the data, the model and its metadata."""
from typing import Any, Dict, List, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner

from ....backbones.weights.metadata import numbered
from ...common.cli import UserError
from ..training.building import build, check_batch_size
from ..weights.starting_weights import adopt_options, load_starting_weights, refuse_other_state
from .model import TimmClassifier
from .pixels import MixupPreprocessor
from .weight_files import WRAPPER_ARGUMENTS


def build_model(config: Config, classes: Sequence[str], training: bool) -> TimmClassifier:
    """Build the model and, in training, load its starting weights.

    The config's model receives the number of `classes`, which are those of the data, and the options of these weights.
    """
    if config.model.setdefault('num_classes', len(classes)) != len(classes):
        raise UserError(f'the model has {config.model.num_classes} classes, the data set {len(classes)}')
    start, resume = (config.get('load_from'), config.get('resume', False)) if training else (None, False)
    if start:
        adopt_options(config, start)
    if training and not start and config.model.get('trainable') == 'head':
        raise UserError("model.trainable='head' trains only the classifier: give the weights of the rest with "
                        '--weights')
    options = config.model.to_dict()
    if not training:
        options.pop('distillation', None)                     # a test needs no teacher
    model = build(MODELS, options, 'model')
    if training and isinstance(model.data_preprocessor, MixupPreprocessor):
        model.data_preprocessor.check_batches(config.train_dataloader)
    if model.distillation:
        model.distillation.prepare(model.net.num_classes, classes, config.train_dataloader.dataset.get('transform'))
    if start and resume:
        refuse_other_state(model.net, start)
    elif start:
        load_starting_weights(model.net, start, classes)
        model.has_weights = True
    return model


def build_data(config: Config, parts: Sequence[str]) -> Tuple[Dict[str, Any], List[str]]:
    """Return the Runner's data loaders of these parts, with data sets already built, and the names of the classes."""
    arguments: Dict[str, Any] = {}
    for part in parts:
        loader = config[f'{part}_dataloader'].to_dict()
        loader.setdefault('collate_fn', dict(type='default_collate'))
        loader.setdefault('pin_memory', torch.cuda.is_available())
        loader.setdefault('worker_init_fn', dict(type='keep_torch_worker_seeds'))
        if part == 'val' and loader.get('num_workers'):          # in training, no checkpoint holds their random states
            loader.setdefault('persistent_workers', True)
        loader['dataset'] = _dataset(config, loader['dataset'], part)
        check_batch_size(loader, loader['dataset'], part)
        arguments[f'{part}_dataloader'] = loader
    classes = arguments[f'{parts[0]}_dataloader']['dataset'].classes
    for loader in arguments.values():
        found = getattr(loader['dataset'], 'classes', classes)
        if found != classes:
            odd = ', '.join(sorted({*classes} ^ {*found}))
            raise UserError(f'the parts of the data set have different classes: {odd} not in both')
    return arguments, classes


def _dataset(config: Config, options: Dict[str, Any], part: str) -> Any:
    """Build the data set of a part. Data that do not name their classes take the number of the model's."""
    if options.get('type') == 'TimmDataset':
        seed = (config.get('randomness') or {}).get('seed') or 0
        options = {'is_training': part == 'train', 'seed': seed, **options}
    if config.get('strict_images') and options.get('type') in ('ImageFolder', 'TimmDataset'):
        options = {**options, 'strict': True}                    # others do not read image files of a user
    dataset = build(DATASETS, options, f'{part}_dataloader.dataset')
    dataset.evaluated = part != 'train'
    if not getattr(dataset, 'classes', True):
        if not config.model.get('num_classes'):
            raise UserError(f'{part}_dataloader.dataset does not name its classes: give their number with '
                            '--cfg-options model.num_classes=N')
        dataset.classes = numbered(config.model.num_classes)
    return dataset


def metadata(config: Config, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return what `subquad predict` needs: the model, its options, its classes and its transform."""
    part = config.get('test_dataloader') or config.get('val_dataloader') or config.train_dataloader
    options = {k: v for k, v in config.model.to_dict().items() if k not in WRAPPER_ARGUMENTS}
    transform = {k: v for k, v in part.dataset.to_dict().get('transform', {}).items() if k != 'is_training'}
    dataset = arguments['train_dataloader']['dataset']
    found = dict(model=config.model.name, options=options, classes=list(dataset.classes), transform=transform)
    return {**found, 'multi_label': True} if getattr(dataset, 'multi_label', False) else found


def timm_model(runner: Runner) -> TimmClassifier:
    """Return the timm model inside the runner's model."""
    return getattr(runner.model, 'module', runner.model).net
