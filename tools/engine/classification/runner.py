"""Build a classification Runner from a config; model and data are checked before anything is written."""
import time
from copy import deepcopy
from typing import Any, Dict, List, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner, set_random_seed

from ....backbones.weights.metadata import numbered
from ...common.cli import UserError
from ...common.paths import writable_folder
from ..checkpoints.runner_checkpoints import atomic_checkpoints
from ..training.building import build, check_batch_size, made, process_options
from ..training.finite import FiniteHook
from ..training.hooks import WeightsHook
from ..training.loops import resumable
from ..training.resumable_runner import ResumableRunner
from ..training.scalars import READ_EVERY
from ..training.sharding import GatheringHook, ShardingHook, is_sharded
from ..weights.starting_weights import adopt_options, load_starting_weights, refuse_other_state
from .mixup import MixupPreprocessor
from .model import TimmClassifier
from .pixels import send_bytes
from .weight_files import WRAPPER_ARGUMENTS


class ClassifierRunner(ResumableRunner):
    """Compiles the network if the config has compile=True or compile=dict(...), with arguments of torch.compile.

    MMEngine would compile the whole step. The numbers of its optimizer wrapper and of its logs change in each step, and
    each change would compile them again.
    """

    def _maybe_compile(self, target: str) -> None:
        options = self.cfg.get('compile') or False
        if not isinstance(options, (bool, dict)):
            raise UserError(f'compile must be True, False or a dict of arguments of torch.compile, got {options!r}')
        if options is not False:
            # In place, so that the names of the weights stay the same.
            timm_model(self).compile(**({} if options is True else options))


def build_runner(config: Config, work_dir: str, training: bool, hooks: Sequence[Hook] = (),
                 log_level: str = 'ERROR') -> Runner:
    """Build a Runner; the model and the data sets are built first, to check them.

    Args:
        config: As `subquad.tools.engine.config.load` returns it.
        work_dir: Folder for logs and checkpoints.
        training: Build the training and validation parts; otherwise the test part.
        hooks: Further hooks; a WeightsHook receives the metadata.
        log_level: Level of MMEngine's logger.

    Raises:
        UserError: A part cannot be built, or classes or starting weights do not match the model.
    """
    config = deepcopy(config)
    if config.get('strict_images'):
        for part in ('train', 'val', 'test'):
            dataset = config.get(f'{part}_dataloader', {}).get('dataset', {})
            if dataset.get('type') in ('ImageFolder', 'TimmDataset'):     # others do not read image files of a user
                dataset.strict = True
    arguments, classes = build_data(config, ('train', 'val') if training else ('test',))
    resume = training and config.get('resume', False)
    model = build_model(config, classes, training)
    hooks = [dict(type='SeedHook'), *hooks]
    if training:
        if torch.cuda.is_available():                            # a CPU normalizes faster in the workers
            send_bytes(model, arguments)
        hooks += [FiniteHook(READ_EVERY), *([GatheringHook(), ShardingHook()] if is_sharded(config) else ())]
        arguments.update(optim_wrapper=build_optimizer(config, model),
                         param_scheduler=config.get('param_scheduler'), auto_scale_lr=config.get('auto_scale_lr'),
                         default_hooks=atomic_checkpoints(config.get('default_hooks')),
                         train_cfg=resumable(arguments['train_cfg']))
        for hook in hooks:
            if isinstance(hook, WeightsHook):
                hook.metadata = _metadata(config, classes)
                if getattr(arguments['train_dataloader']['dataset'], 'multi_label', False):
                    hook.metadata['multi_label'] = True
    config.work_dir = str(writable_folder(work_dir))             # MLflow's backend reads it
    # MMEngine keeps visualizers by this name: a second run in the same second would write to those of the first.
    name = config.get('experiment_name') or f'{config.model.name}_{time.time_ns()}'
    if config.get('visualizer'):
        arguments['visualizer'] = {**config.visualizer, 'name': name}
    return made(lambda: ClassifierRunner(
        model, work_dir, **arguments, custom_hooks=[*(config.get('custom_hooks') or []), *hooks],
        randomness=config.get('randomness', dict(seed=0)), load_from=config.get('load_from') if resume else None,
        resume=resume, log_processor=config.get('log_processor'), log_level=log_level,
        default_scope=config.get('default_scope') or 'mmengine', cfg=config, experiment_name=name,
        **process_options(config)), 'the Runner cannot be built')


def build_model(config: Config, classes: Sequence[str], training: bool) -> TimmClassifier:
    """Build the model with the config's seed and, in training, its starting weights.

    Args:
        config: Config; its model receives the number of classes and the options of the starting weights.
        classes: Names of the classes of the data.
        training: Whether the model is for training.

    Raises:
        UserError: The model cannot be built, or classes, starting weights or a checkpoint to resume do not match it.
    """
    if config.model.setdefault('num_classes', len(classes)) != len(classes):
        raise UserError(f'the model has {config.model.num_classes} classes, the data set {len(classes)}')
    start, resume = (config.get('load_from'), config.get('resume', False)) if training else (None, False)
    if start:
        adopt_options(config, start)
    if training and not start and config.model.get('trainable') == 'head':
        raise UserError("model.trainable='head' trains only the classifier: give the weights of the rest with "
                        '--pretrained')
    options = config.model.to_dict()
    if not training:
        options.pop('distillation', None)                     # a test needs no teacher
    # The Runner seeds only in its constructor, which is too late for the weights.
    set_random_seed(config.get('randomness', dict(seed=0)).get('seed'))
    model = build(MODELS, options, 'model')
    if model.distillation:
        model.distillation.prepare(model.net.num_classes, classes, config.train_dataloader.dataset.get('transform'))
    if start and resume:
        refuse_other_state(model.net, start)
    elif start:
        load_starting_weights(model.net, start, classes)
        model.has_weights = True                              # MMEngine's loading would skip weights that do not match
    return model


def build_optimizer(config: Config, model: TimmClassifier) -> OptimWrapper:
    """Build the optimizer, after checking that the model's preprocessor accepts the batches.

    Raises:
        UserError: The optimizer cannot be built, or batches cannot be mixed.
    """
    optimizer = config.get('optim_wrapper')
    if optimizer is None:
        raise UserError('the config has no optim_wrapper')
    if isinstance(model.data_preprocessor, MixupPreprocessor):
        model.data_preprocessor.check_batches(config.train_dataloader)
    return made(lambda: build_optim_wrapper(model, optimizer), 'optim_wrapper')


def build_data(config: Config, parts: Sequence[str]) -> Tuple[Dict[str, Any], List[str]]:
    """Return the Runner's arguments for these parts, with data sets already built, and the names of the classes.

    Raises:
        UserError: A part is missing or cannot be built, or the parts have different classes.
    """
    arguments: Dict[str, Any] = {}
    for part in parts:
        loader = config.get(f'{part}_dataloader')
        if loader is None and part != 'val':
            raise UserError(f'the config has no {part}_dataloader')
        if loader is not None:
            loader = loader.to_dict()
            loader.setdefault('collate_fn', dict(type='default_collate'))
            loader.setdefault('pin_memory', torch.cuda.is_available())
            loader.setdefault('worker_init_fn', dict(type='keep_torch_worker_seeds'))
            if part == 'val' and loader.get('num_workers'):      # in training, no checkpoint holds their random states
                loader.setdefault('persistent_workers', True)
            loader['dataset'] = _dataset(config, loader['dataset'], part)
            check_batch_size(loader, loader['dataset'], part)
            arguments[f'{part}_dataloader'] = loader
            arguments[f'{part}_cfg'] = config.get(f'{part}_cfg')
            if part != 'train':
                arguments[f'{part}_evaluator'] = config.get(f'{part}_evaluator')
    classes = arguments[f'{parts[0]}_dataloader']['dataset'].classes
    for loader in arguments.values():
        found = getattr(loader.get('dataset'), 'classes', classes) if isinstance(loader, dict) else classes
        if found != classes:
            odd = ', '.join(sorted({*classes} ^ {*found}))
            raise UserError(f'the parts of the data set have different classes: {odd} not in both')
    return arguments, classes


def _dataset(config: Config, options: Dict[str, Any], part: str) -> Any:
    """Build the data set of a part. Data that do not name their classes take the number of the model's.

    Raises:
        UserError: The data set cannot be built, or the number of classes is unknown.
    """
    if options.get('type') == 'TimmDataset':
        seed = (config.get('randomness') or {}).get('seed') or 0
        options = {'is_training': part == 'train', 'seed': seed, **options}
    dataset = build(DATASETS, options, f'{part}_dataloader.dataset')
    dataset.evaluated = part != 'train'
    if not getattr(dataset, 'classes', True):
        if not config.model.get('num_classes'):
            raise UserError(f'{part}_dataloader.dataset does not name its classes: give their number with '
                            '--cfg-options model.num_classes=N')
        dataset.classes = numbered(config.model.num_classes)
    return dataset


def _metadata(config: Config, classes) -> Dict[str, Any]:
    """Return what `subquad predict` needs: the model, its options, its classes and its transform."""
    part = config.get('test_dataloader') or config.get('val_dataloader') or config.train_dataloader
    options = {k: v for k, v in config.model.to_dict().items() if k not in WRAPPER_ARGUMENTS}
    transform = {k: v for k, v in part.dataset.to_dict().get('transform', {}).items() if k != 'is_training'}
    return dict(model=config.model.name, options=options, classes=list(classes), transform=transform)


def timm_model(runner: Runner) -> TimmClassifier:
    """Return the timm model inside the runner's model."""
    return getattr(runner.model, 'module', runner.model).net
