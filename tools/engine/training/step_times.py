"""How long training steps take, and how long they wait for their data."""
import time
from typing import Any, Dict, List, Optional, Tuple

from mmengine.hooks import Hook

# The share of the time that waits for data from which a hint is given, and the number of steps before it.
_BINDING, _ENOUGH = 0.3, 10


class StepTimesHook(Hook):
    """Measures each step and its wait for data. It runs after all other hooks, whose time belongs to the step.

    The first step of a run is left out: it waits until the first batch is loaded, and is slower.
    """

    priority = 'LOWEST'

    def __init__(self):
        self.steps, self.data, self.step, self.hinted, self.first = 0, 0., 0., False, True
        self.recent: List[Tuple[float, float]] = []
        self.ready, self.start = 0., 0.                  # when the step before has ended, and this one has its data

    def before_train_epoch(self, runner) -> None:
        self.ready = time.perf_counter()

    def after_val_epoch(self, runner, metrics: Optional[Dict[str, float]] = None) -> None:
        self.ready = time.perf_counter()                 # a loop that counts iterations validates between two steps

    def before_train_iter(self, runner, batch_idx: int, data_batch: Any = None) -> None:
        self.start = time.perf_counter()

    def after_train_iter(self, runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        before, self.ready = self.ready, time.perf_counter()
        if self.first:
            self.first = False
            return
        times = self.start - before, self.ready - self.start
        self.steps += 1
        self.data += times[0]
        self.step += times[1]
        self.recent.append(times)

    @property
    def share(self) -> float:
        """Share of the time that waits for data, 0 to 1."""
        return self.data / max(self.data + self.step, 1e-9)

    def line(self) -> str:
        """Return the mean times since the last call, or '' if there was no step."""
        if not self.recent:
            return ''
        data, step = (sum(times) / len(self.recent) for times in zip(*self.recent))
        self.recent.clear()
        return f'data {data:.2g} s  step {step:.2g} s'

    def hint(self, workers: int) -> Optional[str]:
        """Return a sentence if the data loader is the slower part, once, else None."""
        if self.hinted or self.steps < _ENOUGH or self.share < _BINDING:
            return None
        self.hinted = True
        return (f'the loader binds: {self.share:.0%} of the time waits for data; more train_dataloader.num_workers '
                f'than {workers} may help')

    def summary(self) -> str:
        """Return a sentence with the mean times of all steps, or '' if there was none."""
        if not self.steps:
            return ''
        data, step = self.data / self.steps, self.step / self.steps
        return (f'a step took {data + step:.2g} s on average: {data:.2g} s to wait for data ({self.share:.0%}), '
                f'{step:.2g} s for model, optimizer and hooks')
