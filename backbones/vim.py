"""Vim (Vision Mamba): a plain backbone of bidirectional selective scans, with the class token in the middle.

Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model", ICML 2024,
arXiv 2401.09417, and its published code (Apache-2.0). The defaults build the networks of the published weights, which
follow the code. All layers have one width and one stride, as in timm's plain vision transformers.
"""
import math
import warnings
from functools import partial
from typing import Annotated, Any, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import DropPath, calculate_drop_path_rates, lecun_normal_, to_2tuple, trunc_normal_
from timm.models import generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn

from ._timm import checkpoint_seq, feature_take_indices
from .blocks import check_image, check_pool
from .mixers.bidirectional import BidirectionalMixer
from .mixers.eos_linear import at_least_float
from .options import (
    MIN_SIZE,
    Flag,
    ImageSize,
    InChans,
    NumClasses,
    Rate,
    checked,
    integer,
    one_of,
)
from .timm_interface import TimmInterface, build_model, image_cfg, init_linear, published_cfgs
from .weights import WeightsError, vim_keys

__all__ = ['Vim']

ARCHS: Dict[str, Dict[str, Any]] = {
    'tiny': dict(dim=192),
    'small': dict(dim=384, drop_path_rate=0.05),
    'base': dict(dim=768),
    'tiny_stride8': dict(dim=192, stride=8),
    'small_stride8': dict(dim=384, stride=8),
    'test': dict(dim=64, depth=4, img_size=64),
}


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight in float32, for the sum of the layers, which is in float32, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float(x)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


class Layer(nn.Module):
    """x + mixer(RMSNorm(x)): (B, T, C) -> (B, T, C), in float32 or wider."""

    def __init__(self, dim: int, drop_path: float, symmetric_init: bool, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.norm = RMSNorm(dim, eps=1e-5, **dd)
        self.mixer = BidirectionalMixer(dim, symmetric_init=symmetric_init, **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return at_least_float(x) + self.drop_path(self.mixer(self.norm(x)))


def put_in_middle(x: Tensor, row: Tensor) -> Tensor:
    """Insert a row (B, 1, C) at index floor(M / 2) of x (B, M, C)."""
    middle = x.shape[1] // 2
    return torch.cat([x[:, :middle], row, x[:, middle:]], 1)


def take_from_middle(x: Tensor) -> Tuple[Tensor, Tensor]:
    """Undo `put_in_middle`: (B, M + 1, C) -> (B, M, C) and (B, 1, C)."""
    middle = (x.shape[1] - 1) // 2
    return torch.cat([x[:, :middle], x[:, middle + 1:]], 1), x[:, middle:middle + 1]


def resize_pos_embed(pos_embed: Tensor, old: Sequence[int], new: Sequence[int], class_token: bool = True) -> Tensor:
    """Resize position embeddings (1, M, C), or (1, M + 1, C) with the class token's in the middle, to another grid.

    The class token's row goes to the middle of the new grid. The authors' code takes it for the first row instead.

    Args:
        pos_embed: the embeddings of the old grid.
        old, new: rows and columns of the grids of patches.
        class_token: whether one row belongs to a class token.
    """
    if tuple(old) == tuple(new):
        return pos_embed
    rows, own = take_from_middle(pos_embed) if class_token else (pos_embed, None)
    grid = at_least_float(rows).mT.unflatten(2, tuple(old))
    grid = F.interpolate(grid, tuple(new), mode='bicubic', align_corners=False)
    rows = grid.flatten(2).mT.to(pos_embed.dtype)
    return rows if own is None else put_in_middle(rows, own)


@register_notrace_module
class PatchEmbed(nn.Module):
    """Patches with position embeddings, and the class token in the middle: (B, in_chans, H, W) -> (B, M + 1, dim).

    Attributes:
        grid: rows and columns of the patches to which `pos_embed` belongs. It is resized for other images.
    """

    def __init__(
            self,
            in_chans: int,
            dim: int,
            patch_size: int,
            stride: int,
            img_size: Union[int, Tuple[int, int]],
            class_token: bool,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride, **dd)
        self.grid = self.grid_of(to_2tuple(img_size))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **dd)) if class_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1] + class_token, dim, **dd))
        lecun_normal_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)
        for embedding in (self.pos_embed, self.cls_token)[:1 + class_token]:
            trunc_normal_(embedding, std=.02)

    def grid_of(self, size: Sequence[int]) -> Tuple[int, int]:
        """Return the rows and columns of patches of an image; pixels at the right and bottom may be left over."""
        height, width = ((side - self.proj.kernel_size[0]) // self.proj.stride[0] + 1 for side in size)
        return height, width

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(check_image(x, self.proj.in_channels))
        grid, x = x.shape[2:], x.flatten(2).mT
        if self.cls_token is not None:
            x = put_in_middle(x, self.cls_token.expand(x.shape[0], -1, -1))
        return x + resize_pos_embed(self.pos_embed, self.grid, grid, self.cls_token is not None)


class Head(nn.Module):
    """The class token or the mean of the patches, then the classifier: (B, T, C) -> (B, num_classes).

    Args:
        dim: channels C.
        num_classes: number of classes; 0 for no classifier.
        class_token: whether the token in the middle is a class token.
        global_pool: 'token', 'avg', or '' to keep all tokens.
        drop_rate: dropout rate before the classifier.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
            self,
            dim: int,
            num_classes: int,
            class_token: bool,
            global_pool: str,
            drop_rate: float,
            device=None,
            dtype=None,
    ):
        super().__init__()
        self.num_features, self.class_token = dim, class_token
        self.drop = nn.Dropout(drop_rate)
        self.reset(num_classes, global_pool, device=device, dtype=dtype)

    def reset(
            self,
            num_classes: int,
            global_pool: Optional[str] = None,
            in_features: Optional[int] = None,
            device=None,
            dtype=None,
    ) -> None:
        """Replace the classifier. All layers have as many channels, so that `in_features` changes nothing.

        Raises:
            ValueError: the classifier has no pooling, or the pooled token does not exist.
        """
        if global_pool is not None:
            check_pool(global_pool, num_classes)
            if global_pool == 'token' and not self.class_token:
                raise ValueError("global_pool='token' needs class_token=True; without a class token, use 'avg'")
            self.global_pool = global_pool
        self.fc = (nn.Linear(self.num_features, num_classes, device=device, dtype=dtype) if num_classes
                   else nn.Identity())
        self.fc.train(self.training)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
            patches, token = take_from_middle(x) if self.class_token else (x, x)
            x = token[:, 0] if self.global_pool == 'token' else patches.mean(1)
        x = self.drop(x)
        return x if pre_logits else self.fc(x)


class Vim(TimmInterface):
    """Backbone with a bidirectional selective scan in each layer.

    Images of any size of at least 32 x 32 work. Position embeddings are resized to the grid of patches at each call, as
    with `dynamic_img_size=True` in timm's vision transformers.

    Args:
        dim: number of channels.
        depth: number of layers.
        patch_size: side of a patch in pixels.
        stride: pixels between neighboring patches; they overlap if it is below `patch_size`.
        class_token: insert a class token in the middle of the sequence.
        symmetric_init: initialize the steps of both directions alike; see `BidirectionalMixer`.
        output_norms: add a LayerNorm (eps 1e-5) after the last norm to the output of each layer, for dense prediction;
            `forward_intermediates(norm=True)` applies it.
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of input channels.
        global_pool: 'token' for the class token, 'avg' for the mean of the patches, or '' without a classifier. None
            is 'token' with a class token and 'avg' without.
        drop_rate: dropout rate before the classifier.
        drop_path_rate: rate of stochastic depth, which rises linearly from 0 in the first layer to this in the last.
        img_size: the image size of the position embeddings. Those of a file that has others are resized.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: the value of an option is not allowed.
        TypeError: an option does not exist.
    """

    @checked
    def __init__(
            self,
            dim: Annotated[int, integer(1, 65_536)] = 192,
            depth: Annotated[int, integer(1, 1024)] = 24,
            patch_size: Annotated[int, integer(1, MIN_SIZE)] = 16,
            stride: Annotated[int, integer(1, MIN_SIZE)] = 16,
            class_token: Flag = True,
            symmetric_init: Flag = False,
            output_norms: Flag = False,
            num_classes: NumClasses = 1000,
            in_chans: InChans = 3,
            global_pool: Annotated[Optional[str], one_of('token', 'avg', '', None)] = None,
            drop_rate: Rate = 0.,
            drop_path_rate: Rate = 0.,
            img_size: ImageSize = 224,
            device=None,
            dtype=None,
    ):
        super().__init__(num_classes, in_chans)
        dd = {'device': device, 'dtype': dtype}
        self.num_features = self.head_hidden_size = dim
        self.stem = PatchEmbed(in_chans, dim, patch_size, stride, img_size or 224, class_token, **dd)
        # Every layer is a stage, because its output is a feature map.
        self.stages = nn.Sequential(*(
            Layer(dim, rate, symmetric_init, **dd) for rate in calculate_drop_path_rates(drop_path_rate, depth)))
        self.feature_info = [dict(num_chs=dim, reduction=stride, module=f'stages.{i}') for i in range(depth)]
        self.norm = RMSNorm(dim, eps=1e-5, **dd)
        self.output_norms = nn.ModuleList(nn.LayerNorm(dim, **dd) for _ in range(depth)) if output_norms else None
        pool = ('token' if class_token else 'avg') if global_pool is None else global_pool
        self.head = Head(dim, num_classes, class_token, pool, drop_rate, **dd)
        self.head.fc.apply(init_linear)
        self.grad_checkpointing = False
        with torch.no_grad():
            for layer in self.stages:
                layer.mixer.out_proj.weight.div_(depth ** 0.5)

    @property
    def class_token(self) -> bool:
        return self.stem.cls_token is not None

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters without weight decay, apart from biases and norms: embeddings, D and biases of steps.

        A_log decays, as in the published training.
        """
        return {name for name, _ in self.named_parameters()
                if name in ('stem.pos_embed', 'stem.cls_token') or name.endswith(('.scan.D', '.scan.dt_bias'))}

    def group_matcher(self, coarse: bool = False) -> Dict[str, object]:
        """Patterns for layer decay: the stem with its embeddings, then every layer."""
        return dict(stem=r'^stem', blocks=[(r'^stages\.(\d+)', None), (r'^norm|^output_norms', (99999,))])

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the layers' activations in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable

    def set_input_size(self, img_size: Union[None, int, Tuple[int, int]] = None) -> None:
        """Resize the position embeddings to another image size. This also happens at each call, for its images.

        Raises:
            ValueError: a side is below 32.
        """
        super().set_input_size(img_size)
        if img_size is not None:
            grid = self.stem.grid_of(to_2tuple(img_size))
            resized = resize_pos_embed(self.stem.pos_embed.detach(), self.stem.grid, grid, self.class_token)
            self.stem.pos_embed, self.stem.grid = nn.Parameter(resized.clone()), grid

    def forward_features(self, x: Tensor) -> Tensor:
        """Return all tokens after the last norm, with the class token in the middle.

        Args:
            x: images (B, in_chans, H, W).

        Returns:
            (B, M + 1, num_features), where M is the number of patches; (B, M, num_features) without a class token.
        """
        x = self.stem(x)
        return self.norm(checkpoint_seq(self.stages, x) if self.grad_checkpointing else self.stages(x))

    def forward_intermediates(
            self,
            x: Tensor,
            indices: Union[None, int, List[int]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
            return_prefix_tokens: bool = False,
    ) -> Any:
        """Return the outputs of layers without the class token, and the output of `forward_features`.

        Args:
            x: images (B, in_chans, H, W).
            indices: indices of the layers to return; an integer n selects the last n, None selects all.
            norm: apply the last norm, and then the output norms, if the model has them (`output_norms=True`).
            stop_early: do not run the layers after the last selected one.
            output_fmt: 'NCHW' for maps (B, C, H / stride, W / stride), 'NHWC', or 'NLC' for tokens.
            intermediates_only: return the list of outputs only.
            return_prefix_tokens: return a pair (output, class token (B, 1, C)) for each layer.

        Returns:
            A tuple (features, list of outputs), or the list only.

        Raises:
            ValueError: `output_fmt` is not allowed.
        """
        if output_fmt not in ('NCHW', 'NHWC', 'NLC'):
            raise ValueError(f"output_fmt must be 'NCHW', 'NHWC' or 'NLC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        grid = self.stem.grid_of(x.shape[2:])
        intermediates = []
        x = self.stem(x)
        for i, layer in enumerate(self.stages[:last + 1] if stop_early else self.stages):
            x = checkpoint_seq([layer], x) if self.grad_checkpointing else layer(x)
            if i in take:
                y = self.norm(x) if norm else x.to(self.stem.pos_embed.dtype)
                y = self.output_norms[i](y) if norm and self.output_norms is not None else y
                y, token = take_from_middle(y) if self.class_token else (y, None)
                if output_fmt != 'NLC':
                    y = y.unflatten(1, grid)
                y = y.permute(0, 3, 1, 2) if output_fmt == 'NCHW' else y
                intermediates.append((y, token) if return_prefix_tokens and token is not None else y)
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def prune_intermediate_layers(
            self,
            indices: Union[int, List[int]] = 1,
            prune_norm: bool = False,
            prune_head: bool = True,
    ) -> List[int]:
        """Remove the layers after the last selected one, and the head. Return the indices of the selected layers."""
        take = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_norm:
            self.norm = nn.Identity()
        return take

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of published weights, and resize position embeddings. Keys of this model are kept.

        Raises:
            WeightsError: the weights need rotary embeddings, or are those of a network of another stride.
        """
        weights = vim_keys.to_our_keys(weights)
        found, own = weights.get('stem.pos_embed'), self.stem.pos_embed
        side = math.isqrt(max(0, found.shape[1] - self.class_token)) if getattr(found, 'ndim', 0) == 3 else 0
        square = side and found.shape[1:] == (side * side + self.class_token, own.shape[2])
        if not square or found.shape == own.shape:       # the loader says what differs
            return weights
        patch, stride = self.stem.proj.kernel_size[0], self.stem.proj.stride[0]
        for other in {8, 16} - {stride}:
            if side == (224 - patch) // other + 1:
                raise WeightsError(f'its position embeddings are those of {side} x {side} patches, which a network of '
                                   f'stride {other} has on 224 x 224 images, and this one has stride {stride}: build '
                                   f"vim_tiny{'_stride8' if other == 8 else ''} or its like")
        warnings.warn('the position embeddings of {} x {} patches are resized to {} x {}'.format(
            side, side, *self.stem.grid), stacklevel=2)
        resized = resize_pos_embed(found, (side, side), self.stem.grid, self.class_token)
        return {**weights, 'stem.pos_embed': resized}

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return vim_keys.to_published_keys(weights)


_cfg = partial(image_cfg, pool_size=None, first_conv='stem.proj', paper_ids='arXiv:2401.09417')
default_cfgs = generate_default_cfgs(published_cfgs({
    **{f'vim_{size}': _cfg() for size in ARCHS if size != 'test'},
    'test_vim': _cfg(input_size=(3, 64, 64), crop_pct=1.0),
}))


def quarters(options: Dict[str, Any]) -> Tuple[int, ...]:
    """Return the index of the last layer of each quarter of a network with these options: 5, 11, 17 and 23 of 24."""
    depth = options.get('depth', 24)
    return tuple(dict.fromkeys(max(0, depth * n // 4 - 1) for n in (1, 2, 3, 4))) if isinstance(depth, int) else (0,)


def _build(name: str, pretrained: bool, options: Dict[str, Any]) -> Vim:
    return build_model(
        Vim, name, pretrained, options, feature_cfg=dict(out_indices=quarters(options), feature_cls='getter'))


@register_model
def vim_tiny(pretrained: bool = False, **kwargs: Any) -> Vim:
    """Vim-Ti: 7.1 M parameters, 1.5 GMACs at 224."""
    return _build('vim_tiny', pretrained, {**ARCHS['tiny'], **kwargs})


@register_model
def vim_tiny_stride8(pretrained: bool = False, **kwargs: Any) -> Vim:
    """Vim-Ti+, with overlapping patches at stride 8: 7.3 M parameters, 5.4 GMACs at 224."""
    return _build('vim_tiny_stride8', pretrained, {**ARCHS['tiny_stride8'], **kwargs})


@register_model
def vim_small(pretrained: bool = False, **kwargs: Any) -> Vim:
    """Vim-S: 25.8 M parameters, 5.2 GMACs at 224."""
    return _build('vim_small', pretrained, {**ARCHS['small'], **kwargs})


@register_model
def vim_small_stride8(pretrained: bool = False, **kwargs: Any) -> Vim:
    """Vim-S+, with overlapping patches at stride 8: 26.0 M parameters, 19.3 GMACs at 224."""
    return _build('vim_small_stride8', pretrained, {**ARCHS['small_stride8'], **kwargs})


@register_model
def vim_base(pretrained: bool = False, **kwargs: Any) -> Vim:
    """Vim-B: 97.6 M parameters, 19.5 GMACs at 224."""
    return _build('vim_base', pretrained, {**ARCHS['base'], **kwargs})


@register_model
def test_vim(pretrained: bool = False, **kwargs: Any) -> Vim:
    """A small Vim with a few hundred thousand parameters, for tests and demonstrations."""
    return _build('test_vim', pretrained, {**ARCHS['test'], **kwargs})
