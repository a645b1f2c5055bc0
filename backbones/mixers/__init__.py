"""Token mixers, one file for each family: modules that project tokens and call the operators in kernels/."""
from .eos import EosMixer
from .polyline import PolylineMixer
from .separable import LinformerSelfAttention, MultiHeadSelfAttention, SeparableSelfAttention
from .tree import TreeMixer

__all__ = [
    'EosMixer',
    'LinformerSelfAttention',
    'MultiHeadSelfAttention',
    'PolylineMixer',
    'SeparableSelfAttention',
    'TreeMixer',
]
