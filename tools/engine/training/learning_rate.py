"""Scale the learning rate with the batch."""
from typing import Any, Dict, Optional

from ...common.cli import UserError


def total_batch(config: Any, processes: int) -> int:
    """Return the number of images in a step of the optimizer: of all processes and accumulated batches."""
    return config.train_dataloader.batch_size * processes * _accumulated(config)


def _accumulated(config: Any) -> int:
    return config.optim_wrapper.get('accumulative_counts', 1)


def describe_batch(config: Any, processes: int) -> str:
    """Describe the number of images in a step of the optimizer, such as '1,024 images (8 processes with 128 each)'."""
    size, accumulated = config.train_dataloader.batch_size, _accumulated(config)
    parts = f'{processes} process{"es" if processes != 1 else ""} with {size:,} each'
    parts += f', gradients of {accumulated} batches accumulated' if accumulated > 1 else ''
    return f'{total_batch(config, processes):,} images ({parts})'


def scale_learning_rate(optimizer: Any, config: Any, processes: int) -> str:
    """Multiply the learning rates of an optimizer by batch / base_batch_size if `auto_scale_lr` enables it.

    MMEngine's own scaling neither counts accumulated batches nor prints anything at its default
    log level. Returns a sentence with the learning rate before and after, or '' if the config does
    not scale it.
    """
    scaling: Optional[Dict[str, Any]] = config.get('auto_scale_lr')
    if not scaling or not scaling.get('enable', False):
        return ''
    base = scaling.get('base_batch_size')
    if not isinstance(base, int) or base < 1:
        raise UserError(f'auto_scale_lr: base_batch_size must be an integer of at least 1, got {base!r}')
    factor = total_batch(config, processes) / base
    before = max(group['lr'] for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group['lr'] *= factor
    return (f'the learning rate is {before * factor:.4g}: {before:.4g} for {base:,} images, scaled to '
            f'{describe_batch(config, processes)}')
