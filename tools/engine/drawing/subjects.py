"""The model of a picture: its weights, its transform and what the title says about it."""
from typing import Any, List, NamedTuple, Optional

from PIL import Image

from ...common.cli import UserError, shown


class Subject(NamedTuple):
    """A model to draw.

    Attributes:
        model: the model, in evaluation mode.
        transform: transform of PIL images.
        classes: names of the classes.
        title: title of the figure, whose first line names model and weights.
        note: a sentence for the output, or ''.
        fixed_size: whether the model takes images of one size only.
    """
    model: Any
    transform: Any
    classes: List[str]
    title: str
    note: str
    fixed_size: bool


def load(checkpoint: str, name: Optional[str], random: bool, allow_nonfinite: bool) -> Subject:
    """Load a model with its weights, or make one with random weights.

    Args:
        checkpoint: A file or name of weights; with `random` the timm name of the model.
        name: timm name of the model, if the file does not contain it.
        random: Make a model with random weights. Nothing else leads to random weights.
        allow_nonfinite: Accept weights that hold NaN or infinities.
    """
    from ..classification.weight_files import classifier_from_file
    if random:
        return _random(checkpoint, name, allow_nonfinite)
    model, transform, classes = classifier_from_file(checkpoint, name, allow_nonfinite)
    return _subject(model, transform, classes, f'weights {shown(checkpoint, 60)}', '')


def _random(checkpoint: str, name: Optional[str], allow_nonfinite: bool) -> Subject:
    import timm.data
    import torch

    from ..zoo import create, default_size
    if name or allow_nonfinite:
        raise UserError(f'{"--model" if name else "--allow-nonfinite"} is for a checkpoint; with --random give the '
                        'timm name of the model alone')
    try:
        default_size(checkpoint)                          # raises for an unknown name, and for models of tokens
    except RuntimeError as error:
        raise UserError(f'{shown(checkpoint)} is no timm name of a model: {error}') from error
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create(checkpoint).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return _subject(model, transform, [str(n) for n in range(model.num_classes)], 'random weights (untrained)',
                    f'{checkpoint} has random weights: the picture shows an untrained model')


def _subject(model: Any, transform: Any, classes: List[str], weights: str, note: str) -> Subject:
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    name = cfg.get('architecture') or type(model).__name__
    height, width = transform(Image.new('RGB', (64, 64))).shape[1:]
    title = f'{name}, {weights}\nIts own input size is {height} x {width} pixels.'
    return Subject(model, transform, classes, title, note, bool(cfg.get('fixed_input_size')))
