"""Name the settings of training in which two configs differ."""
from typing import Any, Iterator, List

from ....backbones.weights.metadata import parse_config

# Entries of a config that affect what is learned, and entries below them that do not.
_ROOTS = ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper', 'param_scheduler', 'auto_scale_lr',
          'custom_hooks', 'sync_bn', 'strict_images')
_WITHOUT_EFFECT = ('num_workers', 'pin_memory', 'persistent_workers', 'prefetch_factor', 'init_cfg',
                   'val_interval', 'val_begin', 'dynamic_intervals')


def changed_settings(before: Any, now: str) -> List[str]:
    """Return a phrase such as 'model.drop_path_rate is 0.2 (was 0.1)' for each setting that differs.

    Args:
        before, now: Texts of configs as MMEngine writes them into checkpoints.
    """
    theirs, ours = parse_config(before), parse_config(now)
    return [phrase for root in _ROOTS for phrase in _changes(theirs.get(root), ours.get(root), root)] if theirs else []


def _changes(before: Any, now: Any, path: str) -> Iterator[str]:
    before, now = _keyed(before), _keyed(now)
    if before == now or path.rpartition('.')[2] in _WITHOUT_EFFECT:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _changes(before.get(key), now.get(key), f'{path}.{key}')
    else:
        new, old = ('not set' if value is None else f'{value!r:.80}' for value in (now, before))
        yield f'{path} is {new} (was {old})'


def _keyed(value: Any) -> Any:
    """Return a list of dicts of different types as a dict by type, and a tuple as a list."""
    if not isinstance(value, (list, tuple)):
        return value
    kinds = [item.get('type') if isinstance(item, dict) else None for item in value]
    unique = value and all(isinstance(kind, str) for kind in kinds) and len({*kinds}) == len(kinds)
    return dict(zip(kinds, value)) if unique else list(value)
