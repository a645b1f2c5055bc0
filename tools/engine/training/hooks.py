"""Hooks for progress, seeds, evaluation before training, and weights in safetensors files."""
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch
from mmengine.dist import all_reduce, get_rank, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import FUNCTIONS, HOOKS
from mmengine.runner import EpochBasedTrainLoop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from ....backbones.weights import WeightsError, read_checkpoint, save_state_dict, write_atomically
from ..checkpoints.earlier_runs import earlier_files, now_own
from .messages import NOTHING_FOUND, Estimate, summary
from .run_logs import START
from .scalars import READ_EVERY
from .step_times import StepTimesHook


@HOOKS.register_module()
class ProgressHook(Hook):
    """Reports what is trained, how long it will take, the progress, and how long steps and their data take.

    On a terminal, progress is a bar with loss, learning rate and remaining time. Elsewhere it is one line for each
    tenth of the epochs, or of the iterations if the loop does not count epochs. Losses are means over all processes.

    Args:
        start: Description of the weights at the start of training.
        times: Measures the steps; it must be a hook of the run as well.
    """

    priority = 'VERY_LOW'

    def __init__(self, start: str, times: StepTimesHook):
        self.progress: Optional[Progress] = None
        self.start, self.started, self.estimate = start, False, Estimate()
        self.losses: List[Tensor] = []                           # since the line before, on the device
        self.shown = 0.
        self.times = times

    def before_train(self, runner) -> None:
        for module in runner.model.modules() if not runner._resume else ():
            if getattr(module, 'load_summary', ''):              # of a DenseBackbone
                self._print(f'init_cfg: {module.load_summary}')
        self._print(summary(runner, self.start))
        if is_main_process():
            self._note_start(runner)
        if is_main_process() and sys.stderr.isatty():
            self.progress = Progress(TextColumn('epoch {task.fields[epoch]}'), BarColumn(), TextColumn(
                '{task.completed}/{task.total}  loss {task.fields[loss]:.3f}  lr {task.fields[lr]:.1e}'),
                TimeElapsedColumn(), TextColumn('left'), TimeRemainingColumn(), console=Console(stderr=True))
            self.task = self.progress.add_task('', total=runner.max_iters, completed=runner.iter, epoch='', loss=0.,
                                               lr=0.)
            self.progress.start()

    @staticmethod
    def _note_start(runner) -> None:
        """Write beside the log where this run starts, so that `subquad logs` can join it with the log before."""
        loop = runner.train_loop
        epochs = isinstance(loop, EpochBasedTrainLoop)
        start = dict(iteration=runner.iter, epoch=runner.epoch if epochs else 0,
                     steps_per_epoch=len(loop.dataloader) if epochs else 0)
        with write_atomically(Path(runner._log_dir) / START) as temporary:
            Path(temporary).write_text(json.dumps(start))

    def after_train_iter(self, runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.started = True
        self.losses.append(outputs['loss'].detach().reshape(()))
        left = self.estimate.after_step(time.perf_counter(), runner.max_iters - runner.iter - 1)
        if left:
            self._print(left)
        if self.progress:
            if (len(self.losses) - 1) % READ_EVERY == 0:
                self.shown = self._mean(self.losses[-20:])
            self.progress.update(self.task, completed=runner.iter + 1, epoch=f'{runner.epoch + 1}/{runner.max_epochs}',
                                 loss=self.shown, lr=self._lr(runner))
        if not isinstance(runner.train_loop, EpochBasedTrainLoop):
            self._line(runner, 'iteration', runner.iter + 1, runner.max_iters)

    def after_train_epoch(self, runner) -> None:
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            self._line(runner, 'epoch', runner.epoch + 1, runner.max_epochs)
            self.losses.clear()

    def _line(self, runner, unit: str, done: int, total: int) -> None:
        if done % max(1, total // 10) and done != total:
            return
        loss = torch.tensor(self._mean(self.losses))
        all_reduce(loss, 'mean')
        if not self.progress:
            times = self.times.line()
            self._print(f'{unit} {done}/{total}  loss {loss:.3f}  lr {self._lr(runner):.1e}{times and "  " + times}')
        self._hint(runner)
        self.losses.clear()

    def _hint(self, runner) -> None:
        hint = self.times.hint(runner.train_dataloader.num_workers)
        if hint:
            self._print(hint)

    def _print(self, text: str) -> None:
        if self.progress:
            self.progress.console.print(text, markup=False, highlight=False)
        elif is_main_process():
            print(text, file=sys.stderr, flush=True)

    def after_val_epoch(self, runner, metrics: Optional[Dict[str, float]] = None) -> None:
        if metrics:
            # COCO reports -1 if there are no such objects.
            self._print('validation  ' + '  '.join(f'{name} {value:.{2 if value > 1 else 3}f}'
                                                   for name, value in metrics.items() if not value < 0))
        elif metrics is not None:
            self._print(f'validation  {NOTHING_FOUND}')

    def after_train(self, runner) -> None:
        if self.times.steps:
            self._print(self.times.summary())
        self.stop()

    def stop(self) -> None:
        """Remove the bar and restore the cursor; also called after an exception."""
        if self.progress:
            self.progress.stop()
            self.progress = None

    @staticmethod
    def _mean(losses: List[Tensor]) -> float:
        return torch.stack(losses).double().mean().item()

    @staticmethod
    def _lr(runner) -> float:
        return max(runner.optim_wrapper.get_lr()['lr'])


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


@HOOKS.register_module()
class WeightsHook(Hook):
    """Writes `last.safetensors` after training, and `best.safetensors` whenever the metric improves in validation.

    The files hold the weights of the timm model in a classifier or of the whole detector or segmenter, and the metadata
    that `subquad predict` needs.

    Args:
        metadata: Entries to keep in the file beside the weights.
        metrics: Names of metrics, of which higher is better; the first that validation reports is used. NaN is never
            the best.
    """

    priority = 'LOW'

    def __init__(self, metadata: Optional[Dict[str, Any]] = None,
                 metrics: Sequence[str] = ('accuracy/top1', 'multi_label/mAP', 'language/log_likelihood',
                                          'coco/segm_mAP', 'coco/bbox_mAP', 'mIoU')):
        self.metadata, self.metrics, self.best = metadata or {}, tuple(metrics), -float('inf')
        self.best_file: Optional[Path] = None
        self.last_file: Optional[Path] = None

    def before_train(self, runner) -> None:
        """Keep the best file of the first part of a resumed run."""
        path = Path(runner.work_dir) / 'best.safetensors'
        start = Path(runner._load_from) if runner._resume else None
        if runner.iter and path.is_file() and path.name not in earlier_files(path.parent, start):
            try:
                _, metadata, _ = read_checkpoint(path)
            except WeightsError:
                return                                       # the next validation replaces a damaged file
            known = [metadata[name] for name in self.metrics if isinstance(metadata.get(name), (int, float))]
            self.best = max(filter(math.isfinite, known), default=self.best)
            self.best_file = path

    def after_val_epoch(self, runner, metrics: Optional[Dict[str, float]] = None) -> None:
        name = next((name for name in self.metrics if name in (metrics or {})), None)
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
            now_own(path)
        return path
