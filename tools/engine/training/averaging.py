"""Average the weights of a model during training (EMA), as timm does."""
from typing import Any, Dict, Optional

import torch
from mmengine.dist import get_world_size
from mmengine.hooks import EMAHook
from mmengine.registry import HOOKS

from ..weights.starting_weights import say
from .learning_rate import total_batch


@HOOKS.register_module()
class ModelEMAHook(EMAHook):
    """Keeps an exponential moving average of weights and buffers, as timm's ModelEmaV3 does.

    After each step of the optimizer, average = d * average + (1 - d) * weights, starting from the weights before
    training. Validation, checkpoints (`state_dict`) and safetensors files hold the average; the weights themselves are
    in the checkpoint's `ema_state_dict`, from which training resumes.

    MMEngine's EMAHook differs: it averages after each batch even if gradients are accumulated over several, ignores
    the initial weights, and leaves buffers out by default.

    Args:
        decay: The decay d, between 0 and 1.
        base_batch_size: Number of images to which `decay` belongs: d = decay ** (batch / base_batch_size), where the
            batch counts all processes and accumulated batches. None: d = decay for any batch.
    """

    def __init__(self, decay: float = 0.9999, base_batch_size: Optional[int] = None):
        super().__init__(strict_load=True, update_buffers=True, momentum=1 - decay)
        self.decay, self.base_batch_size = decay, base_batch_size

    def decay_for(self, batch: int) -> float:
        """Return the decay d for a number of images in a step of the optimizer."""
        return self.decay if self.base_batch_size is None else self.decay ** (batch / self.base_batch_size)

    def before_train(self, runner) -> None:
        super().before_train(runner)
        batch = total_batch(runner.cfg, get_world_size())
        decay = self.decay_for(batch)
        self.ema_model.momentum = 1 - decay
        if self.ema_model.steps == 0:                            # not resumed
            self.ema_model.module.load_state_dict(self.src_model.state_dict())
            self.ema_model.steps += 1                            # MMEngine's first step would copy the weights
        own, sources = self.ema_model.module.state_dict(), self.src_model.state_dict()
        once = {own[key].data_ptr() or key: key for key in own}.values()        # shared weights have several names
        keys = [[key for key in once if own[key].is_floating_point() == floating] for floating in (True, False)]
        self.averaged, self.copied = ([[state[key] for key in part] for state in (own, sources)] for part in keys)
        scaled = f' = {self.decay}^({batch:,} / {self.base_batch_size:,})' if self.base_batch_size else ''
        say(f'validation and saved weights are averages of the weights (EMA) with decay {decay:.8g}{scaled}')

    def after_train_iter(self, runner, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[Dict[str, Any]] = None) -> None:
        if not runner.optim_wrapper.should_update():
            return
        torch._foreach_lerp_(*self.averaged, self.ema_model.momentum)
        for average, source in zip(*self.copied):
            average.copy_(source)
        self.ema_model.steps += 1
