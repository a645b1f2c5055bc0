"""Rename MambaVision weights between the names of the authors' files and the names of this package, both ways.

A scan of the authors has one path, and its two convolutions are the halves of one here. Detectors and segmenters name
the output norms `outnorm0` to `outnorm3`.
"""
from typing import Any, Dict

import torch
from torch import Tensor

from .key_table import KeyTable

_SCAN = {'A_log': 'scan.A_log', 'D': 'scan.D', 'x_proj': 'scan.x_proj', 'dt_proj.bias': 'scan.dt_bias',
         'dt_proj.weight': 'scan.dt_proj.weight'}
_BLOCK = (('conv1', 'conv1.conv'), ('conv2', 'conv2.conv'), ('gamma_1', 'ls1.gamma'), ('gamma_2', 'ls2.gamma'),
          *((f'mixer.{theirs}', f'mixer.{ours}') for theirs, ours in _SCAN.items()),
          *((name, name) for name in ('norm1', 'norm2', 'mlp.fc1', 'mlp.fc2', 'mixer.in_proj', 'mixer.out_proj',
                                      'mixer.qkv', 'mixer.proj')))
# In stages 1 and 2 `norm1` belongs to a convolution.
_CONV_NORMS = tuple((f'levels.{s}.blocks.{{b}}.norm{n}', f'stages.{s}.blocks.{{b}}.conv{n}.norm')
                    for s in (0, 1) for n in (1, 2))
TABLE = KeyTable((
    ('patch_embed.conv_down.0', 'stem.conv1.conv'),
    ('patch_embed.conv_down.1', 'stem.conv1.norm'),
    ('patch_embed.conv_down.3', 'stem.conv2.conv'),
    ('patch_embed.conv_down.4', 'stem.conv2.norm'),
    *_CONV_NORMS,
    *((f'levels.{{s}}.blocks.{{b}}.{theirs}', f'stages.{{s}}.blocks.{{b}}.{ours}') for theirs, ours in _BLOCK),
    ('levels.{s}.downsample.reduction.0', 'stages.{s+1}.downsample'),
    ('norm', 'head.norm'),
    ('head', 'head.fc'),
    ('outnorm{s}', 'output_norms.{s}'),
))
_HALVES = ('.mixer.conv1d_x.weight', '.mixer.conv1d_z.weight')
_CONV = '.mixer.conv.weight'
# The ends of names here with an axis for the paths.
_BY_PATH = ('.scan.A_log', '.scan.D', '.scan.dt_bias', '.scan.dt_proj.weight')


def is_published(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of the authors' network."""
    return any('patch_embed.conv_down.' in key for key in weights)


def to_our_keys(weights: Dict[str, Any]) -> Dict[str, Any]:
    """Rename the weights of an authors' network to this package's keys.

    Args:
        weights: the state dict of a network, also with transformers' prefix `model.`. Weights that already have this
            package's keys come back unchanged.

    Returns:
        Key -> tensor. Unknown keys stay as they are, so that the loader reports them.
    """
    if not is_published(weights):
        return weights
    weights = {key.removeprefix('model.'): value for key, value in weights.items()}
    renamed = {}
    for key, value in weights.items():
        stem = key.removesuffix(_HALVES[0])
        if stem != key and f'{stem}{_HALVES[1]}' in weights:
            key, value = f'stages{stem[len("levels"):]}{_CONV}', torch.cat([value, weights[f'{stem}{_HALVES[1]}']])
        elif key.endswith(_HALVES[1]) and f'{key.removesuffix(_HALVES[1])}{_HALVES[0]}' in weights:
            continue
        else:
            key = TABLE.to_ours(key) or key
        renamed[key] = value[None] if key.endswith(_BY_PATH) else value
    return renamed


def to_published_keys(weights: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Rename the weights of this package's MambaVision to the names of the authors' files.

    Args:
        weights: the state dict of a classifier or of a dense backbone.

    Returns:
        Key -> tensor, with the authors' shapes.

    Raises:
        WeightsError: the authors' network has no such weight.
    """
    convs = {key: value for key, value in weights.items() if key.endswith(_CONV)}
    names = TABLE.all_to_theirs([key for key in weights if key not in convs], "the authors' MambaVision")
    renamed = {names[key]: value[0] if key.endswith(_BY_PATH) else value
               for key, value in weights.items() if key in names}
    for key, value in convs.items():
        stem = f"levels{key.removesuffix(_CONV)[len('stages'):]}"
        renamed.update((f'{stem}{half}', part) for half, part in zip(_HALVES, value.chunk(2)))
    return renamed
