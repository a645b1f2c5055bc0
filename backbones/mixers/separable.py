"""Separable self-attention (MobileViTv2), and the attention units that the paper compares it with (Figure 1, Table 1).

Mehta & Rastegari, "Separable Self-attention for Mobile Vision Transformers", TMLR 2023, arXiv 2206.02680. Unlike the
other mixers, these take channels first, (B, C, H, W), because they consist of 1 x 1 convolutions and run on phones.
"""
from typing import Annotated, Optional, Tuple, Union

import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import separable_attention
from ...kernels.separable_attention import SAMPLINGS
from ...kernels.separable_attention.portable import context_scores
from ..options import checked, integer, one_of

LatentTokens = Annotated[int, integer(1, 64)]
Sampling = Annotated[str, one_of(*SAMPLINGS)]


def check_source(x: Tensor, source: Tensor) -> Tensor:
    """Check that tokens x (B, C, ...) can take their context from `source`, and return `source`.

    Raises:
        ValueError: batch, rank or number of channels differ from those of x.
    """
    if source.ndim != x.ndim or source.shape[:2] != x.shape[:2]:
        raise ValueError(f'source must be tokens (B, C, H, W) with B={x.shape[0]} and C={x.shape[1]}, like x, '
                         f'got {tuple(source.shape)}')
    return source


@register_notrace_module
class SeparableSelfAttention(nn.Module):
    """Separable self-attention (section 3.2, equations 5 to 10).

    The context scores of a group of tokens weight the sum of its keys. All tokens of the group multiply their values by
    this context vector.

    `qkv_proj` has L + 2 C output channels: a logit for each latent token, key, value. With several latent tokens, for
    which the paper has no formula, the context is the mean over the latent tokens.

    Args:
        dim: channels C.
        num_latent_tokens: L, from 1 to 64; the published networks have 1.
        patch_size: p. For 'pixel' sampling the side of a patch; for 'patch' sampling the number of patches along each
            side. A pair stands for height and width.
        sampling: 'pixel' groups the tokens at one place of their p x p patch; 'patch' groups the tokens of one of p x p
            patches of the map.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: the number of latent tokens or the sampling is not allowed.
    """

    @checked
    def __init__(
            self,
            dim: int,
            num_latent_tokens: LatentTokens = 1,
            patch_size: Union[int, Tuple[int, int]] = 2,
            sampling: Sampling = 'pixel',
            device=None,
            dtype=None,
    ):
        super().__init__()
        self.num_latent_tokens, self.patch_size, self.sampling = num_latent_tokens, patch_size, sampling
        self.qkv_proj = nn.Conv2d(dim, num_latent_tokens + 2 * dim, 1, device=device, dtype=dtype)
        self.out_proj = nn.Conv2d(dim, dim, 1, device=device, dtype=dtype)

    def query(self, x: Tensor) -> Tensor:
        """Return the logits of the context scores, (B, H, W, L), for x (B, C, H, W)."""
        return self.qkv_proj(x)[:, :self.num_latent_tokens].permute(0, 2, 3, 1)

    def scores(self, x: Tensor) -> Tensor:
        """Return the context scores (B, L, H, W) for x (B, C, H, W), at least float32. They sum to 1 in each group."""
        patch = (self.patch_size, self.patch_size) if isinstance(self.patch_size, int) else self.patch_size
        return context_scores(self.query(x), patch, self.sampling).permute(0, 3, 1, 2)

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        """Attend from the tokens of x to those of `source`.

        Args:
            x: (B, C, H, W), the input of values.
            source: (B, C, H', W'), the input of queries and keys in cross-attention; None for x.

        Returns:
            A tensor of the shape of x.
        """
        parts = [self.num_latent_tokens, x.shape[1], x.shape[1]]
        query, key, value = self.qkv_proj(x).split(parts, 1)
        if source is not None:
            query, key, _ = self.qkv_proj(check_source(x, source)).split(parts, 1)
        y = separable_attention(
            query.permute(0, 2, 3, 1),
            key.permute(0, 2, 3, 1),
            value.permute(0, 2, 3, 1),
            patch_size=self.patch_size,
            sampling=self.sampling,
        )
        return self.out_proj(y.permute(0, 3, 1, 2))


@register_notrace_module
class SeparableMixer(SeparableSelfAttention):
    """Separable self-attention with one group of all tokens: (B, H, W, C) -> (B, H, W, C) for any H, W >= 1.

    See `SeparableSelfAttention`, which has channels first. There are no heads.

    Args:
        dim: channels C.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, dim: int, device=None, dtype=None):
        super().__init__(dim, patch_size=1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@register_notrace_module
class MultiHeadSelfAttention(nn.Module):
    """Softmax attention between the N tokens of each of P groups (Figure 3a): O(N^2). Maps (B, C, P, N) to the same."""

    def __init__(
            self,
            dim: int,
            num_heads: int = 4,
            device=None,
            dtype=None,
    ):
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f'num_heads must divide the {dim} channels, got {num_heads}')
        self.num_heads = num_heads
        self.qkv_proj = nn.Conv2d(dim, 3 * dim, 1, device=device, dtype=dtype)
        self.out_proj = nn.Conv2d(dim, dim, 1, device=device, dtype=dtype)

    def shorten(self, key: Tensor, value: Tensor) -> Tuple[Tensor, Tensor]:
        """Return keys and values (B, C, P, N) unchanged. Linformer reduces their number."""
        return key, value

    def forward(self, x: Tensor, source: Optional[Tensor] = None) -> Tensor:
        """Attend from the tokens of x to those of `source`.

        Args:
            x: (B, C, P, N), the input of queries.
            source: (B, C, P, M), the input of keys and values in cross-attention; None for x.

        Returns:
            A tensor of the shape of x.
        """
        dim, (batch, _, places, tokens) = x.shape[1], x.shape
        if source is None:
            q, k, v = self.qkv_proj(x).split(dim, 1)
        else:
            check_source(x, source)
            weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
            q = F.conv2d(x, weight[:dim], bias[:dim])
            k, v = F.conv2d(source, weight[dim:], bias[dim:]).split(dim, 1)
        q, k, v = (
            y.permute(0, 2, 3, 1)
            .reshape(batch * places, y.shape[3], self.num_heads, dim // self.num_heads)
            .transpose(1, 2)
            for y in (q, *self.shorten(k, v))
        )
        y = F.scaled_dot_product_attention(q, k, v)                               # (B P, heads, N, C / heads)
        y = y.transpose(1, 2).reshape(batch, places, tokens, dim)
        return self.out_proj(y.permute(0, 3, 1, 2))


@register_notrace_module
class LinformerSelfAttention(MultiHeadSelfAttention):
    """Multi-head attention to learned linear combinations of keys and values (Figure 3b): O(N).

    The layer works for one number of tokens only.

    Args:
        dim: channels C.
        tokens: number of tokens of a group, or the pair (rows, columns) of their grid.
        num_heads: number of heads; dim must be a multiple of it.
        projected: number of combinations, p in the paper; at most `tokens` are used.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
            self,
            dim: int,
            tokens: Union[int, Tuple[int, int]],
            num_heads: int = 4,
            projected: int = 256,
            device=None,
            dtype=None,
    ):
        super().__init__(dim, num_heads, device=device, dtype=dtype)
        self.grid = None if isinstance(tokens, int) else tuple(tokens)
        self.tokens = tokens = tokens if self.grid is None else self.grid[0] * self.grid[1]
        self.key_tokens, self.value_tokens = (
            nn.Linear(tokens, min(projected, tokens), bias=False, device=device, dtype=dtype) for _ in range(2))

    def check_grid(self, rows: int, columns: int) -> None:
        """Raise ValueError for a grid of the right number of tokens but of another shape, such as the transpose.

        `shorten` raises for another number of tokens.
        """
        if self.grid is not None and rows * columns == self.tokens and (rows, columns) != self.grid:
            made, came = ('{} x {}'.format(*grid) for grid in (self.grid, (rows, columns)))
            raise ValueError(f"attention='linformer' expects {made} tokens per group (rows x columns), got {came}: "
                             'create the model with img_size=(height, width) of your images')

    def shorten(self, key: Tensor, value: Tensor) -> Tuple[Tensor, Tensor]:
        """Combine the N keys and values of each group: (B, C, P, N) -> (B, C, P, projected)."""
        if key.shape[3] != self.tokens:
            raise ValueError(f"attention='linformer' expects {self.tokens} tokens per group, got {key.shape[3]}: "
                             'create the model with img_size=(height, width) of your images')
        return self.key_tokens(key), self.value_tokens(value)
