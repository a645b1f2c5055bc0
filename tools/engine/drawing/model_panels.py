"""Panels of a whole model: its effective receptive field, and the activation of a class."""
from typing import Any, List, Optional, Sequence, Tuple

from .panels import Panel

MODEL_PANELS = ('receptive-field', 'activation')


def model_panel(name: str, model: Any, x: Any, pixel: Tuple[int, int], classes: Sequence[str],
                target: Optional[int]) -> Panel:
    """Return a panel of MODEL_PANELS for an image x (1, 3, H, W).

    Raises:
        ValueError: the model has no feature map or no classifier.
    """
    from ....backbones.saliency import class_activation, effective_receptive_field
    if name == 'receptive-field':
        field = effective_receptive_field(model, x, pixel)[0]
        return Panel('effective receptive field\nof the last feature at +', field, '|gradient| of the pixel', 'decades',
                     True)
    import torch
    found = class_activation(model, x, target)
    with torch.inference_mode():
        chance = model(x).softmax(1)[0, found.classes[0]]
    number = int(found.classes[0])
    return Panel(f'class activation (Grad-CAM):\n{classes[number]}, probability {float(chance):.2g}', found.maps[0],
                 'sum of weighted channels', over_image=True)


def predicted(model: Any, x: Any, classes: Sequence[str]) -> str:
    """Return the likeliest class of an image x (1, 3, H, W) and its probability; '' for a model without classes."""
    logits = model(x)
    if not classes or logits.shape != (1, len(classes)):
        return ''
    chance, number = logits.softmax(1)[0].max(0)
    return f'predicted: {classes[int(number)]}, {float(chance):.0%}'


def class_number(name: str, classes: Sequence[str]) -> int:
    """Return the number of a class that is given by its number or name.

    Raises:
        ValueError: there is no such class.
    """
    matches: List[int] = [n for n, label in enumerate(classes) if label == name]
    if len(matches) == 1:
        return matches[0]
    if name.isdecimal() and int(name) < len(classes):
        return int(name)
    raise ValueError(f'there is no class {name!r}; the model has {len(classes)} classes, such as {classes[0]}')
