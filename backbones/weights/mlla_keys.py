"""Rename MLLA weights between the names of the authors' files and the names of this package, in both directions.

Each block of the authors' network stores the cosines and sines of its rotary embedding for images of 224 pixels as
`attn.rope.rotations` (H, W, C / 2, 2), also in files of detectors and segmenters, which do not use it. This package
computes them. Detectors and segmenters name the output norms `norm0` to `norm3`.
"""
from typing import Any, Callable, Dict

import torch
from torch import Tensor

from .errors import WeightsError
from .key_table import KeyTable

_BLOCK = (('cpe1', 'pos1'), ('cpe2', 'pos2'), ('norm1', 'norm1'), ('norm2', 'norm2'), ('act_proj', 'mixer.gate'),
          ('in_proj', 'mixer.value'), ('dwc', 'mixer.conv'), ('attn.qk', 'mixer.qk'), ('attn.lepe', 'mixer.lepe'),
          ('out_proj', 'mixer.out'), ('mlp.fc1', 'mlp.fc1'), ('mlp.fc2', 'mlp.fc2'))
TABLE = KeyTable((
    *((f'patch_embed.{name}', f'stem.{name}') for conv in ('conv1', 'conv2.{n}', 'conv3.{n}')
      for name in (f'{conv}.conv', f'{conv}.norm')),
    *((f'layers.{{s}}.blocks.{{b}}.{theirs}', f'stages.{{s}}.blocks.{{b}}.{ours}') for theirs, ours in _BLOCK),
    ('layers.{s}.downsample.conv.0.conv', 'stages.{s+1}.downsample.conv1'),
    ('layers.{s}.downsample.conv.1.conv', 'stages.{s+1}.downsample.conv2'),
    ('layers.{s}.downsample.conv.2.conv', 'stages.{s+1}.downsample.conv3.conv'),
    ('layers.{s}.downsample.conv.2.norm', 'stages.{s+1}.downsample.conv3.norm'),
    ('norm{s}', 'output_norms.{s}'),
    ('norm', 'head.norm'),
    ('head', 'head.fc'),
))
ROTATIONS = '.attn.rope.rotations'
# Sides of the maps of the stages, for images of 224 pixels.
_SIDES = (56, 28, 14, 7)
# Maps (height, width, channels, device, dtype) to (height * width, channels / 2, 2).
_Table = Callable[..., Tensor]


def is_published(weights: Any) -> bool:
    """True for a state dict with the keys of the authors' network."""
    return isinstance(weights, dict) and 'layers.0.blocks.0.act_proj.weight' in weights


# The authors' evaluation, figures and detectors take the raw weights.
reports_raw = is_published


def to_our_keys(weights: Dict[str, Any], grid_table: _Table) -> Dict[str, Any]:
    """Rename the weights of an authors' network to this package's keys.

    Args:
        weights: the state dict of a network. Weights that already have this package's keys come back unchanged.
        grid_table: computes the rotary embedding.

    Returns:
        Key -> tensor, without the rotary embedding. Unknown keys stay as they are, so that the loader reports them.

    Raises:
        WeightsError: the rotary embedding differs from the one that this package computes.
    """
    for key, value in weights.items():
        if key.endswith(ROTATIONS):
            _check_rotations(key, value, grid_table)
    return {TABLE.to_ours(key) or key: value for key, value in weights.items() if not key.endswith(ROTATIONS)}


def to_published_keys(weights: Dict[str, Tensor], grid_table: _Table) -> Dict[str, Tensor]:
    """Rename the weights of this package's MLLA to the names of the authors' files; the inverse of `to_our_keys`.

    Args:
        weights: the state dict of a classifier or of a dense backbone.
        grid_table: computes the rotary embedding.

    Returns:
        Key -> tensor, with the authors' buffers for images of 224 pixels.

    Raises:
        WeightsError: the authors' network has no such weight.
    """
    names = TABLE.all_to_theirs(weights, "the authors' MLLA")
    renamed = {names[key]: value for key, value in weights.items()}
    for key, value in weights.items():
        if key.endswith('.mixer.value.bias'):
            block = names[key].removesuffix('.in_proj.bias')
            side = _SIDES[int(key.split('.')[1])]
            table = grid_table(side, side, len(value), value.device, torch.float32)
            renamed[f'{block}{ROTATIONS}'] = table.unflatten(0, (side, side))
    return renamed


def _check_rotations(key: str, stored: Any, grid_table: _Table) -> None:
    """Check that a stored rotary embedding, which may be in half precision, is the one that this package computes."""
    if not isinstance(stored, Tensor) or stored.ndim != 4 or stored.shape[2] % 2 or stored.shape[3] != 2:
        raise WeightsError(f'{key} must hold the rotary embedding as (H, W, C / 2, 2)')
    height, width, pairs, _ = stored.shape
    expected = grid_table(height, width, 2 * pairs, stored.device, torch.float32).reshape(stored.shape)
    if not stored.is_meta and not torch.allclose(stored.float(), expected, rtol=0, atol=1e-2):
        raise WeightsError(f'{key} holds other rotations than the rotary embedding of the published networks')
