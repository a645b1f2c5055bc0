"""Panels of a picture: a map with its color scale or a chart, and how an axis shows it."""
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import numpy as np
from matplotlib.colors import LogNorm, Normalize

# Share of the values at each end of a map that may lie beyond its color scale.
_BEYOND = 0.005
# The lowest color of a logarithmic scale over several decades, as a share of the highest value.
_LOWEST = 1e-5
# A map is heavy-tailed if its largest value is so many times the value that few exceed.
_HEAVY = 20


class Panel(NamedTuple):
    """A map."""
    title: str                 # what is seen, in one or two lines
    values: Any                # tensor (h, w) of finite numbers; (heads, h, w) before `of_head`
    label: str                 # unit of the numbers, below the map
    scale: str = 'positive'    # a key of SCALES
    marked: bool = False       # whether the map belongs to the chosen pixel, which gets a cross
    over_image: bool = False   # whether the map is drawn over the image: interpolated, and the more opaque the higher
    geometric: bool = False    # whether the heads' mean is a geometric one


class Chart(NamedTuple):
    """A chart: `draw` is called with the axis."""
    title: str
    draw: Callable[[Any], None]


def of_head(panel: Union[Panel, Chart], head: Optional[int]) -> Union[Panel, Chart]:
    """Return the panel of one head, or of the mean of all heads; charts show all heads."""
    if isinstance(panel, Chart):
        return panel
    values = panel.values.detach().double()
    if head is not None:
        values = values[min(head, len(values) - 1)]
    else:
        values = values.log().mean(0).exp() if panel.geometric else values.mean(0)
    return panel._replace(values=values)


def _ends(values: Any, beyond: float = _BEYOND) -> Tuple[float, float]:
    """Return the range of all values but a share at each end; never the outermost values of a small map."""
    ordered = values.flatten().double().sort().values
    last = len(ordered) - 1
    cut = int(beyond * last)
    return float(ordered[cut]), float(ordered[last - cut])


def _decades(values: Any) -> Tuple[float, float, bool]:
    high = float(values.max())
    return max(float(values.min()), high * _LOWEST), high, high > 0


def _signed(values: Any) -> Tuple[float, float, bool]:
    high = _ends(values.abs())[1] or float(values.abs().max())
    return -high, high, False


# Scale -> color map, and a function of the values that returns the lowest and highest color's value, and whether the
# scale is logarithmic. All color maps are perceptually uniform, but for the diverging one.
SCALES: Dict[str, Tuple[str, Callable[[Any], Tuple[float, float, bool]]]] = {
    'range': ('viridis', lambda values: (*_ends(values), False)),
    'positive': ('magma', lambda values: (0.0, _ends(values)[1] or float(values.max()), False)),
    'span': ('magma', lambda values: (*_ends(values), False)),
    'signed': ('RdBu_r', _signed),
    'logarithmic': ('magma', lambda values: (*_ends(values), True)),
    'decades': ('magma', _decades),
}


def scale_of_weights(values: Any) -> str:
    """Return 'signed' for weights of which some are negative beyond rounding, 'decades' if few are far larger than the
    others, else 'positive'."""
    if float(values.min()) < -1e-6 * float(values.abs().max()):
        return 'signed'
    return 'decades' if float(values.max()) > _HEAVY * _ends(values)[1] else 'positive'


def limits(panel: Panel) -> Tuple[float, float, bool]:
    """Return the lowest and highest color's value, which differ, and whether the scale is logarithmic."""
    low, high, logarithmic = SCALES[panel.scale][1](panel.values)
    if high - low > 1e-6 * max(abs(high), abs(low)):
        return low, high, logarithmic
    spread = 0.01 * abs(high) or 1.0
    return (low - spread if panel.scale in ('range', 'span', 'logarithmic') else 0.0), high + spread, False


def ticks(low: float, high: float, logarithmic: bool) -> Dict[str, Any]:
    """Return places and labels of ticks at the ends and in the middle, with three digits or more if they are close."""
    if high - low <= 1e-6 * max(abs(high), abs(low)):
        return dict(ticks=[low], labels=[f'{low:.3g}'])
    middle = (low * high) ** 0.5 if logarithmic else (low + high) / 2
    digits = 3
    while digits < 7 and len({f'{x:.{digits}g}' for x in (low, middle, high)}) < 3:
        digits += 1
    return dict(ticks=[low, middle, high], labels=[f'{x:.{digits}g}' for x in (low, middle, high)])


def draw_panel(page: Any, axis: Any, panel: Union[Panel, Chart], image: Any,
               place: Optional[Tuple[float, float]] = None) -> None:
    """Draw a panel on an axis of a figure, over an image (H, W, 3) from 0 to 1.

    `place` is the chosen pixel, as fractions of height and width, for panels that belong to it.
    """
    if isinstance(panel, Chart):
        axis.set_title(panel.title, fontsize=7.5)
        panel.draw(axis)
        return
    low, high, logarithmic = limits(panel)
    norm = (LogNorm if logarithmic else Normalize)(low, high)
    values = panel.values.double().numpy()
    constant = np.ptp(values) <= 1e-5 * max(abs(values.max()), abs(values.min()))          # up to rounding
    size = image.shape[:2]
    extent = (0, size[1], size[0], 0)
    if panel.over_image:
        axis.imshow(image, extent=extent)
    # A logarithm does not show zeros.
    shown = axis.imshow(values.clip(low) if logarithmic else values, cmap=SCALES[panel.scale][0], norm=norm,
                        extent=extent, interpolation='bilinear' if panel.over_image else 'nearest',
                        alpha=0.7 * norm(values).filled(0).clip(0, 1) if panel.over_image else 1)
    axis.set(xticks=[], yticks=[])
    axis.set_title(panel.title + ('\n(the same everywhere)' if constant else ''), fontsize=7.5)
    below, above = values.min() < low - 1e-9 * abs(low), values.max() > high + 1e-9 * abs(high)
    bar = page.colorbar(shown, cax=axis.inset_axes((1.03, 0, 0.045, 1)), extendfrac=0.06,
                        extend={(0, 0): 'neither', (0, 1): 'max', (1, 0): 'min', (1, 1): 'both'}[below, above])
    bar.minorticks_off()
    bar.set_ticks(**ticks(low, high, logarithmic), fontsize=6.5)
    axis.set_xlabel(panel.label + (', logarithmic' if logarithmic else ''), fontsize=6.5)
    if panel.marked and place is not None:
        mark(axis, size, place)


def mark(axis: Any, size: Tuple[int, int], place: Tuple[float, float]) -> None:
    """Draw a cross at the chosen pixel, white with a black edge, so that it is seen on every color."""
    for color, width in (('black', 3.0), ('white', 1.2)):
        axis.plot(place[1] * size[1], place[0] * size[0], '+', color=color, markersize=9, markeredgewidth=width)
    axis.set(xlim=(0, size[1]), ylim=(size[0], 0))
