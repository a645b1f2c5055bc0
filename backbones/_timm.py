"""Everything of timm that is not public API, in one place: when timm moves it, only this file changes."""
from timm.layers import ClassifierHead
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import nn

__all__ = ['checkpoint_seq', 'feature_take_indices', 'narrow_head', 'pooled_width']


def pooled_width(head: nn.Module) -> int:
    """Channels that a head's classifier takes; timm's ClassifierHead knows them from 1.0.31 on."""
    if hasattr(head, 'num_features'):
        return head.num_features
    return head.in_features * head.global_pool.feat_mult()


def narrow_head(head: nn.Module, in_features: int) -> None:
    """Take `in_features` channels, without pooling and classifier; ClassifierHead.reset takes the argument from timm
    1.0.31 on."""
    if isinstance(head, ClassifierHead):
        head.in_features = in_features
        head.reset(0, '')
    else:
        head.reset(0, '', in_features=in_features)
