"""Change how long and in which precision a config trains."""
from ...common.cli import UserError, quiet


def use_mixed_precision(config) -> None:
    """Train in bfloat16 on CPUs and on GPUs that support it, else in float16 with a loss scale."""
    import torch

    with quiet():
        import subquad.backbones.mm  # noqa: F401  (registers the wrapper for CPUs)
    if not torch.cuda.is_available():
        config.optim_wrapper.update(type='CPUAmpOptimWrapper')
    elif torch.cuda.is_bf16_supported():
        config.optim_wrapper.update(type='AmpOptimWrapper', dtype='bfloat16')
    else:
        config.optim_wrapper.update(type='AmpOptimWrapper', dtype='float16', loss_scale='dynamic')


def check_length(config) -> None:
    """Check the number of epochs or iterations that a config trains.

    Raises:
        UserError: It is not a positive integer.
    """
    for key in ('max_epochs', 'max_iters', 'val_interval'):
        planned = config.train_cfg.get(key, 1)
        if not isinstance(planned, int) or isinstance(planned, bool) or planned < 1:
            raise UserError(f'train_cfg.{key} must be an integer of at least 1, got {planned!r}')


def scale_schedule(config, epochs: int) -> None:
    """Train for `epochs` epochs with a schedule of the same shape; phases shorter than an epoch are left out.

    Raises:
        UserError: The config counts iterations, or its number of epochs is not a positive integer.
    """
    if 'max_epochs' not in config.train_cfg:
        raise UserError('--epochs is not supported: the config counts iterations (use --cfg-options '
                        'train_cfg.max_iters=N)')
    check_length(config)
    if epochs == config.train_cfg.max_epochs:
        return
    factor = epochs / config.train_cfg.max_epochs
    config.train_cfg.max_epochs = epochs
    schedulers = config.get('param_scheduler') or []
    schedulers = [schedulers] if isinstance(schedulers, dict) else schedulers
    for scheduler in schedulers:
        if not scheduler.get('by_epoch', True):              # a warm-up that counts iterations keeps them
            continue
        for key in ('begin', 'end', 'T_max', 'step_size', 'milestones', 'warmup', 'delay'):
            if isinstance(scheduler.get(key), (list, tuple)):
                scheduler[key] = [max(1, round(step * factor)) for step in scheduler[key]]
            elif key in scheduler:
                scheduler[key] = max(int(key in ('T_max', 'step_size')), round(scheduler[key] * factor))
    config.param_scheduler = [s for s in schedulers if s.get('begin', 0) < s.get('end', epochs)
                              or not s.get('by_epoch', True)]
