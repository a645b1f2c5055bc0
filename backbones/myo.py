"""Myo: a hierarchical vision transformer whose tokens meet by solves on a quad tree.

The layer is that of "Myosotis: structured computation for attention like layer", arXiv 2509.20503; the paper has it for
sequences (`MyoSequence`), these backbones are ours: the macro-architecture of PPMA with another mixer. There are no
published weights. See backbones/mixers/tree.py for the layer.
"""
from functools import partial
from typing import Any, ClassVar, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from ..kernels.trees import heights
from .hierarchical import OPTIONS, HierarchicalBackbone
from .mixers import TreeMixer
from .options import Options, flag
from .weights import pretrained_filter

__all__ = ['Myo']

# Widths, depths and ratios of PPMA's.
ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': dict(dims=(64, 128, 256, 512), depths=(2, 2, 8, 2), num_heads=(4, 4, 8, 16), mlp_ratios=(3, 3, 3, 3),
                 drop_path_rate=0.1),
    'small': dict(dims=(64, 128, 256, 512), depths=(3, 4, 18, 4), num_heads=(4, 4, 8, 16), mlp_ratios=(4, 4, 3, 3),
                  drop_path_rate=0.15),
    'base': dict(dims=(80, 160, 320, 512), depths=(4, 8, 25, 8), num_heads=(5, 5, 10, 16), mlp_ratios=(4, 4, 3, 3),
                 drop_path_rate=0.4, layer_scale=(False, False, True, True)),
    'test': dict(dims=(32, 48, 64, 96), depths=(1, 1, 2, 1), num_heads=(2, 3, 4, 6), mlp_ratios=(3, 3, 3, 3),
                 head_hidden_size=128),
}


class Influence(NamedTuple):
    """Of one layer: the place of the token that is looked at (row, column); what each token contributes to it,
    (B, heads, H, W); the edges of each level, (B, heads, H_l, W_l); and the share of the contributions' size by the
    height of the lowest node that two tokens share, (B, levels), 0 for the token itself."""
    place: Tuple[int, int]
    weights: Tensor
    edges: List[Tensor]
    shares: Tensor


class Myo(HierarchicalBackbone):
    """Quad-tree solves on the common skeleton. Every second block has its tree on a shifted grid.

    Args:
        parametrisation: 'laplacian', 'symmetric' or 'skew'.
        static_edges: edges that do not depend on the image.
        max_levels: height of the trees; None for one over the whole map.
        shift: whether every second block's grid is shifted.
        kwargs: as for HierarchicalBackbone.

    Raises:
        ValueError: an option or a size that is not allowed.
        TypeError: an unknown option.
    """

    OPTIONS: ClassVar[Options] = {**OPTIONS, **TreeMixer.OPTIONS, 'shift': flag()}

    def __init__(self, parametrisation: str = 'laplacian', static_edges: bool = False,
                 max_levels: Optional[int] = None, shift: bool = True, **kwargs: Any):
        def mixer(stage: int, block: int, dim: int, num_heads: int, **dd: Any) -> nn.Module:
            return TreeMixer(dim, num_heads, parametrisation, static_edges, max_levels, shift and block % 2 == 1, **dd)

        super().__init__(mixer, parametrisation=parametrisation, static_edges=static_edges, max_levels=max_levels,
                         shift=shift, **kwargs)

    def influences(self, x: Tensor, at: Tuple[float, float] = (0.5, 0.5)) -> Dict[str, Influence]:
        """What every token of each layer contributes to one of them, in evaluation mode.

        Args:
            x: (B, in_chans, H, W).
            at: where that one is, as shares of the map's height and width, 0 to below 1.

        Returns:
            By the layer's name ('stages.0.blocks.0', ...).

        Raises:
            ValueError: a place outside of the map.
        """
        if len(at) != 2 or not all(isinstance(place, (int, float)) and 0 <= place < 1 for place in at):
            raise ValueError(f'at must be two shares of height and width from 0 to below 1, got {at!r}')
        found: Dict[str, Influence] = {}

        def keep(name: str, mixer: TreeMixer, inputs: Tuple[Tensor, ...]) -> None:
            tokens = inputs[0].detach().clone()          # not an inference tensor
            levels = mixer.levels(*tokens.shape[1:3])
            row, column = (int(place * size) for place, size in zip(at, tokens.shape[1:3]))
            with torch.no_grad():
                edges = mixer.edges(tokens, levels)
            weights = mixer.influence(tokens, row, column, edges)
            height = heights(levels, row, column).to(x.device)
            mass = weights.abs().mean(1)
            shares = torch.stack([(mass * (height == n)).sum((1, 2)) for n in range(len(levels))], 1)
            found[name] = Influence((row, column), weights, list(edges), shares / shares.sum(1, keepdim=True))

        handles = [block.mixer.register_forward_pre_hook(partial(keep, f'stages.{i}.blocks.{j}'))
                   for i, stage in enumerate(self.stages) for j, block in enumerate(stage.blocks)]
        modes = [(module, module.training) for module in self.modules()]
        try:
            self.eval()                                  # no running statistics change
            with torch.inference_mode(False), torch.no_grad():
                self.forward_features(x.clone())
        finally:
            for module, training in modes:
                module.training = training
            for handle in handles:
                handle.remove()
        return found

    def no_weight_decay(self) -> Set[str]:
        """The edges' biases."""
        return {name for name, _ in self.named_parameters() if name.endswith('.edge_bias')}


def _cfg(**kwargs: Any) -> Dict[str, Any]:
    return {'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': (7, 7), 'crop_pct': 0.875,
            'interpolation': 'bicubic', 'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
            'first_conv': 'stem.conv1.conv', 'classifier': 'head.fc', 'license': 'apache-2.0',
            'paper_ids': 'arXiv:2509.20503', **kwargs}


default_cfgs = generate_default_cfgs({
    'myo_tiny.untrained': _cfg(), 'myo_small.untrained': _cfg(), 'myo_base.untrained': _cfg(),
    'test_myo.untrained': _cfg(input_size=(3, 64, 64), pool_size=(2, 2), crop_pct=1.0),
})


def _build(name: str, pretrained: bool, **kwargs: Any) -> Myo:
    # Output norms are applied by forward_intermediates, which timm's getter calls and its default wrapper does not.
    wrapper = dict(feature_cls='getter', norm=True) if kwargs.get('output_norms') else dict(flatten_sequential=True)
    return build_model_with_cfg(Myo, name, pretrained, pretrained_filter_fn=pretrained_filter(**kwargs),
                                feature_cfg=dict(out_indices=(0, 1, 2, 3), **wrapper), **kwargs)


@register_model
def myo_tiny(pretrained: bool = False, **kwargs: Any) -> Myo:
    """Myo-T: 13.7 M parameters, 2.3 GMACs at 224."""
    return _build('myo_tiny', pretrained, **{**ARCHS['tiny'], **kwargs})


@register_model
def myo_small(pretrained: bool = False, **kwargs: Any) -> Myo:
    """Myo-S: 25.6 M parameters, 4.3 GMACs at 224."""
    return _build('myo_small', pretrained, **{**ARCHS['small'], **kwargs})


@register_model
def myo_base(pretrained: bool = False, **kwargs: Any) -> Myo:
    """Myo-B: 51.4 M parameters, 9.5 GMACs at 224."""
    return _build('myo_base', pretrained, **{**ARCHS['base'], **kwargs})


@register_model
def test_myo(pretrained: bool = False, **kwargs: Any) -> Myo:
    """A Myo of a few hundred thousand parameters, for tests and demonstrations."""
    return _build('test_myo', pretrained, **{**ARCHS['test'], **kwargs})
