"""Effective receptive field and class activation maps of any timm model."""
from functools import partial
from typing import List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from .influence import check_place, token_of

__all__ = ['ClassActivation', 'class_activation', 'effective_receptive_field']


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
        ValueError: the pixel is outside of the images, or the model has no feature map.
    """
    _check_images(x)
    size = tuple(x.shape[2:])
    pixel = (size[0] // 2, size[1] // 2) if pixel is None else pixel
    check_place('pixel', pixel, size, 'image')
    with torch.inference_mode(False), torch.enable_grad(), _Evaluation(model):
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
        layer: name of the module whose output is used. None for the last feature map, or the first norm of the last
            block of a vision transformer, because a classifier that reads one token has no gradient behind it.

    Returns:
        Maps, classes and the name of the layer.

    Raises:
        ValueError: the model has no classifier or no such layer, the class is out of range, or the layer's output is no
            map.
    """
    _check_images(x)
    modules = dict(model.named_modules())
    layer = _default_layer(model) if layer is None else layer
    if layer not in modules:
        raise ValueError(f'the model has no layer {layer!r}: give the name of one of its modules, such as '
                         f"{list(modules)[-1]!r}")
    seen: List[Tensor] = []
    with torch.inference_mode(False), torch.enable_grad(), _Evaluation(model):
        images = x.detach().clone().requires_grad_()
        handle = modules[layer].register_forward_hook(partial(_keep, seen))
        try:
            logits = model(images)
        finally:
            handle.remove()
        if logits.ndim != 2 or not getattr(model, 'num_classes', 1):
            raise ValueError(f'{type(model).__name__} has no classifier: its output is {tuple(logits.shape)}')
        if target is not None and not 0 <= target < logits.shape[1]:
            raise ValueError(f'target must be a class from 0 to {logits.shape[1] - 1}, got {target!r}')
        classes = logits.argmax(1) if target is None else torch.full((len(x),), target, device=x.device)
        activations = seen[-1]
        gradient, = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), activations, allow_unused=True)
        if gradient is None:
            raise ValueError(f'the classifier does not depend on the output of {layer!r}')
        activations, gradient = (_as_map(model, images, y.detach(), layer) for y in (activations, gradient))
        maps = (activations * gradient.mean((2, 3), keepdim=True)).sum(1).relu()
    return ClassActivation(maps, classes, layer)


def feature_map(model: nn.Module, x: Tensor) -> Tensor:
    """Return the last feature map of a timm model, (B, C, h, w).

    Raises:
        ValueError: the model has none.
    """
    if hasattr(model, 'forward_intermediates'):
        return model.forward_intermediates(x, indices=1, output_fmt='NCHW', intermediates_only=True)[-1]
    features = model.forward_features(x) if hasattr(model, 'forward_features') else x
    if features is x or features.ndim != 4:
        raise ValueError(f'{type(model).__name__} has no feature map: it has no method forward_intermediates, and '
                         'forward_features returns no map')
    return features.permute(0, 3, 1, 2) if _is_channels_last(model) else features


def _default_layer(model: nn.Module) -> str:
    """Return the first norm of the last block of a vision transformer, or the module of the last feature map."""
    blocks = getattr(model, 'blocks', None)
    if hasattr(model, 'cls_token') and isinstance(blocks, nn.Sequential) and hasattr(blocks[-1], 'norm1'):
        return f'blocks.{len(blocks) - 1}.norm1'
    info = getattr(model, 'feature_info', None)
    name = info[-1].get('module', '') if isinstance(info, list) and info else ''
    if name not in dict(model.named_modules()) or not name:
        raise ValueError(f'{type(model).__name__} does not name its last feature map: give `layer`')
    return name


def _as_map(model: nn.Module, x: Tensor, y: Tensor, layer: str) -> Tensor:
    """Return the output of a layer as (B, C, h, w).

    Raises:
        ValueError: it is no map, and no tokens of the grid of the last feature map.
    """
    if y.ndim == 4:
        return y.permute(0, 3, 1, 2) if _is_channels_last(model) else y
    if y.ndim == 3:
        with torch.no_grad():
            height, width = feature_map(model, x).shape[2:]
        prefix = getattr(model, 'num_prefix_tokens', 0)
        if y.shape[1] == height * width + prefix:
            return y[:, prefix:].transpose(1, 2).unflatten(2, (height, width))
    raise ValueError(f'the output of {layer!r}, {tuple(y.shape)}, is no map of features')


def _is_channels_last(model: nn.Module) -> bool:
    return getattr(model, 'output_fmt', 'NCHW') == 'NHWC'


def _keep(seen: List[Tensor], module: nn.Module, inputs: Tuple[Tensor, ...], output: Tensor) -> None:
    seen.append(output)


class _Evaluation:
    """Put a model into evaluation mode, and restore the mode of each module afterwards."""

    def __init__(self, model: nn.Module):
        self.model, self.modes = model, [(module, module.training) for module in model.modules()]

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: object) -> None:
        for module, training in self.modes:
            module.training = training


def _check_images(x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        what = f'{x.dtype} of shape {tuple(x.shape)}' if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f'x must be images (B, C, H, W) of real numbers, got {what}')
