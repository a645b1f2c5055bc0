"""Stop a training run whose loss or weights are not finite, and report the step."""
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop
from torch import Tensor
from torch.utils.data import DataLoader

from ....backbones.weights import is_finite
from ....backbones.weights.errors import some
from ...common.cli import UserError
from ..checkpoints.runner_checkpoints import latest_checkpoint
from .scalars import READ_EVERY


class FiniteHook(Hook):
    """Stops training at the first loss that is NaN or infinite, and before weights that are not finite are written.

    The losses of the first steps, and those before a checkpoint, are read from the device at once, later ones every
    READ_EVERY steps.
    """

    priority = 'VERY_HIGH'

    def __init__(self):
        self.exempt: Set[str] = set()
        self.steps = 0
        self.unread: List[Tuple[Tensor, int, int, List[str]]] = []           # loss, iteration, batch_idx, files

    def before_train(self, runner) -> None:
        # Some networks keep infinities in a buffer, for masks.
        self.exempt = set(_not_finite(getattr(runner.model, 'module', runner.model).state_dict()))

    def after_train_iter(self, runner, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[Dict[str, Any]] = None) -> None:
        self.steps += 1
        self.unread.append((outputs['loss'].detach().reshape(()), runner.iter, batch_idx,
                            list(_image_paths(data_batch))))
        if self.steps <= READ_EVERY or len(self.unread) >= READ_EVERY:
            self._check(runner)

    def after_train_epoch(self, runner) -> None:
        self._check(runner)

    def _check(self, runner) -> None:
        unread, self.unread = self.unread, []
        losses = torch.stack([loss for loss, *_ in unread]).tolist() if unread else []
        for loss, (_, iteration, batch_idx, files) in zip(losses, unread):
            if not math.isfinite(loss):
                files = ', '.join(files or _drawn_files(runner.train_dataloader, batch_idx))
                raise UserError(f'the loss is {loss} at step {_step(runner, iteration + 1)}; '
                                f"{files and f'the batch holds {files}; '}{_last_good(runner)}; "
                                'a lower learning rate, clipped gradients or a longer warm-up may help')

    def before_save_checkpoint(self, runner, checkpoint: Dict[str, Any]) -> None:
        self._check(runner)
        bad = [key for key in _not_finite(checkpoint['state_dict']) if key not in self.exempt]
        if bad:
            raise UserError(f'the weights hold NaN or infinities after step {_step(runner, runner.iter)} '
                            f'({some(bad, 1)}): nothing is written; {_last_good(runner)}')


def _last_good(runner) -> str:
    path = latest_checkpoint(Path(runner.work_dir))
    return f'the last good checkpoint is {path}' if path else 'no checkpoint had been written'


def _not_finite(weights: Dict[str, Any]) -> List[str]:
    return [key for key, value in weights.items() if isinstance(value, Tensor) and not is_finite(value)]


def _step(runner, done: int) -> str:
    total = f'{done} of {runner.max_iters}'
    return f'{total} (epoch {runner.epoch + 1})' if isinstance(runner.train_loop, EpochBasedTrainLoop) else total


def _image_paths(value: Any) -> Iterator[str]:
    """Yield the paths of the images in a batch of MMDetection or MMSegmentation."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _image_paths(item)
    elif isinstance(getattr(value, 'img_path', None), str):
        yield value.img_path


def _drawn_files(loader: DataLoader, batch_idx: int) -> List[str]:
    """Return the files of a batch of an image folder, whose sampler draws the same again in this epoch."""
    samples = getattr(loader.dataset, 'samples', None)           # (file, label)
    drawn = next(itertools.islice(loader.batch_sampler, batch_idx, None), ()) if samples is not None else ()
    # VariableBatchSampler gives (index, side).
    return [str(samples[index[0] if isinstance(index, tuple) else index][0]) for index in drawn]
