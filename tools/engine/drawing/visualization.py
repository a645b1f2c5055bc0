"""Choose what is drawn of a model for images, compute it, and write it to a file."""
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ...common.cli import UserError, nearest, shown
from ...common.paths import writable_folder
from .figures import Picture, Row, write
from .layer_panels import Kind, kinds
from .memories import HeadMaps
from .model_panels import MODEL_PANELS, class_number, model_panel
from .panels import Chart, Panel
from .pictures import unnormalized
from .webpage import Viewer, write_page

SUFFIXES = ('.png', '.jpg', '.jpeg', '.pdf', '.svg', '.html')
# Rows and columns of the pixels that a page lets choose.
_POSITIONS = 9


class Wish(NamedTuple):
    """What the user wants to see.

    Attributes:
        panels: names of panels; None for the usual ones of the model.
        layers: parts of names of layers; None for the last layer of each map size.
        at: the pixel as fractions of height and width; None for the center.
        heads: draw each head by itself.
        target: name or number of the class of the panel `activation`; None for the likeliest.
        dpi: resolution of the figure.
    """
    panels: Optional[List[str]] = None
    layers: Optional[List[str]] = None
    at: Optional[Tuple[float, float]] = None
    heads: bool = False
    target: Optional[str] = None
    dpi: int = 120


class Plan(NamedTuple):
    """What is drawn.

    Attributes:
        layers: the layers, by their names.
        kinds: the kind of each layer.
        panels: names of the panels.
        every: whether all layers are drawn.
        pixel: the pixel as fractions, or None if no panel belongs to one.
        optional: whether a panel that a layer does not have is left out.
        target: number of the class of the panel `activation`.
    """
    layers: Dict[str, Any]
    kinds: Dict[str, Kind]
    panels: List[str]
    every: bool
    pixel: Optional[Tuple[float, float]]
    optional: bool
    target: Optional[int]


def make_plan(model: Any, wish: Wish, classes: Sequence[str]) -> Plan:
    """Choose panels and layers.

    Raises:
        UserError: A name is unknown, or an option has no effect on these panels.
    """
    from ....backbones.influence import model_mixers, pixel_of
    known = kinds()
    try:
        layers = model_mixers(model)
    except ValueError:
        layers = {}
    own = {name: known[type(mixer)] for name, mixer in layers.items()}
    available = [*dict.fromkeys(panel for kind in own.values() for panel in kind.panels), *MODEL_PANELS]
    for name in wish.panels or ():
        if name not in available:
            raise UserError(f'--panels {name}: {type(model).__name__} has no such panel'
                            f"{nearest(name, available) or '; it has ' + ', '.join(available)}")
    usual = list(dict.fromkeys(panel for kind in own.values() for panel in kind.usual)) or list(MODEL_PANELS)
    panels = list(dict.fromkeys(wish.panels)) if wish.panels else usual
    layers = {name: mixer for name, mixer in _chosen(layers, wish.layers).items()
              if any(panel in own[name].panels for panel in panels)}
    moving = {'receptive-field', *(panel for name in layers for panel in own[name].moving)} & set(panels)
    if wish.layers and not layers:
        raise UserError(f"--layers has no effect on the panels {', '.join(panels)}: they show the whole model")
    if wish.at and not moving:
        raise UserError(f"--at has no effect on the panels {', '.join(panels)}: they show all pixels")
    if wish.target is not None and 'activation' not in panels:
        raise UserError('--target is for --panels activation')
    try:
        pixel_of(wish.at or (0.5, 0.5), (1, 1))
        target = None if wish.target is None else class_number(wish.target, classes)
    except ValueError as error:
        raise UserError(str(error)) from error
    return Plan(layers, own, panels, bool(wish.layers), (wish.at or (0.5, 0.5)) if moving else None, not wish.panels,
                target)


def _chosen(layers: Dict[str, Any], wanted: Optional[List[str]]) -> Dict[str, Any]:
    """Return the layers whose names contain one of the wanted texts.

    Raises:
        UserError: A text matches no layer.
    """
    for text in wanted or []:
        if not any(text in name for name in layers):
            hint = nearest(text, list(layers)) or (f"; there are {', '.join(layers)}" if layers else '')
            raise UserError(f'--layers {text}: no such layer{hint}')
    return {name: layer for name, layer in layers.items() if not wanted or any(text in name for text in wanted)}


class _Drawn(NamedTuple):
    """What is drawn of an image, how many layers these are, and the most heads of one of them."""
    picture: Picture
    viewers: List[Viewer]
    layers: int
    heads: int


def _draw_image(model: Any, file: Path, inputs: Any, transform: Any, plan: Plan, wish: Wish, classes: Sequence[str],
                page: bool) -> _Drawn:
    """Compute the panels of one image (3, H, W).

    Raises:
        ValueError: The model does not take the image, or a panel cannot be drawn.
    """
    from ....backbones.influence import observed_mixers, pixel_of, token_of
    x, size = inputs[None], tuple(inputs.shape[1:])
    pixel = pixel_of(plan.pixel or (0.5, 0.5), size)
    whole = [model_panel(name, model, x, pixel, classes, plan.target) for name in MODEL_PANELS if name in plan.panels]
    rows, viewers = [Row('', whole)] if whole else [], []
    image = unnormalized(x, transform)[0].permute(1, 2, 0).numpy()
    observed = observed_mixers(model, x, list(plan.layers)) if plan.layers else {}
    heads = 1
    if not plan.every:                                    # the last layer of each map size
        observed = dict({layer.size: (name, layer) for name, layer in observed.items()}.values())
    for name, layer in observed.items():
        token = token_of(pixel, size, layer.size)
        label = f'{name}\n{layer.size[0]} x {layer.size[1]} tokens\nof {size[0] / layer.size[0]:.3g} px'
        found = _layer_panels(name, layer, token, plan)
        heads = max(heads, _heads(found))
        rows += [Row(f'{label}\nhead {head}' if wish.heads else label, [_panel(maps, head) for maps in found])
                 for head in (range(_heads(found)) if wish.heads else (None,)) if found]
        if page and set(plan.kinds[name].moving) & set(plan.panels):
            viewers.append(_viewer(f'{file.stem}: {name}, {layer.size[0]} x {layer.size[1]} tokens', image, name, layer,
                                   token, plan))
    place = ((pixel[0] + 0.5) / size[0], (pixel[1] + 0.5) / size[1]) if plan.pixel else None
    return _Drawn(Picture(file.stem, image, place, _joined(rows)), viewers, len(observed), heads)


def _layer_panels(name: str, layer: Any, token: Tuple[int, int], plan: Plan, moving: bool = False) -> List[Any]:
    """Return the maps and charts of a layer; those that it does not have are left out with a note."""
    found, kind = [], plan.kinds[name]
    for panel in plan.panels:
        if panel in (kind.panels if not moving else kind.moving):
            try:
                found += kind.panels[panel](layer, token)
            except ValueError as error:
                if not plan.optional:
                    raise
                print(f'left out the panel {panel} of {name}: {error}', file=sys.stderr)
    return found


def _joined(rows: List[Row]) -> List[Row]:
    """Return rows of one panel each as one row, whose labels stand above the panels."""
    if not 1 < len(rows) <= _POSITIONS or any(len(row.panels) > 1 or not row.label for row in rows):
        return rows
    return [Row('', [row.panels[0]._replace(title=f'{_in_two_lines(row.label)}\n{row.panels[0].title}')
                     for row in rows])]


def _in_two_lines(label: str) -> str:
    name, *others = label.split('\n')
    return f"{name}\n{' '.join(others)}"


def _heads(found: List[Any]) -> int:
    return max([len(maps.values) for maps in found if isinstance(maps, HeadMaps)], default=1)


def _panel(maps: Any, head: Optional[int]) -> Any:
    """Return the panel of one head, or of the mean of all heads."""
    if isinstance(maps, Chart):
        return maps
    values = maps.values.detach().double()
    if head is not None:
        values = values[min(head, len(values) - 1)]
    else:
        values = values.log().mean(0).exp() if maps.geometric else values.mean(0)
    return Panel(maps.title, values, maps.label, maps.scale, maps.marked)


def _viewer(label: str, image: Any, name: str, layer: Any, token: Tuple[int, int], plan: Plan) -> Viewer:
    """Return the panels that move with the pixel, for a grid of pixels."""
    places = [sorted({round(n * (length - 1) / max(min(length, _POSITIONS) - 1, 1))
                      for n in range(min(length, _POSITIONS))}) for length in layer.size]
    start = tuple(min(range(len(line)), key=lambda n, line=line, at=at: abs(line[n] - at))
                  for line, at in zip(places, token))
    frames = [[_panel(maps, None) for maps in _layer_panels(name, layer, (row, column), plan, moving=True)
               if isinstance(maps, HeadMaps)] for row in places[0] for column in places[1]]
    return Viewer(label, image, places[0], places[1], start, frames)


def visualize(out: Path, model: Any, title: str, transform: Any, images: Sequence[Tuple[Path, Any]],
              classes: Sequence[str], wish: Wish) -> Tuple[int, List[str]]:
    """Draw panels of a model for images into one file.

    Args:
        out: Output file, .html for a self-contained page.
        model: Model in eval mode.
        title: Title of the figure.
        transform: Transform that prepared the images.
        images: (file, tensor (3, H, W)) of each image.
        classes: Names of the classes.
        wish: What is to be seen.

    Returns:
        The number of layers that are drawn of an image, and the names of the panels.

    Raises:
        UserError: An option has no effect, the model does not take an image, or the file cannot be written.
    """
    import torch
    plan = make_plan(model, wish, classes)
    page = out.suffix.lower() == '.html'
    try:
        with torch.no_grad():
            drawn = [_draw_image(model, file, x, transform, plan, wish, classes, page) for file, x in images]
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f'{type(model).__name__}: {error}') from error
    if not any(one.picture.rows for one in drawn):
        raise UserError(f'{type(model).__name__} has none of its usual panels; choose --panels influence, '
                        'receptive-field or activation')
    if wish.heads and not any(one.heads > 1 for one in drawn):
        raise UserError(f"--heads has no effect on the panels {', '.join(plan.panels)}: they have one head")
    writable_folder(str(out.parent))
    pictures = [one.picture for one in drawn]
    if not wish.heads and any(one.heads > 1 for one in drawn):
        title = f'{title} Maps of layers are means over heads.'
    if page:
        write_page(out, pictures, [viewer for one in drawn for viewer in one.viewers], title, wish.dpi)
    else:
        write(out, pictures, title, wish.dpi)
    return max(one.layers for one in drawn), plan.panels


def check_suffix(out: Path) -> Path:
    """Return the path of the output file.

    Raises:
        UserError: Its ending is that of no format that can be written.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {shown(out)}")
    return out
