"""Exact padding: a batch of images of several sizes whose results equal those of the single images.

The images lie in the top left corners of a batch, with padding at the right and at the bottom. `exact_padding` makes a
network treat the border of each image as the border of the batch. Layers that work on single tokens run as they are.
Padding is set to zero before each convolution, so that it equals the zero padding of the convolution. Token mixers run
without the padding. No module has an extra operation outside of the context.
"""
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Integral
from typing import Any, Callable, Dict, Hashable, Iterator, List, Optional, Sequence, Tuple, Union
from weakref import WeakSet

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .blocks import Block, ProjectionHead, Stem, check_image
from .hierarchical import Stage
from .mixers import EosMixer, TreeMixer
from .mobilevitv2 import PATCH, InvertedResidual, MobileStage, MobileStem
from .observation import check_model
from .options import MIN_SIZE
from .timm_interface import TimmInterface

Size = Tuple[int, int]
Sizes = Union[Tensor, Sequence[Sequence[int]]]


class Regions:
    """The valid regions of the maps (B, ..., H, W, ...) of a batch, in the top left corners.

    Args:
        sizes: height and width of each image's region.
    """

    def __init__(self, sizes: Sequence[Size]):
        self.sizes = list(sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def strided(self, stride: int) -> 'Regions':
        """The regions after a convolution with this stride, whose sizes are rounded up."""
        return Regions([(-(-height // stride), -(-width // stride)) for height, width in self.sizes])

    def even(self) -> 'Regions':
        """The regions after a resize to even sides."""
        return Regions([tuple(n + -n % p for n, p in zip(size, PATCH)) for size in self.sizes])

    def mask(self, x: Tensor, axis: int) -> Tensor:
        """Return (B, H, W), true inside, for maps x whose height is dimension `axis`."""
        sizes = torch.tensor(self.sizes, device=x.device)
        rows, columns = (torch.arange(n, device=x.device) < sizes[:, k:k + 1]
                         for k, n in enumerate(x.shape[axis:axis + 2]))
        return rows[:, :, None] & columns[:, None]

    def clear(self, x: Tensor, axis: int) -> Tensor:
        """Return x with zeros in the padding, whatever is there."""
        return x.masked_fill(~self.mask(x, axis).unsqueeze(3 if axis == 1 else 1), 0)

    def crop(self, x: Tensor, images: List[int], axis: int) -> Tensor:
        """Return some images of x, cut to the largest of their heights and widths."""
        height, width = (max(self.sizes[n][k] for n in images) for k in (0, 1))
        x = x if images == list(range(len(x))) else x[images]
        return x.narrow(axis, 0, height).narrow(axis + 1, 0, width)

    def grouped(self, run: Callable[[Tensor, List[int]], Tensor], x: Tensor, axis: int,
                key: Callable[[Size], Hashable] = lambda size: size) -> Tensor:
        """Apply `run` to the images of each group, cropped, and join the results in the order of the batch.

        Args:
            run: called as run(images cropped to the largest of the group, their indices).
            x: maps whose height is dimension `axis`.
            axis: 1 for (B, H, W, C), 2 for (B, C, H, W).
            key: images whose sizes have equal keys form a group; by default, those of equal sizes.

        Returns:
            The results. Maps are padded with zeros at least to the size of x.
        """
        groups: Dict[Hashable, List[int]] = defaultdict(list)
        for n, size in enumerate(self.sizes):
            groups[key(size)].append(n)
        results = [run(self.crop(x, images, axis), images) for images in groups.values()]
        if results[0].ndim == x.ndim:
            height, width = (max(y.shape[k] for y in (x, *results)) for k in (axis, axis + 1))
            last = (0, 0) if axis == 1 else ()
            results = [F.pad(y, (*last, 0, width - y.shape[axis + 1], 0, height - y.shape[axis])) for y in results]
        order = torch.tensor([n for images in groups.values() for n in images], device=x.device).argsort()
        return torch.cat(results).index_select(0, order)


class _Hooks(ExitStack):
    """Hooks and replaced forward methods, which are removed at the end."""

    def clear_input(self, module: nn.Module, regions: Regions, axis: int) -> None:
        """Set the padding of the module's input to zero."""
        self.callback(module.register_forward_pre_hook(
            lambda module, args: (regions.clear(args[0], axis), *args[1:])).remove)

    def clear_output(self, module: nn.Module, regions: Regions, axis: int) -> None:
        """Set the padding of the module's output to zero."""
        self.callback(module.register_forward_hook(
            lambda module, args, y: regions.clear(y, axis)).remove)

    def check_input(self, module: nn.Module, check: Callable[[Any], None]) -> None:
        """Call `check` on the module's input."""
        self.callback(module.register_forward_pre_hook(lambda module, args: check(args[0])).remove)

    def replace_forward(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        """Call forward(module's own forward method, ...) in place of the module's forward method."""
        earlier = module.__dict__.get('forward')         # of a library that replaces it, too
        module.forward = partial(forward, module.forward)
        self.callback(module.__dict__.pop if earlier is None else partial(setattr, module), 'forward', earlier)


def _by_size(regions: Regions, axis: int, forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
             ) -> Tensor:
    """Run the images of each size at once, without padding."""
    return regions.grouped(lambda part, images: forward(part.contiguous(), *args, **kwargs), x, axis)


def _mix_tree(mixer: TreeMixer, regions: Regions, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Run the images whose trees have equal depths and shifts at once, with a mask."""
    mask = regions.mask(x, 1)

    def key(size: Size) -> Hashable:
        levels = mixer.levels(*size)
        return len(levels), levels[0][2:]

    def run(part: Tensor, images: List[int]) -> Tensor:
        depth, shift = key(regions.sizes[images[0]])
        return forward(part, regions.crop(mask, images, 1), depth=depth, shift=shift)

    return regions.grouped(run, x, 1, key)


def _pad_block(hooks: _Hooks, block: Block, regions: Regions) -> None:
    """Prepare a block of the four-stage skeleton."""
    hooks.clear_input(block.pos, regions, 1)
    hooks.clear_input(block.ffn.dwconv, regions, 1)
    if isinstance(block.mixer, TreeMixer):
        hooks.replace_forward(block.mixer, partial(_mix_tree, block.mixer, regions))
    elif isinstance(block.mixer, EosMixer) and block.mixer.takes_mask:
        hooks.replace_forward(block.mixer, lambda forward, x: forward(x, regions.mask(x, 1)))
    else:
        hooks.replace_forward(block.mixer, partial(_by_size, regions, 1))


# The functions `_pad_*` below prepare a part of a network for the regions of its input, and return those of its output.

def _pad_stem(hooks: _Hooks, stem: Stem, regions: Regions) -> Regions:
    for layer in (stem.conv1, stem.conv2, stem.conv3, stem.conv4):
        hooks.clear_input(layer, regions, 2)
        regions = regions.strided(layer.conv.stride[0])
    return regions


def _pad_stage(hooks: _Hooks, stage: Stage, regions: Regions) -> Regions:
    if not isinstance(stage.downsample, nn.Identity):    # its input is cleared by the stage before it
        regions = regions.strided(stage.downsample.conv.stride[0])
    for block in stage.blocks:
        _pad_block(hooks, block, regions)
    hooks.clear_output(stage, regions, 2)
    return regions


def _pad_mobilevitv2_stem(hooks: _Hooks, stem: MobileStem, regions: Regions) -> Regions:
    hooks.clear_input(stem, regions, 2)
    return regions.strided(stem.conv.stride[0])


def _pad_mobilevitv2_stage(hooks: _Hooks, stage: MobileStage, regions: Regions) -> Regions:
    for block in stage:
        if isinstance(block, InvertedResidual):
            hooks.clear_input(block.conv2_kxk, regions, 2)
            regions = regions.strided(block.conv2_kxk.conv.stride[0])
        else:
            hooks.replace_forward(block, partial(_by_size, regions, 2))
            regions = regions if block.exact_size else regions.even()
    hooks.clear_output(stage, regions, 2)
    return regions


# The parts of the backbones; `subquad.prepare` makes them subclasses of these.
PARTS: Dict[type, Callable[[_Hooks, Any, Regions], Regions]] = {
    Stem: _pad_stem,
    Stage: _pad_stage,
    MobileStem: _pad_mobilevitv2_stem,
    MobileStage: _pad_mobilevitv2_stage,
}
# The stems of the networks that are in a context.
_ACTIVE: WeakSet = WeakSet()


@contextmanager
def exact_padding(
        model: nn.Module,
        sizes: Optional[Sizes] = None,
        mask: Optional[Tensor] = None,
) -> Iterator[List[List[Size]]]:
    """Treat the batches of a model as images of several sizes, padded at the right and at the bottom.

    Inside of the context, results equal those of the single images up to rounding, whatever the padding holds. This
    holds for logits, `forward_features`, `forward_intermediates` and models with features_only=True. The padding of
    feature maps is zero. It works with gradients, and for a detector that has one of these backbones.

    Convolutions and layers on single tokens run on the whole batch. Myo's trees run on all images of a depth at once,
    and LCSM's scans with mode='axis' on all images at once. Other mixers (PPMA's attention, MobileViTv2's blocks, other
    scans) and the head run once for each distinct size: few sizes are faster than many.

    Args:
        model: an image backbone of this package, or a module that contains one.
        sizes: height and width of each image: B pairs of integers of at least 32, or an integer tensor (B, 2).
        mask: instead of sizes, booleans (B, H, W), true for the image and false for padding.

    Yields:
        For each stage of the backbone, height and width of each image's region of the stage's feature map.

    Raises:
        TypeError: the mask is not boolean, the sizes are no integers, or the model is compiled.
        ValueError: neither or both of sizes and mask are given, a size is below 32, a mask is not that of images with
            padding at the right and at the bottom, the model does not contain exactly one backbone, or is in another
            such context. When the model runs: the sizes do not fit the batch, BatchNorm is in training mode, where its
            statistics would include the padding, or gradient checkpointing is on.
    """
    if (sizes is None) == (mask is None):
        raise ValueError(f"exact_padding needs either sizes or mask, got {'neither' if sizes is None else 'both'}")
    regions = Regions(_checked_sizes(sizes) if mask is None else sizes_of_mask(mask))
    parts = _parts(model)
    if parts[0] in _ACTIVE:
        raise ValueError('exact_padding contexts of one model cannot be nested')
    with _Hooks() as hooks:
        _ACTIVE.add(parts[0])
        hooks.callback(_ACTIVE.discard, parts[0])
        # Pre-hooks run in the order of registration, and this check must precede what depends on its result.
        hooks.check_input(parts[0], partial(_check_batch, model, parts[0], regions,
                                            None if mask is None else mask.shape[1:]))
        stages = []
        for part in parts:
            pad = next(pad for kind, pad in PARTS.items() if isinstance(part, kind))
            regions = pad(hooks, part, regions)
            stages.append(regions)
        del stages[0]                                    # the stem's
        for module in model.modules():
            if isinstance(module, (ProjectionHead, ClassifierHead)):
                hooks.replace_forward(module, partial(_by_size, regions, 2))
            elif isinstance(module, TimmInterface) and module.output_norms is not None:
                for norm, own in zip(module.output_norms, stages):
                    hooks.clear_output(norm, own, 1)
        yield [stage.sizes for stage in stages]


def forward_padded(model: nn.Module, images: Sequence[Tensor]) -> Any:
    """Run a model on images of several sizes as one batch, with the results of the single images.

    See `exact_padding`, which this function calls.

    Args:
        model: an image backbone of this package, or a module that contains one.
        images: tensors (in_chans, H, W) with sides of at least 32, of one dtype and device.

    Returns:
        The output of model(batch).

    Raises:
        TypeError: the images are no list, or an image is not a tensor.
        ValueError: there is no image, or ranks, channels, dtypes or devices differ.
    """
    batch, sizes = pad_images(images)
    with exact_padding(model, sizes):
        return model(batch)


def pad_images(images: Sequence[Tensor]) -> Tuple[Tensor, List[Size]]:
    """Return a batch (B, C, H, W) of images (C, H_n, W_n), padded with zeros to the largest sides, and their sizes.

    Raises:
        TypeError: the images are no list, or an image is not a tensor.
        ValueError: there is no image, or ranks, channels, dtypes or devices differ.
    """
    if not isinstance(images, Iterable):
        raise TypeError(f'images must be a list of tensors (C, H, W), got {type(images).__name__}')
    images = list(images)
    for image in images:
        if not isinstance(image, Tensor):
            raise TypeError(f'images must be tensors (C, H, W), got {type(image).__name__}')
    kinds = {(image.ndim, *image.shape[:-2], image.dtype, image.device) for image in images}
    if len(kinds) != 1 or images[0].ndim != 3:
        came = ', '.join(f'{tuple(image.shape)} {image.dtype} on {image.device}' for image in images[:4]) or 'none'
        raise ValueError('images must be one or more tensors (C, H, W) with equal channels, dtypes and devices, got '
                         f'{came}')
    sizes = [tuple(image.shape[1:]) for image in images]
    height, width = (max(size[k] for size in sizes) for k in (0, 1))
    return torch.stack([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images]), sizes


def sizes_of_mask(mask: Tensor) -> List[Size]:
    """Return height and width of each image of a padding mask (B, H, W), true for the image and false for padding.

    Raises:
        TypeError: the mask is not a boolean tensor.
        ValueError: it is not (B, H, W), a side is below 32, or an image has padding at the left, at the top or inside.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f'mask must be a boolean tensor (B, H, W), true for the image, got {came}')
    if mask.ndim != 3:
        raise ValueError(f'mask must be (B, H, W), got {tuple(mask.shape)}')
    sizes = list(zip(mask.any(2).sum(1).tolist(), mask.any(1).sum(1).tolist()))
    right = Regions(sizes).mask(mask, 1) == mask if sizes else mask
    if not right.all():
        image = int((~right.flatten(1).all(1)).nonzero()[0])
        raise ValueError('mask must be true in a rectangle at the top left of each image and false at the right and at '
                         f'the bottom of it, but image {image} differs')
    return _checked_sizes(sizes)


def _checked_sizes(sizes: Sizes) -> List[Size]:
    """Return sizes as pairs of integers."""
    given = sizes.tolist() if isinstance(sizes, Tensor) else sizes
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise TypeError(f'sizes must be a list of pairs (height, width) or an integer tensor (B, 2), got {sizes!r}')
    sizes = list(given)
    if not sizes:
        raise ValueError('sizes must be those of at least one image, got none')
    for n, size in enumerate(sizes):
        if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(
                isinstance(k, Integral) and not isinstance(k, bool) for k in size):
            raise TypeError(f'sizes must be a pair (height, width) of integers for each image, got {size!r} for image '
                            f'{n}')
        if min(size) < MIN_SIZE:
            raise ValueError(f'sizes must be at least {MIN_SIZE} x {MIN_SIZE}, got {size[0]} x {size[1]} for image {n}')
    return [(int(height), int(width)) for height, width in sizes]


def _check_batch(model: nn.Module, stem: nn.Module, regions: Regions, size: Optional[torch.Size], x: Any) -> None:
    """Check a batch of images and the mode of the model."""
    first = next(module for module in stem.modules() if isinstance(module, nn.Conv2d))
    check_image(x, first.in_channels)
    if len(x) != len(regions):
        raise ValueError(f'sizes and mask must have one entry for each of the {len(x)} images of the batch, got '
                         f'{len(regions)}')
    if size is not None and x.shape[2:] != size:
        raise ValueError(f'mask must have the height and width of the batch, {tuple(x.shape[2:])}, got {tuple(size)}')
    for n, (height, width) in enumerate(regions.sizes):
        if height > x.shape[2] or width > x.shape[3]:
            raise ValueError(f'sizes must not exceed those of the batch, {x.shape[2]} x {x.shape[3]}, got '
                             f'{height} x {width} for image {n}')
    training = next((name for name, module in model.named_modules()
                     if isinstance(module, _BatchNorm) and module.training), None)
    if training is not None:
        raise ValueError(f'exact_padding needs BatchNorm in evaluation mode, because its statistics would include the '
                         f'padding, but {training} is in training mode: call eval() on the model, or on its BatchNorm '
                         'layers')
    if torch.is_grad_enabled() and any(getattr(module, 'grad_checkpointing', False) for module in model.modules()):
        raise ValueError('exact_padding does not work with gradient checkpointing, which runs layers again outside of '
                         'the context: call set_grad_checkpointing(False)')


def _parts(model: nn.Module) -> List[nn.Module]:
    """Return the stem and the stages of the backbone in a model."""
    check_model(model)
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        raise TypeError('exact_padding does not work for a compiled model; pass the model that was compiled')
    parts = [module for module in model.modules() if isinstance(module, tuple(PARTS))]
    stems = [module for module in parts if isinstance(module, (Stem, MobileStem))]
    if len(stems) != 1 or parts[0] is not stems[0]:
        raise ValueError('model must contain one PPMA, RMT, MobileViTv2, Myo or LCSM of subquad, got '
                         f'{type(model).__name__} with {len(stems)}')
    return parts
