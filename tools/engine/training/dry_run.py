"""Show what a config would train, without writing anything: every parameter's options, the schedule and the batch."""
import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Dict, List, Tuple

from mmengine.optim import OptimWrapper
from mmengine.registry import PARAM_SCHEDULERS
from rich.table import Table
from timm.data.distributed_sampler import RepeatAugSampler
from torch import nn, optim, zeros

from ....backbones.weights.errors import some
from ...common.output import add_row, print_table
from ..classification.task import build_data, build_model
from .learning_rate import describe_batch, scale_learning_rate, total_batch
from .runner import build_optimizer

# Number of training images of ImageNet-1k, whose schedule is shown if there are no data.
IMAGENET = 1_281_167
# Approximate number of steps of a simulated schedule.
_SIMULATED = 3_000


def dry_run(config: Any, processes: int) -> Dict[str, Any]:
    """Build data, model and optimizer of a classification config, and describe the training by several processes.

    Returns:
        dict(model, data, batch, learning_rate, steps_per_epoch, epochs, steps, schedule, parameters), where
        `learning_rate` says how it is scaled, and `schedule` and `parameters` are as from the functions below.
    """
    config = deepcopy(config)
    data, images, classes = _data(config)
    model = build_model(config, classes, training=True)
    wrapper = build_optimizer(config, model)
    scaled = scale_learning_rate(wrapper, config, processes)
    loader = config.train_dataloader
    own = len(RepeatAugSampler(range(images), num_replicas=processes, rank=0)) if (
        loader.sampler.type == 'RepeatedAugmentationSampler') else math.ceil(images / processes)
    drops = loader.get('drop_last') or loader.get('batch_sampler')
    length = max(1, own // loader.batch_size if drops else math.ceil(own / loader.batch_size))
    by_epoch = 'max_epochs' in config.train_cfg
    epochs = config.train_cfg.max_epochs if by_epoch else None
    steps = epochs * length if by_epoch else config.train_cfg.max_iters
    top = max(group['lr'] for group in wrapper.param_groups)
    return dict(
        model=config.model.name, data=data, batch=total_batch(config, processes),
        learning_rate=scaled or f'the learning rate is {top:.4g}, not scaled; a step has '
        f'{describe_batch(config, processes)}',
        steps_per_epoch=length, epochs=epochs, steps=steps,
        schedule=schedule(config.get('param_scheduler'), top, length, steps, by_epoch),
        parameters=list(parameters(model.net, wrapper)))


def _data(config: Any) -> Tuple[str, int, List[str]]:
    """Return a description of the data, the number of training samples, and the classes."""
    parts = [part for part in ('train', 'val') if config.get(f'{part}_dataloader')]
    roots = {part: Path(config[f'{part}_dataloader'].dataset.get('root') or '.').expanduser() for part in parts}
    absent = [part for part in parts if not roots[part].exists()
              and config[f'{part}_dataloader'].dataset.type != 'TimmDataset']        # whose root can be an address
    if 'train' in absent:
        classes = config.model.setdefault('num_classes', 1000)
        assumed = f'{IMAGENET:,} training images (those of ImageNet-1k) and {classes} classes are assumed'
        return f"there is no {roots['train']}; {assumed}", IMAGENET, [str(n) for n in range(classes)]
    arguments, classes = build_data(config, [part for part in parts if part not in absent])
    images = len(arguments['train_dataloader']['dataset'])
    missing = f"; there is no {roots['val']} to validate on" if absent else ''
    return f'{images:,} training samples of {len(classes)} classes{missing}', images, classes


def schedule(schedulers: Any, lr: float, length: int, steps: int, by_epoch: bool) -> List[Dict[str, float]]:
    """Return the learning rate at the first step, at the end of its maximum, in the middle and at the last step.

    MMEngine's schedulers run on a shortened training, in which all lengths have the same proportions.

    Args:
        schedulers: The config's param_scheduler.
        lr: Learning rate of the optimizer.
        length, steps: Number of steps of an epoch, and of the training.
        by_epoch: Whether the training counts epochs.

    Returns:
        A list of dict(step, epoch, lr), in order.
    """
    factor = max(1., steps / _SIMULATED)
    short = max(1, round(length / factor))
    factor = length / short if by_epoch else factor
    total = steps // length * short if by_epoch else round(steps / factor)
    optimizer = optim.SGD([zeros(1, requires_grad=True)], lr=lr)
    built = []
    for scheduler in [schedulers] if isinstance(schedulers, dict) else schedulers or []:
        scheduler, counts_epochs = dict(scheduler), by_epoch and scheduler.get('by_epoch', True)
        for key in ('begin', 'end', 'T_max', 'step_size', 'milestones') if not scheduler.get('by_epoch', True) else ():
            value = scheduler.get(key)
            if isinstance(value, (list, tuple)):
                scheduler[key] = [round(step / factor) for step in value]
            elif value is not None:
                scheduler[key] = max(round(value / factor), int(value > 0))
        scheduler.setdefault('end', total // short if counts_epochs else total)
        built.append(PARAM_SCHEDULERS.build(scheduler, default_args=dict(optimizer=optimizer, epoch_length=short)))
    rates = []
    for step in range(total):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for each in built:
            if not each.by_epoch or by_epoch and not (step + 1) % short:
                each.step()
    largest = max(rates) * (1 - 1e-9)
    top = max(n for n, rate in enumerate(rates) if rate > largest)
    return [dict(step=min(round(n * factor), steps - 1), epoch=round(n / short, 2), lr=rates[n])
            for n in sorted({0, top, total // 2, total - 1})]


def parameters(net: nn.Module, wrapper: OptimWrapper) -> Iterator[Dict[str, Any]]:
    """Yield dict(name, shape, lr, weight_decay, drop_path) of every parameter of a network, in the network's order.

    `lr` is its largest learning rate; it and `weight_decay` are None if the parameter is not trained. `drop_path` is
    the probability of dropping the residual branches of its block, and None outside of such blocks.
    """
    groups = {id(parameter): group for group in wrapper.param_groups for parameter in group['params']}
    rates = {name: max(getattr(child, 'drop_prob', 0.) or 0. for child in drops) for name, module
             in net.named_modules() if (drops := [child for key, child in module.named_children()
                                                  if key.startswith('drop_path')])}
    for name, parameter in net.named_parameters():
        group = groups.get(id(parameter), {}) if parameter.requires_grad else {}
        blocks = [block for block in rates if name.startswith(f'{block}.')]
        yield dict(name=name, shape=tuple(parameter.shape), lr=group.get('lr'), weight_decay=group.get('weight_decay'),
                   drop_path=rates[max(blocks, key=len)] if blocks else None)


def print_dry_run(found: Dict[str, Any]) -> None:
    """Print the result of `dry_run`: a row for all parameters with the same options."""
    total = sum(math.prod(each['shape']) for each in found['parameters'])
    print(f"{found['model']}: {total:,} parameters; {found['data']}")
    print(found['learning_rate'])
    length = f"{found['epochs']} epochs of {found['steps_per_epoch']:,} steps" if found['epochs'] else 'training'
    print(f"{length}, {found['steps']:,} steps in all; nothing has been written")
    table = Table('step', 'epoch', 'learning rate')
    for row in found['schedule']:
        add_row(table, f"{row['step']:,}", f"{row['epoch']:g}", f"{row['lr']:.4g}")
    print_table(table)
    rows: Dict[Tuple[Any, ...], List[Dict[str, Any]]] = {}
    for each in found['parameters']:
        rows.setdefault((each['lr'], each['weight_decay'], each['drop_path']), []).append(each)
    table = Table('learning rate', 'weight decay', 'drop path', 'tensors', 'parameters', 'names')
    for (lr, decay, drop), members in rows.items():
        cells = ('frozen', '-') if lr is None else (f'{lr:.4g}', f'{decay:g}')
        add_row(table, *cells, '-' if drop is None else f'{drop:.4g}', len(members),
                f"{sum(math.prod(each['shape']) for each in members):,}", some([each['name'] for each in members]))
    print_table(table)
