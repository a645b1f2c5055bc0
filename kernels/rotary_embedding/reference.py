"""Rotary embedding by its definition in float64; tests compare all backends with it."""
from typing import Tuple

import torch
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE


def rotary_embedding(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    cos, sin = table.to(REFERENCE_DTYPE).unbind(-1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.to(REFERENCE_DTYPE)[..., ::2], x.to(REFERENCE_DTYPE)[..., 1::2]
        return torch.stack((cos * first - sin * second, sin * first + cos * second), -1).flatten(-2)

    return rotated(q).to(q.dtype), (scale * rotated(k)).to(k.dtype)
