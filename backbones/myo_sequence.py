"""MyoSequence: the architecture of "Myosotis: structured computation for attention like layer", arXiv 2509.20503, for
sequences and for images read as sequences: a linear encoder and a stack of layers, each a tree solve behind a gate.

The paper says little more (specification of Myo, A3, A4): how edges come from the input, what inner nodes have at the
start and what is read out are options here, with our defaults.
"""
import math
from typing import Any, ClassVar, Dict, List, Optional, Set, Tuple, Union

import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels import tree_solve
from ..kernels.common.autocast import without_autocast
from ..kernels.trees import ORDERS, PARAMETRISATIONS, Tree, cached_sequence, grid_order, level_lengths, tree_blocks
from .mixers.scan import ScanMixer
from .options import COMMON, Options, check, flag, image_size, integer, number, one_of, or_none
from .weights import pretrained_filter

__all__ = ['MyoSequence']

VIRTUAL_INPUTS = ('mean', 'zero', 'embed')
# Levels with an embedding and edge biases of their own, from the leaves up; higher ones share the last.
_LEVELS = 16
# Channels of a head's query and key.
_EDGE_DIM = 8


class Nodes:
    """A sequence's nodes, leaves first, for one length: the tree, each node's level, and which leaves count.

    Args:
        length: of the sequence. arity, block: of the tree.
        mask: (B, length), true for elements that are there, or None for all.
    """

    def __init__(self, length: int, arity: int, block: int, mask: Optional[Tensor], device):
        length = int(length)                                                    # a tracer's numbers are tensors
        self.tree: Tree = cached_sequence(length, arity, None, block)
        self.arity, self.lengths = arity, level_lengths(length, arity)
        self.level = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths)).to(device)
        self.level.clamp_(max=_LEVELS - 1)
        self.place = torch.cat([torch.arange(length) % arity for length in self.lengths]).to(device)   # among siblings
        self.parents = self.tree.parents.clamp(min=0).to(device)
        leaves = torch.ones(1, length, device=device) if mask is None else mask.to(torch.float32)
        self.counts = self._sums(leaves[..., None])                             # leaves below each node, (B, n, 1)
        self.present = None if mask is None else torch.cat(self.counts, 1)[..., 0] > 0    # (B, V)

    def _sums(self, leaves: Tensor) -> List[Tensor]:
        """(B, L, C) and the sums over the leaves below each inner node, (B, n, C) a level."""
        result = [leaves]
        for length in self.lengths[1:]:
            padding = length * self.arity - result[-1].shape[1]
            result.append(F.pad(result[-1], (0, 0, 0, padding)).unflatten(1, (length, self.arity)).sum(2))
        return result

    def means(self, leaves: Tensor) -> Tensor:
        """(B, L, C) -> (B, V, C): leaves, then the means over the leaves below each inner node."""
        total = leaves.to(torch.promote_types(leaves.dtype, torch.float32))
        if self.present is not None:
            total = total.masked_fill(self.counts[0] == 0, 0)
        levels = self._sums(total)
        return torch.cat([x / count.clamp(min=1) for x, count in zip(levels, self.counts)], 1).to(leaves.dtype)

    def top_means(self, x: Tensor, levels: int) -> List[Tensor]:
        """(B, V, C) -> (B, C) a level: means over the nodes of each of the top levels, root first."""
        parts = x.split(self.lengths, 1)
        result = []
        for part, count in zip(parts[::-1][:levels], self.counts[::-1]):
            weight = (count > 0).to(x.dtype)
            result.append((part * weight).sum(1) / weight.expand(len(part), *part.shape[1:2], 1).sum(1).clamp(min=1))
        return result


@register_notrace_module
class TreeSequenceMixer(nn.Module):
    """solve(x) on a tree over a sequence: (B, V, dim) -> (B, V, dim), nodes as `Nodes` has them.

    Heads of dim / heads channels share their edges. With blocks of m, a head's channels are m rows of as many
    right-hand sides. Edges come from products of the child's and the parent's projections (of the rows and columns of
    the block with m > 1) and a bias for each level, place among siblings and head.
    """

    def __init__(self, dim: int, heads: int, arity: int, block: int, parametrisation: str, static_edges: bool,
                 device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.heads, self.arity, self.block, self.parametrisation = heads, arity, block, parametrisation
        self.query, self.key = (None if static_edges else nn.Linear(dim, heads * block * _EDGE_DIM, bias=False, **dd)
                                for _ in range(2))
        self.edge_bias = nn.Parameter(torch.empty(_LEVELS, arity, heads, block, block, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Heads from short to long range, the timescales of S5 as moduli (laplacian: weights from 1 to 16, growing by
        the arity from level to level; symmetric: rho_h = exp(-step_h), steps log-uniform in [1e-3, 1e-1]), and random
        from place to place among siblings: where all are alike, a parent knows its children's mean and not which is
        which.
        """
        low, high = (1.0, 16.0) if self.parametrisation == 'laplacian' else (0.5, 4.0)
        first = torch.linspace(math.log(low), math.log(high), self.heads).exp()[:, None, None]
        noise = torch.randn(*self.edge_bias.shape[:3], 1, 1)
        if self.parametrisation == 'laplacian' and self.block == 1:
            first = torch.log(torch.expm1(first)) + noise                     # the inverse of softplus
        else:
            first = first * noise                                             # of both signs, like wavelets
        with torch.no_grad():
            self.edge_bias.copy_(first * torch.eye(self.block))

    def edges(self, x: Tensor, nodes: Nodes) -> Tensor:
        """z of `tree_blocks`, (B or 1, heads, V, m, m), in float32 at least."""
        z = self.edge_bias[nodes.level, nodes.place].transpose(0, 1)[None]                       # (1, heads, V, m, m)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.query is not None:
            query, key = (linear(x).to(z.dtype).unflatten(2, (self.heads, self.block, _EDGE_DIM)).transpose(1, 2)
                          for linear in (self.query, self.key))                              # (B, heads, V, m, e)
            key = key.index_select(2, nodes.parents)
            dots = query @ key.mT if self.block > 1 else (query * key).sum(-1, keepdim=True)
            z = z + dots * _EDGE_DIM ** -0.5
        if self.parametrisation == 'laplacian':
            growth = self.arity ** nodes.level.to(z.dtype)[:, None, None]
            z = F.softplus(z) * growth if self.block == 1 else z * growth.sqrt()
        if nodes.present is not None:
            z = z.masked_fill(~nodes.present[:, None, :, None, None], 0)
        return z

    def forward(self, x: Tensor, nodes: Nodes) -> Tensor:
        with without_autocast(x):
            z = self.edges(x.to(self.edge_bias.dtype), nodes)
            steps = torch.linspace(math.log(1e-3), math.log(1e-1), self.heads, device=z.device, dtype=z.dtype).exp()
            a, b, c = tree_blocks(nodes.tree, z, self.parametrisation, rho=torch.exp(-steps)[:, None, None, None])
            u = x.to(z.dtype).unflatten(2, (self.heads, self.block, -1)).transpose(1, 2)     # (B, heads, V, m, r)
            y = tree_solve(nodes.tree, a, b, c, u)
        return y.transpose(1, 2).flatten(2).to(x.dtype)


class Layer(nn.Module):
    """u + out(SiLU(gate(v)) * mixed(q) + D * q), v = norm(u), q = value(v), then a feed-forward if mlp_ratio > 0:
    (B, V, dim) -> (B, V, dim)."""

    def __init__(self, dim: int, mixer: nn.Module, mlp_ratio: float, drop_rate: float, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm = nn.LayerNorm(dim, **dd)
        self.value, self.gate, self.out = (nn.Linear(dim, dim, **dd) for _ in range(3))
        self.skip = nn.Parameter(torch.ones(dim, **dd))
        self.mixer = mixer
        self.drop = nn.Dropout(drop_rate)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.LayerNorm(dim, **dd), nn.Linear(dim, hidden, **dd), nn.GELU(),
                                 nn.Linear(hidden, dim, **dd)) if hidden else None

    def forward(self, u: Tensor, where: Union[None, Nodes, Tensor]) -> Tensor:
        """where: what the mixer takes beside q, the tree's nodes or a recurrence's mask."""
        v = self.norm(u)
        q = self.value(v)
        x = self.mixer(q, where)
        u = u + self.drop(self.out(F.silu(self.gate(v)) * x + self.skip * q))
        return u if self.mlp is None else u + self.drop(self.mlp(u))


class MyoSequence(nn.Module):
    """A classifier of sequences by tree solves, or by S5's recurrence in their place.

    Args:
        num_classes: 0 for none. in_chans: channels of an image or a sequence.
        vocab_size: of sequences of tokens, which an embedding encodes; None for channels. padding_idx: the token of
            padding, whose encoding reaches nothing. (The tree depends on the padded length: keep that the same.)
        dim: channels. depth: layers. num_heads: of the trees; dim must be a multiple of num_heads * block_size.
        block_size: m of the tree's blocks. arity: children of a node.
        order: of an image's pixels: 'morton', 'snake' or 'raster'.
        parametrisation: 'symmetric' (the paper's), 'laplacian' or 'skew'. static_edges: edges that do not depend on the
            input.
        virtual_input: what inner nodes have at the start: 'mean' of their leaves or nothing ('embed'), and an embedding
            of their level and place among siblings, which leaves get as well; or 'zero', no embedding either.
        readout_levels: how many levels, from the root, are averaged and read. readout: their 'mean' or 'concat'.
        mixer: 'tree', or 'scan' for the control: S5's recurrence over the sequence with `states` complex states in
            both directions, mean over the sequence.
        mlp_ratio: of a feed-forward in each layer; 0 for none, as in the paper. drop_rate: in each layer.
        img_size: ignored (any size works). global_pool: 'avg'.

    Before torch.jit.trace and torch.export call the model once with a sequence of that length: the tree over it is
    built then, and kept. torch.compile takes it in several graphs.

    Raises:
        ValueError: an option that is not allowed.
    """

    OPTIONS: ClassVar[Options] = {
        **{name: COMMON[name] for name in ('num_classes', 'in_chans', 'drop_rate')},
        'vocab_size': or_none(integer(1, 10_000_000)), 'padding_idx': integer(-1, 10_000_000),
        'dim': integer(1, 65_536), 'depth': integer(1, 1024), 'num_heads': integer(1, 65_536),
        'block_size': integer(1, 64), 'arity': integer(2, 1024), 'order': one_of(*ORDERS),
        'parametrisation': one_of(*PARAMETRISATIONS), 'static_edges': flag(), 'virtual_input': one_of(*VIRTUAL_INPUTS),
        'readout_levels': integer(1, 64), 'readout': one_of('mean', 'concat'), 'mixer': one_of('tree', 'scan'),
        'states': integer(1, 65_536), 'mlp_ratio': number(0, 64), 'img_size': or_none(image_size(1)),
        'global_pool': one_of('avg')}

    def __init__(self, num_classes: int = 10, in_chans: int = 3, vocab_size: Optional[int] = None, padding_idx: int = 0,
                 dim: int = 64, depth: int = 4, num_heads: int = 8, block_size: int = 1, arity: int = 4,
                 order: str = 'morton', parametrisation: str = 'symmetric', static_edges: bool = False,
                 virtual_input: str = 'mean', readout_levels: int = 2, readout: str = 'concat', mixer: str = 'tree',
                 states: int = 32, mlp_ratio: float = 0., drop_rate: float = 0.,
                 img_size: Union[None, int, Tuple[int, int]] = None, global_pool: str = 'avg', device=None, dtype=None):
        check(type(self).__name__, self.OPTIONS, dict(
            num_classes=num_classes, in_chans=in_chans, vocab_size=vocab_size, padding_idx=padding_idx, dim=dim,
            depth=depth, num_heads=num_heads, block_size=block_size, arity=arity, order=order,
            parametrisation=parametrisation, static_edges=static_edges, virtual_input=virtual_input,
            readout_levels=readout_levels, readout=readout, mixer=mixer, states=states, mlp_ratio=mlp_ratio,
            drop_rate=drop_rate, img_size=img_size, global_pool=global_pool))
        super().__init__()
        if dim % (num_heads * block_size):
            raise ValueError(f'dim must be a multiple of num_heads * block_size, got {dim}, {num_heads}, {block_size}')
        dd = {'device': device, 'dtype': dtype}
        self.num_classes, self.in_chans = num_classes, in_chans
        self.vocab_size, self.padding_idx = vocab_size, padding_idx
        self.arity, self.block_size, self.order, self.virtual_input = arity, block_size, order, virtual_input
        self.grad_checkpointing = False
        self.tree, self.readout, self.readout_levels = mixer == 'tree', readout, readout_levels
        self.encoder = nn.Embedding(vocab_size, dim, **dd) if vocab_size else nn.Linear(in_chans, dim, **dd)
        self.level_embedding = (nn.Parameter(torch.zeros(_LEVELS, arity, dim, **dd))
                                if self.tree and virtual_input != 'zero' else None)
        self.layers = nn.ModuleList(Layer(dim, TreeSequenceMixer(
            dim, num_heads, arity, block_size, parametrisation, static_edges, **dd) if self.tree
            else ScanMixer(dim, states, **dd), mlp_ratio, drop_rate, **dd) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, **dd)
        self.num_features = dim * readout_levels if self.tree and readout == 'concat' else dim
        self.head_hidden_size = self.num_features
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes else nn.Identity()
        self.apply(_init)
        if self.level_embedding is not None:
            nn.init.normal_(self.level_embedding, std=0.5)

    def no_weight_decay(self) -> Set[str]:
        """What S5 takes out too: the recurrence's parameters; and edge biases and level embeddings."""
        ends = ('edge_bias', 'level_embedding', 'skip', 'log_rate', 'frequency', 'log_step')
        return {name for name, _ in self.named_parameters() if name.endswith(ends)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> Dict[str, object]:
        """Patterns for layer decay: what encodes, then every layer."""
        return dict(stem=r'^encoder|^level_embedding', blocks=[(r'^layers\.(\d+)', None), (r'^norm', (99999,))])

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """A new classifier (none for 0), its weights random.

        Raises:
            ValueError: a number of classes that is not allowed, or another pooling than 'avg'.
        """
        pooling = {} if global_pool is None else {'global_pool': global_pool}
        check(type(self).__name__, self.OPTIONS, {'num_classes': num_classes, **pooling})
        weight = self.norm.weight
        self.num_classes = num_classes
        self.head = (nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
                     if num_classes else nn.Identity())
        self.head.apply(_init)

    def _sequence(self, x: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """The encoded sequence (B, L, dim), and (B, L), true for what is there, where there is padding."""
        if self.vocab_size:
            if x.ndim != 2 or x.is_floating_point():
                raise ValueError(f'the input must be integer tokens (B, L), got {x.dtype} of shape {tuple(x.shape)}')
            return self.encoder(x), x != self.padding_idx
        if x.ndim == 4 and x.shape[1] == self.in_chans:
            index = grid_order(*x.shape[2:], self.order).to(x.device)
            x = x.flatten(2).index_select(2, index).transpose(1, 2)
        if x.ndim != 3 or x.shape[2] != self.in_chans or not x.shape[1]:
            raise ValueError(f'the input must be images (B, {self.in_chans}, H, W) or sequences (B, L, '
                             f'{self.in_chans}), got {tuple(x.shape)}')
        return self.encoder(x), None

    def forward_features(self, x: Tensor) -> Tensor:
        """Images, sequences or tokens -> what is read out, (B, num_features)."""
        u, mask = self._sequence(x)
        nodes = Nodes(u.shape[1], self.arity, self.block_size, mask, u.device) if self.tree else None
        if nodes is not None:
            u = self._with_inner_nodes(u, nodes)
        for layer in self.layers:
            if self.grad_checkpointing and not torch.jit.is_tracing():
                u = checkpoint(layer, u, mask if nodes is None else nodes, use_reentrant=False)
            else:
                u = layer(u, mask if nodes is None else nodes)
        u = self.norm(u)
        if nodes is None:
            weight = torch.ones_like(u[..., :1]) if mask is None else mask[..., None].to(u.dtype)
            return (u * weight).sum(1) / weight.sum(1).clamp(min=1)
        tops = nodes.top_means(u, self.readout_levels)
        if self.readout == 'mean':
            return torch.stack(tops).mean(0)
        tops += [torch.zeros_like(tops[0])] * (self.readout_levels - len(tops))        # a tree lower than that
        return torch.cat(tops, 1)

    def _with_inner_nodes(self, leaves: Tensor, nodes: Nodes) -> Tensor:
        """(B, L, dim) -> (B, V, dim)."""
        if self.virtual_input == 'mean':
            u = nodes.means(leaves)
        else:
            u = F.pad(leaves, (0, 0, 0, len(nodes.tree) - leaves.shape[1]))
        if self.level_embedding is None:
            return u
        return u + self.level_embedding[nodes.level, nodes.place].to(u.dtype)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _init(module: nn.Module) -> None:
    """Linear layers from a normal distribution of variance 1 / inputs; no bias."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features ** -0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _cfg(**kwargs: Any) -> Dict[str, Any]:
    return {'num_classes': 10, 'input_size': (3, 28, 28), 'pool_size': None, 'crop_pct': 1.0,
            'interpolation': 'bilinear', 'mean': (0.5, 0.5, 0.5), 'std': (0.5, 0.5, 0.5), 'first_conv': 'encoder',
            'classifier': 'head', 'license': 'apache-2.0', 'paper_ids': 'arXiv:2509.20503', **kwargs}


default_cfgs = generate_default_cfgs({'myo_sequence.untrained': _cfg()})


@register_model
def myo_sequence(pretrained: bool = False, **kwargs: Any) -> MyoSequence:
    """The paper's stack of tree solves over a flattened image or a sequence; every size is an option.

    Raises:
        ValueError: features_only, which a sequence has not.
    """
    if kwargs.pop('features_only', False):
        raise ValueError('myo_sequence has no feature maps (features_only=True): myo_tiny, myo_small and myo_base have')
    return build_model_with_cfg(MyoSequence, 'myo_sequence', pretrained,
                                pretrained_filter_fn=pretrained_filter(**kwargs), **kwargs)
