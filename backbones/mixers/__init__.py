"""Token mixers, one file a family: nn.Modules thin over the operators of kernels/."""
from .polyline import PolylineMixer
from .separable import LinformerSelfAttention, MultiHeadSelfAttention, SeparableSelfAttention
from .tree import TreeMixer

__all__ = ['LinformerSelfAttention', 'MultiHeadSelfAttention', 'PolylineMixer', 'SeparableSelfAttention',
           'TreeMixer']
