"""Whole detectors and segmenters from files: ours, those that mmengine's Runner writes, and the authors'."""
from pathlib import Path
from typing import Dict, Optional, Sequence, Union

from torch import Tensor, nn

from ..weights import WeightsError, differences, read_checkpoint, some
from . import cvnets


def load_checkpoint(model: nn.Module, path: Union[str, Path], classes: Optional[Sequence[str]] = None) -> str:
    """Load every weight of a detector or segmenter, or none. mmengine's own function goes on where keys are missing.

    Args:
        model: of MMDetection or MMSegmentation, on a backbone of this package.
        path: a Runner's checkpoint, a .safetensors file of its weights, or a published file: PPMA's, or one of the
            MobileViTv2 authors' library (see `cvnets.translate`).
        classes: names that a file of `subquad train`, which knows its own, must agree with.

    Returns:
        Where in the file the weights were found ('' for safetensors and bare state dicts).

    Raises:
        WeightsError: the file cannot be read, or is not this model's: which keys, which shapes. Only an auxiliary head,
            which inference does not use, may be missing.
    """
    weights, facts, source = read_checkpoint(path)
    if classes and facts.get('classes') not in (None, list(classes)):
        raise WeightsError(f"{path} knows the classes {some(facts['classes'], 6)}, the data has "
                           f'{some(list(classes), 6)}')
    weights = translated(weights, model)
    own = model.state_dict()
    if not any(key.startswith('auxiliary_head.') for key in weights):
        weights.update((key, value) for key, value in own.items() if key.startswith('auxiliary_head.'))
    problems = differences(own, weights)
    if problems:
        raise WeightsError(f"{path} is not a checkpoint of this {type(model).__name__} on "
                           f"{type(model.backbone).__name__}: {'; '.join(problems)}")
    model.load_state_dict(weights)
    return source


def translated(weights: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    """The weights under our key names; ours come back as they are."""
    weights = cvnets.translate(weights, model)
    translate = getattr(model.backbone, 'translate_checkpoint', None)
    if translate is None:
        return dict(weights)
    backbone = {key.removeprefix('backbone.'): value for key, value in weights.items() if key.startswith('backbone.')}
    others = {key: value for key, value in weights.items() if not key.startswith('backbone.')}
    return {**{f'backbone.{key}': value for key, value in translate(backbone).items()}, **others}
