"""Panels of a layer, by the kind of its mixer."""
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Tuple, Union

import torch

from ....backbones import mixers
from ....backbones.influence import attention_without_decay, polyline_mask
from ....backbones.mixers.eos_decay import memory_lengths
from ....backbones.mixers.separable import SeparableMixer
from ....kernels.trees import common_ancestor_levels
from .panels import Chart, Panel, scale_of_weights, ticks

Found = List[Union[Panel, Chart]]
Function = Callable[[Any, Tuple[int, int]], Found]
_FORMS = {'full': 'attention', 'crisscross': 'criss-cross attention', 'linear': 'linear attention',
          'decomposed': 'decomposed attention'}


class Kind(NamedTuple):
    """What can be drawn of a mixer."""
    # name -> function of the observed mixer and the token that returns maps of all heads and charts. It raises
    # a ValueError that says why a layer does not have the panel.
    panels: Dict[str, Function]
    usual: Tuple[str, ...]                      # the panels that are drawn unless others are chosen
    moving: Tuple[str, ...] = ('influence',)    # panels that show the row of one token


def _influence(layer: Any, token: Tuple[int, int]) -> Found:
    weights = layer.influence(token)[0]
    return [Panel('influence of every token\non the token at +', weights, 'weight',
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
    return [Panel(f'{name}\nof each token', factors, 'factor per step; 1: no decay', 'range')]


def _attention(layer: Any, token: Tuple[int, int]) -> Found:
    weights = attention_without_decay(layer.mixer, layer.x, token)[0]
    return [Panel(f'{_FORMS[layer.mixer.attention]} map of +\nwithout decay', weights, 'weight; sum 1',
                  scale_of_weights(weights.mean(0)), True)]


def _mask(layer: Any, token: Tuple[int, int]) -> Found:
    mask = polyline_mask(layer.mixer, layer.x, token)[0]
    both = layer.mixer.paths == 'both'
    name = 'L2D = L(V2H) + L(H2V)' if both else 'L(V2H)'
    return [Panel(f'polyline mask of +\n{name}', mask, f'factor; {2 if both else 1}: no decay', 'span', True)]


def _masked_attention(layer: Any, token: Tuple[int, int]) -> Found:
    mixer = layer.mixer
    if mixer.paths == 'none':
        form = "no mask: paths='none'"
    elif mixer.attention in ('linear', 'decomposed') or mixer.mask_mode == 'multiplicative':
        form = 'multiplicative: attention x mask'
    else:
        form = 'additive: log mask added to logits'
    weights = layer.influence(token)[0]
    return [Panel(f'masked {_FORMS[mixer.attention]} of +\n{form}', weights, 'weight',
                  scale_of_weights(weights.mean(0)), True)]


def _context(layer: Any, token: Tuple[int, int]) -> Found:
    x = layer.x.permute(0, 3, 1, 2) if isinstance(layer.mixer, SeparableMixer) else layer.x
    scores, groups = layer.mixer.scores(x)[0].mean(0, keepdim=True), layer.mixer.patch_size ** 2
    uniform = groups / (layer.size[0] * layer.size[1])
    title = f'the sum of each\nof {groups} groups of tokens is 1' if groups > 1 else 'sum 1'
    return [Panel(f'context scores; {title}', scores, f'score; uniform: {uniform:.2g}')]


def _edges(layer: Any, token: Tuple[int, int]) -> Found:
    edges = layer.mixer.edges(layer.x, layer.mixer.levels(*layer.size))
    if not edges:
        raise ValueError('a map of one token has no edges')
    return [Panel('weights of the edges from tokens\nto their parents in the tree', edges[0][0], 'edge weight',
                     'signed' if layer.mixer.parametrization != 'laplacian' else 'range')]


def _deviation(layer: Any, token: Tuple[int, int]) -> Found:
    return [Panel('standard deviation of each token\nunder the Gaussian of the tree',
                     layer.mixer.standard_deviation(layer.x)[0], 'standard deviation', 'range')]


def _shares(layer: Any, token: Tuple[int, int]) -> Found:
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


def _decay_logs(layer: Any) -> Any:
    """Return the mean log decay per token of each head of an `EosMixer`, (1, heads, h, w)."""
    logs = layer.mixer.state_decay(layer.x)[0]
    if logs.shape[2:] == (1, 1):
        raise ValueError(f'mixer={layer.mixer.mixer!r} decays alike at all tokens, which the panel heads shows')
    return logs


def _state_decay(layer: Any, token: Tuple[int, int]) -> Found:
    return [Panel('state decay per token\n(geometric mean over the memory)', _decay_logs(layer)[0].exp(),
                  'factor per token; 1: no decay', 'range', geometric=True)]


def _lengths(layer: Any, token: Tuple[int, int]) -> Found:
    """Tokens until the product of decays falls to 1/e, the mean of both ways unless the scan has one."""
    logs, mode = _decay_logs(layer), layer.mixer.mode
    if mode == 'axis':
        found = {'along rows': memory_lengths(logs, 3), 'along columns': memory_lengths(logs, 2)}
    else:
        reverse = False if mode == 'forward' else None
        found = {'along the scan': memory_lengths(logs.flatten(2), 2, reverse).reshape(logs.shape)}
    return [Panel(f'effective memory length\n{name}, until 1/e is left', lengths[0], 'tokens', 'logarithmic',
                  geometric=True) for name, lengths in found.items()]


def _head_charts(layer: Any, token: Tuple[int, int]) -> Found:
    decays = layer.mixer.state_decay(layer.x)[1].double().exp().clamp(1e-35, 1 - 1e-6)
    return [Chart('decay of each head:\nall elements, middle half, mean', partial(_draw_heads, decays, False)),
            Chart('memory length of each head:\nall elements, middle half, mean', partial(_draw_heads, decays, True))]


def _draw_heads(decays: Any, lengths: bool, axis: Any) -> None:
    """Draw the range, the middle half and the mean of the decays (heads, elements), or of the lengths, by head."""
    mean, values = decays.log().mean(1).exp(), decays
    if lengths:
        mean, values = -1 / mean.log(), -1 / decays.log()
    ends = torch.quantile(values, torch.tensor([0, 0.25, 0.75, 1], dtype=values.dtype), 1)
    places = range(len(values))
    axis.hlines(places, ends[0], ends[3], color='tab:gray', linewidth=1)
    axis.hlines(places, ends[1], ends[2], color='tab:blue', linewidth=3)
    axis.plot(mean, places, 'o', color='black', markersize=3)
    axis.set_ylim(len(values) - 0.5, -0.5)
    step = 1 if len(values) <= 8 else 4
    axis.set_yticks(list(places)[::step], [str(n) for n in places][::step], fontsize=6.5)
    axis.set_ylabel('head', fontsize=6.5)
    axis.set_xlabel('tokens' if lengths else 'decay per token', fontsize=6.5)
    axis.set_xscale('log' if lengths else 'linear')
    axis.minorticks_off()
    axis.margins(x=0.2)
    axis.set_xticks(**ticks(float(values.min()), float(values.max()), lengths), fontsize=6.5)


_POLYLINE = Kind({'horizontal-decay': partial(_decay, 0), 'vertical-decay': partial(_decay, 1), 'attention': _attention,
                  'mask': _mask, 'masked-attention': _masked_attention},
                 ('horizontal-decay', 'vertical-decay', 'attention', 'mask', 'masked-attention'),
                 ('attention', 'mask', 'masked-attention'))
_SEPARABLE = Kind(dict(context=_context, influence=_influence), ('context',))
_ATTENTION = Kind(dict(influence=_influence), ('influence',))
# What can be drawn, by the type of the mixer.
KINDS: Dict[type, Kind] = {
    mixers.PolylineMixer: _POLYLINE,
    mixers.SeparableSelfAttention: _SEPARABLE,
    SeparableMixer: _SEPARABLE,
    mixers.MultiHeadSelfAttention: _ATTENTION,
    mixers.LinformerSelfAttention: _ATTENTION,
    mixers.TreeMixer: Kind(dict(influence=_tree_influence, levels=_shares, edges=_edges, deviation=_deviation),
                           ('influence', 'levels', 'edges', 'deviation'), ('influence', 'levels')),
    mixers.EosMixer: Kind(dict(decay=_state_decay, length=_lengths, heads=_head_charts, influence=_influence),
                          ('decay', 'length', 'heads')),
}
