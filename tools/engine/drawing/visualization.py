"""Choose what is drawn of a model for images, compute it, and write it to a file."""
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from ...common.cli import UserError, nearest, one_line, shown
from ...common.paths import writable_folder
from .figures import Picture, Row, write
from .layer_panels import Function, Kind, kinds
from .memories import HeadMaps
from .model_panels import MODEL_PANELS, class_number, model_panel, predicted
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
        strict: stop at an image that cannot be drawn.
    """
    panels: Optional[List[str]] = None
    layers: Optional[List[str]] = None
    at: Optional[Tuple[float, float]] = None
    heads: bool = False
    target: Optional[str] = None
    dpi: int = 120
    strict: bool = False


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
    """Choose panels and layers."""
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
    except ValueError as error:
        raise UserError(f'--{error}') from error         # the sentence starts with the argument's name, which is 'at'
    try:
        target = None if wish.target is None else class_number(wish.target, classes)
    except ValueError as error:
        raise UserError(str(error)) from error
    return Plan(layers, own, panels, bool(wish.layers), (wish.at or (0.5, 0.5)) if moving else None, not wish.panels,
                target)


def _chosen(layers: Dict[str, Any], wanted: Optional[List[str]]) -> Dict[str, Any]:
    """Return the layers whose names contain one of the wanted texts."""
    for text in wanted or []:
        if not any(text in name for name in layers):
            hint = nearest(text, list(layers)) or (f"; there are {', '.join(layers)}" if layers else '')
            raise UserError(f'--layers {text}: no such layer{hint}')
    return {name: layer for name, layer in layers.items() if not wanted or any(text in name for text in wanted)}


# (panel, why it is left out) -> the layers where it is; none for panels of the whole model.
LeftOutPanels = Dict[Tuple[str, str], List[str]]


class _Drawn(NamedTuple):
    """What is drawn of an image.

    Attributes:
        picture, viewers: the picture, and the maps that follow a pixel.
        layers: number of the layers.
        heads: the most heads of one of the layers.
        panels: names of the panels.
        left_out: the panels that are left out.
    """
    picture: Picture
    viewers: List[Viewer]
    layers: int
    heads: int
    panels: Set[str]
    left_out: LeftOutPanels


class Result(NamedTuple):
    """What is drawn of all images: the number of images, the most layers of one, and the names of the panels."""
    images: int
    layers: int
    panels: List[str]


def _draw_image(model: Any, file: Path, inputs: Any, transform: Any, plan: Plan, wish: Wish, classes: Sequence[str],
                page: bool) -> _Drawn:
    """Compute the panels of one image (3, H, W).

    Raises:
        ValueError: The model does not take the image.
    """
    from ....backbones.influence import observed_mixers, pixel_of, token_of
    x, size = inputs[None], tuple(inputs.shape[1:])
    pixel = pixel_of(plan.pixel or (0.5, 0.5), size)
    left_out: LeftOutPanels = {}
    whole = _model_panels(model, x, pixel, classes, plan, left_out)
    rows, viewers, names, heads = [Row('', list(whole.values()))] if whole else [], [], set(whole), 1
    image = unnormalized(x, transform)[0].permute(1, 2, 0).numpy()
    observed = observed_mixers(model, x, list(plan.layers)) if plan.layers else {}
    tokens = {name: token_of(pixel, size, layer.size) for name, layer in observed.items()}
    chosen = _drawn_layers(observed, tokens, plan, left_out)
    for name, panels in chosen.items():
        layer, found = observed[name], [maps for maps in panels.values() for maps in maps]
        label = f'{name}\n{layer.size[0]} x {layer.size[1]} tokens\nof {size[0] / layer.size[0]:.3g} px'
        names, heads = names | set(panels), max(heads, _heads(found))
        rows += [Row(f'{label}\nhead {head}' if wish.heads else label, [_panel(maps, head) for maps in found])
                 for head in (range(_heads(found)) if wish.heads else (None,))]
        moving = [panel for panel, maps in panels.items() if any(_follows(one) for one in maps)]
        if page and moving:
            viewers.append(_viewer(f'{file.stem}: {name}, {layer.size[0]} x {layer.size[1]} tokens', image, layer,
                                   tokens[name], [plan.kinds[name].panels[panel] for panel in moving]))
    place = ((pixel[0] + 0.5) / size[0], (pixel[1] + 0.5) / size[1]) if plan.pixel else None
    picture = Picture(file.stem, image, place, _joined(rows), predicted(model, x, classes))
    return _Drawn(picture, viewers, len(chosen), heads, names, left_out)


def _model_panels(model: Any, x: Any, pixel: Tuple[int, int], classes: Sequence[str], plan: Plan,
                  left_out: LeftOutPanels) -> Dict[str, Panel]:
    """Return the panels of the whole model, and add those that it does not have to `left_out`."""
    from ....backbones.saliency import NoFeatureMap
    found = {}
    for name in MODEL_PANELS:
        if name in plan.panels:
            try:
                found[name] = model_panel(name, model, x, pixel, classes, plan.target)
            except NoFeatureMap as error:
                left_out[name, str(error)] = []
    return found


def _drawn_layers(observed: Dict[str, Any], tokens: Dict[str, Tuple[int, int]], plan: Plan, left_out: LeftOutPanels,
                  ) -> Dict[str, Dict[str, List[Any]]]:
    """Return the panels of each layer that is drawn, and add those that a layer does not have to `left_out`.

    Unless all layers are wanted, these are the last layers of each map size that have a panel. If the user named the
    panels, layers before them are drawn, too, if they have a panel that the later ones do not have.
    """
    found, absent, shown_panels = {}, [], {}
    for name, layer in reversed(list(observed.items())):
        earlier = shown_panels.setdefault(layer.size, set())
        wanted = [panel for panel in plan.panels if panel in plan.kinds[name].panels]
        if not plan.every and earlier and (plan.optional or earlier >= set(wanted)):
            continue
        panels = {}
        for panel in wanted:
            try:
                panels[panel] = plan.kinds[name].panels[panel](layer, tokens[name])
            except ValueError as error:
                absent.append((panel, str(error), name))
        if panels and (plan.every or not earlier >= set(panels)):
            found[name] = panels
            earlier |= set(panels)
    for panel, why, name in sorted(reversed(absent), key=lambda one: plan.panels.index(one[0])):
        left_out.setdefault((panel, why), []).append(name)
    return dict(reversed(list(found.items())))


def _follows(maps: Any) -> bool:
    """Whether something is a map that belongs to the chosen pixel."""
    return isinstance(maps, HeadMaps) and maps.marked


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


def _viewer(label: str, image: Any, layer: Any, token: Tuple[int, int], panels: List[Function]) -> Viewer:
    """Return the maps of panels that follow the pixel, for a grid of pixels."""
    places = [sorted({round(n * (length - 1) / max(min(length, _POSITIONS) - 1, 1))
                      for n in range(min(length, _POSITIONS))}) for length in layer.size]
    start = tuple(min(range(len(line)), key=lambda n, line=line, at=at: abs(line[n] - at))
                  for line, at in zip(places, token))
    frames = [[_panel(maps, None) for panel in panels for maps in panel(layer, (row, column)) if _follows(maps)]
              for row in places[0] for column in places[1]]
    return Viewer(label, image, places[0], places[1], start, frames)


def visualize(out: Path, model: Any, title: str, transform: Any, images: Sequence[Tuple[Path, Any]],
              classes: Sequence[str], wish: Wish) -> Result:
    """Draw panels of a model for images into one file. Notes on stderr name what is left out.

    Args:
        out: Output file, .html for a self-contained page.
        model: Model in eval mode.
        title: Title of the figure.
        transform: Transform that prepared the images.
        images: (file, tensor (3, H, W)) of each image.
        classes: Names of the classes.
        wish: What is to be seen.
    """
    plan = make_plan(model, wish, classes)
    page = out.suffix.lower() == '.html'
    drawn, notes = _draw_images(model, images, transform, plan, wish, classes, page)
    panels = [name for name in plan.panels if any(name in one.panels for one in drawn)]
    notes += _check_panels(model, plan, panels, drawn)
    drawn = [one for one in drawn if one.picture.rows]
    if wish.heads and not any(one.heads > 1 for one in drawn):
        raise UserError(f"--heads has no effect on the panels {', '.join(panels)}: they have one head")
    writable_folder(str(out.parent))
    pictures, viewers = [one.picture for one in drawn], [viewer for one in drawn for viewer in one.viewers]
    if any(one.heads > 1 for one in drawn) and (viewers or not wish.heads):
        title = f"{title} Maps {'that follow the pixel' if wish.heads else 'of layers'} are means over heads."
    if page:
        write_page(out, pictures, viewers, title, wish.dpi)
    else:
        write(out, pictures, title, wish.dpi)
    for note in notes:
        print(note, file=sys.stderr)
    return Result(len(drawn), max(one.layers for one in drawn), panels)


def _draw_images(model: Any, images: Sequence[Tuple[Path, Any]], transform: Any, plan: Plan, wish: Wish,
                 classes: Sequence[str], page: bool) -> Tuple[List[_Drawn], List[str]]:
    """Return what is drawn of each image, and notes about the images that the model does not take."""
    import torch
    drawn, errors = [], []
    for file, x in images:
        try:
            with torch.no_grad():
                drawn.append(_draw_image(model, file, x, transform, plan, wish, classes, page))
        except (ValueError, AssertionError, RuntimeError) as error:
            errors.append(f'{shown(file)} cannot be drawn: {type(model).__name__}: {one_line(error)}')
            if wish.strict or len(errors) == len(images):
                raise UserError(errors[0]) from error
    return drawn, [f'left out: {error}' for error in errors]


def _check_panels(model: Any, plan: Plan, panels: List[str], drawn: List[_Drawn]) -> List[str]:
    """Return a note about each panel that is left out, and about images without panels."""
    left_out: LeftOutPanels = {}
    for one in drawn:
        for key, layers in one.left_out.items():
            left_out[key] = list(dict.fromkeys([*left_out.get(key, []), *layers]))
    for panel, why in left_out:
        if not plan.optional and panel not in panels:
            raise UserError(f'--panels {panel}: {why}')
    if not panels:
        hint = '; choose --panels influence, receptive-field or activation'
        raise UserError(f'{type(model).__name__} has none of its usual panels'
                        f'{hint if plan.layers else ": " + next(iter(left_out))[1]}')
    notes = [f"left out the panel {panel}{' of ' if layers else ''}{', '.join(layers)}: {why}"
             for (panel, why), layers in left_out.items()]
    return notes + [f'left out: {shown(one.picture.name)}, which has none of the panels' for one in drawn
                    if not one.picture.rows]


def check_suffix(out: Path) -> Path:
    """Return the path of the output file."""
    if out.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {shown(out)}")
    return out
