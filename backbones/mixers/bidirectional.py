"""Vim's token mixer: a convolution and a selective scan in each direction of a sequence, and one gate.

Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model", ICML 2024,
Algorithm 1.
"""
import math

import torch.nn.functional as F
from torch import Tensor, nn

from .selective import SelectiveScan


class SequenceConv(nn.Conv1d):
    """Depthwise convolution of a token and those before it, or of it and those after it: (B, T, C) -> (B, T, C).

    With `reverse`, weight[..., j] belongs to the token k - 1 - j places later, for a kernel of width k.
    """

    def __init__(self, dim: int, kernel_size: int, reverse: bool = False, device=None, dtype=None):
        super().__init__(dim, dim, kernel_size, groups=dim, device=device, dtype=dtype)
        self.reverse = reverse

    def forward(self, x: Tensor) -> Tensor:
        around = self.kernel_size[0] - 1
        x = F.pad(x.mT, (0, around) if self.reverse else (around, 0))
        weight = self.weight.flip(-1) if self.reverse else self.weight
        return F.conv1d(x, weight, self.bias, groups=self.groups).mT


class Direction(nn.Module):
    """scan(SiLU(conv(u))) along one path, 'right' or 'left': (B, T, C) -> (B, T, C)."""

    def __init__(self, dim: int, path: str, states: int, rank: int, kernel_size: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.conv = SequenceConv(dim, kernel_size, reverse=path == 'left', **dd)
        self.scan = SelectiveScan(dim, states, rank, (path,), **dd)

    def forward(self, u: Tensor) -> Tensor:
        return self.scan(F.silu(self.conv(u))[:, None])[:, 0]


class BidirectionalMixer(nn.Module):
    """out((right(u) + left(u)) * SiLU(z) / 2) with [u, z] = in_proj x: (B, T, C) -> (B, T, C).

    The authors gate each direction before they add them, which is the same. The direction 'left' has its own weights,
    and runs from the last token to the first without a reversed copy.

    Args:
        dim: number C of channels.
        expand: width of u and z, as a multiple of `dim`.
        states: number of states of a channel.
        kernel_size: number of tokens that a convolution sees.
        symmetric_init: initialize the steps of both directions alike. The authors' code leaves those of 'left' at
            softplus(0) = 0.69, so that its memory starts with a length of one or two tokens.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
            self,
            dim: int,
            expand: int = 2,
            states: int = 16,
            kernel_size: int = 4,
            symmetric_init: bool = False,
            device=None,
            dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        inner, rank = expand * dim, math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False, **dd)
        self.right = Direction(inner, 'right', states, rank, kernel_size, **dd)
        self.left = Direction(inner, 'left', states, rank, kernel_size, **dd)
        self.out_proj = nn.Linear(inner, dim, bias=False, **dd)
        if not symmetric_init:
            nn.init.zeros_(self.left.scan.dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        return self.out_proj((self.right(u) + self.left(u)) * F.silu(z) / 2)
