"""Choose what is drawn of a model for images, compute it, and write it to a file."""
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ....backbones.influence import model_mixers, observed_mixers, pixel_of, token_of
from ....backbones.saliency import NoFeatureMap, class_activation, effective_receptive_field
from ...common.canvas import save
from ...common.cli import UserError, nearest, one_line, shown
from ...common.paths import writable_folder
from .figures import Picture, Row, draw
from .layer_panels import KINDS, Function, Kind
from .panels import Panel, of_head
from .pictures import unnormalized
from .subjects import Subject
from .webpage import Viewer, write_page

MODEL_PANELS = ('receptive-field', 'activation')
# Rows and columns of the pixels that a page lets choose.
_POSITIONS = 9


class Wish(NamedTuple):
    """What the user wants to see."""
    panels: Optional[List[str]] = None  # names of panels; None for the usual ones of the model
    layers: Optional[List[str]] = None  # parts of names of layers; None for the last layer of each map size
    at: Optional[Tuple[float, float]] = None  # the pixel as fractions of height and width; None for the center
    heads: bool = False                # draw each head by itself
    target: Optional[str] = None       # name or number of the class of the panel `activation`; None for the likeliest
    dpi: int = 120                     # resolution of the figure
    strict: bool = False               # stop at an image that cannot be drawn


# (panel, why it is left out) -> the layers where it is; none for panels of the whole model.
LeftOutPanels = Dict[Tuple[str, str], List[str]]


class _Drawn(NamedTuple):
    """What is drawn of an image: its picture, the maps that follow a pixel, the numbers of layers and of heads (of the
    layer with the most), the names of the panels, and the panels that are left out."""
    picture: Picture
    viewers: List[Viewer]
    layers: int
    heads: int
    panels: List[str]
    left_out: LeftOutPanels


class _Plan:
    """The panels and layers that are drawn of a model.

    Attributes:
        layers: the mixers of the layers, by the names of the layers.
        kinds: the kind of each layer.
        panels: names of the panels.
        pixel: the pixel as fractions, or None if no panel belongs to one.
        target: number of the class of the panel `activation`.
        page: whether a page lets choose the pixel.
    """

    def __init__(self, subject: Subject, wish: Wish, page: bool):
        self.subject, self.wish, self.page = subject, wish, page
        name = type(subject.model).__name__
        try:
            layers = model_mixers(subject.model)
        except ValueError:
            layers = {}
        self.kinds: Dict[str, Kind] = {layer: KINDS[type(mixer)] for layer, mixer in layers.items()}
        known = [*dict.fromkeys(panel for kind in self.kinds.values() for panel in kind.panels), *MODEL_PANELS]
        for panel in wish.panels or ():
            if panel not in known:
                raise UserError(f"--panels {panel}: {name} has no such panel"
                                f"{nearest(panel, known) or '; it has ' + ', '.join(known)}")
        usual = dict.fromkeys(panel for kind in self.kinds.values() for panel in kind.usual)
        self.panels = list(dict.fromkeys(wish.panels or usual or MODEL_PANELS))
        for text in wish.layers or ():
            if not any(text in layer for layer in layers):
                hint = nearest(text, list(layers)) or (f"; there are {', '.join(layers)}" if layers else '')
                raise UserError(f'--layers {text}: no such layer{hint}')
        self.layers = {layer: mixer for layer, mixer in layers.items()
                       if (not wish.layers or any(text in layer for text in wish.layers))
                       and any(panel in self.kinds[layer].panels for panel in self.panels)}
        shown_panels = f"the panels {', '.join(self.panels)}"
        if wish.layers and not self.layers:
            raise UserError(f'--layers has no effect on {shown_panels}: they show the whole model')
        moving = {'receptive-field', *(panel for layer in self.layers for panel in self.kinds[layer].moving)}
        self.pixel = (wish.at or (0.5, 0.5)) if moving & set(self.panels) else None
        if wish.at and not self.pixel:
            raise UserError(f'--at has no effect on {shown_panels}: they show all pixels')
        if wish.target is not None and 'activation' not in self.panels:
            raise UserError('--target is for --panels activation')
        try:
            pixel_of(wish.at or (0.5, 0.5), (1, 1))
        except ValueError as error:
            raise UserError(f'--{error}') from error         # the sentence starts with the argument's name, 'at'
        self.target = None if wish.target is None else _class_number(wish.target, subject.classes)

    def draw_image(self, file: Path, inputs: Any) -> _Drawn:
        """Compute the panels of one image (3, H, W).

        Raises:
            ValueError: The model does not take the image.
        """
        model, wish, x, size = self.subject.model, self.wish, inputs[None], tuple(inputs.shape[1:])
        pixel = pixel_of(self.pixel or (0.5, 0.5), size)
        left_out: LeftOutPanels = {}
        whole = self._model_panels(x, pixel, left_out)
        rows, viewers, names, most = [Row('', list(whole.values()))] if whole else [], [], [*whole], 1
        image = unnormalized(x, self.subject.transform)[0].permute(1, 2, 0).numpy()
        observed = observed_mixers(model, x, list(self.layers)) if self.layers else {}
        tokens = {name: token_of(pixel, size, layer.size) for name, layer in observed.items()}
        chosen = self._layer_panels(observed, tokens, left_out)
        for name, panels in chosen.items():
            layer, found = observed[name], [panel for part in panels.values() for panel in part]
            heads = max([len(panel.values) for panel in found if isinstance(panel, Panel)], default=1)
            label = f'{name}\n{layer.size[0]} x {layer.size[1]} tokens\nof {size[0] / layer.size[0]:.3g} px'
            rows += [Row(f'{label}\nhead {head}' if wish.heads else label, [of_head(panel, head) for panel in found])
                     for head in (range(heads) if wish.heads else (None,))]
            names, most = [*names, *panels], max(most, heads)
            moving = [self.kinds[name].panels[panel] for panel, part in panels.items() if any(map(_follows, part))]
            if self.page and moving:
                viewers.append(_viewer(f'{file.stem}: {name}, {layer.size[0]} x {layer.size[1]} tokens', image, layer,
                                       tokens[name], moving))
        place = ((pixel[0] + 0.5) / size[0], (pixel[1] + 0.5) / size[1]) if self.pixel else None
        picture = Picture(file.stem, image, place, _joined(rows), self._predicted(x))
        return _Drawn(picture, viewers, len(chosen), most, names, left_out)

    def _model_panels(self, x: Any, pixel: Tuple[int, int], left_out: LeftOutPanels) -> Dict[str, Panel]:
        """Return the panels of the whole model, and add those that it does not have to `left_out`."""
        model, found = self.subject.model, {}
        for name in [name for name in MODEL_PANELS if name in self.panels]:
            try:
                if name == 'receptive-field':
                    found[name] = Panel('effective receptive field\nof the last feature at +',
                                        effective_receptive_field(model, x, pixel)[0], '|gradient| of the pixel',
                                        'decades', True)
                    continue
                active = class_activation(model, x, self.target)
            except NoFeatureMap as error:
                left_out[name, str(error)] = []
                continue
            number = int(active.classes[0])
            chance = float(model(x).softmax(1)[0, number])
            found[name] = Panel(f'class activation (Grad-CAM):\n{self.subject.classes[number]}, probability '
                                f'{chance:.2g}', active.maps[0], 'sum of weighted channels', over_image=True)
        return found

    def _predicted(self, x: Any) -> str:
        """Return the likeliest class of an image and its probability; '' for a model without classes."""
        logits, classes = self.subject.model(x), self.subject.classes
        if not classes or logits.shape != (1, len(classes)):
            return ''
        chance, number = logits.softmax(1)[0].max(0)
        return f'predicted: {classes[int(number)]}, {float(chance):.0%}'

    def _layer_panels(self, observed: Dict[str, Any], tokens: Dict[str, Tuple[int, int]], left_out: LeftOutPanels,
                      ) -> Dict[str, Dict[str, List[Any]]]:
        """Return the panels of each layer that is drawn, and add those that a layer does not have to `left_out`.

        Unless the user named layers, these are the last layers of each map size that have a panel. If the user named
        the panels, layers before them are drawn, too, if they have a panel that the later ones do not have.
        """
        found, absent, seen = {}, [], {}
        for name, layer in reversed(list(observed.items())):
            later, kind = seen.setdefault(layer.size, set()), self.kinds[name]
            wanted = [panel for panel in self.panels if panel in kind.panels]
            if not self.wish.layers and later and (not self.wish.panels or later >= set(wanted)):
                continue
            panels = {}
            for panel in wanted:
                try:
                    panels[panel] = kind.panels[panel](layer, tokens[name])
                except ValueError as error:
                    absent.append((panel, str(error), name))
            if panels and (self.wish.layers or not later >= set(panels)):
                found[name] = panels
                later |= set(panels)
        for panel, why, name in sorted(reversed(absent), key=lambda one: self.panels.index(one[0])):
            left_out.setdefault((panel, why), []).append(name)
        return dict(reversed(list(found.items())))


def _class_number(name: str, classes: Sequence[str]) -> int:
    """Return the number of a class that is given by its number or name."""
    matches = [n for n, label in enumerate(classes) if label == name]
    if len(matches) == 1:
        return matches[0]
    if name.isdecimal() and int(name) < len(classes):
        return int(name)
    raise UserError(f'there is no class {name!r}; the model has {len(classes)} classes, such as {classes[0]}')


def _follows(panel: Any) -> bool:
    """Whether something is a map that belongs to the chosen pixel."""
    return isinstance(panel, Panel) and panel.marked


def _joined(rows: List[Row]) -> List[Row]:
    """Return rows of one panel each as one row, whose labels stand above the panels."""
    if not 1 < len(rows) <= _POSITIONS or any(len(row.panels) > 1 or not row.label for row in rows):
        return rows
    labels = [row.label.replace('\n', ' ').replace(' ', '\n', 1) for row in rows]              # names have no spaces
    return [Row('', [row.panels[0]._replace(title=f'{label}\n{row.panels[0].title}')
                     for label, row in zip(labels, rows)])]


def _viewer(label: str, image: Any, layer: Any, token: Tuple[int, int], panels: List[Function]) -> Viewer:
    """Return the maps of panels that follow the pixel, for a grid of pixels."""
    places = [sorted({round(n * (length - 1) / max(min(length, _POSITIONS) - 1, 1))
                      for n in range(min(length, _POSITIONS))}) for length in layer.size]
    start = tuple(min(range(len(line)), key=lambda n, line=line, at=at: abs(line[n] - at))
                  for line, at in zip(places, token))
    frames = [[of_head(panel, None) for draw in panels for panel in draw(layer, (row, column)) if _follows(panel)]
              for row in places[0] for column in places[1]]
    return Viewer(label, image, places[0], places[1], start, frames)


def visualize(out: Path, subject: Subject, images: Sequence[Tuple[Path, Any]], wish: Wish) -> Tuple[int, int,
                                                                                                    List[str]]:
    """Draw panels of a model for images, (file, tensor (3, H, W)) each, into one file. Notes on stderr name what is
    left out.

    Returns:
        The number of images, the most layers of one, and the names of the panels.
    """
    plan = _Plan(subject, wish, out.suffix.lower() == '.html')
    drawn, notes = [], []
    for file, x in images:
        try:
            with torch.no_grad():
                drawn.append(plan.draw_image(file, x))
        except (ValueError, AssertionError, RuntimeError) as error:
            text = f'{shown(file)} cannot be drawn: {type(subject.model).__name__}: {one_line(error)}'
            notes.append(f'left out: {text}')
            if wish.strict or len(notes) == len(images):
                raise UserError(notes[0].removeprefix('left out: ')) from error
    panels = [name for name in plan.panels if any(name in one.panels for one in drawn)]
    notes += _left_out(plan, panels, drawn)
    drawn = [one for one in drawn if one.picture.rows]
    several = any(one.heads > 1 for one in drawn)
    if wish.heads and not several:
        raise UserError(f"--heads has no effect on the panels {', '.join(panels)}: they have one head")
    writable_folder(str(out.parent))
    pictures, viewers = [one.picture for one in drawn], [viewer for one in drawn for viewer in one.viewers]
    title = subject.title
    if several and (viewers or not wish.heads):
        title = f"{title} Maps {'that follow the pixel' if wish.heads else 'of layers'} are means over heads."
    if plan.page:
        write_page(out, pictures, viewers, title, wish.dpi)
    else:
        save(draw(pictures, title), out, wish.dpi)
    for note in notes:
        print(note, file=sys.stderr)
    return len(drawn), max(one.layers for one in drawn), panels


def _left_out(plan: _Plan, panels: List[str], drawn: List[_Drawn]) -> List[str]:
    """Return a note about each panel that is left out, and about images without panels; if the user named a panel that
    is drawn nowhere, or if no panel is drawn, that is an error."""
    left_out: LeftOutPanels = {}
    for one in drawn:
        for key, layers in one.left_out.items():
            left_out[key] = list(dict.fromkeys([*left_out.get(key, []), *layers]))
    for panel, why in left_out:
        if plan.wish.panels and panel not in panels:
            raise UserError(f'--panels {panel}: {why}')
    if not panels:
        hint = '; choose --panels influence, receptive-field or activation'
        raise UserError(f'{type(plan.subject.model).__name__} has none of its usual panels'
                        f'{hint if plan.layers else ": " + next(iter(left_out))[1]}')
    notes = [f"left out the panel {panel}{' of ' if layers else ''}{', '.join(layers)}: {why}"
             for (panel, why), layers in left_out.items()]
    return notes + [f'left out: {shown(one.picture.name)}, which has none of the panels' for one in drawn
                    if not one.picture.rows]
