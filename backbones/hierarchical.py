"""The four-stage skeleton that PPMA, RMT, Myo and LCSM share.

A family supplies the token mixer of each block. The stem, convolutions, feed-forward layers, downsampling and head are
the same for all families, so that a comparison between families compares mixers.
"""
from functools import partial
from typing import Annotated, Any, Callable, Dict, Optional, Sequence, Set, Type

from timm.layers import calculate_drop_path_rates
from torch import Tensor, nn

from ._timm import checkpoint_seq
from .blocks import Block, ConvNorm, ProjectionHead, Stem, forward_in_parts
from .mixers.choices import Names, block_mixers, find_mixer, mixer_name, warn_of_unused
from .options import (
    FLAG,
    Flag,
    ImageSize,
    InChans,
    NumClasses,
    Rate,
    checked,
    each_stage,
    integer,
    known_options,
    number,
    one_of,
    one_or_each_stage,
    or_none,
)
from .timm_interface import TimmInterface, init_linear

STRIDES = (4, 8, 16, 32)
# The published networks of PPMA, including their drop path rates, and a small one for tests.
ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': dict(
        dims=(64, 128, 256, 512),
        depths=(2, 2, 8, 2),
        num_heads=(4, 4, 8, 16),
        mlp_ratios=(3, 3, 3, 3),
        drop_path_rate=0.1,
    ),
    'small': dict(
        dims=(64, 128, 256, 512),
        depths=(3, 4, 18, 4),
        num_heads=(4, 4, 8, 16),
        mlp_ratios=(4, 4, 3, 3),
        drop_path_rate=0.15,
    ),
    'base': dict(
        dims=(80, 160, 320, 512),
        depths=(4, 8, 25, 8),
        num_heads=(5, 5, 10, 16),
        mlp_ratios=(4, 4, 3, 3),
        drop_path_rate=0.4,
        layer_scale=(False, False, True, True),
    ),
    'test': dict(
        dims=(32, 48, 64, 96),
        depths=(1, 1, 2, 1),
        num_heads=(2, 3, 4, 6),
        mlp_ratios=(3, 3, 3, 3),
        head_hidden_size=128,
    ),
}
# Ends of the names of parameters without weight decay, apart from biases and norms: decays and biases of edges.
_NO_WEIGHT_DECAY = ('.A_log', '.dt_bias', '.edge_bias')


class Stage(nn.Module):
    """Downsampling, then blocks on channels-last tokens: (B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2))."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        # (B, H, W, C): a view, because the memory is channels-last.
        x = self.downsample(x).permute(0, 2, 3, 1)
        if self.grad_checkpointing:
            x = checkpoint_seq(self.blocks, x)
        else:
            x = forward_in_parts(self.blocks, self.blocks, x)
        return x.permute(0, 3, 1, 2)


class HierarchicalBackbone(TimmInterface):
    """A stem at stride 4, four stages at strides 4, 8, 16 and 32, and a head with a projection and a classifier.

    Args:
        build_mixer: called as build_mixer(stage=0..3, block=0.., dim=..., num_heads=..., device=..., dtype=...) for
            each block of a stage; returns a module (B, H, W, C) -> (B, H, W, C) that takes any H, W >= 1.
        dims: number of channels of each stage.
        depths: number of blocks of each stage.
        num_heads: number of heads of each stage.
        mlp_ratios: width of the feed-forward layers of each stage, as a multiple of its `dims`.
        layer_scale: whether the blocks of each stage have LayerScale.
        layer_scale_init: initial value of LayerScale.
        head_hidden_size: width of the head's projection; None for no projection.
        output_norms: add a LayerNorm (eps 1e-5) to the output of each stage, for dense prediction;
            `forward_intermediates(norm=True)` applies it.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of input channels.
        global_pool: 'avg', or '' without a classifier.
        drop_rate: dropout rate before the classifier.
        drop_path_rate: rate of stochastic depth, which rises linearly from 0 in the first block to this in the last.
        img_size: checked and otherwise ignored, because any size of at least 32 x 32 works; timm passes it.
        output_stride: 32.
        mixers: build a hybrid: the name of a mixer in `subquad.backbones.mixers.choices`, or one for each stage, which
            replaces the family's own. None keeps the family's own, in all stages or in one. Named mixers have their
            default options; the family's options apply where its own mixer stays.
        attention_share: the share of the blocks of each stage, from 0 to 1, that use plain softmax attention instead of
            their mixer. They are spread evenly, and the last block of a stage is the first to change.
        device, dtype: device and dtype of the parameters.
        mixer_options: options of the family's mixer, with which `build_mixer` is called, too.

    Attributes:
        hybrid_options: the values of `mixers` and `attention_share` that are not the default; empty if both are.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    @checked
    def __init__(
            self,
            build_mixer: Callable[..., nn.Module],
            dims: Annotated[Sequence[int], each_stage(integer(8, 8192))],
            depths: Annotated[Sequence[int], each_stage(integer(1, 256))],
            num_heads: Annotated[Sequence[int], each_stage(integer(1, 1024))],
            mlp_ratios: Annotated[Sequence[float], each_stage(number(0.125, 64))],
            layer_scale: Annotated[Sequence[bool], each_stage(FLAG)] = (False, False, False, False),
            layer_scale_init: Annotated[float, number(0, 10)] = 1e-6,
            head_hidden_size: Annotated[Optional[int], or_none(integer(1, 65_536))] = 1024,
            output_norms: Flag = False,
            num_classes: NumClasses = 1000,
            in_chans: InChans = 3,
            global_pool: Annotated[str, one_of('avg', '')] = 'avg',
            drop_rate: Rate = 0.,
            drop_path_rate: Rate = 0.,
            img_size: ImageSize = None,
            output_stride: Annotated[int, one_of(STRIDES[-1])] = STRIDES[-1],
            mixers: Annotated[Names, one_or_each_stage(or_none(mixer_name()))] = None,
            attention_share: Annotated[float, number(0, 1)] = 0.,
            device=None,
            dtype=None,
            **mixer_options: Any,
    ):
        options = known_options(type(self))
        warn_of_unused(mixers, attention_share, depths, {
            name: value for name, value in mixer_options.items() if value != options[name].default})
        super().__init__(num_classes, in_chans)
        self.hybrid_options = {**({} if mixers is None else {'mixers': mixers}),
                               **({'attention_share': attention_share} if attention_share else {})}
        own_mixer = partial(build_mixer, **mixer_options)
        names = block_mixers(mixers, attention_share, depths)
        dd = {'device': device, 'dtype': dtype}
        self.num_features, self.head_hidden_size = dims[-1], head_hidden_size or dims[-1]
        self.stem = Stem(in_chans, dims[0], **dd)

        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        for i, dim in enumerate(dims):
            blocks = [
                Block(
                    dim,
                    mixer=(find_mixer(names[i][j]) or own_mixer)(
                        stage=i, block=j, dim=dim, num_heads=num_heads[i], **dd),
                    mlp_ratio=mlp_ratios[i],
                    drop_path=rate,
                    init_values=layer_scale_init if layer_scale[i] else None,
                    **dd,
                )
                for j, rate in enumerate(rates[i])
            ]
            downsample = ConvNorm(dims[i - 1], dim, stride=2, **dd) if i else nn.Identity()
            stages.append(Stage(downsample, blocks))
        self.stages = nn.Sequential(*stages)
        self.feature_info = [
            dict(num_chs=dim, reduction=stride, module=f'stages.{i}')
            for i, (dim, stride) in enumerate(zip(dims, STRIDES))
        ]

        self.output_norms = nn.ModuleList(nn.LayerNorm(dim, **dd) for dim in dims) if output_norms else None
        self.head = ProjectionHead(dims[-1], head_hidden_size, num_classes, global_pool, drop_rate, **dd)
        self.apply(init_linear)

    def mixers(self, kind: Type[nn.Module] = nn.Module) -> Dict[str, nn.Module]:
        """The token mixers of a class, by the name of their block ('stages.0.blocks.0', ...).

        Args:
            kind: the class; by default the mixers of all blocks.

        Raises:
            ValueError: no block has a mixer of this class.
        """
        found = {
            f'stages.{i}.blocks.{j}': block.mixer
            for i, stage in enumerate(self.stages)
            for j, block in enumerate(stage.blocks)
            if isinstance(block.mixer, kind)
        }
        if not found:
            raise ValueError(f'no block of this {type(self).__name__} has a {kind.__name__}')
        return found

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters without weight decay, apart from biases and norms.

        These are A_log and dt_bias of polyline decays, which the published training of PPMA's classifiers excludes,
        biases of tree edges, and the decays, angles and matrices of recurrences that belong to no linear layer.
        """
        return {
            name for name, _ in self.named_parameters()
            if name.endswith(_NO_WEIGHT_DECAY)
            or '.mixer.recurrence.' in name and not name.endswith(('.weight', '.bias'))
        }

    def group_matcher(self, coarse: bool = False) -> Dict[str, object]:
        """Patterns for layer decay: the stem, then every block. Downsampling belongs to the stage's first block."""
        if coarse:
            return dict(stem=r'^stem', blocks=[(r'^stages\.(\d+)', None), (r'^output_norms', (99999,))])
        return dict(
            stem=r'^stem',
            blocks=[
                (r'^stages\.(\d+)\.downsample', (0,)),
                (r'^stages\.(\d+)\.blocks\.(\d+)', None),
                (r'^output_norms', (99999,)),
            ],
        )
