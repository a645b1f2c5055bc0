"""Effective receptive field of timm models, and class activation maps of timm classifiers."""
from numbers import Integral
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
from timm.layers import LayerNormAct2d
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn

from .blocks import Block
from .influence import check_place, token_of
from .mixers import SeparableSelfAttention
from .mobilevitv2 import MobileViTv2Block
from .observation import check_images, check_model, evaluation_mode

__all__ = ['ClassActivation', 'NoFeatureMap', 'class_activation', 'effective_receptive_field']

# Modules whose output (4 dimensions) has channels first or last, whatever model they are in.
_CHANNELS_FIRST = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, LayerNorm2d, LayerNormAct2d, SeparableSelfAttention)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm)


class NoFeatureMap(ValueError):
    """A model has no classifier, or a layer has no output that is one map of features."""


class ClassActivation(NamedTuple):
    """A class activation map.

    Attributes:
        maps: the activation of each position, (B, h, w), at least 0.
        classes: the class of each image, (B,).
        layer: the name of the layer whose activations they are.
    """
    maps: Tensor
    classes: Tensor
    layer: str


def effective_receptive_field(model: nn.Module, x: Tensor, pixel: Optional[Tuple[int, int]] = None) -> Tensor:
    """Return how much each pixel of the images changes the last feature map at one place, in evaluation mode.

    It is the gradient of the sum of the channels of the feature that contains the pixel, with respect to the images
    (Luo et al., "Understanding the Effective Receptive Field in Deep Convolutional Neural Networks", 2016): the sum of
    its absolute values over the input channels.

    Args:
        model: a timm model whose features are a map, or tokens of a grid.
        x: images (B, C, H, W) as the model takes them.
        pixel: row and column of a pixel of the images; None for the center.

    Returns:
        (B, H, W), at least 0, in the dtype of x.

    Raises:
        TypeError: the model is no module, or cannot run images of this dtype.
        NoFeatureMap: a ValueError: the model has no feature map.
        ValueError: the pixel is outside of the images, or there are no images.
    """
    check_model(model)
    check_images(x)
    size = tuple(x.shape[2:])
    pixel = check_place('pixel', (size[0] // 2, size[1] // 2) if pixel is None else pixel, size, 'image')
    with torch.inference_mode(False), torch.enable_grad(), evaluation_mode(model, x):
        images = x.detach().clone().requires_grad_()
        features = feature_map(model, images)
        row, column = token_of(pixel, size, tuple(features.shape[2:]))
        return torch.autograd.grad(features[:, :, row, column].sum(), images)[0].abs().sum(1)


def class_activation(model: nn.Module, x: Tensor, target: Optional[int] = None,
                     layer: Optional[str] = None) -> ClassActivation:
    """Return which positions speak for a class, in evaluation mode: Grad-CAM (Selvaraju et al., ICCV 2017).

    The channels of a layer are added up with weights, the means over all positions of the gradient of the class's
    logit, and negative sums become 0 (equations 1 and 2).

    Args:
        model: a timm classifier.
        x: images (B, C, H, W) as the model takes them.
        target: number of the class; None for the likeliest class of each image.
        layer: name of the module whose output is used: a map, or tokens of the grid of the last feature map. None for
            the last feature map, or the first norm of the last block of a vision transformer, because a classifier
            that reads one token has no gradient behind it.

    Returns:
        Maps, classes and the name of the layer.

    Raises:
        TypeError: the model is no module or cannot run images of this dtype, or class or layer has a wrong type.
        NoFeatureMap: a ValueError: the model has no classifier, or the layer's output is not one map.
        ValueError: there is no such layer or class, or there are no images.
    """
    check_model(model)
    check_images(x)
    if target is not None and (isinstance(target, bool) or not isinstance(target, Integral)):
        raise TypeError(f'target must be None or the number of a class, an integer, got {target!r}')
    if layer is not None and not isinstance(layer, str):
        raise TypeError(f'layer must be None or the name of a module, got {layer!r}')
    modules = dict(model.named_modules())
    layer = _default_layer(model) if layer is None else layer
    if layer not in modules:
        raise ValueError(f'the model has no layer {layer!r}: give the name of one of its modules, such as '
                         f"{list(modules)[-1]!r}")
    seen: List[Any] = []
    with torch.inference_mode(False), torch.enable_grad(), evaluation_mode(model, x):
        images = x.detach().clone().requires_grad_()
        handle = modules[layer].register_forward_hook(lambda module, inputs, output: seen.append(output))
        try:
            logits = model(images)
        finally:
            handle.remove()
        if not isinstance(logits, Tensor) or logits.ndim != 2 or not getattr(model, 'num_classes', 1):
            came = tuple(logits.shape) if isinstance(logits, Tensor) else f'a {type(logits).__name__}'
            raise NoFeatureMap(f'{type(model).__name__} has no classifier: its output is {came}')
        if target is not None and not 0 <= target < logits.shape[1]:
            raise ValueError(f'target must be a class from 0 to {logits.shape[1] - 1}, got {target!r}')
        classes = logits.argmax(1) if target is None else torch.full((len(x),), int(target), device=x.device)
        if not seen:
            raise NoFeatureMap(f'{type(model).__name__} does not call its layer {layer!r}, '
                               'which has no output then')
        activations = seen[-1]
        if not isinstance(activations, Tensor):
            raise NoFeatureMap(f'the output of {layer!r}, a {type(activations).__name__}, '
                               'is not one map of features')
        as_map = _map_form(model, images, layer, activations)
        gradient, = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), activations, allow_unused=True)
        if gradient is None:
            raise NoFeatureMap(f'the classifier does not depend on the output of {layer!r}')
        maps = (as_map(activations.detach()) * as_map(gradient).mean((2, 3), keepdim=True)).sum(1).relu()
    return ClassActivation(maps, classes, layer)


def feature_map(model: nn.Module, x: Tensor) -> Tensor:
    """Return the last feature map of a timm model, (B, C, h, w).

    Raises:
        NoFeatureMap: the model has none.
    """
    if hasattr(model, 'forward_intermediates'):
        return model.forward_intermediates(x, indices=1, output_fmt='NCHW', intermediates_only=True)[-1]
    features = model.forward_features(x) if hasattr(model, 'forward_features') else x
    if features is x or features.ndim != 4:
        raise NoFeatureMap(f'{type(model).__name__} has no feature map: it has no method forward_intermediates, and '
                           'forward_features returns no map')
    return features.permute(0, 3, 1, 2) if _is_channels_last(model) else features


def _default_layer(model: nn.Module) -> str:
    """Return the first norm of the last block of a vision transformer, or the module of the last feature map."""
    blocks = getattr(model, 'blocks', None)
    if hasattr(model, 'cls_token') and isinstance(blocks, nn.Sequential) and hasattr(blocks[-1], 'norm1'):
        return f'blocks.{len(blocks) - 1}.norm1'
    info = getattr(model, 'feature_info', None)
    named, modules = info[-1].get('module', '') if isinstance(info, list) and info else '', dict(model.named_modules())
    for name in (named, 'norm'):                          # the norm of all tokens
        if name and name in modules:
            return name
    raise NoFeatureMap(f'{type(model).__name__} does not name its last feature map: class_activation needs `layer`')


def _map_form(model: nn.Module, x: Tensor, layer: str, y: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that brings the output y of a layer for images x, or its gradient, to (B, C, h, w)."""
    if len(y) == len(x) and y.ndim == 4 and not _is_grouped(model, layer):
        order = (0, 1, 2, 3) if _layout(model, x, layer, y) == 'NCHW' else (0, 3, 1, 2)
        return lambda z: z.permute(order)
    if len(y) == len(x) and y.ndim == 3:
        with torch.no_grad():
            height, width = feature_map(model, x).shape[2:]
        prefix = y.shape[1] - height * width
        if prefix in (0, getattr(model, 'num_prefix_tokens', 0)):
            return lambda z: z[:, prefix:].transpose(1, 2).unflatten(2, (height, width))
    raise _no_map(layer, y, x)


def _no_map(layer: str, y: Tensor, x: Tensor) -> NoFeatureMap:
    return NoFeatureMap(f'the output of {layer!r}, {tuple(y.shape)}, is no map of features of images of '
                        f'{x.shape[2]} x {x.shape[3]}')


def _is_grouped(model: nn.Module, layer: str) -> bool:
    """Whether a layer of MobileViTv2 sees groups of tokens, (B, C, 4, N), as softmax attention does."""
    return any(isinstance(block, MobileViTv2Block) and block.grouped
               and f'{layer}.'.startswith((f'{name}.transformer.', f'{name}.norm.'))
               for name, block in model.named_modules())


def _layout(model: nn.Module, x: Tensor, layer: str, y: Tensor) -> str:
    """Return 'NCHW' or 'NHWC' for the output y of a layer, which has 4 dimensions.

    The layer's type decides if it is known, and all layers in the blocks of this package's skeleton are channels-last.
    Otherwise it is the layout whose sides are to each other as those of the images. If both are, the model's
    `output_fmt` decides about the layers in its `feature_info`.
    """
    module = model.get_submodule(layer)
    if isinstance(module, _CHANNELS_FIRST):
        return 'NCHW'
    parts = layer.split('.')
    around = (model.get_submodule('.'.join(parts[:n])) for n in range(len(parts), 0, -1))
    if isinstance(module, _CHANNELS_LAST) or any(isinstance(outer, Block) for outer in around):
        return 'NHWC'
    sizes = {'NCHW': y.shape[2:], 'NHWC': y.shape[1:3]}
    possible = [layout for layout, size in sizes.items() if _is_like(size, x.shape[2:])]
    if len(possible) == 1:
        return possible[0]
    info = getattr(model, 'feature_info', None)
    if any(entry.get('module') == layer for entry in (info if isinstance(info, list) else ())):
        return 'NHWC' if _is_channels_last(model) else 'NCHW'
    if not possible:
        raise _no_map(layer, y, x)
    raise NoFeatureMap(f'the output of {layer!r}, {tuple(y.shape)}, can be (B, C, H, W) or (B, H, W, C): give another '
                       '`layer`, or images of other sides')


def _is_like(size: Tuple[int, ...], image: Tuple[int, ...]) -> bool:
    """Whether a map (rows, columns) can be that of an image (height, width): one stride, up to one row and column."""
    return ((size[0] - 1) * image[1] < (size[1] + 1) * image[0] and (size[1] - 1) * image[0] < (size[0] + 1) * image[1])


def _is_channels_last(model: nn.Module) -> bool:
    return getattr(model, 'output_fmt', 'NCHW') == 'NHWC'
