"""The four-stage skeleton that PPMA, Myo and LCSM share, and all of timm's model methods, once.

A family brings a mixer for each block; stem, convolutions, feed-forward, downsampling and head are the same, so that a
comparison between families compares mixers.
"""
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch
from timm.layers import calculate_drop_path_rates, get_device_dtype, trunc_normal_
from torch import Tensor, nn

from ._timm import checkpoint_seq, feature_take_indices
from .blocks import MIN_SIZE, Block, ConvNorm, ProjectionHead, Stem
from .inference import in_parts

STRIDES = (4, 8, 16, 32)


class Stage(nn.Module):
    """Downsampling, then blocks on channels-last tokens: (B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2))."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        return in_parts(self, self._forward, x, x.shape[1] * x.shape[2] * x.shape[3])

    def _forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)                        # (B, H, W, C): a view, the memory is channels-last
        if self.grad_checkpointing and not torch.jit.is_tracing():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return x.permute(0, 3, 1, 2)


class HierarchicalBackbone(nn.Module):
    """A stem at stride 4 and four stages at strides 4, 8, 16, 32, with a projecting classifier head.

    Args:
        mixer: called as mixer(stage=0..3, dim=..., num_heads=..., device=..., dtype=...) for each block; returns a
            module (B, H, W, C) -> (B, H, W, C) that takes any H, W >= 1.
        dims, depths, num_heads, mlp_ratios: one value a stage.
        layer_scale: whether a stage's blocks have LayerScale, one value a stage.
        layer_scale_init: its initial value.
        head_hidden_size: width of the head's projection; None for none.
        output_norms: a LayerNorm (eps 1e-5) on each stage's output, for dense prediction; applied by
            `forward_intermediates(norm=True)`.
        num_classes: 0 for no classifier.
        in_chans: input channels.
        global_pool: 'avg', or '' for a map of logits.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth, linearly from 0 in the first block to this in the last.
        img_size: ignored but for a check, since any size of at least 32 x 32 works; for timm's sake.
        output_stride: 32.
        device, dtype: of the parameters.

    Raises:
        ValueError: sequences that are not four long, or an option that is not allowed.
    """

    def __init__(self, mixer: Callable[..., nn.Module], dims: Sequence[int], depths: Sequence[int],
                 num_heads: Sequence[int], mlp_ratios: Sequence[float],
                 layer_scale: Sequence[bool] = (False, False, False, False), layer_scale_init: float = 1e-6,
                 head_hidden_size: Optional[int] = 1024, output_norms: bool = False, num_classes: int = 1000,
                 in_chans: int = 3, global_pool: str = 'avg', drop_rate: float = 0., drop_path_rate: float = 0.,
                 img_size: Union[None, int, Tuple[int, int]] = None, output_stride: int = 32, device=None, dtype=None):
        super().__init__()
        for name, value in (('dims', dims), ('depths', depths), ('num_heads', num_heads), ('mlp_ratios', mlp_ratios),
                            ('layer_scale', layer_scale)):
            if len(value) != len(STRIDES):
                raise ValueError(f'{name} must have one value for each of {len(STRIDES)} stages, got {value!r}')
        if output_stride != STRIDES[-1]:
            raise ValueError(f'output_stride must be {STRIDES[-1]}, got {output_stride}')
        sizes = [img_size] if isinstance(img_size, int) else list(img_size or ())
        if not all(isinstance(size, int) and size >= MIN_SIZE for size in sizes):
            raise ValueError(f'img_size must be integers of at least {MIN_SIZE}, height and width, got {img_size!r}')
        for name, value, least in (('in_chans', in_chans, 1), ('num_classes', num_classes, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f'{name} must be an integer of at least {least}, got {value!r}')
        for name, value in (('drop_rate', drop_rate), ('drop_path_rate', drop_path_rate)):
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f'{name} must be a number from 0 to below 1, got {value!r}')
        dd = {'device': device, 'dtype': dtype}
        self.num_classes, self.in_chans = num_classes, in_chans
        self.num_features, self.head_hidden_size = dims[-1], head_hidden_size or dims[-1]
        self.stem = Stem(in_chans, dims[0], **dd)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        for i, dim in enumerate(dims):
            blocks = [Block(dim, mixer(stage=i, dim=dim, num_heads=num_heads[i], **dd), mlp_ratios[i], rate,
                            layer_scale_init if layer_scale[i] else None, **dd) for rate in rates[i]]
            stages.append(Stage(ConvNorm(dims[i - 1], dim, stride=2, **dd) if i else nn.Identity(), blocks))
        self.stages = nn.Sequential(*stages)
        self.feature_info = [dict(num_chs=dim, reduction=stride, module=f'stages.{i}')
                             for i, (dim, stride) in enumerate(zip(dims, STRIDES))]
        self.output_norms = nn.ModuleList(nn.LayerNorm(dim, **dd) for dim in dims) if output_norms else None
        self.head = ProjectionHead(dims[-1], head_hidden_size, num_classes, global_pool, drop_rate, **dd)
        self.apply(_init_weights)

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters that take no weight decay whatever their rank; families add theirs."""
        return set()

    def group_matcher(self, coarse: bool = False) -> Dict[str, object]:
        """Patterns for layer decay: the stem, then every block; a stage's downsampling goes with its first block."""
        if coarse:
            return dict(stem=r'^stem', blocks=[(r'^stages\.(\d+)', None), (r'^output_norms', (99999,))])
        return dict(stem=r'^stem', blocks=[(r'^stages\.(\d+)\.downsample', (0,)),
                                           (r'^stages\.(\d+)\.blocks\.(\d+)', None),
                                           (r'^output_norms', (99999,))])

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """A new classifier (none for 0), its weights random; `global_pool` None keeps the pooling."""
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, **get_device_dtype(self))
        self.head.fc.apply(_init_weights)

    def forward_intermediates(self, x: Tensor, indices: Union[None, int, List[int]] = None, norm: bool = False,
                              stop_early: bool = False, output_fmt: str = 'NCHW', intermediates_only: bool = False,
                              ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Outputs of the stages, and of `forward_features`.

        Args:
            x: (B, in_chans, H, W).
            indices: which stages: the last n if int, all if None.
            norm: apply the output norms, where the model has them (`output_norms=True`).
            stop_early: do not run stages after the last one wanted.
            output_fmt: 'NCHW' or 'NHWC'.
            intermediates_only: return the list alone.

        Returns:
            (features, [stage outputs]) or the list.
        """
        if output_fmt not in ('NCHW', 'NHWC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages[:last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                y = x.permute(0, 2, 3, 1)
                y = self.output_norms[i](y) if norm and self.output_norms is not None else y
                intermediates.append(y if output_fmt == 'NHWC' else y.permute(0, 3, 1, 2))
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(self, indices: Union[int, List[int]] = 1, prune_norm: bool = False,
                                  prune_head: bool = True) -> List[int]:
        """Drop the stages after the last one wanted, and the head; returns the indices of the stages wanted."""
        take, last = feature_take_indices(len(self.stages), indices)
        shorter = last < len(self.stages) - 1
        self.stages = self.stages[:last + 1]
        if prune_norm:
            self.output_norms = None
        elif self.output_norms is not None:
            self.output_norms = self.output_norms[:last + 1]
        if shorter or prune_head:
            self.num_features = self.head_hidden_size = self.feature_info[last]['num_chs']
            self.head.remove_projection(self.num_features)
            self.reset_classifier(0, '')
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, C4, ceil(H/32), ceil(W/32))."""
        return self.stages(self.stem(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features of `forward_features` -> logits (B, num_classes), or the pooled projection with pre_logits."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
