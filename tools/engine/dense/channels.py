"""Check that neck or head take the channels that the backbone of a detector or segmenter returns."""
from typing import Iterator, List, Tuple

from torch import nn

from ...common.cli import UserError


def check_channels(model: nn.Module) -> None:
    """Compare the channels of a backbone that states them (`out_channels`) with those of what follows it."""
    model = getattr(model, 'module', model)                  # of test-time augmentation
    given = list(getattr(getattr(model, 'backbone', None), 'out_channels', None) or ())
    for name, channels, places in _taken(model) if given else ():
        fitting = [given[place] if -len(given) <= place < len(given) else None for place in places]
        if channels != fitting:
            levels = '' if places == list(range(len(places))) else f'; in_index is {places}'
            raise UserError(f'model.{name}.in_channels is {channels}, but the backbone returns {given} '
                            f'channels{levels}')


def _taken(model: nn.Module) -> Iterator[Tuple[str, List[int], List[int]]]:
    """Yield name, in_channels and levels of the modules that read the backbone's maps."""
    neck, count = getattr(model, 'neck', None), len(model.backbone.out_channels)
    if neck is not None:
        channels = getattr(neck, 'in_channels', None)        # a list in necks of pyramids
        if isinstance(channels, (list, tuple)):
            yield 'neck', list(channels), list(range(max(count, len(channels))))
        return
    for name in ('decode_head', 'auxiliary_head'):
        head = getattr(model, name, None)
        for part in head if isinstance(head, nn.ModuleList) else [head]:
            channels, index = getattr(part, 'in_channels', None), getattr(part, 'in_index', None)
            places = [index] if isinstance(index, int) else index
            channels = [channels] if isinstance(channels, int) else channels
            if channels and places and getattr(part, 'input_transform', None) != 'resize_concat':
                yield name, list(channels), list(places)
