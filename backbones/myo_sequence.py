"""MyoSequence: a linear encoder and a stack of gated tree solves, for sequences and for images read as sequences.

The architecture is from "Myosotis: structured computation for attention like layer", arXiv 2509.20503. The paper does
not say how edges depend on the input, which values inner nodes start with, or what is read out. These are options
here.
"""
from typing import Annotated, Any, Dict, Optional, Set, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import get_device_dtype
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels.trees import ORDERS, PARAMETRIZATIONS, grid_order
from .blocks import check_tokens
from .mixers.scan import ScanMixer
from .mixers.tree_sequence import LEVELS, Nodes, TreeSequenceMixer
from .options import (
    Flag,
    InChans,
    NumClasses,
    Rate,
    check,
    checked,
    image_size,
    integer,
    known_options,
    number,
    one_of,
    or_none,
)
from .timm_interface import build_model, image_cfg, published_cfgs

__all__ = ['MyoSequence']


class Layer(nn.Module):
    """u + out(SiLU(gate(v)) * mixer(q) + skip * q), where v = norm(u) and q = value(v): (B, V, dim) -> (B, V, dim).

    A feed-forward layer follows if mlp_ratio > 0.
    """

    def __init__(
            self,
            dim: int,
            mixer: nn.Module,
            mlp_ratio: float,
            drop_rate: float,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm = nn.LayerNorm(dim, **dd)
        self.value, self.gate, self.out = (nn.Linear(dim, dim, **dd) for _ in range(3))
        self.skip = nn.Parameter(torch.ones(dim, **dd))
        self.mixer = mixer
        self.drop = nn.Dropout(drop_rate)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim, **dd),
            nn.Linear(dim, hidden, **dd),
            nn.GELU(),
            nn.Linear(hidden, dim, **dd),
        ) if hidden else None

    def forward(self, u: Tensor, context: Union[None, Nodes, Tensor]) -> Tensor:
        """Map u (B, V, dim) to the same shape.

        Args:
            u: values of all nodes of the tree, or of all elements of the sequence.
            context: second argument of the mixer, the nodes of a tree or the mask of a recurrence.
        """
        v = self.norm(u)
        q = self.value(v)
        x = self.mixer(q, context)
        u = u + self.drop(self.out(F.silu(self.gate(v)) * x + self.skip * q))
        return u if self.mlp is None else u + self.drop(self.mlp(u))


class MyoSequence(nn.Module):
    """Classifier of sequences that mixes tokens by tree solves, or by the recurrence of S5.

    Args:
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of channels of an image or a sequence.
        vocab_size: size of the vocabulary of sequences of tokens, which an embedding encodes; None for channels.
        padding_idx: index of the padding token, which does not affect the output. The tree depends on the padded
            length, so pad all sequences to the same length.
        dim: number of channels of the network.
        depth: number of layers.
        num_heads: number of heads of the trees; dim must be a multiple of num_heads * block_size.
        block_size: side m of the blocks of the tree's matrix.
        arity: number of children of a node.
        order: order in which the pixels of an image are read: 'morton', 'snake' or 'raster'.
        parametrization: 'symmetric' (the paper), 'laplacian' or 'skew'.
        static_edges: use edges that do not depend on the input.
        virtual_input: initial value of inner nodes: 'mean' (of their leaves), 'embed' or 'zero' (both start at zero).
            'mean' and 'embed' add a learned embedding of level and sibling index to every node.
        readout_levels: number of levels, from the root, whose means are read.
        readout: 'mean' or 'concat' of the means of these levels.
        mixer: 'tree', or 'scan' for a baseline: S5's recurrence in both directions, and the mean over the sequence.
        states: number of complex states of the recurrence.
        mlp_ratio: width of a feed-forward layer in each layer, as a multiple of dim; 0 for none, as in the paper.
        drop_rate: dropout rate in each layer.
        img_size: ignored, because any size works.
        global_pool: 'avg'.
        device, dtype: device and dtype of the parameters.

    Before torch.jit.trace and torch.export, call the model once with a sequence of the same length: this call builds
    the tree and caches it. torch.compile splits the model into several graphs.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    @checked
    def __init__(
            self,
            num_classes: NumClasses = 10,
            in_chans: InChans = 3,
            vocab_size: Annotated[Optional[int], or_none(integer(1, 10_000_000))] = None,
            padding_idx: Annotated[int, integer(-1, 10_000_000)] = 0,
            dim: Annotated[int, integer(1, 65_536)] = 64,
            depth: Annotated[int, integer(1, 1024)] = 4,
            num_heads: Annotated[int, integer(1, 65_536)] = 8,
            block_size: Annotated[int, integer(1, 64)] = 1,
            arity: Annotated[int, integer(2, 1024)] = 4,
            order: Annotated[str, one_of(*ORDERS)] = 'morton',
            parametrization: Annotated[str, one_of(*PARAMETRIZATIONS)] = 'symmetric',
            static_edges: Flag = False,
            virtual_input: Annotated[str, one_of('mean', 'zero', 'embed')] = 'mean',
            readout_levels: Annotated[int, integer(1, 64)] = 2,
            readout: Annotated[str, one_of('mean', 'concat')] = 'concat',
            mixer: Annotated[str, one_of('tree', 'scan')] = 'tree',
            states: Annotated[int, integer(1, 65_536)] = 32,
            mlp_ratio: Annotated[float, number(0, 64)] = 0.,
            drop_rate: Rate = 0.,
            img_size: Annotated[Union[None, int, Tuple[int, int]], or_none(image_size(1))] = None,
            global_pool: Annotated[str, one_of('avg')] = 'avg',
            device=None,
            dtype=None,
    ):
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
        has_embedding = self.tree and virtual_input != 'zero'
        self.level_embedding = nn.Parameter(torch.zeros(LEVELS, arity, dim, **dd)) if has_embedding else None

        def make_mixer() -> nn.Module:
            if mixer == 'scan':
                return ScanMixer(dim, states, **dd)
            return TreeSequenceMixer(dim, num_heads, arity, block_size, parametrization, static_edges, **dd)

        self.layers = nn.ModuleList(Layer(dim, make_mixer(), mlp_ratio, drop_rate, **dd) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, **dd)
        self.num_features = dim * readout_levels if self.tree and readout == 'concat' else dim
        self.head_hidden_size = self.num_features
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes else nn.Identity()
        self.apply(_init)
        if self.level_embedding is not None:
            nn.init.normal_(self.level_embedding, std=0.5)

    def no_weight_decay(self) -> Set[str]:
        """The parameters of the recurrence, as in S5, edge biases and level embeddings."""
        ends = ('edge_bias', 'level_embedding', 'skip', 'log_rate', 'frequency', 'log_step')
        return {name for name, _ in self.named_parameters() if name.endswith(ends)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the layers' activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> Dict[str, object]:
        """Patterns for layer decay: the encoder with its embeddings, then every layer."""
        return dict(stem=r'^encoder|^level_embedding', blocks=[(r'^layers\.(\d+)', None), (r'^norm', (99999,))])

    def get_classifier(self) -> nn.Module:
        """The classifier, or nn.Identity if there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replace the classifier by a randomly initialized one.

        Args:
            num_classes: number of classes; 0 for no classifier.
            global_pool: 'avg' or None.

        Raises:
            ValueError: the number of classes or the pooling is not allowed.
        """
        pooling = {} if global_pool is None else {'global_pool': global_pool}
        check(type(self).__name__, known_options(type(self)), {'num_classes': num_classes, **pooling})
        self.num_classes = num_classes
        self.head = (nn.Linear(self.num_features, num_classes, **get_device_dtype(self))
                     if num_classes else nn.Identity())
        self.head.apply(_init)

    def _sequence(self, x: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """Return the encoded sequence (B, L, dim) and its mask (B, L), which is false for padding, or None."""
        if self.vocab_size:
            return self.encoder(check_tokens(x, self.vocab_size)), x != self.padding_idx
        if x.ndim == 4 and x.shape[1] == self.in_chans:
            index = grid_order(*x.shape[2:], self.order).to(x.device)
            x = x.flatten(2).index_select(2, index).transpose(1, 2)
        if x.ndim != 3 or x.shape[2] != self.in_chans or not x.shape[1]:
            raise ValueError(f'the input must be images (B, {self.in_chans}, H, W) or sequences (B, L, '
                             f'{self.in_chans}), got {tuple(x.shape)}')
        return self.encoder(x), None

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features (B, num_features) of images, sequences or tokens."""
        u, mask = self._sequence(x)
        nodes = Nodes(u.shape[1], self.arity, self.block_size, mask, u.device) if self.tree else None
        if nodes is not None:
            u = self._with_inner_nodes(u, nodes)
        for layer in self.layers:
            if self.grad_checkpointing:
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
        tops += [torch.zeros_like(tops[0])] * (self.readout_levels - len(tops))        # the tree has fewer levels
        return torch.cat(tops, 1)

    def _with_inner_nodes(self, leaves: Tensor, nodes: Nodes) -> Tensor:
        """Return the initial values of all nodes: (B, L, dim) -> (B, V, dim)."""
        if self.virtual_input == 'mean':
            u = nodes.means(leaves)
        else:
            u = F.pad(leaves, (0, 0, 0, len(nodes.tree) - leaves.shape[1]))
        if self.level_embedding is None:
            return u
        return u + self.level_embedding[nodes.level, nodes.place].to(u.dtype)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits (B, num_classes) from the output of `forward_features`, or that output with `pre_logits`."""
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _init(module: nn.Module) -> None:
    """Initialize linear layers from a normal distribution of variance 1 / in_features, and biases with 0."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features ** -0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


default_cfgs = generate_default_cfgs(published_cfgs({'myo_sequence': image_cfg(
    num_classes=10,
    input_size=(3, 28, 28),
    pool_size=None,
    crop_pct=1.0,
    interpolation='bilinear',
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    first_conv='encoder',
    classifier='head',
    paper_ids='arXiv:2509.20503',
)}))


@register_model
def myo_sequence(pretrained: bool = False, **kwargs: Any) -> MyoSequence:
    """The paper's stack of tree solves over a flattened image or a sequence; every size is an option."""
    return build_model(MyoSequence, 'myo_sequence', pretrained, kwargs, feature_maps=0)
