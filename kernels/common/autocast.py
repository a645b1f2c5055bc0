"""What autocast does to a part of a layer: switch it off, or cast an argument as it would."""
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which products on x's device keep the type of their arguments."""
    return nullcontext() if x.device.type == 'meta' else torch.autocast(x.device.type, enabled=False)


def cast_for_autocast(x: Tensor) -> Tensor:
    """x in the type that autocast would give to a product, where it is on."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == 'meta' or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
