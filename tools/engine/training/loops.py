"""A training loop that continues in the middle of an epoch, with the random numbers of an uninterrupted run."""
import random
from typing import Any, Dict

import numpy as np
import torch
from mmengine.dist import all_gather_object, get_rank
from mmengine.runner import EpochBasedTrainLoop

from ...common.cli import UserError


class ResumableTrainLoop(EpochBasedTrainLoop):
    """MMEngine's EpochBasedTrainLoop, which can start at any step of an epoch."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.done, self.states = 0, []

    def continue_at(self, meta: Dict[str, Any], path: str) -> None:
        """Continue at the `position` in the meta of a checkpoint; without one the loop starts an epoch."""
        if not meta.get('step'):
            return
        if meta['steps_per_epoch'] != len(self.dataloader):
            raise UserError(f"{path} was written after {meta['step']} of {meta['steps_per_epoch']} steps of an epoch, "
                            f'but an epoch now has {len(self.dataloader)} steps: use the same data, batch size and '
                            'number of processes, or resume from the checkpoint of a whole epoch')
        self.done, self.states = meta['step'], meta['random_states']

    def run_epoch(self) -> None:
        """Run an epoch, or the rest of the epoch in which a resumed run had stopped.

        The batches before that step are loaded and dropped, because loading draws random numbers. Then the random
        states of the checkpoint are restored.
        """
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        batches = enumerate(self.dataloader)
        for _ in range(self.done):
            next(batches)
        if self.done and get_rank() < len(self.states):
            set_random_state(self.states[get_rank()])
        self.done = 0
        for idx, data_batch in batches:
            self.run_iter(idx, data_batch)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


def position(epoch: int, step: int, steps_per_epoch: int) -> Dict[str, Any]:
    """Return the entries of a checkpoint's meta from which `ResumableTrainLoop` continues; all processes call it.

    `epoch` is the number of complete epochs, `step` that of the steps after them.
    """
    return dict(epoch=epoch, iter=epoch * steps_per_epoch + step, step=step, steps_per_epoch=steps_per_epoch,
                random_states=all_gather_object(random_state()))


def random_state() -> Dict[str, Any]:
    """Return the states of random, numpy and torch in types that torch's restricted unpickler reads."""
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return dict(random=(version, list(internal), gauss), numpy=(kind, torch.from_numpy(keys.astype(np.int64)), *rest),
                torch=torch.get_rng_state(), cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None)


def set_random_state(state: Dict[str, Any]) -> None:
    """Restore the states of `random_state`."""
    version, internal, gauss = state['random']
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state['numpy']
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state['torch'].cpu())
    if state['cuda'] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())


def accumulating(runner: Any) -> bool:
    """Whether gradients have been accumulated since the last update of the weights."""
    wrapper = runner.optim_wrapper
    return getattr(wrapper, 'inner_count', 0) % getattr(wrapper, '_accumulative_counts', 1) != 0
