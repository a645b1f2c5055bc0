"""Sharpness-aware self-distillation (MESA): the average of the weights teaches the model."""
from typing import Optional

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop
from torch import Tensor, nn

from ...common.cli import UserError
from ..training.averaging import ModelEMAHook
from .distillation import divergence


@HOOKS.register_module()
class MESAHook(Hook):
    """Adds the divergence from the averaged model to the loss.

    This is MESA of Du et al. 2022, "Sharpness-Aware Training for Free".
    From `start_epoch` on, the loss is loss + weight * KL(softmax(average / T) || softmax(logits / T)), the mean over
    images. The averaged model is that of ModelEMAHook. It gets the same batch, in eval mode and without gradients.

    Args:
        weight: Weight of the divergence, positive.
        temperature: T, positive.
        start_epoch: Number of epochs that are trained without it.
    """

    def __init__(self, weight: float = 1., temperature: float = 1., start_epoch: int = 5):
        self.weight, self.temperature, self.start_epoch = weight, temperature, start_epoch
        self.net: Optional[nn.Module] = None

    def before_train(self, runner) -> None:
        averages = [hook for hook in runner.hooks if isinstance(hook, ModelEMAHook)]
        if not averages:
            raise UserError('MESAHook needs the averaged weights of a ModelEMAHook in custom_hooks')
        if not isinstance(runner.train_loop, EpochBasedTrainLoop):
            raise UserError('MESAHook needs a training that counts epochs: train_cfg=dict(by_epoch=True, ...)')
        if self.start_epoch >= runner.max_epochs:
            raise UserError(f'MESAHook: start_epoch={self.start_epoch} is not before the end of {runner.max_epochs} '
                            'epochs')
        self.net = averages[0].ema_model.module.net.eval()

    def before_train_epoch(self, runner) -> None:
        model = getattr(runner.model, 'module', runner.model)
        model.mesa = self if runner.epoch >= self.start_epoch else None

    def loss(self, logits: Tensor, inputs: Tensor) -> Tensor:
        """Return the weighted divergence for logits (B, num_classes) of a batch (B, 3, H, W)."""
        with torch.no_grad():
            average = self.net(inputs)
        return self.weight * divergence(logits, average, self.temperature)
