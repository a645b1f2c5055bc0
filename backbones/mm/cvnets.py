"""The MobileViTv2 authors' detectors and segmenters (files of their library cvnets) under this package's key names.

Their files are flat: `encoder.*`, then `extra_layers.*` and `ssd_heads.*` of SSDLite or `seg_head.*` of DeepLabv3 and
PSPNet. Shapes and the order of channels are ours too, so that loading is renaming.
"""
import re
from typing import Any, Dict

from torch import nn

from ..mobilevitv2 import MobileViTv2

ENCODER = 'encoder.'
AUXILIARY = 'auxiliary_head.'
# What a key begins with -> what it begins with here; after it come a layer's 'conv.' or 'norm.' and the tensor's name.
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
    """Weights of the authors' SSDLite, DeepLabv3 or PSPNet under the names of our detectors and segmenters.

    Args:
        weights: a state dict; one that is not the authors' comes back as it is.
        model: of MMDetection or MMSegmentation. On another backbone than our MobileViTv2 it gets the weights as they
            are, without an auxiliary head it gets none for one; files may lack them too.

    Returns:
        Names -> the same tensors. Names that the authors' library does not have stay, for the loader to report.
    """
    theirs = any(key.startswith(f'{ENCODER}conv_1.') for key in weights)
    if not theirs or not isinstance(model.backbone, MobileViTv2):
        return weights
    encoder = {key.removeprefix(ENCODER): value for key, value in weights.items() if key.startswith(ENCODER)}
    renamed = {f'backbone.{key}': value for key, value in model.backbone.translate_checkpoint(encoder).items()}
    for key, value in weights.items():
        if not key.startswith(ENCODER):
            renamed[_translated(key)] = value
    if getattr(model, 'auxiliary_head', None) is None:
        renamed = {key: value for key, value in renamed.items() if not key.startswith(AUXILIARY)}
    return renamed


def _translated(key: str) -> str:
    for theirs, ours in _HEADS:
        match = theirs.match(key)
        if match:
            return match.expand(ours) + re.sub(r'^norm\.', 'bn.', key[match.end():])
    return key
