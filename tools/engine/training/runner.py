"""Build the Runner of a config: one for classifiers, sequences, detectors and segmenters."""
import os
import time
import warnings
from collections.abc import Collection
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch
from mmengine.config import Config
from mmengine.dist import get_world_size
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.runner import EpochBasedTrainLoop, LogProcessor, Runner, set_random_seed
from torch import nn
from torch.utils.data import DataLoader

from ....backbones.weights import read_checkpoint
from ....backbones.weights.metadata import class_difference, dataset_classes
from ....backbones.weights.resolve import resolve
from ...common.cli import UserError, quiet
from ...common.paths import writable_folder
from ..checkpoints.changed_settings import changed_settings
from ..checkpoints.interruptions import start_worker
from ..checkpoints.runner_checkpoints import AtomicCheckpointHook
from ..classification.pixels import send_bytes
from ..config import is_classifier, read_entries
from ..weights.starting_weights import StartHook, say
from .building import close_log, made
from .finite import FiniteHook
from .hooks import SeedHook, WeightsHook
from .learning_rate import scale_learning_rate
from .loops import ResumableTrainLoop
from .scalars import ScalarHub, StepLogProcessor, noted
from .sharding import GatheringHook, ShardingHook

# Entries of a config that the Runner receives as they are, beside those of its parts.
_COMMON = ('default_scope', 'randomness', 'default_hooks')
_TRAINING = ('param_scheduler', 'auto_scale_lr', 'load_from', 'resume')
# Classes of MMEngine, and the classes of this package that replace them.
_OWN = {EpochBasedTrainLoop: ResumableTrainLoop, CheckpointHook: AtomicCheckpointHook, LogProcessor: StepLogProcessor}
# Entries of schedulers that change with each step.
_PROGRESS = ('last_step', '_global_step', '_last_value', 'verbose')
# Entries of groups of parameters in which optimizers keep their state.
_STATE = ('params', 'step', 'lookahead_step', 'd', 'd_max', 'd_hat', 'd_numerator', 'k', 'lr_max', 'weight_sum',
          'scheduled_lr', 'train_mode')


def build_runner(config: Config, work_dir: str, training: bool, hooks: Sequence[Hook] = (),
                 log_level: str = 'ERROR') -> Runner:
    """Build a Runner. Data, model and optimizer are built first, to check them before anything is written.

    Args:
        config: As `subquad.tools.engine.config.load` returns it.
        work_dir: Folder for logs and checkpoints.
        training: Build the training and validation parts; otherwise the test part.
        hooks: Further hooks. A WeightsHook receives the metadata, a StartHook the model.
        log_level: Level of MMEngine's logger.
    """
    if is_classifier(config):
        from ..classification import task
    elif config.get('default_scope') in ('mmdet', 'mmseg'):
        with quiet():                                # for what MMDetection prints on import
            from ..dense import task
    else:
        raise UserError("a classifier has the type 'TimmClassifier', a detector or segmenter the default_scope "
                        f"'mmdet' or 'mmseg'; got {config.model.get('type')!r} and {config.get('default_scope')!r}")
    config = deepcopy(config)
    init_default_scope(config.get('default_scope') or 'mmengine')
    for key in ('train_dataloader', 'optim_wrapper') if training else ('test_dataloader',):
        if config.get(key) is None:
            raise UserError(f'the config has no {key}')
    parts = [part for part in (('train', 'val') if training else ('test',)) if config.get(f'{part}_dataloader')]
    arguments, classes = task.build_data(config, parts)
    # The Runner seeds only in its constructor, which is too late for the weights.
    set_random_seed(config.setdefault('randomness', dict(seed=0)).get('seed'))
    model = task.build_model(config, classes, training)
    for hook in hooks:
        if isinstance(hook, StartHook):
            hook.prepare(model, classes)
        elif isinstance(hook, WeightsHook):
            hook.metadata = task.metadata(config, arguments)
    keys = [*_COMMON, *(f'{part}_{entry}' for part in parts for entry in ('cfg', 'evaluator')),
            *(_TRAINING if training else ())]
    arguments.update({key: config[key] for key in keys if config.get(key) is not None},
                     log_processor=_own({'type': 'LogProcessor', **(config.get('log_processor') or {})}))
    hooks = [SeedHook(), *hooks]
    if training:
        if torch.cuda.is_available():                # a CPU normalizes faster in the workers
            send_bytes(model, arguments)
        hooks += [FiniteHook(), *([GatheringHook(), ShardingHook()] if _is_sharded(config) else ())]
        defaults, loop = dict(config.get('default_hooks') or {}), dict(config.get('train_cfg') or {})
        defaults['checkpoint'] = _own(defaults.get('checkpoint', dict(type='CheckpointHook', interval=1)))
        if loop.get('by_epoch'):
            loop = {'type': 'EpochBasedTrainLoop', **{k: v for k, v in loop.items() if k != 'by_epoch'}}
        arguments.update(optim_wrapper=build_optimizer(config, model), default_hooks=defaults, train_cfg=_own(loop))
        if getattr(model, 'has_weights', False):     # MMEngine's loading would skip weights that do not match
            arguments.pop('load_from')
    arguments.update(_process_options(config))
    config.work_dir = str(writable_folder(work_dir))             # MLflow's backend reads it
    # MMEngine keeps loggers and visualizers by name: a second run would write to those of the first.
    name = config.get('experiment_name') or f"{Path(config.filename or 'config').stem}_{time.time_ns()}"
    if config.get('visualizer'):
        arguments['visualizer'] = {**config.visualizer, 'name': name}
    # The whole cfg is written to the work folder for other tools. (Runner.from_cfg would copy the model.)
    return made(lambda: ResumableRunner(
        model, config.work_dir, **arguments, cfg=config, experiment_name=name, log_level=log_level,
        custom_hooks=[*(config.get('custom_hooks') or []), *hooks]), 'the Runner cannot be built')


def _own(options: Any) -> Any:
    """Return the options of a class of MMEngine with the class of this package that replaces it."""
    kind = options.get('type') if isinstance(options, dict) else None
    for theirs, ours in _OWN.items():
        if kind in (theirs, theirs.__name__, f'mmengine.{theirs.__name__}'):
            return {**options, 'type': ours}
    return options


def build_optimizer(config: Config, model: nn.Module) -> OptimWrapper:
    """Build the optimizer of a config for a model, with errors as from `made`."""
    return made(lambda: build_optim_wrapper(model, deepcopy(config.optim_wrapper)), 'optim_wrapper')


def _process_options(config: Config) -> Dict[str, Any]:
    """Return the Runner's arguments about its processes.

    torchrun sets RANK and WORLD_SIZE. Without a GPU its processes are connected here, because MMEngine selects a GPU
    before it connects them.
    """
    launcher = config.get('launcher', 'none')
    if launcher == 'none' and 'RANK' in os.environ and 'WORLD_SIZE' in os.environ:
        launcher = 'pytorch'
    if _is_sharded(config) and launcher == 'none':
        raise UserError('model_wrapper_cfg: FullyShardedModel needs several processes (torchrun --nproc_per_node N -m '
                        'subquad train ...)')
    gpu = torch.cuda.is_available()
    environment = dict(config.get('env_cfg', {}))
    environment['dist_cfg'] = {**environment.get('dist_cfg', {}), 'backend': 'nccl' if gpu else 'gloo'}
    if launcher == 'pytorch' and not gpu:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group('gloo')
        config.sync_bn = None                     # CPUs have no synchronized batch norm
        config.setdefault('model_wrapper_cfg', dict(
            type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False,
            find_unused_parameters=config.get('find_unused_parameters', False)))
    return dict(launcher=launcher, env_cfg=environment)


def _is_sharded(config: Config) -> bool:
    return (config.get('model_wrapper_cfg') or {}).get('type') == 'FullyShardedModel'


class ResumableRunner(Runner):
    """MMEngine's Runner, which says what the learning rate is, also when a training is resumed with other options.

    It scales the learning rate with the batch as `scale_learning_rate`. A resumed training continues the schedule of
    its checkpoint. If the config now has another schedule, learning rate or weight decay, those of the config apply, at
    the step of the checkpoint. MMEngine alone would keep those of the checkpoint.

    The workers of its data loaders outlive a SIGTERM to all processes of a job (`start_worker`). A classifier is
    compiled if the config has compile=True or compile=dict(...), with arguments of torch.compile.
    """

    def train(self) -> nn.Module:
        try:
            return super().train()
        finally:
            close_log(self)

    def _maybe_compile(self, target: str) -> None:
        """Compile the network of a classifier in place, so that the names of its weights stay the same.

        MMEngine compiles the whole step. The numbers of its optimizer wrapper and of its logs change in each step, and
        each change would compile them again.
        """
        options = self.cfg.get('compile') or False
        net = getattr(getattr(self.model, 'module', self.model), 'net', None)
        if net is None:
            super()._maybe_compile(target)
        elif options is not False:
            net.compile(**({} if options is True else options))

    @staticmethod
    def build_dataloader(options: Dict[str, Any], *args: Any, **kwargs: Any) -> DataLoader:
        if hasattr(options.get('dataset'), 'for_loader'):        # data that are streamed
            options = options['dataset'].for_loader(options)
        loader = Runner.build_dataloader(options, *args, **kwargs)
        if loader.num_workers:
            loader.worker_init_fn = partial(start_worker, parent=os.getpid(), init=loader.worker_init_fn)
        return loader

    def build_message_hub(self, message_hub: Any = None) -> ScalarHub:
        return ScalarHub.get_instance(self._experiment_name)

    def build_optim_wrapper(self, optim_wrapper: Any) -> OptimWrapper:
        wrapper = super().build_optim_wrapper(optim_wrapper)
        wrapper.message_hub = self.message_hub                   # it can be older than the Runner
        if wrapper.clip_grad_kwargs:
            wrapper.clip_func = noted(wrapper.clip_func, self.message_hub, f'train/{wrapper.grad_name}')
        return wrapper

    def dump_config(self) -> None:
        """Write nothing: MMEngine would replace the config of the run before, which this run may not."""

    def write_config(self) -> None:
        """Write the config without the variables of its file; the other entries already contain their values."""
        whole, self.cfg = self.cfg, deepcopy(self.cfg)
        kept = {*read_entries(), 'custom_imports', 'work_dir', 'log_level', *([] if is_classifier(whole) else
                                                                              ['data_root'])}          # for --data
        for key in set(whole) - kept:
            self.cfg.pop(key)
        super().dump_config()
        self.cfg = whole

    def scale_lr(self, optim_wrapper: Any, auto_scale_lr: Optional[Dict[str, Any]] = None) -> None:
        sentence = scale_learning_rate(optim_wrapper, self.cfg, get_world_size())
        if sentence:
            say(sentence)

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        """Load every file for `load_from` that `read_checkpoint` reads; resume as MMEngine does."""
        if self._resume:
            self._resumed = super().load_checkpoint(filename, *args, **kwargs)
            self._check(self._resumed, filename)
            return self._resumed
        checkpoint = dict(state_dict=read_checkpoint(resolve(filename))[0], meta={})
        self.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        getattr(self.model, 'module', self.model).load_state_dict(checkpoint['state_dict'], strict=False)
        self._has_loaded = True
        return checkpoint

    def _check(self, checkpoint: Dict[str, Any], filename: str) -> None:
        """Refuse a checkpoint of other classes, or whose state MMEngine would load only in part."""
        meta, restart = checkpoint.get('meta', {}), f'start from its weights with --weights {filename}'
        classes = (getattr(self.train_dataloader.dataset, 'metainfo', None) or {}).get('classes') or ()
        other = class_difference(dataset_classes(meta), classes)
        if other:
            raise UserError(f'{filename} {other}: resume with the data of the run, or {restart}')
        seed, own = meta.get('seed'), self._randomness_cfg.get('seed')
        if None not in (seed, own) and seed != own:
            # MMEngine would take the seed of the checkpoint for everything but the order of the data.
            raise UserError(f'{filename} was trained with seed {seed}, and this run has seed {own}: resume with '
                            f'--seed {seed}')
        if 'ema_state_dict' in checkpoint and not any(isinstance(hook, EMAHook) for hook in self.hooks):
            raise UserError(f'{filename} holds averages of the weights, which the custom_hooks of this run do not '
                            f'continue: keep ModelEMAHook, or {restart}')
        theirs = (checkpoint.get('optimizer') or {}).get('param_groups')
        ours = self.optim_wrapper.optimizer.param_groups
        forms = [[(len(group['params']), {*group} - {*_STATE, 'initial_lr'}) for group in groups or ()]
                 for groups in (theirs, ours)]
        if theirs and forms[0] != forms[1]:
            raise UserError(f'{filename} has the state of another optimizer or of other groups of parameters: keep its '
                            f'optimizer, its layer_decay and whether weight_decay is 0, or {restart}')

    def resume(self, filename: str, *args: Any, **kwargs: Any) -> None:
        schedulers, loop = self.param_schedulers or [], self.train_loop
        planned = deepcopy([each.state_dict() for each in schedulers])
        options = _without(self.optim_wrapper.optimizer.param_groups, _STATE)
        super().resume(filename, *args, **kwargs)
        checkpoint, groups = self.__dict__.pop('_resumed'), self.optim_wrapper.optimizer.param_groups
        if isinstance(loop, EpochBasedTrainLoop):                 # the batch may have another size than before
            loop._iter = loop.epoch * len(loop.dataloader) + getattr(loop, 'done', 0)
        if loop.iter >= loop.max_iters:
            return
        other = changed_settings(checkpoint['meta'].get('cfg'), self.cfg.pretty_text)
        if other:
            say('settings of training differ from those of the checkpoint and apply from step '
                f"{self.iter} on: {', '.join(other)}")
        scheduled = {each.param_name for each in schedulers}
        if _without(planned, _PROGRESS) == _without(checkpoint.get('param_schedulers') or [], _PROGRESS) and (
                _without(options, scheduled) == _without(groups, {*scheduled, *_STATE})):
            return
        if any(getattr(each, 'need_val_args', False) for each in schedulers):
            say('the learning rate and its schedule are those of the checkpoint: a schedule that follows a metric '
                'cannot be computed again, so other options of it have no effect')
            return
        before = max(group['lr'] for group in groups)
        for group, own in zip(groups, options):
            group.update(own)
        for scheduler, state in zip(schedulers, planned):
            scheduler.load_state_dict(state)
        length = len(loop.dataloader) if isinstance(loop, EpochBasedTrainLoop) else 0
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')                       # that the optimizer has taken no steps
            for step in range(1, loop.iter + 1):
                for scheduler in schedulers:
                    if not scheduler.by_epoch or length and step % length == 0:
                        scheduler.step()
        after = max(group['lr'] for group in groups)
        say('the schedule or options of the optimizer differ from those of the checkpoint: those of the config apply '
            f'from step {self.iter} on; the learning rate is now {after:.4g} and was {before:.4g}')


def _without(states: Sequence[Dict[str, Any]], keys: Collection[str]) -> List[Dict[str, Any]]:
    """Return states of schedulers or groups of parameters without these entries."""
    return [{key: value for key, value in state.items() if key not in keys} for state in states]
