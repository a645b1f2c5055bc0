"""Forms of modules for inference on a GPU, where most of the time of small networks goes into launches.

`prepare` chooses them. A module runs its own equation inside of graphs, whose compilers fuse operations themselves, and
where a gradient or autocast is wanted.
"""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..kernels import dispatch, quadtree_attention, separable_attention
from ..kernels.common.launch import LARGEST_HEAD
from ..kernels.crisscross_attention import triton_forward as crisscross
from ..kernels.dispatch import choose
from ..kernels.polyline_attention import triton_forward as polyline
from ..kernels.prepared import bias_act, group_norm, layer_norm, path_sums
from .blocks import Block, FeedForward, has_hooks
from .joined import ACTIVATIONS, is_plain, linear_of
from .mixers import EosMixer, PolylineMixer, SeparableSelfAttention, TreeMixer
from .mixers.eos_linear import gate_log
from .mobilevitv2 import TransformerLayer

# Operators by the option `attention`. The first one takes sums of step logs, and the other one step logs.
OPERATORS = {'full': polyline, 'crisscross': crisscross}
_ROTATE = dispatch.OPERATORS['rotary_embedding'].implementations['triton']        # it has no objection of its own


def is_on_gpu(layer: nn.Module) -> bool:
    """True if the weights of a layer are on a GPU."""
    return any(x.is_cuda for x in layer.parameters())


def on_triton(x: Tensor) -> bool:
    """True if operators without a gradient may take the place of others on x, which Triton's kernels can read."""
    return (not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled('cuda')
            and choose('rotary_embedding', 'auto', x) is _ROTATE)


@register_notrace_module
class FusedNorm(nn.LayerNorm):
    """LayerNorm over the channels by `kernels.prepared`: (..., C) to the same shape."""

    @staticmethod
    def convert(norm: nn.LayerNorm) -> nn.LayerNorm:
        """Change the class of a norm over one dimension, in place, and return it."""
        if len(norm.normalized_shape) == 1 and (norm.weight is None) == (norm.bias is None):
            norm.__class__ = FusedNorm
        return norm

    def forward(self, x: Tensor) -> Tensor:
        known = x.shape[-1:] == self.normalized_shape and (self.weight is None or self.weight.dtype == x.dtype)
        return layer_norm(x, self.weight, self.bias, self.eps)[0] if known and on_triton(x) else super().forward(x)


@register_notrace_module
class FusedBlock(Block):
    """Block whose sums are part of the second norm and of the last product: (B, H, W, C) to the same shape."""

    @staticmethod
    def convert(block: Block) -> Block:
        """Change the class of a block without LayerScale, in place, and return it."""
        if (type(block.ls1) is type(block.ls2) is nn.Identity and type(block.ffn) is FeedForward
                and type(block.norm2) is FusedNorm and is_plain(block.ffn.fc2)):
            block.__class__ = FusedBlock
        return block

    def forward(self, x: Tensor) -> Tensor:
        if not on_triton(x):
            return super().forward(x)
        x, norm, fc2 = self.pos(x), self.norm2, self.ffn.fc2
        y, x = layer_norm(x, norm.weight, norm.bias, norm.eps, self.mixer(self.norm1(x)), fc2.bias)
        y = self.ffn.dwconv(self.ffn.fc1(y))
        return x.flatten(0, 2).addmm_(y.flatten(0, 2), fc2.weight.T).view(x.shape)


@register_notrace_module
class OneProductMixer(PolylineMixer):
    """PolylineMixer on a GPU, where one product gives q, k, v and the decay, and one launch the sums of the step logs.

    The heads of the decay are rows of the product. Its width is padded to a multiple of 16, so that
    kernels load whole vectors.
    """

    @staticmethod
    def convert(mixer: PolylineMixer) -> PolylineMixer:
        """Join the layers of a mixer, in place, and return it."""
        layers, decay = [mixer.q, mixer.k, mixer.v], mixer.decay
        if not is_plain(*layers) or decay is not None and not is_plain(decay.proj):
            return mixer
        weights, biases = [[getattr(layer, name) for layer in layers] for name in ('weight', 'bias')]
        like = weights[0]
        if decay is not None:
            heads = torch.eye(mixer.num_heads, device=like.device, dtype=like.dtype)
            weights += [torch.kron(heads, row[None]) for row in decay.proj.weight]    # (heads, C) each
            biases += [decay.dt_bias] * len(decay.proj.weight)
        rows = -sum(map(len, weights)) % 16
        weights, biases = [*weights, like.new_zeros(rows, like.shape[1])], [*biases, like.new_zeros(rows)]
        mixer.__class__ = OneProductMixer
        mixer.fused = (decay is not None and mixer.head_dim <= LARGEST_HEAD and mixer.attention in OPERATORS
                       and mixer.paths in ('both', 'v2h'))
        mixer.joined = linear_of(torch.cat(weights), torch.cat(biases))
        return mixer

    def forward(self, x: Tensor) -> Tensor:
        y, dim = self.joined(x), x.shape[3]
        q, k, v = y[..., :3 * dim].split(dim, -1)
        steps = y[..., 3 * dim:]
        if self.decay is not None:
            steps = steps[..., :len(self.decay.proj.weight) * self.num_heads]
        if self.fused and x.numel() and on_triton(x):
            y = self.attended(q, k, v, steps)
        else:
            y = self.attend(q, k, v, *self.logs(x, steps)).transpose(1, 2).reshape(x.shape)
        return self.out(self.lepe(v, y))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, steps: Tensor) -> Tensor:
        """Return the heads of masked attention, (B, H, W, C), of q, k, v (B, H, W, C) under steps before softplus."""
        grid, operator = q.shape[1:3], OPERATORS[self.attention]
        q, k, v = (x.unflatten(2, grid) for x in (*self.queries_and_keys(q, k), self._split_heads(v)))
        logs = path_sums(steps, self.decay.A_log, self.decay_scale, operator is polyline)
        y = operator(q, k, v, *logs.unbind(), self.mask_mode, self.paths, False)[0]
        return y.permute(0, 2, 3, 1, 4).flatten(3)

    def logs(self, x: Tensor, steps: Tensor) -> Tuple[Tensor, Tensor]:
        """Return the step logs (B, heads, H, W) from the last channels of the product."""
        if self.decay is None:
            return self.decay_logs(x)
        steps = F.softplus(steps) * -self.decay.A_log.exp().repeat(len(self.decay.proj.weight))
        steps = steps.permute(0, 3, 1, 2)
        return self.scaled(steps[:, :self.num_heads], steps[:, -self.num_heads:])


@register_notrace_module
class OneProductTreeMixer(TreeMixer):
    """TreeMixer where one product gives value, gate, query and key."""

    @staticmethod
    def convert(mixer: TreeMixer) -> TreeMixer:
        """Join the layers of a mixer, in place, and return it."""
        layers = [layer for layer in (mixer.value, mixer.gate, mixer.query, mixer.key) if layer is not None]
        if is_plain(*layers):
            biases = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
                      for layer in layers]
            mixer.joined = linear_of(torch.cat([layer.weight for layer in layers]), torch.cat(biases))
            mixer.__class__ = OneProductTreeMixer
        return mixer

    def forward(self, x: Tensor, mask: Optional[Tensor] = None, depth: Optional[int] = None,
                shift: Optional[Tuple[int, int]] = None) -> Tensor:
        value, gate, q, k = self.parts(x)
        mixed = quadtree_attention(
            q, k, value, self._biases(), parametrization=self.parametrization, rho=self.rho,
            mask=mask, shift=self.levels(*x.shape[1:3])[0][2:] if depth is None else shift,
            max_levels=self._max_levels() if depth is None else depth)
        return self.out(F.silu(gate) * mixed.permute(0, 2, 3, 1, 4).reshape(x.shape))

    def parts(self, x: Tensor) -> Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
        """Return the heads of values, the gate (B, H, W, C), and the heads of queries and keys, or None for them."""
        y, dim = self.joined(x), x.shape[3]
        value, gate = y[..., :2 * dim].split(dim, -1)
        q, k = map(self._split_heads, y[..., 2 * dim:].chunk(2, -1)) if self.query is not None else (None, None)
        return self._split_heads(value), gate, q, k


@register_notrace_module
class OneProductAxesMixer(EosMixer):
    """Gated linear attention along both axes on a GPU, where one product gives all that a token needs."""

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        if mask is not None or not on_triton(x):
            return super().forward(x, mask)
        dim, keys = x.shape[3], len(self.recurrence.expand.weight)
        value, gate, states, z = self.joined(x).split([dim, dim, 2 * keys, keys], -1)
        e, s = F.silu(states).chunk(2, -1)
        tokens = {'e': e, 's': s, 'log_o_k': gate_log(z, self.recurrence.oscillation.tau)}
        columns = layer_norm(self._run(value, tokens, 1), None, None, self.norm.eps)[0].transpose(1, 2)
        return self.out(F.silu(gate) * self.norm(self._run(columns, tokens, 2)))


@register_notrace_module
class FusedConv(nn.Conv2d):
    """act(conv(x)): (B, C, H, W) -> (B, C', H', W'), channels-last.

    A 1 x 1 convolution is a product, which adds the bias. Others leave bias and activation to `kernels.prepared`.

    Attributes:
        act: 'none', 'gelu' or 'silu'.
        pointwise: whether the convolution is 1 x 1.
    """

    @staticmethod
    def convert(conv: nn.Conv2d, act: nn.Module) -> bool:
        """Let a plain convolution on a GPU apply an activation, in place; return False if it does not."""
        pointwise = (conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0) and conv.groups == 1)
        if not (type(conv) is nn.Conv2d and is_on_gpu(conv) and type(act) in ACTIVATIONS
                and getattr(act, 'approximate', 'none') == 'none' and (pointwise or conv.bias is not None)):
            return False
        conv.__class__ = FusedConv
        conv.act, conv.pointwise = ACTIVATIONS[type(act)], pointwise
        return True

    @staticmethod
    def convert_all(model: nn.Module) -> None:
        """Convert all plain convolutions of a model."""
        for conv in model.modules():
            if type(conv) is nn.Conv2d and not has_hooks(conv):
                FusedConv.convert(conv, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or not (x.is_contiguous(memory_format=torch.channels_last) and on_triton(x)):
            return _APPLY[self.act](super().forward(x))
        if self.pointwise:
            return _APPLY[self.act](map_tokens(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        y = self._conv_forward(x, self.weight, None).permute(0, 2, 3, 1)
        return bias_act(y, self.bias, self.act).permute(0, 3, 1, 2)


_APPLY = {'none': lambda x: x, 'gelu': F.gelu, 'silu': F.silu}


def map_tokens(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Map tokens (B, H, W, C) by a 1 x 1 convolution."""
    return F.linear(x, conv.weight.flatten(1), conv.bias)


@register_notrace_module
class ImageNorm(nn.GroupNorm):
    """GroupNorm of one group by `kernels.prepared`: (B, C, H, W) to the same shape, channels-last."""

    @staticmethod
    def convert(norm: nn.GroupNorm) -> nn.GroupNorm:
        """Change the class of a norm with one group, in place, and return it."""
        if norm.num_groups == 1 and norm.weight is not None:
            norm.__class__ = ImageNorm
        return norm

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or not on_triton(x):
            return super().forward(x)
        return group_norm(x.permute(0, 2, 3, 1), self.weight, self.bias, self.eps)[0].permute(0, 3, 1, 2)


@register_notrace_module
class FusedLayer(TransformerLayer):
    """TransformerLayer of separable attention whose sums are part of the second norm and of the last product."""

    @staticmethod
    def convert(layer: TransformerLayer) -> TransformerLayer:
        """Join the queries and values of a layer, in place, and return it."""
        attn = layer.attn
        layers = attn.qkv_proj, attn.out_proj, layer.mlp.fc1, layer.mlp.fc2
        if isinstance(attn, SeparableSelfAttention) and is_plain(*layers) and type(layer.mlp.act) is nn.SiLU:
            count, dim = attn.num_latent_tokens, attn.out_proj.in_channels
            layer.query_value = linear_of(*(torch.cat([x[:count], x[count + dim:]]) for x in (
                attn.qkv_proj.weight.flatten(1), attn.qkv_proj.bias)))
            layer.__class__ = FusedLayer
        return layer

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        attn, norm, fc1, fc2 = self.attn, self.norm2, self.mlp.fc1, self.mlp.fc2
        if source is not None or not on_triton(x) or attn._forward_pre_hooks:
            return super().forward(x, source)
        count, dim = attn.num_latent_tokens, x.shape[1]
        weight, bias = (z[count:count + dim] for z in (attn.qkv_proj.weight.flatten(1), attn.qkv_proj.bias))
        tokens = self.norm1(x).permute(0, 2, 3, 1)
        query, value = self.query_value(tokens).split([count, dim], -1)
        y = map_tokens(attn.out_proj, separable_attention(
            query, tokens, value, key_weight=weight, key_bias=bias, patch_size=attn.patch_size,
            sampling=attn.sampling))
        y, x = group_norm(x.permute(0, 2, 3, 1), norm.weight, norm.bias, norm.eps, y, fc2.bias)
        y = F.silu(map_tokens(fc1, y), inplace=True).flatten(0, 2)
        return x.flatten(0, 2).addmm_(y, fc2.weight.flatten(1).T).view(x.shape).permute(0, 3, 1, 2)
