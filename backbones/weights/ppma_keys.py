"""Rename PPMA weights between the names of the authors' files and the names of this package, in both directions.

The authors' files differ in three more ways. Layer scales have the shape (1, 1, 1, C) instead of (C,). Each stage has a
buffer `Relpos.angle` with the angles of the rotary embedding, which this package computes. Detectors and segmenters
name the output norms `outnorm0` to `outnorm3`.
"""
from typing import Any, Dict

import torch
from torch import Tensor

from .errors import WeightsError
from .key_table import KeyTable

_STEM = ((0, 'conv1.conv'), (1, 'conv1.norm'), (3, 'conv2.conv'), (4, 'conv2.norm'),
         (6, 'conv3.conv'), (7, 'conv3.norm'), (9, 'conv4.conv'), (10, 'conv4.norm'))
_BLOCK = (('pos.conv', 'pos'), ('retention_layer_norm', 'norm1'), ('final_layer_norm', 'norm2'),
          *((f'retention.{name}_proj', f'mixer.{name}') for name in ('q', 'k', 'v', 'out')),
          ('retention.lepe.conv', 'mixer.lepe'), ('retention.path_embed.dt_linear', 'mixer.decay.proj'),
          ('retention.path_embed', 'mixer.decay'), ('ffn.fc1', 'ffn.fc1'), ('ffn.fc2', 'ffn.fc2'),
          ('ffn.dwconv.conv', 'ffn.dwconv'), ('gamma_1', 'ls1.gamma'), ('gamma_2', 'ls2.gamma'))
# The rows that RMT, from which PPMA descends, has too.
ROWS = (
    *((f'patch_embed.proj.{n}', f'stem.{name}') for n, name in _STEM),
    *((f'layers.{{s}}.blocks.{{b}}.{theirs}', f'stages.{{s}}.blocks.{{b}}.{ours}') for theirs, ours in _BLOCK),
    ('layers.{s}.downsample.reduction', 'stages.{s+1}.downsample.conv'),
    ('layers.{s}.downsample.norm', 'stages.{s+1}.downsample.norm'),
    ('proj', 'head.proj'),
    ('norm', 'head.norm'),
    ('head', 'head.fc'),
)
TABLE = KeyTable((*ROWS, ('outnorm{s}', 'output_norms.{s}')))
ANGLE, RMT_DECAY, _DECAY = '.Relpos.angle', '.Relpos.decay', '.mixer.decay.proj.weight'


def is_published(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of the authors' network, or of RMT's."""
    return any(key.startswith('patch_embed.') for key in weights)


def to_our_keys(weights: Dict[str, Any], table: KeyTable = TABLE) -> Dict[str, Any]:
    """Rename the weights of an authors' network to this package's keys.

    Args:
        weights: the state dict of a network. Weights that already have this package's keys come back unchanged.
        table: the names of the authors' files; RMT's has another one.

    Returns:
        Key -> tensor. Unknown keys stay as they are, so that the loader reports them.

    Raises:
        WeightsError: the angles of the rotary embedding differ from those that this package computes, or the weights
            are RMT's.
    """
    if not is_published(weights):
        return weights
    if any(key.endswith(RMT_DECAY) for key in weights):
        raise WeightsError('these are weights of RMT (they have Relpos.decay), not of PPMA: build rmt_tiny, rmt_small, '
                           'rmt_base or rmt_large')
    renamed = {}
    for key, value in weights.items():
        if key.endswith(ANGLE):
            _check_angles(key, value)
            continue
        name = table.to_ours(key) or key
        is_scale = name.endswith('.gamma') and tuple(getattr(value, 'shape', ()))[:-1] == (1, 1, 1)
        renamed[name] = value.reshape(-1) if is_scale else value
    return renamed


def to_published_keys(weights: Dict[str, Tensor], table: KeyTable = TABLE,
                      publisher: str = "the authors' PPMA") -> Dict[str, Tensor]:
    """Rename the weights of this package's PPMA to the names of the authors' files; the inverse of `to_our_keys`.

    Args:
        weights: the state dict of a classifier or of a dense backbone.
        table, publisher: the names of the authors' files, and whose they are, for the message.

    Returns:
        Key -> tensor, with the authors' shapes and buffers.

    Raises:
        WeightsError: the authors' network has no such weight.
    """
    names = table.all_to_theirs(weights, publisher)
    renamed = {}
    for key, value in weights.items():
        renamed[names[key]] = value.reshape(1, 1, 1, -1) if key.endswith('.gamma') else value
        if key.endswith(f'.blocks.0{_DECAY}'):
            stage = key.split('.')[1]
            renamed[f'layers.{stage}{ANGLE}'] = rotary_angles(value.shape[1]).to(value.device)
    return renamed


def rotary_angles(head_dim: int) -> Tensor:
    """Return the angles (head_dim,) that each stage of the authors' network stores: each angle twice."""
    return (1.0 / 10000 ** torch.linspace(0, 1, head_dim // 2, dtype=torch.float32)).repeat_interleave(2)


def _check_angles(key: str, angles: Any) -> None:
    """Check that a stored rotary embedding is the one that this package computes."""
    if not isinstance(angles, Tensor) or angles.ndim != 1 or angles.numel() % 2 or not angles.is_floating_point():
        raise WeightsError(f'{key} must hold the angles of the rotary embedding, one number for each channel of a head')
    expected = rotary_angles(len(angles)).to(angles.device)
    if not angles.is_meta and not torch.allclose(angles.float(), expected, rtol=1e-2, atol=1e-6):
        raise WeightsError(f'{key} holds other angles than the rotary embedding of the published networks')
