"""Rename weights of the MobileViTv2 authors' detectors and segmenters (library cvnets) to this package's keys.

The files are flat. They have `encoder.*`, and `extra_layers.*` and `ssd_heads.*` for SSDLite or `seg_head.*` for
DeepLabv3 and PSPNet. Shapes and the order of channels are the same as here, so only the keys change.
"""
import re
from typing import Any, Dict

from torch import nn

from ..mobilevitv2 import MobileViTv2

ENCODER = 'encoder.'
AUXILIARY = 'auxiliary_head.'
# Beginning of a key in cvnets -> beginning of the key here. A layer's 'conv.' or 'norm.' and the tensor's name follow.
_HEADS = tuple((re.compile(theirs), ours) for theirs, ours in (
    (r'extra_layers\.os_64\.dw_conv\.block\.', 'neck.extra_layers.0.depthwise_conv.'),
    (r'extra_layers\.os_64\.pw_conv\.block\.', 'neck.extra_layers.0.pointwise_conv.'),
    (r'extra_layers\.os_128\.dw_conv\.block\.', 'neck.extra_layers.1.depthwise_conv.'),
    (r'extra_layers\.os_128\.pw_conv\.block\.', 'neck.extra_layers.1.pointwise_conv.'),
    (r'extra_layers\.os_256\.dw_conv\.block\.', 'neck.extra_layers.2.depthwise_conv.'),
    (r'extra_layers\.os_256\.pw_conv\.block\.', 'neck.extra_layers.2.pointwise_conv.'),
    (r'extra_layers\.os_-1\.1\.block\.', 'neck.extra_layers.3.1.'),
    (r'ssd_heads\.(\d+)\.proj_layer\.block\.', r'bbox_head.levels.\1.projection.'),
    (r'ssd_heads\.(\d+)\.loc_cls_layer\.dw_conv\.block\.', r'bbox_head.levels.\1.joint.depthwise_conv.'),
    (r'ssd_heads\.(\d+)\.loc_cls_layer\.pw_conv\.block\.', r'bbox_head.levels.\1.joint.pointwise_conv.'),
    (r'ssd_heads\.(\d+)\.loc_cls_layer\.block\.', r'bbox_head.levels.\1.joint.'),
    (r'seg_head\.aspp\.aspp_layer\.convs\.(\d+)\.(?:aspp_pool\.conv_1x1\.)?block\.', r'decode_head.aspp.\1.'),
    (r'seg_head\.aspp\.aspp_layer\.project\.block\.', 'decode_head.project.'),
    (r'seg_head\.psp_layer\.psp_branches\.(\d+)\.1\.block\.', r'decode_head.branches.\1.'),
    (r'seg_head\.psp_layer\.fusion\.0\.block\.', 'decode_head.fusion.'),
    (r'seg_head\.classifier\.block\.conv\.', 'decode_head.conv_seg.'),
    (r'seg_head\.aux_head\.0\.block\.', f'{AUXILIARY}convs.0.'),
    (r'seg_head\.aux_head\.2\.block\.conv\.', f'{AUXILIARY}conv_seg.'),
))


def translate(weights: Dict[str, Any], model: nn.Module) -> Dict[str, Any]:
    """Rename the weights of the authors' SSDLite, DeepLabv3 or PSPNet to this package's keys.

    Args:
        weights: a state dict. A state dict of another origin comes back unchanged.
        model: a model of MMDetection or MMSegmentation. If its backbone is not MobileViTv2, the weights come back
            unchanged. If it has no auxiliary head, the weights of that head are dropped.

    Returns:
        Key -> the same tensor. Unknown keys stay as they are, so that the loader reports them.
    """
    theirs = any(key.startswith(f'{ENCODER}conv_1.') for key in weights)
    if not theirs or not isinstance(model.backbone, MobileViTv2):
        return weights
    encoder = {key.removeprefix(ENCODER): value for key, value in weights.items() if key.startswith(ENCODER)}
    renamed = {f'backbone.{key}': value for key, value in model.backbone.translate_checkpoint(encoder).items()}
    for key, value in weights.items():
        if not key.startswith(ENCODER):
            renamed[_head_key(key)] = value
    if getattr(model, 'auxiliary_head', None) is None:
        renamed = {key: value for key, value in renamed.items() if not key.startswith(AUXILIARY)}
    return renamed


def _head_key(key: str) -> str:
    """Return this package's key for a key of the authors' heads."""
    for theirs, ours in _HEADS:
        match = theirs.match(key)
        if match:
            return match.expand(ours) + re.sub(r'^norm\.', 'bn.', key[match.end():])
    return key
