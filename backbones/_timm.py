"""Access to timm's private and version-dependent API. When timm changes it, only this file changes."""
from timm.layers import ClassifierHead
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import nn

__all__ = ['checkpoint_seq', 'feature_take_indices', 'narrow_head', 'pooled_width']


def pooled_width(head: nn.Module) -> int:
    """The number of channels that the classifier of a head takes.

    ClassifierHead has the attribute `num_features` from timm 1.0.31 on.
    """
    if hasattr(head, 'num_features'):
        return head.num_features
    return head.in_features * head.global_pool.feat_mult()


def narrow_head(head: nn.Module, in_features: int) -> None:
    """Reset a head to `in_features` input channels, without pooling and without a classifier.

    ClassifierHead.reset has the argument `in_features` from timm 1.0.31 on.
    """
    if isinstance(head, ClassifierHead):
        head.in_features = in_features
        head.reset(0, '')
    else:
        head.reset(0, '', in_features=in_features)
