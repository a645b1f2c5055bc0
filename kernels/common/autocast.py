"""Autocast within a layer: disable it for some products, or cast an input as it would."""
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which products on x's device keep the dtype of their arguments."""
    return nullcontext() if x.device.type == 'meta' else torch.autocast(x.device.type, enabled=False)


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype that autocast would use for a product, if autocast is enabled."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == 'meta' or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
