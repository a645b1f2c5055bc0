"""What autocast should do to a part of a layer."""
import torch
from torch import Tensor


def cast_for_autocast(x: Tensor) -> Tensor:
    """x in the type that autocast would give to a product, where it is on."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == 'meta' or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
