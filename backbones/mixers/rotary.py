"""Rotary position embedding over the flattened token index, as in the published PPMA."""
from typing import Tuple

import torch
from torch import Tensor

from ..inference import is_eager_cpu_inference


def rotary_angles(tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Angles n * 10000^(-linspace(0, 1, dim / 2)) of every token n: (tokens, dim / 2)."""
    frequency = 10000.0 ** -torch.linspace(0, 1, dim // 2, device=device, dtype=dtype)
    return torch.arange(tokens, device=device, dtype=dtype)[:, None] * frequency


def rotate(q: Tensor, k: Tensor, angles: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """Rotate the pairs (x[2m], x[2m+1]) of q and k by angles[n, m], and scale k.

    Args:
        q, k: (B, heads, N, D).
        angles: (N, D / 2).
        scale: factor of k.
    """
    if q.dtype == angles.dtype and not torch.compiler.is_compiling():
        factors = torch.polar(torch.ones_like(angles), angles)                       # complex (N, D / 2)
        return _multiply_pairs(q, factors), _multiply_pairs(k, factors * scale)
    # Compilers and half precision do not support complex numbers.
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

    def rotate_pairs(x: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)

    return rotate_pairs(q), rotate_pairs(k) * scale


def _multiply_pairs(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply the pairs of x (B, heads, N, D), read as complex numbers, by factors (N, D / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    # In inference the result is contiguous for each head, the layout that the operators need. This saves a pass.
    out = pairs.new_empty(pairs.shape) if is_eager_cpu_inference(x) else None
    return torch.view_as_real(torch.mul(pairs, factors, out=out)).flatten(-2)


def rotate_flat(x: Tensor) -> Tensor:
    """Rotate x (B, heads, N, D) like `rotate`, for exporters: without scale, complex numbers and strided slices.

    All tensors have rank 4 or less. The tables are literals, which become constants of the graph.
    """
    dim, dtype = x.shape[-1], torch.float64 if x.dtype == torch.float64 else torch.float32
    exponents = [m // 2 / max(1, dim // 2 - 1) for m in range(dim)]
    frequency = torch.tensor([10000.0 ** -e for e in exponents], dtype=dtype, device=x.device)
    quarter_rotation = [[0.0] * dim for _ in range(dim)]
    for m in range(0, dim, 2):
        quarter_rotation[m][m + 1], quarter_rotation[m + 1][m] = 1.0, -1.0
    position = torch.ones_like(x[:1, :1, :, :1], dtype=dtype).cumsum(2) - 1          # (1, 1, N, 1): 0, 1, 2, ...
    angles = position * frequency
    rotated = x @ torch.tensor(quarter_rotation, dtype=x.dtype, device=x.device)
    return x * angles.cos().to(x.dtype) + rotated * angles.sin().to(x.dtype)
