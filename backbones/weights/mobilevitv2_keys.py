"""Rename MobileViTv2 weights between timm's names, which this package uses, and those of two other libraries.

The authors' library (cvnets) and transformers (`apple/mobilevitv2-*`) hold the same tensors under other names. The
names of cvnets are translated in both directions. All three hold weights for RGB images: transformers copied the
authors' weights unchanged, although its image processor reverses the channels, as the first files of MobileViT v1
needed.
"""
from typing import Any, Dict

import torch
from torch import Tensor

from .errors import WeightsError
from .key_table import KeyTable, below, conv_and_norm

# The number of transformer layers in the last block of stages 3, 4 and 5.
DEPTHS = (2, 4, 3)
# Prefixes of the backbone in detectors and segmenters of cvnets, and in the models of transformers.
ENCODER, TRANSFORMERS_BACKBONE = 'encoder.', 'mobilevitv2.'
# The names of the convolutions of an inverted residual in cvnets, transformers and timm.
_CONVOLUTIONS = (('exp_1x1', 'expand_1x1', 'conv1_1x1'), ('conv_3x3', 'conv_3x3', 'conv2_kxk'),
                 ('red_1x1', 'reduce_1x1', 'conv3_1x1'))


CVNETS = KeyTable((
    *conv_and_norm('conv_1.block', 'stem'),
    *(row for theirs, _, ours in _CONVOLUTIONS
      for row in conv_and_norm(f'layer_{{n}}.{{i}}.block.{theirs}.block', f'stages.{{n-1}}.{{i}}.{ours}')),
    *conv_and_norm('layer_{n}.1.local_rep.0.block', 'stages.{n-1}.1.conv_kxk'),
    ('layer_{n}.1.local_rep.1.block.conv', 'stages.{n-1}.1.conv_1x1'),
    *((f'layer_{{n}}.1.global_rep.{{j}}.{theirs}', f'stages.{{n-1}}.1.transformer.{{j}}.{ours}') for theirs, ours in (
        ('pre_norm_attn.0', 'norm1'), ('pre_norm_attn.1.qkv_proj.block.conv', 'attn.qkv_proj'),
        ('pre_norm_attn.1.out_proj.block.conv', 'attn.out_proj'), ('pre_norm_ffn.0', 'norm2'),
        ('pre_norm_ffn.1.block.conv', 'mlp.fc1'), ('pre_norm_ffn.3.block.conv', 'mlp.fc2'))),
    *((f'layer_{stage}.1.global_rep.{depth}', f'stages.{stage - 1}.1.norm') for stage, depth in enumerate(DEPTHS, 3)),
    *conv_and_norm('layer_{n}.1.conv_proj.block', 'stages.{n-1}.1.conv_proj'),
    ('classifier.1', 'head.fc'),
    ('classifier', 'head.fc'),
))
TRANSFORMERS = KeyTable((
    *conv_and_norm('conv_stem', 'stem', 'convolution', 'normalization'),
    *(row for _, theirs, ours in _CONVOLUTIONS for pair in (
        (f'encoder.layer.{{n}}.layer.{{i}}.{theirs}', f'stages.{{n}}.{{i}}.{ours}'),
        (f'encoder.layer.{{n}}.downsampling_layer.{theirs}', f'stages.{{n}}.0.{ours}'))
      for row in conv_and_norm(*pair, 'convolution', 'normalization')),
    *conv_and_norm('encoder.layer.{n}.conv_kxk', 'stages.{n}.1.conv_kxk', 'convolution', 'normalization'),
    ('encoder.layer.{n}.conv_1x1.convolution', 'stages.{n}.1.conv_1x1'),
    *((f'encoder.layer.{{n}}.transformer.layer.{{j}}.{theirs}', f'stages.{{n}}.1.transformer.{{j}}.{ours}')
      for theirs, ours in (
        ('layernorm_before', 'norm1'), ('attention.qkv_proj.convolution', 'attn.qkv_proj'),
        ('attention.out_proj.convolution', 'attn.out_proj'), ('layernorm_after', 'norm2'),
        ('ffn.conv1.convolution', 'mlp.fc1'), ('ffn.conv2.convolution', 'mlp.fc2'))),
    ('encoder.layer.{n}.layernorm', 'stages.{n}.1.norm'),
    *conv_and_norm('encoder.layer.{n}.conv_projection', 'stages.{n}.1.conv_proj', 'convolution', 'normalization'),
    ('classifier', 'head.fc'),
))


def is_cvnets(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of the authors' library, of a classifier or of a whole detector or segmenter."""
    return any(key.startswith(('conv_1.', f'{ENCODER}conv_1.')) for key in weights)


def is_transformers(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of a MobileViTV2 model of transformers."""
    return any(key.startswith(('conv_stem.', f'{TRANSFORMERS_BACKBONE}conv_stem.')) for key in weights)


def to_timm_keys(weights: Dict[str, Any]) -> Dict[str, Any]:
    """Rename the weights of the authors' library or of transformers to timm's keys.

    Weights that already have timm's keys come back unchanged, and unknown keys stay as they are, so that the loader
    reports them. From a detector or segmenter only the encoder is taken.
    """
    if is_transformers(weights):
        if any(key.startswith(TRANSFORMERS_BACKBONE) for key in weights):
            weights = {key.removeprefix(TRANSFORMERS_BACKBONE): value for key, value in weights.items()
                       if not key.startswith('segmentation_head.')}
        return {TRANSFORMERS.to_ours(key) or key: value for key, value in weights.items()}
    if any(key.startswith(f'{ENCODER}conv_1.') for key in weights):
        weights = below(weights, ENCODER)
    if not is_cvnets(weights):
        return weights
    return {CVNETS.to_ours(key) or key: value for key, value in weights.items()}


def to_cvnets_keys(weights: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Rename the weights of a MobileViTv2 of this package or of timm to the names of the authors' library.

    Raises:
        WeightsError: the authors' library has no such weight.
    """
    names = CVNETS.all_to_theirs(weights, "the authors' library")
    return {names[key]: value for key, value in weights.items()}


def color_order(first_conv: Tensor, reference: Tensor) -> str:
    """Find out whether a network takes RGB or BGR images, by its first convolution.

    Args:
        first_conv: the weight (C, 3, 3, 3) of the network's first convolution.
        reference: that of the same network for RGB images, such as timm's file of the same width.

    Returns:
        'RGB' or 'BGR'.

    Raises:
        WeightsError: the weights equal the reference in neither order.
    """
    for order, weight in (('RGB', reference), ('BGR', reference.flip(1))):
        if weight.shape == first_conv.shape and torch.allclose(weight.float(), first_conv.float(), atol=1e-6):
            return order
    raise WeightsError('the first convolution equals that of the reference neither for RGB nor for BGR images, so the '
                       'two files do not hold the same network')
