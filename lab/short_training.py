"""Train a config once in this process, test the last weights, and measure what a training step costs."""
import statistics
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from subquad.tools.bench.measure import peak_memory
from subquad.tools.common.cli import quiet
from subquad.tools.engine.config import check_training
from subquad.tools.engine.training import building
from subquad.tools.engine.training.runner import build_runner

# Entries of a validation during training, which the result does not need.
_VALIDATION = ('val_dataloader', 'val_cfg', 'val_evaluator')


class StepHook(Hook):
    """Keeps the loss and the time of every step.

    Attributes:
        losses: loss of each step.
        ms: milliseconds of each step, without the loading of its batch: CPU time of this process, so that other
            programs and pauses do not count, or time on the clock with a GPU.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.losses: List[float] = []
        self.ms: List[float] = []
        self._clock = time.perf_counter if torch.cuda.is_available() else time.process_time
        self._start = 0.

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self._start = self._clock()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(float(outputs['loss'].detach()))           # waits for a GPU
        self.ms.append(1e3 * (self._clock() - self._start))


def train_and_test(config: Any, see_inputs: Optional[Callable[[Any], None]] = None) -> Dict[str, Any]:
    """Train a config and test the last weights.

    Args:
        config: MMEngine config of a classifier, detector or segmenter.
        see_inputs: called with the inputs of one training batch. The memory of a training step is then measured, too,
            by one more step after the test.

    Returns:
        The metrics on the test part, train_loss (the mean of the last 50 steps), steps, seconds, and step_ms, the
        median time of a step (see StepHook). With `see_inputs` also peak_mb: how far the memory rises during a step,
        or None where that cannot be measured.
    """
    check_training(config)
    kept = StepHook()
    with tempfile.TemporaryDirectory() as folder, quiet():
        runner = build_runner(config, folder, training=True, hooks=[kept])
        start = time.perf_counter()
        runner.train()
        seconds = time.perf_counter() - start
        tested = build_runner(config, folder, training=False)
        tested.model.load_state_dict(runner.model.state_dict())
        found = {name: float(value) for name, value in tested.test().items()}
        if see_inputs is not None:
            batch = next(iter(runner.train_dataloader))
            see_inputs(batch['inputs'])
            found['peak_mb'] = _step_memory(runner, batch)
        for each in (runner, tested):
            building.close_log(each)
    last = kept.losses[-50:]
    return {**found, 'train_loss': sum(last) / len(last), 'steps': len(kept.losses), 'seconds': round(seconds, 1),
            'step_ms': round(statistics.median(kept.ms), 3)}


def without_validation(config: Any) -> None:
    """Leave the validation during training out of a config."""
    for key in _VALIDATION:
        config.pop(key, None)


def _step_memory(runner: Runner, batch: Any) -> Optional[float]:
    """Return the rise of memory during a training step, in MB; None where it cannot be measured."""
    runner.model.train()
    return peak_memory(lambda: runner.model.train_step(batch, runner.optim_wrapper),
                       device='cuda' if torch.cuda.is_available() else 'cpu')
