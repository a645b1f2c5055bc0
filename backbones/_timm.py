"""Everything of timm that is not public API, in one place: when timm moves it, this file is the one to mend."""
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices

__all__ = ['checkpoint_seq', 'feature_take_indices']
