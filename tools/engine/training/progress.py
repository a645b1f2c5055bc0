"""Report on a training run: what is trained, how far it is, how long it will take, and what its steps wait for."""
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np
import torch
from mmengine.dist import all_reduce, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ....backbones.weights.resolve import SCHEME
from ...common.paths import write_text
from ..weights.starting_weights import starting_point
from .run_logs import START
from .scalars import READ_EVERY

NOTHING_FOUND = 'no metrics: the model found nothing in any image'
# Steps from which the remaining time is estimated, and from which on a slow data loader is reported if this share of
# the time waits for data. The first step is never counted: it starts the workers of the data loader.
_TIMED, _ENOUGH, _BINDING = 5, 10, 0.3


class ProgressHook(Hook):
    """Reports what is trained, how long it will take, the progress, and how long steps and their data take.

    On a terminal, progress is a bar with loss, learning rate and remaining time. Elsewhere it is one line for each
    tenth of the epochs, or of the iterations if the loop does not count epochs. Losses are means over all processes.

    Args:
        weights: The file that training starts from, if the config does not name it.

    Attributes:
        started: Whether the run has taken a step.
    """

    priority = 'VERY_LOW'                            # the time of other hooks belongs to the step

    def __init__(self, weights: Optional[str] = None):
        self.weights, self.started, self.hinted = weights, False, False
        self.progress: Optional[Progress] = None
        self.shown, self.steps = 0., 0               # the loss in the bar, and the steps since the line before
        # When the step before has ended, and when this one has its data.
        self.ready, self.loaded = 0., 0.
        # Seconds that wait for data, seconds of steps, and their number: in all, and since the line before.
        self.total, self.recent = np.zeros(3), np.zeros(3)

    def before_train(self, runner) -> None:
        for module in runner.model.modules() if not runner._resume else ():
            if getattr(module, 'load_summary', ''):              # of a DenseBackbone
                self._print(f'init_cfg: {module.load_summary}')
        self._print(_summary(runner, starting_point(runner.cfg, self.weights).replace(SCHEME, '')))
        if not is_main_process():
            return
        # Where this run starts, so that `subquad logs` can join its log with the one before.
        epochs = isinstance(runner.train_loop, EpochBasedTrainLoop)
        write_text(Path(runner._log_dir) / START, json.dumps(dict(
            iteration=runner.iter, epoch=runner.epoch if epochs else 0,
            steps_per_epoch=len(runner.train_loop.dataloader) if epochs else 0)))
        if sys.stderr.isatty():
            self.progress = Progress(TextColumn('epoch {task.fields[epoch]}'), BarColumn(), TextColumn(
                '{task.completed}/{task.total}  loss {task.fields[loss]:.3f}  lr {task.fields[lr]:.1e}'),
                TimeElapsedColumn(), TextColumn('left'), TimeRemainingColumn(), console=Console(stderr=True))
            self.task = self.progress.add_task('', total=runner.max_iters, completed=runner.iter, epoch='', loss=0.,
                                               lr=0.)
            self.progress.start()

    def before_train_epoch(self, runner) -> None:
        self.ready = time.perf_counter()

    def before_train_iter(self, runner, batch_idx: int, data_batch: Any = None) -> None:
        self.loaded = time.perf_counter()

    def after_train_iter(self, runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        before, self.ready = self.ready, time.perf_counter()
        if self.started:
            self.recent += (self.loaded - before, self.ready - self.loaded, 1)
        else:
            runner.write_config()
        self.started = True
        self.steps += 1
        times, left = self.total + self.recent, runner.max_iters - runner.iter - 1
        if times[2] == _TIMED and left:
            step = times[:2].sum() / _TIMED
            self._print(f'about {timedelta(seconds=max(1, round(step * left)))} left ({left} steps, {step:.2g} s '
                        'each), not counting evaluation')
        if self.progress:
            if self.steps % READ_EVERY == 1:
                self.shown = self._loss(runner, min(20, self.steps))
            self.progress.update(self.task, completed=runner.iter + 1, epoch=f'{runner.epoch + 1}/{runner.max_epochs}',
                                 loss=self.shown, lr=self._lr(runner))
        if not isinstance(runner.train_loop, EpochBasedTrainLoop):
            self._line(runner, 'iteration', runner.iter + 1, runner.max_iters)

    def after_train_epoch(self, runner) -> None:
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            self._line(runner, 'epoch', runner.epoch + 1, runner.max_epochs)
            self.steps = 0

    def _line(self, runner, unit: str, done: int, total: int) -> None:
        if done % max(1, total // 10) and done != total:
            return
        loss, self.steps = torch.tensor(self._loss(runner, self.steps)), 0
        all_reduce(loss, 'mean')
        data, step, steps = self.recent
        self.total += self.recent
        self.recent = np.zeros(3)
        if not self.progress:
            times = f'  data {data / steps:.2g} s  step {step / steps:.2g} s' if steps else ''
            self._print(f'{unit} {done}/{total}  loss {loss:.3f}  lr {self._lr(runner):.1e}{times}')
        data, step, steps = self.total
        if not self.hinted and steps >= _ENOUGH and data / (data + step) >= _BINDING:
            self.hinted = True
            self._print(f'the loader binds: {data / (data + step):.0%} of the time waits for data; more '
                        f'train_dataloader.num_workers than {runner.train_dataloader.num_workers} may help')

    def after_val_epoch(self, runner, metrics: Optional[Dict[str, float]] = None) -> None:
        if metrics:
            # COCO reports -1 if there are no such objects.
            self._print('validation  ' + '  '.join(f'{name} {value:.{2 if value > 1 else 3}f}'
                                                   for name, value in metrics.items() if not value < 0))
        elif metrics is not None:
            self._print(f'validation  {NOTHING_FOUND}')
        self.ready = time.perf_counter()             # a loop that counts iterations validates between two steps

    def after_train(self, runner) -> None:
        data, step, steps = self.total + self.recent
        if steps:
            self._print(f'a step took {(data + step) / steps:.2g} s on average: {data / steps:.2g} s to wait for data '
                        f'({data / (data + step):.0%}), {step / steps:.2g} s for model, optimizer and hooks')
        self.stop()

    def stop(self) -> None:
        """Remove the bar and restore the cursor; also called after an exception."""
        if self.progress:
            self.progress.stop()
            self.progress = None

    def _print(self, text: str) -> None:
        if self.progress:
            self.progress.console.print(text, markup=False, highlight=False)
        elif is_main_process():
            print(text, file=sys.stderr, flush=True)

    @staticmethod
    def _loss(runner, steps: int) -> float:
        """Mean loss of the last steps in this process."""
        return runner.message_hub.get_scalar('train/loss').mean(steps)

    @staticmethod
    def _lr(runner) -> float:
        return max(runner.optim_wrapper.get_lr()['lr'])


def _summary(runner: Any, start: str) -> str:
    """Describe model, weights, data, device, length and work folder in two lines."""
    loader, epochs = runner.train_dataloader, isinstance(runner.train_loop, EpochBasedTrainLoop)
    if runner.iter >= runner.max_iters:
        unit, done, planned = (('epochs', runner.epoch, runner.max_epochs) if epochs else
                               ('steps', runner.iter, runner.max_iters))
        return (f'nothing is left to train: {runner._load_from} has {done} {unit}, and this training has {planned}; '
                f"a larger {'--epochs' if epochs else 'train_cfg.max_iters'} continues it")
    model, config = getattr(runner.model, 'module', runner.model), runner.cfg.model
    backbone = config.get('backbone') or {}
    name = config.get('name') or f"{type(model).__name__}{' on ' if backbone else ''}{backbone.get('type', '')}"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    data = f"{len(loader.dataset):,} {getattr(loader.dataset, 'unit', 'images')}"
    classes = (getattr(loader.dataset, 'metainfo', None) or {}).get('classes')
    data += f' of {len(classes)} classes' if classes else ''
    if runner.val_loop is not None:
        data += f', {len(runner.val_dataloader.dataset):,} to validate on'
    length = (f"{runner.max_epochs} epoch{'s' if runner.max_epochs != 1 else ''} of {len(loader)} steps" if epochs else
              f'{runner.max_iters} steps')
    if runner.iter:
        length += f', resuming after {"epoch" if epochs else "step"} {runner.epoch if epochs else runner.iter}'
        done = getattr(runner.train_loop, 'done', 0)
        length += f' and {done} steps' if done else ''
    device, processes = next(model.parameters()).device, get_world_size()
    device = torch.cuda.get_device_name(device) if device.type == 'cuda' else str(device)
    device = f'{processes} processes, {device} each' if processes > 1 else device
    return (f'training {name} ({trained / 1e6:.1f} M trainable parameters) from {start}\n'
            f'on {data}; on {device}; {length}; everything is written to {runner.work_dir}')
