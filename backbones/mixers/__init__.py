"""Token mixers, one file a family: nn.Modules (B, H, W, C) -> (B, H, W, C), thin over the operators of kernels/."""
from .polyline import PolylineMixer

__all__ = ['PolylineMixer']
