"""Scalars of a training: read from the device when they are used, and averaged over steps and processes when logged."""
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from mmengine.dist import all_reduce
from mmengine.hooks import LoggerHook
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.runner import LogProcessor
from torch import Tensor

# Steps after which losses are read from the device; reading waits until it has finished them.
READ_EVERY = 10


class ScalarHub(MessageHub):
    """MMEngine's MessageHub, which reads tensors from the device when their values are asked for, or every 10 steps.

    MMEngine reads them in every step, and keeps and copies a million values of each scalar.

    Attributes:
        length: Number of values that are kept of each scalar.
    """

    length = 10_000

    def __init__(self, name: str, **kwargs: Any):
        super().__init__(name, **kwargs)
        self._unread: Dict[str, List[Tensor]] = {}

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        if isinstance(value, Tensor) and count == 1:
            self._set_resumed_keys(key, resumed)
            unread = self._unread.setdefault(key, [])
            unread.append(value.detach().reshape(()))
            if len(unread) >= READ_EVERY:
                self._read(key)
        else:
            self._read(key)
            super().update_scalar(key, value, count, resumed)
            self._log_scalars[key].max_length = self.length

    def _read(self, key: str) -> None:
        unread = self._unread.pop(key, [])
        for value in torch.stack(unread).tolist() if unread else ():
            self.update_scalar(key, value, resumed=self._resumed_keys[key])

    @property
    def log_scalars(self) -> OrderedDict:
        for key in list(self._unread):
            self._read(key)
        return super().log_scalars

    def get_scalar(self, key: str) -> HistoryBuffer:
        self._read(key)
        return self._log_scalars[key] if key in self._log_scalars else super().get_scalar(key)

    def state_dict(self) -> Dict[str, Any]:
        for key in list(self._unread):
            self._read(key)
        return super().state_dict()


# MMEngine's own classes look for the hub of the run here.
ScalarHub._instance_dict = MessageHub._instance_dict


def noted(clip: Callable[..., Any], hub: MessageHub, key: str) -> Callable[..., Any]:
    """Return `clip` for an OptimWrapper, that writes the norm to the hub; MMEngine would read it in every step."""
    def clip_and_note(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        if type(norm) is not Tensor:                             # None, or the DTensor of sharded gradients
            return norm
        hub.update_scalar(key, norm)
    return clip_and_note


class StepLogProcessor(LogProcessor):
    """MMEngine's LogProcessor, whose lines of training hold means over all processes and over the steps since the line
    before.

    A mean never includes steps of an earlier epoch. MMEngine takes the losses of the first process, and the last 10
    steps, which can belong to several epochs.

    Args:
        window_size: Number of steps of an epoch to average; None for those since the line before.
    """

    def __init__(self, window_size: Optional[int] = None, **kwargs: Any):
        super().__init__(window_size or 10, **kwargs)
        self.largest = window_size

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: str) -> Tuple[Dict[str, Any], str]:
        before = self.window_size
        if self.largest:
            self.window_size = min(self.largest, batch_idx + 1)
        else:
            interval = next(hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook))
            self.window_size = (batch_idx + 1) % interval or interval
        result = super().get_log_after_iter(runner, batch_idx, mode)
        self.window_size = before                                # of metrics with 'loss' in their name
        return result

    def _collect_scalars(self, custom_cfg: List[Dict[str, Any]], runner: Any, mode: str,
                         reserve_prefix: bool = False) -> Dict[str, Any]:
        found = super()._collect_scalars(custom_cfg, runner, mode, reserve_prefix)
        losses = [key for key in found if mode == 'train' and 'loss' in key]
        if losses:
            means = torch.tensor([found[key] for key in losses], dtype=torch.float64)
            all_reduce(means, 'mean')
            found.update(zip(losses, means.tolist()))
        return found
