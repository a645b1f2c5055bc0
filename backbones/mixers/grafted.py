"""Layers that `subquad.graft` puts into timm's ViT, EVA and Swin models, as subclasses of timm's own layers.

A graft changes the class of a layer that exists, and adds parameters to it. So the layer's own parameters keep their
names, hooks and modes, and `ungraft` only has to take away what was added.
"""
import math
from typing import Dict, Iterable, Optional, Set, Tuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models import register_notrace_module, swin_transformer, swin_transformer_v2
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from ...kernels.common.checks import is_traced_or_wrapped
from ...kernels.common.numerics import column_log_decay, row_log_decay
from .polyline import PathDecay, attend_full

QueriesKeysValues = Tuple[Tensor, Tensor, Tensor]
Size = Tuple[int, int]


class Grid:
    """The grid of the image tokens of a model.

    A forward pre-hook of the patch embedding reads the size of the image. Gradient checkpointing runs blocks again in
    the backward pass, when the last image may have had another size. So a forward pre-hook of the blocks leaves the
    grid with the memory of the tokens. Checkpoints keep this memory, and a recomputation finds its grid there.

    Args:
        prefix: number of tokens before those of the image: class, distillation and register tokens.

    Attributes:
        size: height and width of the grid of the last forward pass.
        sizes: number of tokens -> the grids of all images with so many.
        repeated: number of a backward pass, and the grid of its last recomputation.
    """

    def __init__(self, prefix: int):
        self.prefix = prefix
        self.size: Size = (0, 0)
        self.sizes: Dict[int, Set[Size]] = {}
        self.repeated: Tuple[int, Size] = (-1, (0, 0))

    def attach(self, patch_embed: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Register the hooks."""
        patch_embed.register_forward_pre_hook(self._before_patch_embed)
        for block in blocks:
            block.register_forward_pre_hook(self._before_block)

    def _before_patch_embed(self, patch_embed: nn.Module, inputs: Tuple[Tensor, ...]) -> None:
        size, backward_pass = patch_embed.dynamic_feat_size(inputs[0].shape[-2:]), _backward_pass()
        if backward_pass < 0:
            self.size = size
        else:
            self.repeated = backward_pass, size

    def _before_block(self, block: nn.Module, inputs: Tuple[Tensor, ...]) -> None:
        if inputs:
            self._remember(inputs[0])

    def _remember(self, x: Tensor) -> None:
        """Leave the grid with the memory of tokens; in a backward pass, read it there if it is known."""
        if is_traced_or_wrapped(x):
            return
        memory, backward_pass = x.untyped_storage(), _backward_pass()
        if backward_pass >= 0 and hasattr(memory, 'subquad_grid'):
            self.repeated = backward_pass, memory.subquad_grid
        else:
            memory.subquad_grid = height, width = self._current(backward_pass)
            self.sizes.setdefault(height * width, set()).add((height, width))

    def of(self, x: Tensor) -> Size:
        """Return height and width of the grid of an attention layer's tokens x (B, prefix + N, C).

        Raises:
            ValueError: no image had so many tokens; or several grids have, and a recomputation starts from tokens that
                are unknown.
        """
        self._remember(x)
        backward_pass, tokens = _backward_pass(), x.shape[1] - self.prefix
        height, width = self._current(backward_pass)
        if height * width == tokens:
            return height, width
        sizes = self.sizes.get(tokens, ())
        if len(sizes) == 1:
            return next(iter(sizes))
        if backward_pass >= 0 and sizes:
            grids = ', '.join(f'{height} x {width}' for height, width in sorted(sizes))
            raise ValueError(f'the grafted layer got {tokens} image tokens in a backward pass, and images had the '
                             f'grids {grids}: with several grids of as many tokens, checkpoint whole blocks or models')
        raise ValueError(f'the grafted layer got {tokens} image tokens, but the grid of patches is '
                         f'{self.size[0]} x {self.size[1]}: a graft needs all tokens of the image, in order')

    def _current(self, backward_pass: int) -> Size:
        """Return the grid of the current forward pass or recomputation; (0, 0) if it is unknown."""
        if backward_pass < 0:
            return self.size
        return self.repeated[1] if self.repeated[0] == backward_pass else (0, 0)


def _backward_pass() -> int:
    """Return the number of the backward pass that runs this code, -1 for none. A compiler sees forward passes only."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


class NeutralDecay(nn.Module):
    """Step logs for pretrained attention: 0 at first, so that they change nothing, and learned from there.

    log_alpha = -|strength[0]| * softplus(w_alpha . x_head + dt_bias) * exp(A_log), and log_beta likewise with
    strength[1] and w_beta; see `PathDecay`. `strength` has an entry for each direction and head and starts at 0, where
    its gradient is that from above; `A_log` and `dt_bias` start at 0.

    Args:
        dim: channels C of the tokens.
        num_heads: number of heads.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, dim: int, num_heads: int, device=None, dtype=None):
        super().__init__()
        self.path = PathDecay(dim // num_heads, num_heads, device=device, dtype=dtype)
        self.strength = nn.Parameter(torch.zeros(2, num_heads, device=device, dtype=dtype))
        nn.init.zeros_(self.path.A_log)
        nn.init.zeros_(self.path.dt_bias)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Return log_alpha and log_beta, (B, heads, H, W) each, for tokens x (B, H, W, C)."""
        strength = torch.where(self.strength >= 0, self.strength, -self.strength)[:, :, None, None]
        log_alpha, log_beta = self.path(x)
        return log_alpha * strength[0], log_beta * strength[1]


def polyline_softmax(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, log_beta: Tensor,
                     bias: Optional[Tensor] = None, dropout: float = 0., fused: bool = True) -> Tensor:
    """Compute 1/2 softmax(q k' + log L + bias) v + 1/2 softmax(q k' + log L~ + bias) v, with tokens before the grid.

    L is the polyline mask of the last H * W tokens (PPMA, section 3, in the form of the published code). Tokens before
    them (P >= 0) neither decay nor are decayed. Without such tokens, bias and dropout, `polyline_attention` computes
    it. Otherwise both masks are added to the bias in full, with O(N^2) memory, which is exact, too.

    Args:
        q, k, v: (B, heads, P + H * W, D); q is already scaled.
        log_alpha, log_beta: step logs, (B, heads, H, W).
        bias: a tensor that broadcasts to (B, heads, N, N) for N = P + H * W; None for none.
        dropout: dropout rate of the weights of attention.
        fused: use `scaled_dot_product_attention` with the bias in full.

    Returns:
        (B, heads, P + H * W, D).
    """
    prefix = q.shape[2] - log_alpha.shape[2] * log_alpha.shape[3]
    if not prefix and bias is None and not dropout:
        return attend_full(q, k, v, log_alpha, log_beta, mask_mode='additive', paths='both')
    row, column = row_log_decay(log_alpha, q.dtype), column_log_decay(log_beta, q.dtype)
    mask = (row[:, :, :, :, None] + column[:, :, :, None]).flatten(4).flatten(2, 3)                # (B, heads, HW, HW)
    y = 0
    for log_mask in (mask, mask.transpose(2, 3)):
        log_mask = F.pad(log_mask, (prefix, 0, prefix, 0)).to(q.dtype)
        log_mask = log_mask if bias is None else log_mask + bias
        if fused:
            part = F.scaled_dot_product_attention(q, k, v, log_mask, dropout_p=dropout, scale=1.0)
        else:
            part = F.dropout((q @ k.transpose(2, 3) + log_mask).softmax(-1), dropout) @ v
        y = y + 0.5 * part
    return y


def split_qkv(attn: nn.Module, x: Tensor, rope: Optional[Tensor] = None) -> QueriesKeysValues:
    """Compute queries, keys and values (B, heads, N, D) of tokens x (B, N, C) as timm's attention layers do."""
    batch, tokens = x.shape[:2]
    if attn.qkv is None:                                                                        # EVA's separate layers
        q, k, v = (layer(x).reshape(batch, tokens, -1, attn.head_dim).transpose(1, 2)
                   for layer in (attn.q_proj, attn.k_proj, attn.v_proj))
    else:
        if getattr(attn, 'q_bias', None) is None:
            qkv = attn.qkv(x)
        else:
            qkv = F.linear(x, attn.qkv.weight, torch.cat((attn.q_bias, attn.k_bias, attn.v_bias)))
        q, k, v = qkv.reshape(batch, tokens, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    if hasattr(attn, 'q_norm'):
        q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        prefix, half = attn.num_prefix_tokens, getattr(attn, 'rotate_half', False)
        q, k = (torch.cat((y[:, :, :prefix], apply_rot_embed_cat(y[:, :, prefix:], rope, half=half)), 2).type_as(v)
                for y in (q, k))
    groups = attn.num_heads // k.shape[1]
    return q, *(y if groups == 1 else y.repeat_interleave(groups, dim=1) for y in (k, v))


def project_heads(attn: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    """Apply what follows attention in timm's layers to y (B, heads, N, D): (B, N, C). x are the layer's tokens."""
    y = y.transpose(1, 2).flatten(2)
    y = attn.norm(y) if hasattr(attn, 'norm') else y
    if getattr(attn, 'gate', None) is not None:
        y = y * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(y))


def _additive(attn_mask: Optional[Tensor], is_causal: bool, q: Tensor) -> Optional[Tensor]:
    """Return what `scaled_dot_product_attention` adds to the logits for these arguments; None for nothing."""
    if is_causal:
        attn_mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attn_mask
    return torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float('-inf'))


class _PolylineTokens:
    """Attention of ViT and EVA under the additive polyline mask. The graft adds `decay` and `grid`."""

    grid: Grid

    def forward(self, x: Tensor, rope: Optional[Tensor] = None, attn_mask: Optional[Tensor] = None,
                is_causal: bool = False) -> Tensor:
        prefix = self.grid.prefix
        tokens = x[:, prefix:].unflatten(1, self.grid.of(x))
        q, k, v = split_qkv(self, x, rope)
        bias = _additive(attn_mask, is_causal, q)
        dropout = self.attn_drop.p if self.training else 0.
        y = polyline_softmax(q * self.scale, k, v, *self.decay(tokens), bias, dropout, self.fused_attn)
        return project_heads(self, y, x)


@register_notrace_module
class PolylineAttention(_PolylineTokens, Attention):
    """ViT's attention under the additive polyline mask."""


@register_notrace_module
class PolylineAttentionRope(_PolylineTokens, AttentionRope):
    """EVA's attention with rotary embedding under the additive polyline mask."""


@register_notrace_module
class PolylineEvaAttention(_PolylineTokens, EvaAttention):
    """EVA's own attention under the additive polyline mask."""


class _PolylineWindow:
    """Attention of Swin's windows under the additive polyline mask of the window. The graft adds `decay`."""

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        q, k, v = split_qkv(self, x)
        q, k, bias = self._logits(q, k)
        if mask is not None:                                                                 # (windows, N, N)
            bias = (bias + mask[:, None]).repeat(len(x) // len(mask), 1, 1, 1)
        dropout = self.attn_drop.p if self.training else 0.
        y = polyline_softmax(q, k, v, *self.decay(x.unflatten(1, self.window_size)), bias, dropout,
                             getattr(self, 'fused_attn', True))
        return project_heads(self, y, x)


@register_notrace_module
class PolylineWindowAttention(_PolylineWindow, swin_transformer.WindowAttention):
    """Attention in Swin's windows under the additive polyline mask. Relative position bias and shift mask stay."""

    def _logits(self, q: Tensor, k: Tensor) -> QueriesKeysValues:
        return q * self.scale, k, self._get_rel_pos_bias()


@register_notrace_module
class PolylineWindowAttentionV2(_PolylineWindow, swin_transformer_v2.WindowAttention):
    """Cosine attention in Swin V2's windows under the additive polyline mask. Position bias and shift mask stay."""

    def _logits(self, q: Tensor, k: Tensor) -> QueriesKeysValues:
        scale = self.logit_scale.clamp(max=math.log(1. / 0.01)).exp()
        area = self.window_size[0] * self.window_size[1]
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        bias = 16 * table[self.relative_position_index.view(-1)].view(area, area, -1).permute(2, 0, 1).sigmoid()
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), bias[None]


class _MixerTokens:
    """A mixer of this package for the image tokens of ViT and EVA. The graft adds `mixer`, `gamma` and `grid`.

    Class, distillation and register tokens attend to all tokens with the layer's own softmax attention: O(N).
    """

    grid: Grid

    def forward(self, x: Tensor, rope: Optional[Tensor] = None, attn_mask: Optional[Tensor] = None,
                is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(f'a layer that is grafted with {type(self.mixer).__name__} takes no attn_mask and no '
                             f'is_causal, got attn_mask={attn_mask!r}, is_causal={is_causal!r}')
        prefix = self.grid.prefix
        tokens = x[:, prefix:].unflatten(1, self.grid.of(x))
        y = self.proj_drop(self.gamma * self.mixer(tokens)).flatten(1, 2)
        if not prefix:
            return y
        q, k, v = split_qkv(self, x, rope)
        first = F.scaled_dot_product_attention(q[:, :, :prefix], k, v, scale=self.scale,
                                               dropout_p=self.attn_drop.p if self.training else 0.)
        return torch.cat((project_heads(self, first, x[:, :prefix]), y), 1)


@register_notrace_module
class MixerAttention(_MixerTokens, Attention):
    """A mixer in place of ViT's attention."""


@register_notrace_module
class MixerAttentionRope(_MixerTokens, AttentionRope):
    """A mixer in place of EVA's attention with rotary embedding."""


@register_notrace_module
class MixerEvaAttention(_MixerTokens, EvaAttention):
    """A mixer in place of EVA's own attention."""


class _MixerMap:
    """A mixer of this package on the whole map instead of Swin's windows. The graft adds `mixer` and `gamma`."""

    def _attn(self, x: Tensor) -> Tensor:
        return self.attn.proj_drop(self.gamma * self.mixer(x))


class MixerSwinBlock(_MixerMap, swin_transformer.SwinTransformerBlock):
    """Swin's block with a mixer on the whole map."""


class MixerSwinBlockV2(_MixerMap, swin_transformer_v2.SwinTransformerV2Block):
    """Swin V2's block with a mixer on the whole map."""


# Class of timm -> class of the grafted layer.
POLYLINE = {Attention: PolylineAttention, AttentionRope: PolylineAttentionRope, EvaAttention: PolylineEvaAttention,
            swin_transformer.WindowAttention: PolylineWindowAttention,
            swin_transformer_v2.WindowAttention: PolylineWindowAttentionV2}
MIXER = {Attention: MixerAttention, AttentionRope: MixerAttentionRope, EvaAttention: MixerEvaAttention,
         swin_transformer.SwinTransformerBlock: MixerSwinBlock,
         swin_transformer_v2.SwinTransformerV2Block: MixerSwinBlockV2}
