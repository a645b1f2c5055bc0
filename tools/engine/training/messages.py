"""Messages of a training run: what is trained, how long it will take, how to resume it, and whether a disk is full."""
import errno
import os
import re
import shlex
from pathlib import Path
from typing import Any, List, Optional

import torch
from mmengine.dist import get_world_size
from mmengine.runner import EpochBasedTrainLoop

NOTHING_FOUND = 'no metrics: the model found nothing in any image'
_FULL = {errno.ENOSPC: 'the disk is full', errno.EDQUOT: 'the disk quota is used up',
         errno.EFBIG: 'a file grew beyond the largest size allowed'}
_NUMBER = re.compile(r'os error (\d+)')                         # in messages of safetensors
# The first steps are slower (memory, kernels, caches) and are skipped; then as many as _TIMED are timed.
_SKIPPED, _TIMED = 2, 3


def summary(runner: Any, start: str) -> str:
    """Describe model, weights, data, device, length and work folder in two lines."""
    model = getattr(runner.model, 'module', runner.model)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kind = runner.cfg.model
    name = kind.get('name') or ' on '.join(filter(None, [type(model).__name__, _type(kind.get('backbone'))]))
    loader = runner.train_dataloader
    classes = (getattr(loader.dataset, 'metainfo', None) or {}).get('classes')
    unit = getattr(loader.dataset, 'unit', 'images')
    data = f'{len(loader.dataset):,} {unit}' + (f' of {len(classes)} classes' if classes else '')
    if runner.val_loop is not None:
        data += f', {len(runner.val_dataloader.dataset):,} to validate on'
    epochs = isinstance(runner.train_loop, EpochBasedTrainLoop)
    if runner.iter >= runner.max_iters:
        unit, done, planned = (('epochs', runner.epoch, runner.max_epochs) if epochs else
                               ('steps', runner.iter, runner.max_iters))
        return (f'nothing is left to train: {runner._load_from} has {done} {unit}, and this training has {planned}; '
                f"a larger {'--epochs' if epochs else 'train_cfg.max_iters'} continues it")
    plural = 's' if runner.max_epochs != 1 else ''
    length = f'{runner.max_epochs} epoch{plural} of {len(loader)} steps' if epochs else f'{runner.max_iters} steps'
    if runner.iter:
        length += f', resuming after {"epoch" if epochs else "step"} {runner.epoch if epochs else runner.iter}'
        done = getattr(runner.train_loop, 'done', 0)
        length += f' and {done} steps' if done else ''
    return (f'training {name} ({parameters / 1e6:.1f} M trainable parameters) from {start}\n'
            f'on {data}; {_device(model)}; {length}; everything is written to {runner.work_dir}')


def _type(config: Any) -> str:
    kind = config.get('type') if isinstance(config, dict) else None
    return getattr(kind, '__name__', kind) or ''


def _device(model: torch.nn.Module) -> str:
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else str(device)
    count = get_world_size()
    return f'on {count} processes, {name} each' if count > 1 else f'on {name}'


class Estimate:
    """Estimates the remaining time from a few steps."""

    def __init__(self):
        self.times: List[float] = []
        self.given = False

    def after_step(self, now: float, left: int) -> Optional[str]:
        """Return a sentence with the remaining time once enough steps have run, else None.

        Args:
            now: Seconds of a monotonic clock.
            left: Number of remaining steps.
        """
        if self.given:
            return None
        self.times.append(now)
        if len(self.times) <= _SKIPPED + _TIMED:
            return None
        self.given = True
        step = (self.times[-1] - self.times[_SKIPPED]) / _TIMED
        return (f'about {duration(step * left)} left ({left} steps, {step:.2g} s each), not counting evaluation'
                if left else None)


def duration(seconds: float) -> str:
    """Format seconds as '2 days 3 h', '3 h 20 min', '5 min' or '40 s'."""
    seconds = max(1, round(seconds))
    if seconds < 100:
        return f'{seconds} s'
    minutes = round(seconds / 60)
    if minutes < 100:
        return f'{minutes} min'
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes} min' if hours < 48 else f'{hours // 24} days {hours % 24} h'


def resume_command(args: Any, work_dir: str) -> str:
    """Return the command that resumes a training run from its last checkpoint.

    Args:
        args: Arguments of `subquad train`.
        work_dir: Folder of the run.
    """
    words = [*_launcher(), 'train', args.config, '--work-dir', work_dir]
    for name in ('data', 'model', 'epochs', 'seed'):
        value = getattr(args, name)
        words += [f'--{name}', str(value)] if value is not None else []
    words += [f'--{name}' for name in ('amp', 'strict', 'verbose') if getattr(args, name)]
    words += ['--log-to', *args.log_to] if args.log_to else []
    if args.cfg_options:
        words += ['--cfg-options', *args.option_words]
    return shlex.join([*words, '--resume'])


def _launcher() -> List[str]:
    """Return how this process has been started: by the command, or by torchrun on one or several machines."""
    here, machines = (os.environ.get(name) for name in ('LOCAL_WORLD_SIZE', 'GROUP_WORLD_SIZE'))
    if not here or 'TORCHELASTIC_RUN_ID' not in os.environ:
        return ['subquad']
    several = [] if machines in (None, '1') else [
        '--nnodes', machines, '--node_rank', os.environ.get('GROUP_RANK', '0'), '--master_addr',
        os.environ.get('MASTER_ADDR', 'HOST'), '--master_port', os.environ.get('MASTER_PORT', '29500')]
    return ['torchrun', '--nproc_per_node', here, *several, '-m', 'subquad']


def resume_hint(folder: Path, command: str, started: bool, resumed: str = '') -> str:
    """Say how to continue after training has stopped.

    Args:
        folder: Folder of the run.
        command: Command that resumes the run.
        started: Whether the run has taken a step; otherwise checkpoints in the folder are not its own.
        resumed: The checkpoint from which the run continues.
    """
    from ..checkpoints.runner_checkpoints import latest_checkpoint
    path = latest_checkpoint(folder) if started else None
    if path is None and resumed:
        path, command = resumed, command and f'{command} {shlex.quote(str(resumed))}'
    if path is None:
        return f'no checkpoint has been written to {folder} yet; start the training again'
    return f'training state saved in {path}' + (f'; resume with: {command}' if command else '')


def disk_full(error: BaseException) -> str:
    """Return what is full if an error or its cause says that nothing more can be written, else an empty text."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        number = getattr(error, 'errno', None) or _NUMBER.search(str(error))
        number = number if isinstance(number, (int, type(None))) else int(number[1])
        if number in _FULL:
            return _FULL[number]
        error = error.__cause__ or error.__context__
    return ''
