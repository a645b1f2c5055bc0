"""Rename weights of the MobileViTv2 authors' detectors and segmenters (library cvnets), in both directions.

The files are flat. They have `encoder.*`, and `extra_layers.*` and `ssd_heads.*` for SSDLite or `seg_head.*` for
DeepLabv3 and PSPNet. Shapes and the order of channels are the same as here, so only the keys change. transformers has
DeepLabv3 under other names (`apple/mobilevitv2-1.0-voc-deeplabv3`), which are translated to ours only.
"""
from typing import Any, Dict

from torch import Tensor, nn

from ..mobilevitv2 import MobileViTv2
from ..weights.key_table import KeyTable, below, conv_and_norm
from ..weights.mobilevitv2_keys import ENCODER, TRANSFORMERS_BACKBONE, to_cvnets_keys

AUXILIARY = 'auxiliary_head.'
BACKBONE = 'backbone.'
_TRANSFORMERS_HEAD = 'segmentation_head.'
_SEPARABLE = (('dw_conv', 'depthwise_conv'), ('pw_conv', 'pointwise_conv'))
_HEADS = KeyTable((
    *(row for n, stride in enumerate((64, 128, 256)) for theirs, ours in _SEPARABLE
      for row in conv_and_norm(f'extra_layers.os_{stride}.{theirs}.block', f'neck.extra_layers.{n}.{ours}')),
    ('extra_layers.os_-1.1.block.conv', 'neck.extra_layers.3.1.conv'),
    *conv_and_norm('ssd_heads.{n}.proj_layer.block', 'bbox_head.levels.{n}.projection'),
    *(row for theirs, ours in _SEPARABLE for row in conv_and_norm(
        f'ssd_heads.{{n}}.loc_cls_layer.{theirs}.block', f'bbox_head.levels.{{n}}.joint.{ours}')),
    ('ssd_heads.{n}.loc_cls_layer.block.conv', 'bbox_head.levels.{n}.joint.conv'),
    *conv_and_norm('seg_head.aspp.aspp_layer.convs.4.aspp_pool.conv_1x1.block', 'decode_head.aspp.4'),
    *conv_and_norm('seg_head.aspp.aspp_layer.convs.{n}.block', 'decode_head.aspp.{n}'),
    *conv_and_norm('seg_head.aspp.aspp_layer.project.block', 'decode_head.project'),
    *conv_and_norm('seg_head.psp_layer.psp_branches.{n}.1.block', 'decode_head.branches.{n}'),
    *conv_and_norm('seg_head.psp_layer.fusion.0.block', 'decode_head.fusion'),
    ('seg_head.classifier.block.conv', 'decode_head.conv_seg'),
    *conv_and_norm('seg_head.aux_head.0.block', f'{AUXILIARY}convs.0'),
    ('seg_head.aux_head.2.block.conv', f'{AUXILIARY}conv_seg'),
))
_TRANSFORMERS_HEADS = KeyTable((
    *(row for theirs, ours in (('convs.{n}', 'aspp.{n}'), ('convs.4.conv_1x1', 'aspp.4'), ('project', 'project'))
      for row in conv_and_norm(f'{_TRANSFORMERS_HEAD}aspp.{theirs}', f'decode_head.{ours}', 'convolution',
                               'normalization')),
    (f'{_TRANSFORMERS_HEAD}classifier.convolution', 'decode_head.conv_seg'),
))


def is_published(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of a whole detector or segmenter of cvnets, or of a segmenter of transformers."""
    return any(key.startswith((f'{ENCODER}conv_1.', _TRANSFORMERS_HEAD)) for key in weights)


def translate(weights: Dict[str, Any], model: nn.Module) -> Dict[str, Any]:
    """Rename the weights of a published SSDLite, DeepLabv3 or PSPNet to this package's keys.

    Args:
        weights: a state dict. A state dict of another origin comes back unchanged.
        model: a model of MMDetection or MMSegmentation. If its backbone is not MobileViTv2, the weights come back
            unchanged. If it has no auxiliary head, the weights of that head are dropped.

    Returns:
        Key -> the same tensor. Unknown keys stay as they are, so that the loader reports them.
    """
    if not is_published(weights) or not isinstance(model.backbone, MobileViTv2):
        return weights
    of_cvnets = any(key.startswith(f'{ENCODER}conv_1.') for key in weights)
    prefix, heads = (ENCODER, _HEADS) if of_cvnets else (TRANSFORMERS_BACKBONE, _TRANSFORMERS_HEADS)
    encoder = model.backbone.translate_checkpoint(below(weights, prefix))
    renamed = {f'{BACKBONE}{key}': value for key, value in encoder.items()}
    for key, value in weights.items():
        if not key.startswith(prefix):
            renamed[heads.to_ours(key) or key] = value
    if getattr(model, 'auxiliary_head', None) is None:
        renamed = {key: value for key, value in renamed.items() if not key.startswith(AUXILIARY)}
    return renamed


def to_published_keys(weights: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Rename the weights of SSDLite, DeepLabv3 or PSPNet with MobileViTv2 to the names of cvnets.

    Raises:
        WeightsError: cvnets has no such weight.
    """
    renamed = {f'{ENCODER}{key}': value for key, value in to_cvnets_keys(below(weights, BACKBONE)).items()}
    heads = _HEADS.all_to_theirs((key for key in weights if not key.startswith(BACKBONE)), "the authors' library")
    return {**renamed, **{name: weights[key] for key, name in heads.items()}}
