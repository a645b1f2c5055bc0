"""Inference on a CPU: parts of a batch that fit the caches, memory that stays, and layers joined with activations."""
import platform
from typing import Callable, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ..kernels.common.tracing import exporting
from ..kernels.common.workspace import keep_freed_memory

# Bytes of the token map that run at a time: in float32, 3 images of 224 x 224 at PPMA-T's stride 4.
PART_BYTES = 3_200_000


def is_cpu_inference(x: Tensor) -> bool:
    """True if x is on a CPU and runs without gradients, eagerly or in a compiled graph that stays on this machine."""
    # torch.fx calls layers with proxies, which have no device.
    return isinstance(x, Tensor) and x.device.type == 'cpu' and not torch.is_grad_enabled() and not exporting()


def is_eager_cpu_inference(x: Tensor) -> bool:
    """True if x is on a CPU and runs eagerly without gradients, so that loops and in-place writes are safe."""
    return is_cpu_inference(x) and not torch.compiler.is_compiling()


def forward_in_parts(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, elements: int) -> Tensor:
    """Return forward(x). Eager inference on a CPU runs a few images of the batch at a time.

    On a CPU, fresh memory and cache misses cost more than arithmetic (measured with PPMA-T: a fifth of the time of a
    batch of 32). In all other cases the batch stays whole: a graph must not contain the loop, BatchNorm in training
    must see the whole batch, and a GPU is fastest with large batches.

    The stem and each stage split the batch by themselves, because their maps differ in size: late stages run whole
    batches. A single split of a model's batch would run them on small parts, which changes features by rounding too.

    Args:
        module: the module whose `forward` runs. If a part of it is in training mode, the batch stays whole.
        forward: maps (B, ...) to (B, ...), each image independently of the others.
        x: (B, ...).
        elements: the number of elements of the token map of one image.
    """
    if not is_eager_cpu_inference(x) or _has_hooks_or_trains(module):
        return forward(x)
    keep_freed_memory()
    images = max(1, PART_BYTES // max(1, elements * _dtype(x).itemsize))
    return forward(x) if len(x) <= images else torch.cat([forward(part) for part in x.split(images)])


def _has_hooks_or_trains(module: nn.Module) -> bool:
    """True if a part of the module has a hook, which would see a few images at a time, or is in training mode."""
    return any(m.training or m._forward_hooks or m._forward_pre_hooks for m in module.modules())


# oneDNN's layers with an activation, which torch.compile uses on CPUs too: the names that it has for activations.
_ACTIVATIONS = {nn.Identity: 'none', nn.GELU: 'gelu', nn.SiLU: 'swish'}
_ONEDNN = platform.machine().lower() in ('x86_64', 'amd64') and all(
    hasattr(torch.ops.mkldnn, name) for name in ('_linear_pointwise', '_convolution_pointwise'))
# oneDNN has no bfloat16 on CPUs without AVX-512.
_DTYPES = (torch.float32, torch.bfloat16) if _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() else (
    torch.float32,)
_NO_ACTIVATION, GELU, SILU = nn.Identity(), nn.GELU(), nn.SiLU()


def linear(layer: nn.Module, x: Tensor, act: nn.Module = _NO_ACTIVATION) -> Tensor:
    """Return act(layer(x)): (..., C) -> (..., C').

    Inference on an x86 CPU calls oneDNN, which adds the bias and applies the activation while a block of the result is
    in the cache. Layers other than plain ones run as they are."""
    if not _runs_on_onednn(x, layer, nn.Linear, act):
        return act(layer(x))
    x, weight, bias = _in_one_dtype(x, layer.weight, layer.bias)
    if torch.compiler.is_compiling():
        return _compiled_linear(x, weight, bias, _ACTIVATIONS[type(act)])
    return _linear(x, weight, bias, _ACTIVATIONS[type(act)])


def convolution(layer: nn.Module, x: Tensor, act: nn.Module, folded: Optional[Tuple[Tensor, Tensor]] = None) -> Tensor:
    """Return act(layer(x)), with x (B, C, H, W), as `linear` does.

    `folded`: weight and bias that replace those of a plain `nn.Conv2d`."""
    if not _runs_on_onednn(x, layer, nn.Conv2d, act):
        return act(layer(x) if folded is None else F.conv2d(
            x, *folded, layer.stride, layer.padding, layer.dilation, layer.groups))
    x, weight, bias = _in_one_dtype(x, *(folded or (layer.weight, layer.bias)))
    options = layer.padding, layer.stride, layer.dilation, layer.groups, _ACTIVATIONS[type(act)]
    if torch.compiler.is_compiling():
        return _compiled_convolution(x, weight, bias, *options)
    return _convolution(x, weight, bias, *options)


def _linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], act: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, act, [], 'none')


def _convolution(x: Tensor, weight: Tensor, bias: Optional[Tensor], padding: Sequence[int], stride: Sequence[int],
                 dilation: Sequence[int], groups: int, act: str) -> Tensor:
    return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, padding, stride, dilation, groups, act, [], 'none')


# Inductor takes oneDNN's layers with constant weights only. These operators are closed to it.

@torch.library.custom_op('subquad::onednn_linear_fwd', mutates_args=())
def _compiled_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], act: str) -> Tensor:
    keep_freed_memory()
    return _linear(x, weight, bias, act)


@torch.library.custom_op('subquad::onednn_convolution_fwd', mutates_args=())
def _compiled_convolution(x: Tensor, weight: Tensor, bias: Optional[Tensor], padding: List[int], stride: List[int],
                          dilation: List[int], groups: int, act: str) -> Tensor:
    """x and the result are channels-last."""
    keep_freed_memory()
    return _convolution(x, weight, bias, padding, stride, dilation, groups, act)


@_compiled_linear.register_fake
def _(x, weight, bias, act):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_compiled_convolution.register_fake
def _(x, weight, bias, padding, stride, dilation, groups, act):
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups).contiguous(memory_format=torch.channels_last)


@register_flop_formula(torch.ops.subquad.onednn_linear_fwd)
def _(x, weight, bias, act, out_shape=None, **kwargs) -> int:
    return 2 * torch.Size(x).numel() * weight[0]


@register_flop_formula(torch.ops.subquad.onednn_convolution_fwd)
def _(x, weight, *args, out_shape=None, **kwargs) -> int:
    batch, _, height, width = out_shape
    return 2 * batch * height * width * torch.Size(weight).numel()


def _runs_on_onednn(x: Tensor, layer: nn.Module, kind: type, act: nn.Module) -> bool:
    """True if oneDNN can compute a layer and nobody would miss PyTorch's own operator.

    Hooks, adapters and quantized weights change what a layer does. Modes such as a counter of operations know PyTorch's
    own operators only."""
    plain = type(layer) is kind and type(layer.weight) is nn.Parameter and type(act) in _ACTIVATIONS
    return (_ONEDNN and plain and type(x) is Tensor and is_cpu_inference(x) and x.numel() > 0
            and (type(act) is not nn.SiLU or _dtype(x) == torch.bfloat16)          # no faster in float32
            and getattr(act, 'approximate', 'none') == 'none'
            and not any(m._forward_hooks or m._forward_pre_hooks for m in (layer, act))
            and layer.weight.dtype in _DTYPES and _dtype(x) in _DTYPES
            and (torch.is_autocast_enabled('cpu') or x.dtype == layer.weight.dtype)
            and (torch.compiler.is_compiling() or _pytorch_runs_it_unseen(x)))


def _pytorch_runs_it_unseen(x: Tensor) -> bool:
    """True if no switch, mode or transform of PyTorch wants to see an operator on x."""
    return (torch._C._get_mkldnn_enabled() and torch._C._len_torch_dispatch_stack() == 0
            and not torch._C._functorch.is_functorch_wrapped_tensor(x))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else x.dtype


def _in_one_dtype(*tensors: Optional[Tensor]) -> List[Optional[Tensor]]:
    """Cast as autocast would."""
    dtype = _dtype(tensors[0])
    return [None if x is None else x.to(dtype) for x in tensors]
