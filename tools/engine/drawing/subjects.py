"""The model of a picture: its weights, its transform and what the title says about it."""
from typing import Any, List, NamedTuple, Optional

import timm.data
import torch
from PIL import Image

from ...common.cli import UserError, shown
from ..classification.weight_files import classifier_from_file
from ..zoo import create, default_size


class Subject(NamedTuple):
    """A model to draw."""
    model: Any            # the model, in evaluation mode
    transform: Any        # transform of PIL images
    classes: List[str]    # names of the classes
    title: str            # title of the figure, whose first line names model and weights
    note: str             # a sentence for the output, or ''
    fixed_size: bool      # whether the model takes images of one size only


def load(checkpoint: str, name: Optional[str] = None, random: bool = False, allow_nonfinite: bool = False) -> Subject:
    """Load a model with its weights, a file or published ones, or make the timm model `checkpoint` with random weights.

    Nothing but `random` leads to random weights. `name` is the timm name of the model, if the file does not contain it.
    """
    weights, note = f'weights {shown(checkpoint, 60)}', ''
    if random:
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
        classes = [str(n) for n in range(model.num_classes)]
        weights = 'random weights (untrained)'
        note = f'{checkpoint} has random weights: the picture shows an untrained model'
    else:
        model, transform, classes = classifier_from_file(checkpoint, name, allow_nonfinite)
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    height, width = transform(Image.new('RGB', (64, 64))).shape[1:]
    title = (f"{cfg.get('architecture') or type(model).__name__}, {weights}\nIts own input size is {height} x {width} "
             'pixels.')
    return Subject(model, transform, classes, title, note, bool(cfg.get('fixed_input_size')))
