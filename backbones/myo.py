"""Myo: a hierarchical vision transformer that mixes tokens by linear solves on a quad tree.

The layer is from "Myosotis: structured computation for attention like layer", arXiv 2509.20503, which describes it for
sequences (`MyoSequence`). These backbones are this project's: they are PPMA with another token mixer. There are no
published weights. See backbones/mixers/tree.py for the layer.
"""
from functools import partial
from typing import Any, ClassVar, Dict, List, NamedTuple, Tuple

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from ..kernels.trees import common_ancestor_levels
from .hierarchical import ARCHS, HierarchicalBackbone
from .influence import pixel_of
from .mixers import TreeMixer
from .observation import observe_inputs
from .options import Flag, Options, checked, known_options
from .timm_interface import build_model, image_cfg, published_cfgs

__all__ = ['Myo']


class Influence(NamedTuple):
    """The contributions of all tokens of a layer to the query token.

    Attributes:
        place: row and column of the query token.
        weights: the contribution of each token, (B, heads, H, W).
        edges: the edges of each level, (B, heads, H_l, W_l).
        shares: for each level, the share of the absolute contributions of the tokens whose lowest common ancestor with
            the query token is on that level, (B, levels). Level 0 is the query token itself.
    """
    place: Tuple[int, int]
    weights: Tensor
    edges: List[Tensor]
    shares: Tensor


class Myo(HierarchicalBackbone):
    """Backbone with quad-tree solves. The tree of every second block lies on a shifted grid.

    Args:
        shifted_blocks: shift the grid of every second block.
        kwargs: `parametrization`, `static_edges` and `max_levels` of `TreeMixer`, and arguments of
            `HierarchicalBackbone`.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    PASSED_ON: ClassVar[Options] = known_options(TreeMixer, without=('shift_grid', 'rho'))

    @checked
    def __init__(self, shifted_blocks: Flag = True, **kwargs: Any):
        def mixer(stage: int, block: int, shifted_blocks: bool, **options: Any) -> nn.Module:
            return TreeMixer(shift_grid=shifted_blocks and block % 2 == 1, **options)

        super().__init__(mixer, shifted_blocks=shifted_blocks, **kwargs)

    def influences(self, x: Tensor, at: Tuple[float, float] = (0.5, 0.5)) -> Dict[str, Influence]:
        """Return the contributions of all tokens to the query token of each layer, in evaluation mode.

        Args:
            x: images (B, in_chans, H, W).
            at: position of the query token, as fractions of the map's height and width, 0 to below 1.

        Returns:
            The influences by the name of the layer ('stages.0.blocks.0', ...).

        Raises:
            ValueError: the position is outside of the map, or no block has a `TreeMixer`.
        """
        def influence(mixer: TreeMixer, tokens: Tensor) -> Influence:
            tokens = tokens.detach().clone()             # not an inference tensor
            levels = mixer.levels(*tokens.shape[1:3])
            row, column = pixel_of(at, tuple(tokens.shape[1:3]))
            edges = mixer.edges(tokens, levels)
            weights = mixer.influence(tokens, row, column, edges)
            ancestor = common_ancestor_levels(levels, row, column).to(x.device)
            mass = weights.abs().mean(1)
            shares = torch.stack([(mass * (ancestor == n)).sum((1, 2)) for n in range(len(levels))], 1)
            return Influence((row, column), weights, list(edges), shares / shares.sum(1, keepdim=True))

        with torch.inference_mode(False), torch.no_grad():
            return observe_inputs(self, self.mixers(TreeMixer), x.clone(), influence)


_cfg = partial(image_cfg, paper_ids='arXiv:2509.20503')
default_cfgs = generate_default_cfgs(published_cfgs({
    'myo_tiny': _cfg(),
    'myo_small': _cfg(),
    'myo_base': _cfg(),
    'test_myo': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
}))


@register_model
def myo_tiny(pretrained: bool = False, **kwargs: Any) -> Myo:
    """Myo-T: 13.7 M parameters, 2.3 GMACs at 224."""
    return build_model(Myo, 'myo_tiny', pretrained, {**ARCHS['tiny'], **kwargs})


@register_model
def myo_small(pretrained: bool = False, **kwargs: Any) -> Myo:
    """Myo-S: 25.6 M parameters, 4.3 GMACs at 224."""
    return build_model(Myo, 'myo_small', pretrained, {**ARCHS['small'], **kwargs})


@register_model
def myo_base(pretrained: bool = False, **kwargs: Any) -> Myo:
    """Myo-B: 51.4 M parameters, 9.5 GMACs at 224."""
    return build_model(Myo, 'myo_base', pretrained, {**ARCHS['base'], **kwargs})


@register_model
def test_myo(pretrained: bool = False, **kwargs: Any) -> Myo:
    """A small Myo with a few hundred thousand parameters, for tests and demonstrations."""
    return build_model(Myo, 'test_myo', pretrained, {**ARCHS['test'], **kwargs})
