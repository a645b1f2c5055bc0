"""2D selective scan: Liu et al., "VMamba: Visual State Space Model", NeurIPS 2024, section 4.2."""
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..blocks import DepthwiseConv
from .selective import SelectiveScan

# Along the rows, along the columns, and back.
PATHS = ('right', 'down', 'left', 'up')


@register_notrace_module
class SS2D(nn.Module):
    """Selective scans of a grid along its rows and columns, in both directions: (B, H, W, C) -> (B, H, W, C).

        u, z = split(in_proj x),   y = out_proj (norm(scan SiLU(conv u)) SiLU(z))

    Without a gate, u = in_proj x and y = out_proj norm(scan SiLU(conv u)).

    Args:
        dim: channels C.
        ratio: number of channels of u, as a multiple of C.
        states: number of states of a channel.
        gated: whether there is a gate z, and the depthwise convolution has a bias, as in the first version of VMamba.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, dim: int, ratio: float = 1., states: int = 1, gated: bool = False, device=None, dtype=None):
        super().__init__()
        dd, inner = {'device': device, 'dtype': dtype}, int(ratio * dim)
        self.gated = gated
        self.in_proj = nn.Linear(dim, inner * (1 + gated), bias=False, **dd)
        self.conv = DepthwiseConv(inner, 3, bias=gated, **dd)
        self.scan = SelectiveScan(inner, states, -(-dim // 16), PATHS, **dd)
        self.norm = nn.LayerNorm(inner, **dd)
        self.out_proj = nn.Linear(inner, dim, bias=False, **dd)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1) if self.gated else (self.in_proj(x), None)
        y = self.norm(self.scan(F.silu(self.conv(u))))
        return self.out_proj(y if z is None else y * F.silu(z))
