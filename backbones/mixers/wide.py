"""Precision of what a recurrence holds by itself: rates, angles, steps and matrices stay in float32."""
from typing import Any, Callable, Dict

import torch
from torch import Tensor, nn


def at_least_float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def wide(device=None, dtype=None) -> Dict[str, Any]:
    """Return factory arguments for parameters of a `WideModule`: the dtype is at least float32."""
    return {'device': device, 'dtype': torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)}


class WideModule(nn.Module):
    """A module whose own parameters and buffers stay in float32 when a model is converted to float16 or bfloat16.

    A rate or an angle acts again at each token, so that its rounding error grows with the length of the line. The
    modules inside, such as linear layers, are converted as usual. A conversion to float64 converts all.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> 'WideModule':
        # PyTorch calls this method for half(), to(), cuda() and the like, with the conversion of one tensor.
        def convert(x: Tensor) -> Tensor:
            y = fn(x)
            return at_least_float(x).to(y.device) if y.is_floating_point() and y.dtype.itemsize < 4 else y

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(convert, recurse=False)
