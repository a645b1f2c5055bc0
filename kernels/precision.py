"""What autocast must not do to a solve."""
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which products on x's device keep the type of their arguments."""
    return nullcontext() if x.device.type == 'meta' else torch.autocast(x.device.type, enabled=False)
