"""Mamba-like linear attention (MLLA): linear attention in the place of Mamba's selective scan.

Han et al., "Demystify Mamba in Vision: A Linear Attention Perspective", NeurIPS 2024, arXiv 2405.16605, and the
published code.
"""
from functools import lru_cache

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...kernels import rotary_embedding
from ...kernels.common.checks import is_traced_or_wrapped
from ...kernels.common.numerics import without_autocast
from ..blocks import DepthwiseConv
from .eos_linear import at_least_float

EPS = 1e-6


def grid_table(height: int, width: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines, (H * W, C / 2, 2), of the angles of the tokens of a grid.

    The first half of the pairs of channels turns with the row, the second half with the column: pair m of each half by
    10000^(-4 m / C) for each step.
    """
    frequencies = 10000 ** -(torch.arange(dim // 4, device=device, dtype=dtype) / (dim // 4))
    rows, columns = (torch.arange(side, device=device, dtype=dtype)[:, None] * frequencies for side in (height, width))
    angles = torch.cat((rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)), -1)
    return torch.stack((angles.cos(), angles.sin()), -1).flatten(0, 1)


@lru_cache(maxsize=16)
def kept_grid_table(*key) -> Tensor:
    """Keep the tables of the last few sizes: a network needs one for each stage."""
    with torch.inference_mode(False), torch.no_grad():   # training could not save a tensor made in inference mode
        return grid_table(*key)


def table_for(x: Tensor, height: int, width: int, dim: int) -> Tensor:
    """Return the table of a grid for tokens x, a kept one unless a graph records it."""
    fresh = is_traced_or_wrapped(x) or x.is_cuda and torch.cuda.is_current_stream_capturing()
    return (grid_table if fresh else kept_grid_table)(height, width, dim, x.device, x.dtype)


@register_notrace_module
class LinearMixer(nn.Module):
    """Gated linear attention with a rotary embedding and LePE: (B, H, W, C) -> (B, H, W, C).

        v = SiLU(DWConv(value x)),   q, k = elu(qk v) + 1,   q', k' = rotated q, k
        y_i = q'_i (mean_j k'_j v_j') / (q_i . mean_j k_j + 1e-6) for each head
        out((y + LePE v) * SiLU(gate x))

    Pairs of all channels are rotated before they are split into heads, so that half of the heads turn with the row and
    half with the column. The denominator has the unrotated q and k, which are positive. Sums over tokens are in
    float32.

    Args:
        dim: channels C, a multiple of 4.
        num_heads: number of heads, which are contiguous slices of C.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: `dim` is not a multiple of `num_heads` and of 4.
    """

    def __init__(self, dim: int, num_heads: int, device=None, dtype=None):
        super().__init__()
        if dim % num_heads or dim % 4:
            raise ValueError(f'dim must be a multiple of num_heads and of 4, got dim={dim}, num_heads={num_heads}')
        dd = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.gate, self.value = nn.Linear(dim, dim, **dd), nn.Linear(dim, dim, **dd)
        self.conv = DepthwiseConv(dim, 3, **dd)
        self.qk = nn.Linear(dim, 2 * dim, **dd)
        self.lepe = DepthwiseConv(dim, 3, **dd)
        self.out = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        v = F.silu(self.conv(self.value(x)))
        q, k = (F.elu(at_least_float(self.qk(v))) + 1).chunk(2, -1)
        return self.out(self.lepe(v, self.attend(q, k, v)) * F.silu(self.gate(x)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return y of the dtype of v for q, k (at least float32) and v, (B, H, W, C) each."""
        batch, height, width, dim = v.shape
        tokens = height * width

        def split(x: Tensor) -> Tensor:
            """(B, ..., C) -> (B, heads, N, D), a view."""
            return x.reshape(batch, tokens, self.num_heads, dim // self.num_heads).transpose(1, 2)

        table = table_for(q, height, width, dim)
        rotated = rotary_embedding(*(x.reshape(batch, 1, tokens, dim) for x in (q, k)), table)
        q, k, turned_q, turned_k, values = (split(x) for x in (q, k, *rotated, v.to(q.dtype)))
        with without_autocast(q):
            weights = q @ k.mean(2)[..., None] + EPS                              # (B, heads, N, 1)
            y = turned_q @ (turned_k.transpose(2, 3) @ values / tokens) / weights
        return y.transpose(1, 2).reshape(v.shape).to(v.dtype)
