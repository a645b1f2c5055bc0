"""Learning-rate schedules that MMEngine lacks: a cosine over all epochs, and the inverse square root of the step."""
import math
from typing import List, Optional

from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import INF, _ParamScheduler
from mmengine.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class EpochCosineLR(LRSchedulerMixin, _ParamScheduler):
    """A linear warm-up, then eta_min + (lr - eta_min) * (1 + cos(pi * epoch / epochs)) / 2, as in timm and cvnets.

    The cosine counts all epochs, those of the warm-up included, and is constant within an epoch. The warm-up changes
    the learning rate once an epoch, or, with convert_to_iter_based=True, at each step.

    Args:
        optimizer: optimizer, or MMEngine's wrapper of one.
        end: number of epochs; MMEngine sets it to those of the training.
        warmup: length of the warm-up in epochs.
        warmup_lr: first learning rate of the warm-up.
        eta_min: limit of the cosine.
        eta_min_ratio: the same, relative to the learning rate; replaces `eta_min`.
        delay: number of epochs by which the schedule lags behind; 1 for a script that passes the number of the
            finished epoch to timm's scheduler.
        epoch_length: number of steps of an epoch; 1 if the schedule counts epochs.
        kwargs: other arguments of MMEngine's schedulers.
    """

    def __init__(self, optimizer, *args, end: int, warmup: float = 0, warmup_lr: float = 0., eta_min: float = 0.,
                 eta_min_ratio: Optional[float] = None, delay: int = 0, epoch_length: int = 1, **kwargs):
        self.warmup, self.warmup_lr, self.delay, self.epoch_length = warmup, warmup_lr, delay, epoch_length
        self.eta_min, self.eta_min_ratio = eta_min, eta_min_ratio
        super().__init__(optimizer, *args, end=end, **kwargs)

    @classmethod
    def build_iter_from_epoch(cls, *args, end: int, epoch_length: int, by_epoch: bool = True, **kwargs):
        return cls(*args, end=end * epoch_length, epoch_length=epoch_length, by_epoch=False, **kwargs)

    def _get_value(self) -> List[float]:
        step = max(self.last_step - self.delay * self.epoch_length, 0)
        if step < self.warmup * self.epoch_length:
            done = step / (self.warmup * self.epoch_length)
            return [self.warmup_lr + (lr - self.warmup_lr) * done for lr in self.base_values]
        factor = (1 + math.cos(math.pi * (step // self.epoch_length) * self.epoch_length / self.end)) / 2
        floors = [self.eta_min if self.eta_min_ratio is None else lr * self.eta_min_ratio for lr in self.base_values]
        return [floor + (lr - floor) * factor for lr, floor in zip(self.base_values, floors)]


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
        super().__init__(optimizer, *args, begin=begin, end=max(end, begin + 1), **kwargs)

    def _get_value(self) -> List[float]:
        values = [group[self.param_name] for group in self.optimizer.param_groups]
        if not self.last_step:
            return values
        step = self.begin + self.last_step
        return [value * math.sqrt((step - 1) / step) for value in values]
