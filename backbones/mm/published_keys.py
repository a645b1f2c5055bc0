"""Translate whole detectors and segmenters between published names and those of this package, in both directions."""
from typing import Any, Dict

from torch import Tensor, nn

from ..mobilevitv2 import MobileViTv2
from ..ppma import PPMA
from ..weights.key_table import below
from . import cvnets
from .cvnets import BACKBONE

# The heads of the authors' UPerNet for Cityscapes have the classes of ADE20K; training used the first 19 only.
BUILT_CLASSES, USED_CLASSES = 150, 19
_CLASSIFIERS = ('decode_head.conv_seg.', 'auxiliary_head.conv_seg.')


def translate_keys(weights: Dict[str, Tensor], model: nn.Module, cut_classes: bool = False) -> Dict[str, Tensor]:
    """Rename published weights of a detector or segmenter to this package's keys; other keys stay as they are.

    Args:
        weights: name -> tensor.
        model: a model of MMDetection or MMSegmentation.
        cut_classes: keep the first 19 classes of the heads; see `has_unused_classes`. The caller says so to the user.
    """
    if not hasattr(model, 'backbone'):
        return dict(weights)
    weights = cvnets.translate(weights, model)
    if cut_classes:
        weights = {key: value[:USED_CLASSES] if key.startswith(_CLASSIFIERS) else value
                   for key, value in weights.items()}
    translate = getattr(model.backbone, 'translate_checkpoint', None)
    if translate is None:
        return dict(weights)
    return _with_backbone(weights, translate(below(weights, BACKBONE)))


def _with_backbone(weights: Dict[str, Tensor], backbone: Dict[str, Tensor]) -> Dict[str, Tensor]:
    others = {key: value for key, value in weights.items() if not key.startswith(BACKBONE)}
    return {**{f'{BACKBONE}{key}': value for key, value in backbone.items()}, **others}


def has_unused_classes(weights: Dict[str, Any], model: nn.Module) -> bool:
    """True for a UPerNet of PPMA's authors with 150 classes and a model of 19: the authors' files for Cityscapes.

    Only the keys and the shapes of the classifiers decide, so a file for the 150 classes of ADE20K looks the same.
    """
    if not isinstance(getattr(model, 'backbone', None), PPMA) or not any(
            key.startswith(f'{BACKBONE}patch_embed.') for key in weights):
        return False
    own = {key: value for key, value in model.state_dict().items() if key.startswith(_CLASSIFIERS)}
    found = [key for key in own if key in weights]
    return any(key.startswith(_CLASSIFIERS[0]) for key in found) and all(
        tuple(own[key].shape) == (USED_CLASSES, *weights[key].shape[1:]) and len(weights[key]) == BUILT_CLASSES
        for key in found)


def unused_classes_note(name: str) -> str:
    """Say that classes of a file are left out; see `has_unused_classes`."""
    return (f'the heads of {name} have {BUILT_CLASSES} classes, of which the first {USED_CLASSES} are kept: the '
            "authors' files for Cityscapes were built for more classes than they were trained for")


def to_published_keys(weights: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    """Rename the weights of a detector or segmenter to the names of its backbone's authors.

    Args:
        weights: the complete state dict of the model.
        model: a model of MMDetection or MMSegmentation with a family that has published names, or SSDLite, DeepLabv3
            or PSPNet with MobileViTv2.

    Raises:
        WeightsError: there are no published names for the model or for one of its weights.
    """
    if isinstance(model.backbone, MobileViTv2):
        return cvnets.to_published_keys(weights)
    return _with_backbone(weights, model.backbone.published_state(below(weights, BACKBONE)))
