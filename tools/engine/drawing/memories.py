"""Panels of LCSM: how fast the memories of a layer decay, and how long they last."""
from functools import partial
from typing import Any, Dict, List, NamedTuple, Union

from .panels import Chart, ticks

_DIRECTIONS = {'rows': 'along rows', 'columns': 'along columns', 'raster': 'along the scan'}


class HeadMaps(NamedTuple):
    """Maps of all heads of a layer.

    Attributes:
        title, label, scale, marked: those of the panel.
        values: (heads, h, w).
        geometric: whether the heads' mean is a geometric one.
    """
    title: str
    values: Any
    label: str
    scale: str = 'positive'
    marked: bool = False
    geometric: bool = False


class Memory(NamedTuple):
    """The memories of a layer for one image.

    Attributes:
        decays: mean log decay per token of each head, (heads, h, w), or (heads, 1, 1) if all tokens decay alike.
        lengths: direction ('rows' and 'columns', or 'raster') -> tokens until the product of decays falls to 1/e, mean
            of both ways unless the scan has one, of the shape of `decays`.
        elements: mean log decay of each element of each head's memory, (heads, elements).
    """
    decays: Any
    lengths: Dict[str, Any]
    elements: Any


def memory(mixer: Any, x: Any) -> Memory:
    """Return the memories of an `EosMixer` for its input x (1, H, W, C).

    Raises:
        ValueError: the recurrence has no decay for each token.
    """
    from ....backbones.mixers.eos_decay import memory_lengths
    logs, elements = mixer.state_decay(x)
    if mixer.mode == 'axis':
        lengths = {'rows': memory_lengths(logs, 3), 'columns': memory_lengths(logs, 2)}
    else:
        reverse = False if mixer.mode == 'forward' else None
        lengths = {'raster': memory_lengths(logs.flatten(2), 2, reverse).reshape(logs.shape)}
    return Memory(logs[0], {name: length[0] for name, length in lengths.items()}, elements)


def decay_maps(mixer: Any, x: Any) -> List[HeadMaps]:
    """Return the map of the decays.

    Raises:
        ValueError: the recurrence has no decay for each token, or all tokens decay alike.
    """
    found = _varying(memory(mixer, x), mixer)
    return [HeadMaps('state decay per token\n(geometric mean over the memory)', found.decays.exp(),
                     'factor per token; 1: no decay', 'range', geometric=True)]


def length_maps(mixer: Any, x: Any) -> List[HeadMaps]:
    """Return the maps of the memory lengths.

    Raises:
        ValueError: the recurrence has no decay for each token, or all tokens decay alike.
    """
    found = _varying(memory(mixer, x), mixer)
    return [HeadMaps(f'effective memory length\n{_DIRECTIONS[name]}, until 1/e is left', length, 'tokens',
                     'logarithmic', geometric=True) for name, length in found.lengths.items()]


def head_charts(mixer: Any, x: Any) -> List[Union[HeadMaps, Chart]]:
    """Return charts of the decays, and of the lengths that belong to them, of the elements of each head's memory.

    Raises:
        ValueError: the recurrence has no decay for each token.
    """
    decays = memory(mixer, x).elements.double().exp().clamp(1e-35, 1 - 1e-6)
    return [Chart('decay of each head:\nall elements, middle half, mean', partial(_draw_heads, decays, False)),
            Chart('memory length of each head:\nall elements, middle half, mean', partial(_draw_heads, decays, True))]


def _varying(found: Memory, mixer: Any) -> Memory:
    if found.decays.shape[1:] == (1, 1):
        raise ValueError(f'mixer={mixer.mixer!r} decays alike at all tokens, which the panel heads shows')
    return found


def _draw_heads(decays: Any, lengths: bool, axis: Any) -> None:
    """Draw the range, the middle half and the mean of the decays (heads, elements), or of the lengths, by head."""
    import torch
    mean, values = decays.log().mean(1).exp(), decays
    if lengths:
        mean, values = -1 / mean.log(), -1 / decays.log()
    ends = torch.quantile(values, torch.tensor([0, 0.25, 0.75, 1], dtype=values.dtype), 1)
    places = range(len(values))
    axis.hlines(places, ends[0], ends[3], color='tab:gray', linewidth=1)
    axis.hlines(places, ends[1], ends[2], color='tab:blue', linewidth=3)
    axis.plot(mean, places, 'o', color='black', markersize=3)
    axis.set_ylim(len(values) - 0.5, -0.5)
    step = 1 if len(values) <= 8 else 4
    axis.set_yticks(list(places)[::step], [str(n) for n in places][::step], fontsize=6.5)
    axis.set_ylabel('head', fontsize=6.5)
    axis.set_xlabel('tokens' if lengths else 'decay per token', fontsize=6.5)
    axis.set_xscale('log' if lengths else 'linear')
    axis.minorticks_off()
    axis.margins(x=0.2)
    axis.set_xticks(**ticks(float(values.min()), float(values.max()), lengths), fontsize=6.5)
