"""Prepare a finished model for inference: `subquad.prepare` swaps modules for faster ones of equal outputs.

A module's own `forward` is the equation. What inference can change about a network without changing its results (norms
folded into layers, products joined, layouts) stands here and in `joined.py`, as modules that replace others.
"""
from functools import partial
from typing import Callable, Dict, Optional, Tuple, Type

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..kernels import separable_attention
from ..kernels.common.numerics import cast_for_autocast, packed
from ..kernels.common.patches import patch
from ..kernels.crisscross_attention import native_forward as native_crisscross
from ..kernels.dispatch import chosen_backend
from ..kernels.eos_elementwise import native_axes
from ..kernels.native import LIBRARY as NATIVE
from ..kernels.native.linear_attention import linear_attention
from ..kernels.native.product import product
from ..kernels.polyline_attention import native_forward as native_polyline
from ..kernels.quadtree_attention import native_forward as native_quadtree
from ..kernels.rotary_embedding.angles import kept_table, rotary_table
from ..kernels.separable_attention.native import native_attention as native_separable
from .blocks import Block, ConvNorm, FeedForward, has_hooks
from .joined import apply_packed, is_packable, is_plain, join, join_linears, linear_of, pack, runs_natively
from .mixers import EosMixer, PolylineMixer, SeparableSelfAttention, TreeMixer
from .mixers.depthwise import DepthwiseMixer
from .mixers.eos_linear import TokenGates
from .mixers.linear import EPS, LinearMixer, table_for
from .mixers.separable import SeparableMixer, check_source
from .mobilevitv2 import (
    ConvNormAct,
    InvertedResidual,
    MobileStem,
    MobileViTv2Block,
    TransformerLayer,
    to_even_size,
)
from .prepare_gpu import (
    FusedBlock,
    FusedConv,
    FusedLayer,
    FusedNorm,
    ImageNorm,
    OneProductAxesMixer,
    OneProductMixer,
    OneProductTreeMixer,
    is_on_gpu,
)


def prepare(model: nn.Module) -> nn.Module:
    """Replace modules by forms that are faster in inference, in place.

    Outputs change by rounding only. `print(model)` shows the new modules. To undo it, build the
    model again: a prepared one refuses `train()`, other weights and `save_weights`, because its
    layers are joined.
    Modules with hooks or adapters stay as they are. Hooks that layers get afterwards may not run,
    because a replaced module does not call the layers that it joined.

    Args:
        model: a model in evaluation mode, on the device that it will run on.

    Returns:
        The model.

    Raises:
        ValueError: the model is in training mode.
    """
    if model.training:
        raise ValueError('prepare is for inference: call model.eval() first')
    with torch.no_grad():
        # Inner modules first: a stage is replaced with its blocks already prepared.
        for parent in reversed(list(model.modules())):
            for name, child in list(parent.named_children()):
                if type(child) in REPLACEMENTS and not child.training and not has_hooks(child):
                    setattr(parent, name, REPLACEMENTS[type(child)](child).eval())
        join_linears(model)
        FusedConv.convert_all(model)
    model.prepared, model.train = True, partial(_train, model)
    model.register_load_state_dict_pre_hook(_load)
    return model


def _train(model: nn.Module, mode: bool = True) -> nn.Module:
    if mode:
        raise ValueError('a prepared model is for inference: build the model again to train it')
    return type(model).train(model, mode)


def _load(*_) -> None:
    raise ValueError('a prepared model keeps its weights in other forms, too: load weights before subquad.prepare')


# ---- the four-stage skeleton and its mixers

@register_notrace_module
class HeadsInPlaceMixer(PolylineMixer):
    """PolylineMixer on a CPU, which adds LePE to the heads where they lie, without a copy in the order of the grid."""

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = self.v(x), self.q(x), self.k(x)
        y = self.attend(q, k, v, *self.decay_logs(x)).transpose(1, 2)             # (B, N, heads, D)
        y = self.lepe(v).reshape(y.shape) + packed(y)
        return self.out(y.reshape(x.shape))


@register_notrace_module
class NativeMixer(OneProductMixer, HeadsInPlaceMixer):
    """PolylineMixer on a CPU, where one product gives q, k, v and the decay, and one native operator does the rest."""

    OPERATORS = {'full': native_polyline, 'crisscross': native_crisscross}

    @staticmethod
    def convert(mixer: PolylineMixer) -> PolylineMixer:
        """Join the layers of a mixer, in place, and return it. It adds the bias of the decay in float32."""
        if OneProductMixer.convert(mixer).__class__ is OneProductMixer:
            mixer.joined.bias[3 * len(mixer.q.weight):] = 0
            mixer.__class__ = NativeMixer
        return mixer

    def forward(self, x: Tensor) -> Tensor:
        y, dim, heads = self.joined(x), x.shape[3], self.num_heads
        if y.requires_grad or chosen_backend('polyline_attention', 'auto', y) != 'native':
            return HeadsInPlaceMixer.forward(self, x)
        if self.decay is None:
            paths, logs, softplus = 'h2v', self.decay_logs(x), ()                      # RMT's
        else:
            steps = y[..., 3 * dim:3 * dim + heads * len(self.decay.proj.weight)].permute(0, 3, 1, 2)
            paths, logs = self.paths, (steps[:, :heads], steps[:, -heads:])
            softplus = self.decay.dt_bias.float(), self.decay.A_log.float().exp() / self.decay_scale
        q, k, v = (part.unflatten(3, (heads, self.head_dim)).permute(0, 3, 1, 2, 4)
                   for part in y[..., :3 * dim].split(dim, -1))
        make_table = rotary_table if torch.compiler.is_compiling() else kept_table     # graphs do not keep tables
        attended = self.OPERATORS[self.attention](
            q, k, v, *logs, self.mask_mode, paths,
            make_table(x.shape[1] * x.shape[2], self.head_dim, x.device, torch.float32), self.head_dim ** -0.5,
            *softplus)
        return self.out(self.lepe(y[..., 2 * dim:3 * dim], attended.permute(0, 2, 3, 1, 4).reshape(x.shape)))


@register_notrace_module
class NativeTreeMixer(OneProductTreeMixer):
    """TreeMixer on a CPU, where one product gives value, gate, query and key, and one native operator does the rest."""

    @staticmethod
    def convert(mixer: TreeMixer) -> TreeMixer:
        """Join the layers of a mixer, in place, and return it."""
        if NATIVE and mixer.value.weight.is_cpu and type(OneProductTreeMixer.convert(mixer)) is OneProductTreeMixer:
            mixer.__class__ = NativeTreeMixer
        return mixer

    def forward(self, x: Tensor, mask: Optional[Tensor] = None, depth: Optional[int] = None,
                shift: Optional[Tuple[int, int]] = None) -> Tensor:
        value, gate, q, k = self.parts(x)
        if value.requires_grad or mask is not None or chosen_backend('quadtree_attention', 'auto', value) != 'native':
            return super().forward(x, mask, depth, shift)
        mixed = native_quadtree(
            q, k, value, self._biases(), None, self.parametrization, self.rho, self.levels(*x.shape[1:3])[0][2:],
            self._max_levels(), self._split_heads(gate))
        return self.out(mixed.permute(0, 2, 3, 1, 4).reshape(x.shape))


@register_notrace_module
class NativeAxesMixer(EosMixer):
    """Gated linear attention along both axes on a CPU: one product, one native operator, and the product `out`."""

    @staticmethod
    def convert(mixer: EosMixer) -> EosMixer:
        """Join the layers of a mixer whose recurrence the operator has, in place, and return it."""
        found = mixer.recurrence
        gates = getattr(found, 'oscillation', None)
        if mixer.mode != 'axis' or mixer.gate is None or type(gates) is not TokenGates or gates.gate_d is not None or (
                found.normalized or found.activate is not F.silu or None in (found.expand, found.shrink)):
            return mixer
        layers = [mixer.value, mixer.gate, found.expand, found.shrink, gates.gate_k]
        if is_plain(*layers):
            mixer.__class__ = NativeAxesMixer if mixer.value.weight.is_cpu else OneProductAxesMixer
            mixer.joined = linear_of(*(torch.cat([getattr(layer, name) for layer in layers])
                                       for name in ('weight', 'bias')))
        return mixer

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        y = None if mask is not None else self.joined(x)
        if y is None or y.requires_grad or chosen_backend('eos_elementwise', 'auto', y) != 'native':
            return super().forward(x, mask)
        tau = self.recurrence.oscillation.tau * self.decay_scale
        return self.out(native_axes(y, self.norm.weight, self.norm.bias, self.num_heads,
                                    len(self.recurrence.expand.weight) // self.num_heads, 1 / tau, self.norm.eps))


@register_notrace_module
class NativeLinearMixer(LinearMixer):
    """LinearMixer on a CPU, where one native operator maps queries, keys and values to the heads."""

    @staticmethod
    def convert(mixer: LinearMixer) -> LinearMixer:
        """Change the class of a mixer whose heads hold whole pairs of channels, in place, and return it."""
        if NATIVE and mixer.out.in_features // mixer.num_heads % 2 == 0:
            mixer.__class__ = NativeLinearMixer
        return mixer

    def forward(self, x: Tensor) -> Tensor:
        if not runs_natively(x):
            return super().forward(x)
        v = F.silu(self.conv(self.value(x)), inplace=True)
        y = linear_attention(self.qk(v), v, table_for(v, *v.shape[1:]), self.num_heads, EPS)
        return self.out(self.lepe(v, y) * F.silu(self.gate(x), inplace=True))


def fold_norm(layer: nn.Module) -> nn.Module:
    """Fold the norm of a ConvNorm or ConvNormAct into its convolution, in place, and return the layer."""
    name = 'bn' if isinstance(layer, ConvNormAct) else 'norm'
    norm = getattr(layer, name)
    if is_plain(layer.conv, norm):
        layer.conv = fuse_conv_bn_eval(layer.conv, norm).to(memory_format=torch.channels_last)
        setattr(layer, name, nn.Identity())
        if join(layer.conv, layer.act) or FusedConv.convert(layer.conv, layer.act):
            layer.act = nn.Identity()
    return layer


def prepare_mlp(layer: Mlp) -> Mlp:
    """Move the activation into the linear layer before it, on a CPU."""
    if join(layer.fc1, layer.act):
        layer.act = nn.Identity()
    return layer


def prepare_feed_forward(layer: FeedForward) -> FeedForward:
    """Move GELU from the depthwise convolution into the linear layer before it, on a CPU."""
    if join(layer.fc1, nn.GELU()):
        layer.dwconv.gelu = False
    return layer


def prepare_polyline(mixer: PolylineMixer) -> PolylineMixer:
    """Choose the form of a mixer for its device, in place, and return the mixer."""
    if is_on_gpu(mixer.q):
        return OneProductMixer.convert(mixer)
    mixer.__class__ = HeadsInPlaceMixer
    if NATIVE and mixer.attention in NativeMixer.OPERATORS and mixer.paths in ('both', 'v2h', 'rmt'):
        NativeMixer.convert(mixer)
    return mixer


def prepare_eos(mixer: EosMixer) -> EosMixer:
    """Choose the form of a mixer for its device, in place, and return it."""
    native = NATIVE and mixer.value.weight.is_cpu
    return NativeAxesMixer.convert(mixer) if native or is_on_gpu(mixer.value) else mixer


def prepare_tree(mixer: TreeMixer) -> TreeMixer:
    """Choose the form of a mixer for its device, in place, and return it."""
    return (OneProductTreeMixer if is_on_gpu(mixer.value) else NativeTreeMixer).convert(mixer)


def for_gpu(convert: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Return a replacement that leaves modules on other devices as they are."""
    return lambda module: convert(module) if is_on_gpu(module) else module


# ---- MobileViTv2

def norm_options(norm: nn.GroupNorm) -> Dict[str, object]:
    return dict(norm_weight=norm.weight, norm_bias=norm.bias, eps=norm.eps)


def convolve_before_act(layer: ConvNormAct, x: Tensor) -> Tensor:
    """Return tokens (B, H, W, C), without the activation, which the next product applies."""
    return layer.conv._conv_forward(x, layer.conv.weight, layer.conv.bias).permute(0, 2, 3, 1)


@register_notrace_module
class NativeResidual(InvertedResidual):
    """InvertedResidual whose 1 x 1 convolutions are native products with SiLU and the sum inside, on a CPU."""

    @staticmethod
    def convert(block: InvertedResidual) -> InvertedResidual:
        """Pack the weights of a block whose norms are folded, in place, and return it."""
        layers = block.conv1_1x1, block.conv2_kxk, block.conv3_1x1
        if is_packable(*(part for layer in layers for part in (layer.conv, layer.bn))):
            block.__class__ = NativeResidual
            pack(block.conv1_1x1.conv)
            pack(block.conv3_1x1.conv)
        return block

    def forward(self, x: Tensor) -> Tensor:
        if not runs_natively(x):
            return super().forward(x)
        x = x.permute(0, 2, 3, 1)
        y = apply_packed(self.conv1_1x1.conv, x, act='silu')
        y = convolve_before_act(self.conv2_kxk, y.permute(0, 3, 1, 2))
        y = apply_packed(self.conv3_1x1.conv, y, act_before=True, residual=x if self.residual else None)
        return y.permute(0, 3, 1, 2)


@register_notrace_module
class NativeLayer(TransformerLayer):
    """TransformerLayer whose norms, activation and sums are part of native products, on a CPU.

    Keys are computed once for each group, as in `KeysOfContextAttention`, from tokens before the norm: it is linear for
    an image.
    """

    @staticmethod
    def convert(layer: TransformerLayer) -> TransformerLayer:
        """Pack the weights of a layer, in place, and return it."""
        attn, mlp = layer.attn, layer.mlp
        if type(attn) is KeysOfContextAttention and is_packable(
                attn.qkv_proj, attn.out_proj, mlp.fc1, mlp.fc2, layer.norm1, layer.norm2):
            layer.__class__ = NativeLayer
            for conv in (attn.out_proj, mlp.fc1, mlp.fc2):
                pack(conv)
            keys = slice(attn.num_latent_tokens, -attn.out_proj.in_channels)
            pack(attn.qkv_proj, slice(keys.start), slice(keys.stop, None))
            weight = attn.qkv_proj.weight.flatten(1)[keys]
            layer.register_buffer('key_weight', weight * layer.norm1.weight)
            layer.register_buffer('key_bias', weight @ layer.norm1.bias + attn.qkv_proj.bias[keys])
        return layer

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        attn, mlp = self.attn, self.mlp
        if source is not None or not runs_natively(x) or attn._forward_pre_hooks:
            return super().forward(x, source)
        x, sizes, projection = x.permute(0, 2, 3, 1), [attn.num_latent_tokens, x.shape[1]], attn.qkv_proj
        y, statistics = product(x, projection.packed_weight, projection.packed_bias, sum(sizes),
                                **norm_options(self.norm1))
        query, value = y.split(sizes, -1)
        y = native_separable(query, x, value, self.key_weight, self.key_bias,
                             patch('patch_size', attn.patch_size), attn.sampling, statistics)
        x = apply_packed(attn.out_proj, y, residual=x)
        y = apply_packed(mlp.fc1, x, act='silu', **norm_options(self.norm2))
        return apply_packed(mlp.fc2, y, residual=x).permute(0, 3, 1, 2)


@register_notrace_module
class NativeBlock(MobileViTv2Block):
    """MobileViTv2Block whose maps between the widths are native products, on a CPU."""

    @staticmethod
    def convert(block: MobileViTv2Block) -> MobileViTv2Block:
        """Pack the weights of a block whose norms are folded, in place, and return it."""
        layers = block.conv_kxk, block.conv_proj
        if not block.grouped and is_packable(block.conv_1x1, block.norm, *(
                part for layer in layers for part in (layer.conv, layer.bn))):
            block.__class__ = NativeBlock
            pack(block.conv_1x1)
            pack(block.conv_proj.conv)
        return block

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        if source is not None or not runs_natively(x):
            return super().forward(x, source)
        y = convolve_before_act(self.conv_kxk, x if self.exact_size else to_even_size(x))
        y = self.transformer(apply_packed(self.conv_1x1, y, act_before=True).permute(0, 3, 1, 2))
        y = apply_packed(self.conv_proj.conv, y.permute(0, 2, 3, 1), **norm_options(self.norm))
        return y.permute(0, 3, 1, 2)


@register_notrace_module
class KeysOfContextAttention(SeparableSelfAttention):
    """Separable self-attention that maps to keys after the weighted sum: once for each group, as scores sum to 1."""

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        x = cast_for_autocast(x)
        source = x if source is None else cast_for_autocast(check_source(x, source))
        count, dim = self.num_latent_tokens, x.shape[1]
        sizes = [count, dim, dim]
        (query, key, value), (query_bias, key_bias, value_bias) = (
            y.to(x.dtype).split(sizes) for y in (self.qkv_proj.weight, self.qkv_proj.bias))
        y = separable_attention(
            F.linear(source.permute(0, 2, 3, 1), query.flatten(1), query_bias),
            source.permute(0, 2, 3, 1),
            F.conv2d(x, value, value_bias).permute(0, 2, 3, 1),
            key_weight=key.flatten(1),
            key_bias=key_bias,
            patch_size=self.patch_size,
            sampling=self.sampling,
        )
        return self.out_proj(y.permute(0, 3, 1, 2))


@register_notrace_module
class KeysOfContextMixer(KeysOfContextAttention, SeparableMixer):
    """SeparableMixer that maps to keys after the weighted sum: (B, H, W, C) to the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def prepare_separable(unit: SeparableSelfAttention) -> SeparableSelfAttention:
    """Let separable attention compute fewer keys, in place, and return it."""
    if is_plain(unit.qkv_proj):
        unit.__class__ = KeysOfContextMixer if isinstance(unit, SeparableMixer) else KeysOfContextAttention
    return unit


def prepare_depthwise(mixer: DepthwiseMixer) -> DepthwiseMixer:
    """Let the linear layers of a mixer run on oneDNN, the first one with GELU, in place, and return the mixer."""
    if join(mixer.value, mixer.act):
        mixer.act = nn.Identity()
    return mixer


def prepare_layer(layer: TransformerLayer) -> TransformerLayer:
    """Let convolutions or norms of a layer apply SiLU and sums, in place, and return the layer."""
    if is_on_gpu(layer):
        return FusedLayer.convert(layer)
    if join(layer.mlp.fc1, layer.mlp.act):
        layer.mlp.act = nn.Identity()
    return NativeLayer.convert(layer)


# Class of a module -> what replaces an instance of it. A subclass is not replaced.
REPLACEMENTS: Dict[Type[nn.Module], Callable[[nn.Module], nn.Module]] = {
    ConvNorm: fold_norm,
    ConvNormAct: fold_norm,
    DepthwiseMixer: prepare_depthwise,
    EosMixer: prepare_eos,
    FeedForward: prepare_feed_forward,
    InvertedResidual: NativeResidual.convert,
    LinearMixer: NativeLinearMixer.convert,
    Mlp: prepare_mlp,
    MobileStem: fold_norm,
    MobileViTv2Block: NativeBlock.convert,
    PolylineMixer: prepare_polyline,
    SeparableMixer: prepare_separable,
    SeparableSelfAttention: prepare_separable,
    TransformerLayer: prepare_layer,
    TreeMixer: prepare_tree,
    Block: for_gpu(FusedBlock.convert),
    nn.GroupNorm: for_gpu(ImageNorm.convert),
    nn.LayerNorm: for_gpu(FusedNorm.convert),
}
