"""Layers with an activation inside, for `subquad.prepare`: on oneDNN, or as native products with packed weights."""
import platform
from typing import List, Optional, Sequence

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ..kernels.common.checks import exporting
from ..kernels.dispatch import chosen_backend
from ..kernels.native import INSTRUCTION_SET
from ..kernels.native import LIBRARY as NATIVE
from ..kernels.native.product import packed_bias, packed_weight, product

ACTIVATIONS = {nn.Identity: 'none', nn.GELU: 'gelu', nn.SiLU: 'silu'}
# On CPUs without AVX-512, oneDNN has no bfloat16, and its float32 layers take longer than PyTorch's.
_ONEDNN = platform.machine().lower() in ('x86_64', 'amd64') and all(
    hasattr(torch.ops.mkldnn, name) for name in ('_linear_pointwise', '_convolution_pointwise')
) and torch.ops.mkldnn._is_mkldnn_bf16_supported()
# With AVX2, a native product takes 0.7 to 1 times the time of PyTorch's. Other instructions were not measured.
_PACKED = INSTRUCTION_SET == 'avx2'
_DTYPES = (torch.float32, torch.bfloat16)


class _JoinedLayer:
    """A layer of PyTorch with an activation, which oneDNN applies while a block is in the cache."""

    act: nn.Module

    def runs_on_onednn(self, x: Tensor) -> bool:
        """True if oneDNN can compute the layer and nobody would miss PyTorch's own operator.

        It has no gradients. Modes such as a counter of operations know PyTorch's operators only.
        """
        dtype = _dtype(x)
        return (type(x) is Tensor and x.device.type == 'cpu' and not torch.is_grad_enabled()
                and not exporting() and x.numel() > 0
                and (type(self.act) is not nn.SiLU or dtype == torch.bfloat16)    # no faster in float32
                and self.weight.dtype in _DTYPES and dtype in _DTYPES
                and (torch.is_autocast_enabled('cpu') or x.dtype == self.weight.dtype)
                and (torch.compiler.is_compiling() or _is_unseen(x)))


def _onednn_name(act: nn.Module) -> str:
    return 'swish' if type(act) is nn.SiLU else ACTIVATIONS[type(act)]


def _is_unseen(x: Tensor) -> bool:
    """True if no switch, mode or transform of PyTorch wants to see an operator on x."""
    return (torch._C._get_mkldnn_enabled() and torch._C._len_torch_dispatch_stack() == 0
            and not torch._C._functorch.is_functorch_wrapped_tensor(x))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else x.dtype


def _in_one_dtype(*tensors: Optional[Tensor]) -> List[Optional[Tensor]]:
    """Cast as autocast would."""
    dtype = _dtype(tensors[0])
    return [None if x is None else x.to(dtype) for x in tensors]


@register_notrace_module
class JoinedLinear(_JoinedLayer, nn.Linear):
    """act(linear(x)): (..., C) -> (..., C')."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.runs_on_onednn(x):
            return self.act(super().forward(x))
        run = _compiled_linear if torch.compiler.is_compiling() else _linear
        return run(*_in_one_dtype(x, self.weight, self.bias), _onednn_name(self.act))


@register_notrace_module
class JoinedConv2d(_JoinedLayer, nn.Conv2d):
    """act(conv(x)): (B, C, H, W) -> (B, C', H', W')."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.runs_on_onednn(x):
            return self.act(super().forward(x))
        run = _compiled_convolution if torch.compiler.is_compiling() else _convolution
        return run(*_in_one_dtype(x, self.weight, self.bias), self.padding, self.stride, self.dilation,
                   self.groups, _onednn_name(self.act))


@register_notrace_module
class PackedLinear(nn.Linear):
    """act(linear(x)) as one native product: (..., C) -> (..., C')."""

    def forward(self, x: Tensor) -> Tensor:
        if not runs_natively(x):
            return self.act(super().forward(x))
        rows = x.reshape(1, 1, x.numel() // x.shape[-1], x.shape[-1])
        return apply_packed(self, rows, act=ACTIVATIONS[type(self.act)]).reshape(*x.shape[:-1], len(self.weight))


def join(layer: nn.Module, act: nn.Module) -> bool:
    """Let a layer apply an activation, in place. Return False if neither oneDNN nor a native operator can do it.

    Layers with adapters and layers on other devices stay as they are.
    """
    if not (type(act) in ACTIVATIONS and getattr(act, 'approximate', 'none') == 'none' and is_plain(layer)
            and layer.weight.is_cpu):
        return False
    linear = type(layer) is nn.Linear
    if _ONEDNN:
        layer.__class__ = JoinedLinear if linear else JoinedConv2d
    elif _PACKED and linear:
        layer.__class__ = PackedLinear
        pack(layer)
    else:
        return False
    layer.act = act
    return True


def join_linears(model: nn.Module) -> None:
    """Let the linear layers of a model run on oneDNN or as native products, in place.

    Of a module whose layers one product has joined, only that product and the last layer run.
    """
    for module in model.modules():
        for name, layer in module.named_children():
            if type(layer) is nn.Linear and (name in ('joined', 'out') or not hasattr(module, 'joined')):
                join(layer, nn.Identity())


def _linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], act: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, act, [], 'none')


def _convolution(x: Tensor, weight: Tensor, bias: Optional[Tensor], padding: Sequence[int], stride: Sequence[int],
                 dilation: Sequence[int], groups: int, act: str) -> Tensor:
    return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, padding, stride, dilation, groups, act, [], 'none')


# Inductor takes oneDNN's layers with constant weights only. These operators are closed to it.

@torch.library.custom_op('subquad::onednn_linear_fwd', mutates_args=())
def _compiled_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], act: str) -> Tensor:
    return _linear(x, weight, bias, act)


@torch.library.custom_op('subquad::onednn_convolution_fwd', mutates_args=())
def _compiled_convolution(x: Tensor, weight: Tensor, bias: Optional[Tensor], padding: List[int], stride: List[int],
                          dilation: List[int], groups: int, act: str) -> Tensor:
    """x and the result are channels-last."""
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


# ---- native products

def pack(layer: nn.Module, *rows: slice) -> None:
    """Keep the weights of a linear layer or a 1 x 1 convolution as the native product reads them, too.

    `rows`: only these outputs.
    """
    weight, bias = layer.weight.detach().flatten(1), layer.bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias.detach()
    weight, bias = (torch.cat([x[part] for part in rows or (slice(None),)]) for x in (weight, bias))
    layer.register_buffer('packed_weight', packed_weight(weight))
    layer.register_buffer('packed_bias', packed_bias(bias))


def apply_packed(layer: nn.Module, x: Tensor, **options) -> Tensor:
    """Map tokens (B, H, W, C) by a layer with packed weights."""
    return product(x, layer.packed_weight, layer.packed_bias, len(layer.weight), **options)[0]


def runs_natively(x: Tensor) -> bool:
    """True if the native product can take the place of layers on x: it is float32 only, and has no gradient."""
    return (x.dtype == torch.float32 and not torch.is_grad_enabled() and not torch.is_autocast_enabled('cpu')
            and chosen_backend('separable_attention', 'auto', x) == 'native')


def is_packable(*layers: nn.Module) -> bool:
    """True if the layers are convolutions without adapters, and norms that are folded into them."""
    plain = all(type(layer) in (nn.Conv2d, JoinedConv2d, nn.GroupNorm, nn.Identity) for layer in layers)
    return NATIVE is not None and plain and all(x.is_cpu for layer in layers for x in layer.parameters())


def is_plain(*layers: Optional[nn.Module]) -> bool:
    """True if the layers are PyTorch's own, without adapter or parametrization: their weights may be used directly."""
    return all(type(layer) in (nn.Conv2d, nn.BatchNorm2d, nn.Linear) for layer in layers)


def linear_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a layer with weight (C', C) and bias (C',)."""
    layer = nn.utils.skip_init(nn.Linear, *weight.T.shape, device=weight.device, dtype=weight.dtype)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return layer
