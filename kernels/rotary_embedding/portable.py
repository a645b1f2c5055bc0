"""Rotary embedding in plain PyTorch: a product of complex numbers, or of real ones for compilers and exporters."""
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..common.tracing import is_traced_or_wrapped
from .angles import rotate_flat


def rotary_embedding(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    if is_traced_or_wrapped(q):                                 # compilers do not support complex numbers
        return rotary_embedding_real(q, k, table, scale)
    factors = torch.view_as_complex(table)                      # (N, D / 2)
    return _multiply_pairs(q, factors), _multiply_pairs(k, factors * scale)


def _multiply_pairs(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply the pairs of x (B, heads, N, D), read as complex numbers, by factors (N, D / 2)."""
    numbers = x.to(factors.real.dtype)
    batch, head, token, channel = numbers.stride()
    if channel != 1 or (numbers.storage_offset() | batch | head | token) % 2:
        numbers = numbers.contiguous()                          # complex numbers are aligned pairs
    pairs = torch.view_as_complex(numbers.unflatten(-1, (-1, 2)))
    # In inference the result is contiguous for each head, the layout that the operators need. This saves a pass.
    eager = x.device.type == 'cpu' and not torch.is_grad_enabled()
    out = pairs.new_empty(pairs.shape) if eager else None
    return torch.view_as_real(torch.mul(pairs, factors, out=out)).flatten(-2).to(x.dtype)


def rotary_embedding_real(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """Compute the same with real numbers, by operations that compilers fuse and exporters know."""
    cos, sin = table.unbind(-1)

    def rotated(x: Tensor, factor: float) -> Tensor:
        first, second = x.to(table.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
        return (pairs * factor).flatten(-2).to(x.dtype)

    return rotated(q, 1.0), rotated(k, scale)


def rotary_embedding_export(q: Tensor, k: Tensor, table: Optional[Tensor], scale: float) -> Tuple[Tensor, Tensor]:
    """Rotate by constants of the graph if there is no table."""
    return rotate_flat(q, k, scale) if table is None else rotary_embedding_real(q, k, table, scale)
