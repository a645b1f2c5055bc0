"""Token mixers of MambaVision, on the tokens of a window.

Hatamizadeh & Kautz, "MambaVision: A Hybrid Mamba-Transformer Vision Backbone", CVPR 2025, section 3.2.
"""
import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.models import register_notrace_module
from torch import Tensor, nn

from .selective import SelectiveScan

STATES = 8


class MambaVisionMixer(nn.Module):
    """Selective scan of half of the channels beside a branch without it: (B, L, C) -> (B, L, C).

        u, z = split(SiLU(conv(in_proj x))),   out_proj(concat(scan(u), z))

    The convolution is depthwise, with a window of 3 tokens centered on its own, so that it is not causal. In the
    published code the bias of the steps counts twice: the projection of the steps adds it, and the scan adds it again.

    Args:
        dim: channels C, an even number.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, dim: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.in_proj = nn.Linear(dim, dim, bias=False, **dd)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, groups=dim, bias=False, **dd)
        self.scan = SelectiveScan(dim // 2, STATES, -(-dim // 16), bias_factor=2, **dd)
        self.out_proj = nn.Linear(dim, dim, bias=False, **dd)
        # As published: the initial steps are softplus(0), not Mamba's.
        trunc_normal_(self.scan.dt_proj.weight, std=.02)
        nn.init.zeros_(self.scan.dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        u, z = F.silu(self.conv(self.in_proj(x).mT)).mT.chunk(2, -1)
        return self.out_proj(torch.cat([self.scan(u[:, None])[:, 0], z], -1))


@register_notrace_module
class WindowAttention(nn.Module):
    """Softmax attention without position embedding: (B, L, C) -> (B, L, C).

    Args:
        dim: channels C, a multiple of `num_heads`.
        num_heads: number of heads.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, dim: int, num_heads: int, device=None, dtype=None):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
