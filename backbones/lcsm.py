"""LCSM: a hierarchical vision backbone that mixes tokens by a linear recurrence of the user's choice.

The recurrences are from Qin et al., "Unlocking the Secrets of Linear Complexity Sequence Model from A Unified
Perspective", arXiv 2405.17383, which describes them for sequences. These backbones are this project's: they are PPMA
with another token mixer. There are no published weights. See backbones/mixers/eos.py for the layer, and
backbones/mixers/eos_codes.py for the names of the recurrences.
"""
from functools import partial
from typing import Any, ClassVar, Dict

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor

from . import hierarchical
from .hierarchical import HierarchicalBackbone
from .mixers import EosMixer
from .mixers.eos_decay import StateDecay
from .observation import observe_inputs
from .options import Options, known_options
from .timm_interface import build_model, image_cfg, published_cfgs

__all__ = ['LCSM']

# Heads have 32 channels, or 16 where 32 does not divide the width.
ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': dict(hierarchical.ARCHS['tiny'], num_heads=(2, 4, 8, 16)),
    'small': dict(hierarchical.ARCHS['small'], num_heads=(2, 4, 8, 16)),
    'base': dict(hierarchical.ARCHS['base'], num_heads=(5, 5, 10, 16)),
    'test': dict(hierarchical.ARCHS['test'], num_heads=(1, 3, 2, 3)),
}


class LCSM(HierarchicalBackbone):
    """Backbone with bidirectional linear recurrences.

    Args:
        kwargs: `mixer` (a preset such as 'gla' or a code of the paper), `mode`, `expand_dim`, `tau`, `numbering`,
            `learned_decay` and `gated` of `EosMixer`, and arguments of `HierarchicalBackbone`.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    PASSED_ON: ClassVar[Options] = known_options(EosMixer)

    def __init__(self, **kwargs: Any):
        super().__init__(lambda stage, block, **options: EosMixer(**options), **kwargs)

    def state_decays(self, x: Tensor) -> Dict[str, StateDecay]:
        """Return how much the memories of each layer decay per token, in evaluation mode.

        `mixers.eos_decay.memory_lengths` turns them into numbers of tokens.

        Args:
            x: images (B, in_chans, H, W).

        Returns:
            The decays by the name of the layer ('stages.0.blocks.0', ...).

        Raises:
            ValueError: the oscillation of the mixer is no decay for each token, or no block has an `EosMixer`; the
                message says why.
        """
        with torch.no_grad():
            return observe_inputs(self, self.mixers(EosMixer), x, EosMixer.state_decay)


_cfg = partial(image_cfg, paper_ids='arXiv:2405.17383')
default_cfgs = generate_default_cfgs(published_cfgs({
    'lcsm_tiny': _cfg(),
    'lcsm_small': _cfg(),
    'lcsm_base': _cfg(),
    'test_lcsm': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
}))


@register_model
def lcsm_tiny(pretrained: bool = False, **kwargs: Any) -> LCSM:
    """LCSM-T: 14.8 M parameters, 2.6 GMACs at 224 with the default mixer."""
    return build_model(LCSM, 'lcsm_tiny', pretrained, {**ARCHS['tiny'], **kwargs})


@register_model
def lcsm_small(pretrained: bool = False, **kwargs: Any) -> LCSM:
    """LCSM-S: 27.9 M parameters, 5.0 GMACs at 224 with the default mixer."""
    return build_model(LCSM, 'lcsm_small', pretrained, {**ARCHS['small'], **kwargs})


@register_model
def lcsm_base(pretrained: bool = False, **kwargs: Any) -> LCSM:
    """LCSM-B: 56.3 M parameters, 11.1 GMACs at 224 with the default mixer."""
    return build_model(LCSM, 'lcsm_base', pretrained, {**ARCHS['base'], **kwargs})


@register_model
def test_lcsm(pretrained: bool = False, **kwargs: Any) -> LCSM:
    """A small LCSM with a few hundred thousand parameters, for tests and demonstrations."""
    return build_model(LCSM, 'test_lcsm', pretrained, {**ARCHS['test'], **kwargs})
