"""A learning-rate schedule that MMEngine lacks: the inverse square root of the step."""
import math
from typing import List

from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import INF, _ParamScheduler
from mmengine.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class InverseSqrtLR(LRSchedulerMixin, _ParamScheduler):
    """lr * sqrt(begin / step) from the step `begin` on, as in fairseq; a LinearLR up to `begin` is its warm-up.

    Args:
        optimizer: optimizer, or MMEngine's wrapper of one.
        begin: first step of the schedule, at least 1. A shorter training has the warm-up only.
        end: step after which the learning rate stays; MMEngine sets it to the number of steps.
        kwargs: other arguments of MMEngine's schedulers, such as by_epoch.
    """

    def __init__(self, optimizer, *args, begin: int, end: int = INF, **kwargs):
        if begin < 1:
            raise ValueError(f'begin must be at least 1, got {begin}')
        super().__init__(optimizer, *args, begin=begin, end=max(end, begin + 1), **kwargs)

    def _get_value(self) -> List[float]:
        values = [group[self.param_name] for group in self.optimizer.param_groups]
        if not self.last_step:
            return values
        step = self.begin + self.last_step
        return [value * math.sqrt((step - 1) / step) for value in values]
