"""Hooks for seeds, evaluation before training, and weights in safetensors files."""
import math
import random
from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np
import torch
from mmengine.dist import barrier, get_rank, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import FUNCTIONS, HOOKS
from mmengine.runner import EpochBasedTrainLoop

from ....backbones.weights import WeightsError, read_checkpoint, save_state_dict
from ..checkpoints.runner_checkpoints import EARLIER, set_aside

# Metrics of which higher is better, and of which the first decides which weights are the best.
METRICS = ('accuracy/top1', 'multi_label/mAP', 'language/log_likelihood', 'coco/segm_mAP', 'coco/bbox_mAP', 'mIoU')


@FUNCTIONS.register_module()
def keep_torch_worker_seeds(worker_id: int, **kwargs: Any) -> None:
    """Do nothing: torch seeds its workers from the generator that SeedHook sets at each epoch.

    MMEngine's own function would give every epoch the same augmentations.
    """


@HOOKS.register_module()
class SeedHook(Hook):
    """Seeds torch, numpy and random from (seed, epoch, rank) at the start of each epoch.

    A resumed run therefore reproduces an uninterrupted one, if its `worker_init_fn` is `keep_torch_worker_seeds`. A
    loop that counts iterations is a single epoch: after resuming it draws other augmentations than an uninterrupted
    run.
    """

    priority = 'VERY_HIGH'

    def before_train_epoch(self, runner) -> None:
        seed = np.random.SeedSequence([runner.seed, runner.epoch, get_rank()]).generate_state(1)[0].item()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        if hasattr(runner.train_dataloader.dataset, 'set_epoch'):        # data that are streamed have no sampler
            runner.train_dataloader.dataset.set_epoch(runner.epoch)


@HOOKS.register_module()
class EvaluateAtStartHook(Hook):
    """Validates before the first step, which shows the metrics of the starting weights."""

    priority = 'LOWEST'

    def before_train(self, runner) -> None:
        if runner.val_loop is not None and not runner.iter:
            runner.val_loop.run()


class WeightsHook(Hook):
    """Writes `last.safetensors` after training, and `best.safetensors` whenever the metric improves in validation.

    The files hold the weights of the timm model in a classifier or of the whole detector or segmenter, and the metadata
    that `subquad predict` needs. The best has the highest value of the first metric of METRICS that validation reports;
    NaN is never the best.

    Attributes:
        metadata: Entries to keep in the files beside the weights.
    """

    priority = 'LOW'

    def __init__(self):
        self.metadata: Dict[str, Any] = {}
        self.best = -float('inf')
        self.best_file: Optional[Path] = None
        self.last_file: Optional[Path] = None

    def before_train(self, runner) -> None:
        """Move the files of an earlier run aside, and keep the best file of the first part of a resumed run."""
        folder = Path(runner.work_dir)
        if is_main_process():
            set_aside(folder, Path(runner._load_from) if runner._resume else None, f'{EARLIER}{runner.timestamp}')
        barrier()
        path = folder / 'best.safetensors'
        if path.is_file():
            try:
                _, metadata, _ = read_checkpoint(path)
            except WeightsError:
                return                                       # the next validation replaces a damaged file
            known = [metadata[name] for name in METRICS if isinstance(metadata.get(name), (int, float))]
            self.best = max(filter(math.isfinite, known), default=self.best)
            self.best_file = path

    def after_val_epoch(self, runner, metrics: Optional[Dict[str, float]] = None) -> None:
        name = next((name for name in METRICS if name in (metrics or {})), None)
        if name is not None and math.isfinite(metrics[name]) and metrics[name] > self.best:
            self.best = float(metrics[name])
            self.best_file = self._save(runner, 'best.safetensors', {name: self.best, **self._when(runner)})

    def after_train(self, runner) -> None:
        self.last_file = self._save(runner, 'last.safetensors', self._when(runner))

    @staticmethod
    def _when(runner) -> Dict[str, int]:
        epochs = isinstance(runner.train_loop, EpochBasedTrainLoop)
        return {'epoch': runner.epoch} if epochs else {'iteration': runner.iter}

    def _save(self, runner, name: str, state: Dict[str, Any]) -> Path:
        path = Path(runner.work_dir) / name
        model = getattr(runner.model, 'module', runner.model)
        # EMAHook puts the average, which validation has evaluated, into a checkpoint. Sharded weights are gathered from
        # all processes.
        checkpoint = {'state_dict': model.state_dict()}
        runner.call_hook('before_save_checkpoint', checkpoint=checkpoint)
        if is_main_process():
            part = 'net.' if hasattr(model, 'net') else ''
            save_state_dict({key.removeprefix(part): value for key, value in checkpoint['state_dict'].items()}, path,
                            {**self.metadata, **state})
        return path
