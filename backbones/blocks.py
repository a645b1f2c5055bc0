"""Layers that the backbones share: convolutions, stem, feed-forward layer, block and head."""
from typing import Callable, Optional

import torch
from timm.layers import DropPath, LayerScale
from timm.models import register_notrace_function, register_notrace_module
from torch import Tensor, nn
from torch.fx import Proxy

from ..kernels import depthwise_conv
from ..kernels.common.checks import is_traced_or_wrapped, readable
from .options import MIN_SIZE


@register_notrace_function
def check_image(x: Tensor, in_chans: int) -> Tensor:
    """Check that x is a batch of images that a network of stride 32 can take, and return x.

    Raises:
        TypeError: x is not a floating-point tensor, or is the proxy of a tracer that does not know timm's leaf modules.
        ValueError: the shape is not (B, in_chans, H, W) with H, W >= 32.
    """
    if isinstance(x, Proxy):
        raise TypeError('torch.fx cannot trace this network by itself: use features_only=True, or timm.models.'
                        "create_feature_extractor in place of torchvision's")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        came = f'a {x.dtype} tensor' if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f'the input must be a floating-point tensor (B, {in_chans}, H, W), got {came}')
    if x.ndim != 4 or x.shape[1] != in_chans or x.shape[2] < MIN_SIZE or x.shape[3] < MIN_SIZE:
        raise ValueError(f'the input must be (B, {in_chans}, H, W) with H and W >= {MIN_SIZE}, got {tuple(x.shape)}')
    return x


def check_tokens(x: Tensor, vocab_size: int) -> Tensor:
    """Check that x is a batch of sequences of tokens, and return x.

    The values are checked on a CPU, outside of graphs. On a GPU, the embedding reports a token that is out of range.

    Raises:
        ValueError: x is not an int32 or int64 tensor (B, T) with T >= 1, or a token is not below the vocabulary's size.
    """
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.shape[1] or x.dtype not in (torch.int32, torch.int64):
        came = f'{x.dtype} of shape {tuple(x.shape)}' if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f'the input must be integer tokens (B, T) of int32 or int64 with T >= 1, got {came}')
    if readable(x):
        low, high = (int(bound) for bound in x.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(f'tokens must be from 0 to {vocab_size - 1}, got {low if low < 0 else high}')
    return x


# Bytes of the part of a batch that runs at a time on a CPU: in float32, 3 images of 224 x 224 at PPMA-T's stride 4.
PART_BYTES = 3_200_000


def has_hooks(module: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def forward_in_parts(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return forward(x), computed for a few images at a time in eager inference on a CPU.

    There, cache misses and fresh memory cost more than arithmetic (a fifth of the time of PPMA-T's batches of 32). The
    stem and each stage split a batch by themselves, because their maps differ in size.

    Args:
        module: the module that `forward` belongs to. The batch stays whole for its hooks.
        forward: maps (B, ...) to (B, ...), each image independently of the others.
        x: (B, ...).
    """
    if torch.is_grad_enabled() or module.training or is_traced_or_wrapped(x) or not x.is_cpu:
        return forward(x)
    images = max(1, PART_BYTES // x[:1].nbytes) if x.numel() else len(x)
    if len(x) <= images or has_hooks(module):
        return forward(x)
    return torch.cat([forward(part) for part in x.split(images)])


class ConvNorm(nn.Module):
    """Convolution, BatchNorm and activation: (B, C, H, W) -> (B, C', ceil(H/stride), ceil(W/stride))."""

    def __init__(
            self,
            in_chs: int,
            out_chs: int,
            kernel_size: int = 3,
            stride: int = 1,
            bias: bool = True,
            act_layer: Callable[[], nn.Module] = nn.Identity,
            eps: float = 1e-5,
            device=None,
            dtype=None,
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            in_chs, out_chs, kernel_size, stride, kernel_size // 2, bias=bias, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(out_chs, eps, device=device, dtype=dtype)
        self.act = act_layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Stem(nn.Module):
    """Four 3x3 convolutions down to stride 4: (B, in_chans, H, W) -> (B, dim, ceil(H/4), ceil(W/4))."""

    def __init__(self, in_chans: int, dim: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.in_chans = in_chans
        self.conv1 = ConvNorm(in_chans, dim // 2, stride=2, act_layer=nn.GELU, **dd)
        self.conv2 = ConvNorm(dim // 2, dim // 2, act_layer=nn.GELU, **dd)
        self.conv3 = ConvNorm(dim // 2, dim, stride=2, act_layer=nn.GELU, **dd)
        self.conv4 = ConvNorm(dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        # All layers after this one work on channels-last memory, where tokens (B, H, W, C) are a view of images.
        x = check_image(x, self.in_chans).contiguous(memory_format=torch.channels_last)
        return forward_in_parts(self, lambda x: self.conv4(self.conv3(self.conv2(self.conv1(x)))), x)


@register_notrace_module
class DepthwiseConv(nn.Module):
    """k x k depthwise convolution of tokens, (B, H, W, C) -> (B, H, W, C), by `subquad.kernels.depthwise_conv`.

    Args:
        dim: channels C.
        kernel_size: k, an odd number.
        residual: add the input, after GELU if there is one.
        gelu: apply GELU to the input first.
        bias: add a bias.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
            self,
            dim: int,
            kernel_size: int,
            residual: bool = False,
            gelu: bool = False,
            bias: bool = True,
            device=None,
            dtype=None,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, kernel_size, kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if bias else None
        self.residual, self.gelu = residual, gelu
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as PyTorch's convolutions, like the published network."""
        nn.Conv2d.reset_parameters(self)

    def forward(self, x: Tensor, add: Optional[Tensor] = None) -> Tensor:
        """Convolve x (B, H, W, C), and add a tensor of its shape to the result if there is one."""
        return depthwise_conv(x, self.weight, self.bias, add, gelu=self.gelu, residual=self.residual)


class FeedForward(nn.Module):
    """Feed-forward layer on tokens (B, H, W, C): fc1, GELU, h + DWConv3x3(h), fc2."""

    def __init__(self, dim: int, hidden_dim: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.dwconv = DepthwiseConv(hidden_dim, 3, residual=True, gelu=True, **dd)
        self.fc2 = nn.Linear(hidden_dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dwconv(self.fc1(x)))


class Block(nn.Module):
    """Block on tokens (B, H, W, C): x + DWConv3x3(x), then x + mixer(LN(x)), then x + FFN(LN(x)).

    Args:
        dim: channels C.
        mixer: token mixer (B, H, W, C) -> (B, H, W, C).
        mlp_ratio: width of the feed-forward layer, as a multiple of `dim`.
        drop_path: rate of stochastic depth.
        init_values: initial value of LayerScale; None for no LayerScale.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
            self,
            dim: int,
            mixer: nn.Module,
            mlp_ratio: float,
            drop_path: float = 0.,
            init_values: Optional[float] = None,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.pos = DepthwiseConv(dim, 3, residual=True, **dd)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.ffn = FeedForward(dim, int(dim * mlp_ratio), **dd)
        scale: Callable = nn.Identity if init_values is None else lambda: LayerScale(dim, init_values, **dd)
        self.ls1, self.ls2 = scale(), scale()
        self.drop_path1, self.drop_path2 = ((DropPath(drop_path) if drop_path else nn.Identity()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pos(x)
        x = x + self.drop_path1(self.ls1(self.mixer(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.ffn(self.norm2(x))))


def check_pool(global_pool: str, num_classes: int) -> None:
    """Raise ValueError for a classifier without pooling."""
    if not global_pool and num_classes:
        raise ValueError(f"global_pool='' needs num_classes=0, got num_classes={num_classes}; with a classifier, pass "
                         "a pooling such as 'avg'")


class ProjectionHead(nn.Module):
    """Projection of every token (linear, BatchNorm, SiLU), mean over tokens, classifier: (B, C, H, W) -> (B, classes).

    Args:
        dim: channels C.
        hidden: width of the projection; None for no projection.
        num_classes: number of classes; 0 for no classifier.
        global_pool: 'avg', or '' to keep the map.
        drop_rate: dropout rate before the classifier.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
            self,
            dim: int,
            hidden: Optional[int],
            num_classes: int,
            global_pool: str = 'avg',
            drop_rate: float = 0.,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.proj = nn.Linear(dim, hidden, **dd) if hidden else nn.Identity()
        self.norm = nn.BatchNorm2d(hidden, **dd) if hidden else nn.Identity()
        self.act = nn.SiLU() if hidden else nn.Identity()
        self.num_features = hidden or dim
        self.drop = nn.Dropout(drop_rate)
        self.reset(num_classes, global_pool, **dd)

    def reset(
            self,
            num_classes: int,
            global_pool: Optional[str] = None,
            in_features: Optional[int] = None,
            device=None,
            dtype=None,
    ) -> None:
        """Replace the classifier.

        Args:
            num_classes: number of classes; 0 for no classifier.
            global_pool: 'avg' or ''; None keeps the current one.
            in_features: number of input channels of a head without projection; None keeps the projection.
            device, dtype: device and dtype of the parameters.

        Raises:
            ValueError: the classifier has no pooling.
        """
        if global_pool is not None:              # None keeps '' too, as in timm
            check_pool(global_pool, num_classes)
            self.global_pool = global_pool
        if in_features is not None:
            self.proj, self.norm, self.act = nn.Identity(), nn.Identity(), nn.Identity()
            self.num_features = in_features
        self.fc = (nn.Linear(self.num_features, num_classes, device=device, dtype=dtype) if num_classes > 0
                   else nn.Identity())
        self.fc.train(self.training)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.act(self.norm(x))
        if self.global_pool == 'avg':
            x = x.mean((2, 3))
        x = self.drop(x)
        if pre_logits:
            return x
        if self.global_pool == 'avg':
            return self.fc(x)
        return self.fc(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
