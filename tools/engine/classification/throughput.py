"""Measure how many images a second a classifier and its data loader process, each by itself."""
import time
from typing import Any, Dict, Iterable

import torch
from torch import nn

LONGEST = 20.                   # seconds for the data loader


class Stopwatch:
    """Measures the time of a network's forward passes on batches; a GPU's work is waited for."""

    def __init__(self, net: nn.Module):
        self.seconds, self.images = [], []
        self.handles = [net.register_forward_pre_hook(self._start), net.register_forward_hook(self._stop)]

    def _start(self, net: nn.Module, inputs: Any) -> None:
        _wait()
        self.started = time.perf_counter()

    def _stop(self, net: nn.Module, inputs: Any, output: Any) -> None:
        _wait()
        self.seconds.append(time.perf_counter() - self.started)
        self.images.append(len(inputs[0]))

    def rate(self) -> float:
        """Return images per second, without the first batch if there are more, and stop measuring."""
        for handle in self.handles:
            handle.remove()
        first = int(len(self.seconds) > 1)
        return sum(self.images[first:]) / sum(self.seconds[first:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loader_rate(loader: Iterable[Dict[str, Any]]) -> float:
    """Return the images per second that a data loader gives if nothing else is done.

    The loader starts before the measurement, with its first batch if there are more; it stops after `LONGEST` seconds.
    """
    images, start = 0, time.perf_counter()
    for number, batch in enumerate(loader):
        now = time.perf_counter()
        if number == 0 and len(loader) > 1:
            start = now
            continue
        images += len(batch['inputs'])
        seconds = now - start
        if seconds > LONGEST:
            break
    return images / seconds
