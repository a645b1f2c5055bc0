"""Panels of a layer, by the kind of its mixer."""
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Tuple, Union

from .memories import HeadMaps, decay_maps, head_charts, length_maps
from .panels import Chart, scale_of_weights

Found = List[Union[HeadMaps, Chart]]
Function = Callable[[Any, Tuple[int, int]], Found]


class Kind(NamedTuple):
    """What can be drawn of a mixer.

    Attributes:
        panels: name -> function of the observed mixer and the token that returns maps and charts.
        usual: the panels that are drawn unless others are chosen.
        moving: panels that show the row of one token.
    """
    panels: Dict[str, Function]
    usual: Tuple[str, ...]
    moving: Tuple[str, ...] = ('influence',)


def _influence(layer: Any, token: Tuple[int, int]) -> Found:
    weights = layer.influence(token)[0]
    return [HeadMaps('influence of every token\non the token at +', weights, 'weight',
                     scale_of_weights(weights.mean(0)), True)]


def _tree_influence(layer: Any, token: Tuple[int, int]) -> Found:
    maps, = _influence(layer, token)
    # Weights of the Laplacian fall by orders of magnitude from level to level of the tree.
    return [maps if maps.scale == 'signed' else maps._replace(scale='decades')]


def _decay(direction: int, layer: Any, token: Tuple[int, int]) -> Found:
    if layer.mixer.paths == 'none':
        raise ValueError("paths='none': the attention does not decay with distance")
    factors = layer.mixer.decay_logs(layer.x)[direction][0].float().exp()
    name = ('horizontal decay α', 'vertical decay β')[direction]
    return [HeadMaps(f'{name}\nof each token', factors, 'factor per step; 1: no decay', 'range')]


def _attention(layer: Any, token: Tuple[int, int]) -> Found:
    from ....backbones.influence import attention_without_decay
    weights = attention_without_decay(layer.mixer, layer.x, token)[0]
    name = {'full': 'attention map', 'crisscross': 'criss-cross attention map', 'linear': 'linear attention map',
            'decomposed': 'decomposed attention map'}[layer.mixer.attention]
    return [HeadMaps(f'{name} of +\nwithout decay', weights, 'weight; sum 1', scale_of_weights(weights.mean(0)), True)]


def _mask(layer: Any, token: Tuple[int, int]) -> Found:
    from ....backbones.influence import polyline_mask
    mask = polyline_mask(layer.mixer, layer.x, token)[0]
    both = layer.mixer.paths == 'both'
    name = 'L2D = L(V2H) + L(H2V)' if both else 'L(V2H)'
    return [HeadMaps(f'polyline mask of +\n{name}', mask, f'factor; {2 if both else 1}: no decay', 'span', True)]


def _masked_attention(layer: Any, token: Tuple[int, int]) -> Found:
    mixer = layer.mixer
    attention = {'full': 'softmax', 'crisscross': 'criss-cross', 'linear': 'linear', 'decomposed': 'decomposed'}
    name = f'masked {attention[mixer.attention]} attention' if mixer.attention != 'full' else 'masked attention'
    if mixer.paths == 'none':
        form = "no mask: paths='none'"
    elif mixer.attention in ('linear', 'decomposed') or mixer.mask_mode == 'multiplicative':
        form = 'multiplicative: attention x mask'
    else:
        form = 'additive: log mask added to logits'
    weights = layer.influence(token)[0]
    return [HeadMaps(f'{name} of +\n{form}', weights, 'weight', scale_of_weights(weights.mean(0)), True)]


def _context(layer: Any, token: Tuple[int, int]) -> Found:
    from ....backbones.mixers.separable import SeparableMixer
    x = layer.x.permute(0, 3, 1, 2) if isinstance(layer.mixer, SeparableMixer) else layer.x
    scores, groups = layer.mixer.scores(x)[0].mean(0, keepdim=True), layer.mixer.patch_size ** 2
    uniform = groups / (layer.size[0] * layer.size[1])
    title = f'the sum of each\nof {groups} groups of tokens is 1' if groups > 1 else 'sum 1'
    return [HeadMaps(f'context scores; {title}', scores, f'score; uniform: {uniform:.2g}')]


def _edges(layer: Any, token: Tuple[int, int]) -> Found:
    edges = layer.mixer.edges(layer.x, layer.mixer.levels(*layer.size))
    if not edges:
        raise ValueError('a map of one token has no edges')
    return [HeadMaps('weights of the edges from tokens\nto their parents in the tree', edges[0][0], 'edge weight',
                     'signed' if layer.mixer.parametrization != 'laplacian' else 'range')]


def _deviation(layer: Any, token: Tuple[int, int]) -> Found:
    return [HeadMaps('standard deviation of each token\nunder the Gaussian of the tree',
                     layer.mixer.standard_deviation(layer.x)[0], 'standard deviation', 'range')]


def _shares(layer: Any, token: Tuple[int, int]) -> Found:
    import torch

    from ....kernels.trees import common_ancestor_levels
    levels = layer.mixer.levels(*layer.size)
    ancestors, mass = common_ancestor_levels(levels, *token), layer.influence(token)[0].abs().mean(0)
    shares = torch.stack([mass[ancestors == n].sum() for n in range(len(levels))]) / mass.sum()
    return [Chart('share of the influence on +\nby height of the common ancestor', partial(_draw_shares, shares))]


def _draw_shares(shares: Any, axis: Any) -> None:
    axis.bar(range(len(shares)), shares.tolist(), color='tab:blue')
    axis.set_ylim(0, 1)
    axis.set_yticks([0, 0.5, 1], ['0', '0.5', '1'], fontsize=6.5)
    axis.set_xticks(range(len(shares)), [str(n) for n in range(len(shares))], fontsize=6.5)
    axis.set_xlabel('height in the tree; 0: the token itself', fontsize=6.5)


def _of_mixer(draw: Callable[[Any, Any], Found], layer: Any, token: Tuple[int, int]) -> Found:
    return draw(layer.mixer, layer.x)


def kinds() -> Dict[type, Kind]:
    """Return what can be drawn, by the type of the mixer."""
    from ....backbones import mixers
    from ....backbones.mixers.separable import SeparableMixer
    separable = Kind(dict(context=_context, influence=_influence), ('context',))
    attention = Kind(dict(influence=_influence), ('influence',))
    return {
        mixers.PolylineMixer: Kind({
            'horizontal-decay': partial(_decay, 0),
            'vertical-decay': partial(_decay, 1),
            'attention': _attention,
            'mask': _mask,
            'masked-attention': _masked_attention,
        }, ('horizontal-decay', 'vertical-decay', 'attention', 'mask', 'masked-attention'),
            ('attention', 'mask', 'masked-attention')),
        mixers.SeparableSelfAttention: separable,
        SeparableMixer: separable,
        mixers.MultiHeadSelfAttention: attention,
        mixers.LinformerSelfAttention: attention,
        mixers.TreeMixer: Kind(dict(influence=_tree_influence, levels=_shares, edges=_edges, deviation=_deviation),
                               ('influence', 'levels', 'edges', 'deviation'), ('influence', 'levels')),
        mixers.EosMixer: Kind({
            'decay': partial(_of_mixer, decay_maps),
            'length': partial(_of_mixer, length_maps),
            'heads': partial(_of_mixer, head_charts),
            'influence': _influence,
        }, ('decay', 'length', 'heads')),
    }
