"""Activations of the expand and shrink states of `EosMixer`, by the numbers of `eos_codes.ACTIVATIONS`."""
from typing import Callable, Dict

import torch
import torch.nn.functional as F
from torch import Tensor


def _same(x: Tensor) -> Tensor:
    return x


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


# Named functions, because models keep them as attributes, and lambdas cannot be pickled.
ACTIVATE: Dict[int, Callable[[Tensor], Tensor]] = {
    0: _same,
    1: F.relu,
    2: torch.sigmoid,
    3: _elu_plus_one,
    4: F.silu,
    5: F.elu,
    6: _squared_relu,
    7: torch.square,
}
