"""Rename Vim weights between the names of the authors' files and the names of this package, in both directions.

The authors keep the parameters of the second direction of a mixer beside those of the first, with the suffix `_b`.
"""
from typing import Any, Dict

from torch import Tensor

from .errors import WeightsError
from .key_table import KeyTable

_LAYER = (('layers.{i}.norm', 'stages.{i}.norm'),
          *((f'layers.{{i}}.mixer.{part}', f'stages.{{i}}.mixer.{part}') for part in ('in_proj', 'out_proj')))
_DIRECTION = (('conv1d{b}', 'conv'), ('x_proj{b}', 'scan.x_proj'), ('dt_proj{b}.bias', 'scan.dt_bias'),
              ('dt_proj{b}', 'scan.dt_proj'), ('A{b}_log', 'scan.A_log'), ('D{b}', 'scan.D'))
TABLE = KeyTable((
    ('cls_token', 'stem.cls_token'), ('pos_embed', 'stem.pos_embed'), ('patch_embed.proj', 'stem.proj'),
    *_LAYER,
    *((f"layers.{{i}}.mixer.{theirs.replace('{b}', suffix)}", f'stages.{{i}}.mixer.{direction}.{ours}')
      for direction, suffix in (('right', ''), ('left', '_b')) for theirs, ours in _DIRECTION),
    ('norm_f', 'norm'), ('head', 'head.fc'),
))
_PER_PATH = ('.scan.A_log', '.scan.D', '.scan.dt_bias', '.scan.dt_proj.weight')     # of `SelectiveScan`


def is_published(weights: Dict[str, Any]) -> bool:
    """True if the keys are those of the authors' network."""
    return any(key.endswith('.mixer.A_b_log') for key in weights)


def to_our_keys(weights: Dict[str, Any]) -> Dict[str, Any]:
    """Rename the weights of an authors' network to this package's keys.

    Args:
        weights: the state dict of a network. Weights that already have this package's keys come back unchanged. Unknown
            keys keep their names.

    Raises:
        WeightsError: the network has rotary embeddings, which none of the published ones has.
    """
    if any(key.startswith('rope.') for key in weights):
        raise WeightsError('the file has rotary embeddings (rope.freqs_cos, rope.freqs_sin), which the published '
                           'networks do not have, and this Vim neither')
    if not is_published(weights):
        return weights
    renamed = {TABLE.to_ours(key) or key: value for key, value in weights.items()}
    return {key: value[None] if key.endswith(_PER_PATH) and isinstance(value, Tensor) else value
            for key, value in renamed.items()}


def to_published_keys(weights: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """Rename the weights of this package's Vim to the names of the authors' files; the inverse of `to_our_keys`.

    Args:
        weights: the state dict of a classifier or of a dense backbone without output norms.

    Raises:
        WeightsError: the authors' network has no such weight.
    """
    names = TABLE.all_to_theirs(weights, "the authors' Vim")
    return {names[key]: value[0] if key.endswith(_PER_PATH) else value for key, value in weights.items()}


def reports_raw(weights: Dict[str, Any]) -> bool:
    """True for the authors' weights: they keep the checkpoint in which the raw weights were best."""
    return is_published(weights)
