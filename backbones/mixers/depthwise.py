"""Depthwise convolution as a token mixer."""
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..blocks import DepthwiseConv


@register_notrace_module
class DepthwiseMixer(nn.Module):
    """out(DWConv(GELU(value(x)))): (B, H, W, C) -> (B, H, W, C) for any H, W >= 1.

    Args:
        dim: channels C.
        kernel_size: size of the depthwise convolution's window, an odd number.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(self, dim: int, kernel_size: int = 7, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.value = nn.Linear(dim, dim, **dd)
        self.act = nn.GELU()
        self.conv = DepthwiseConv(dim, kernel_size, **dd)
        self.out = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(self.act(self.value(x))))
