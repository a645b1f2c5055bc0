"""Rename RMT weights between the names of the authors' files and the names of this package, in both directions.

PPMA descends from RMT, so that `ppma_keys` has most of the names. Each stage of the authors' network has a second
buffer, `Relpos.decay`, with the step logs of its heads. Detectors and segmenters name the output norms `extra_norms`.
"""
from typing import Any, Dict, Sequence

import torch
from torch import Tensor

from . import ppma_keys
from .errors import WeightsError
from .key_table import KeyTable
from .ppma_keys import ANGLE, RMT_DECAY

TABLE = KeyTable((*ppma_keys.ROWS, ('extra_norms.{s}', 'output_norms.{s}'), ('aux_head', 'head.aux_fc')))


def is_published(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of the authors' network."""
    return any(key.endswith(RMT_DECAY) for key in weights)


def reports_raw(weights: Dict[str, Any]) -> bool:
    """True for the weights of RMT-T, of which the authors report the raw weights (82.41 % top-1, averaged 82.33 %).

    They report the averaged weights of the other variants.
    """
    blocks = [f'layers.0.blocks.{number}.pos.conv.bias' in weights for number in (1, 2)]     # T has two, others more
    return f'layers.0{RMT_DECAY}' in weights and blocks == [True, False]


def to_our_keys(weights: Dict[str, Any], decays: Sequence[Tensor]) -> Dict[str, Any]:
    """Rename the weights of an authors' network to this package's keys; see `ppma_keys.to_our_keys`.

    Args:
        weights: the state dict of a network. Weights that already have this package's keys come back unchanged.
        decays: the step logs (heads,) of each stage of this package's network, which those of the file must equal.

    Raises:
        WeightsError: the weights are PPMA's, or they have the decays of another variant or other rotary angles.
    """
    if any('.path_embed.' in key for key in weights):
        raise WeightsError('these are weights of PPMA (they have path_embed), not of RMT: build ppma_tiny, ppma_small '
                           'or ppma_base')
    for stage, decay in enumerate(decays):
        key = f'layers.{stage}{RMT_DECAY}'
        if key in weights and not _equal(weights[key], decay):
            raise WeightsError(f"{key} holds other decays than this model's {len(decay)} heads: the file is of another "
                               'variant')
    return ppma_keys.to_our_keys({key: value for key, value in weights.items() if not key.endswith(RMT_DECAY)}, TABLE)


def to_published_keys(weights: Dict[str, Tensor], decays: Sequence[Tensor]) -> Dict[str, Tensor]:
    """Rename the weights of this package's RMT to the names of the authors' files; the inverse of `to_our_keys`.

    Args:
        weights: the state dict of a classifier or of a dense backbone.
        decays: see `to_our_keys`.

    Returns:
        Key -> tensor, with the authors' shapes and buffers.

    Raises:
        WeightsError: the authors' network has no such weight.
    """
    renamed = ppma_keys.to_published_keys(weights, TABLE, "the authors' RMT")
    for stage, decay in enumerate(decays):
        bias = renamed.get(f'layers.{stage}.blocks.0.retention.q_proj.bias')
        if bias is not None:
            renamed[f'layers.{stage}{ANGLE}'] = ppma_keys.rotary_angles(len(bias) // len(decay)).to(bias.device)
            renamed[f'layers.{stage}{RMT_DECAY}'] = decay.to(bias.device)
    return renamed


def check_aux_head(weights: Dict[str, Any], width: int) -> None:
    """Check that the classifier of tokens takes the last stage's channels.

    Raises:
        WeightsError: it takes others. S*'s has 1,025,000 parameters and takes 1,024, according to the authors' log.
    """
    found = getattr(weights.get('head.aux_fc.weight'), 'shape', (0, width))
    if tuple(found[1:]) != (width,):
        raise WeightsError(f'aux_head takes {found[-1]} channels, as in the log of RMT-S*, and not the {width} of the '
                           'last stage, so its place in the network is unknown: remove aux_head.weight and '
                           'aux_head.bias from the file and set aux_head=False')


def _equal(stored: Any, expected: Tensor) -> bool:
    """Whether a buffer of a file, which may be in half precision, holds these decays."""
    return isinstance(stored, Tensor) and stored.shape == expected.shape and (
        stored.is_meta or torch.allclose(stored.float().cpu(), expected, rtol=1e-2, atol=1e-4))
