"""Rotary position embedding over the flattened token index, as in the published PPMA."""
from typing import Tuple

import numpy as np
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


def rotate_flat(q: Tensor, k: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """Compute `rotate` for exporters: without complex numbers and strided slices, with tensors of rank 4 or less.

    The tables are literals, which become constants of the graph, unless the number of tokens is dynamic.

    Args:
        q, k: (B, heads, N, D).
        scale: factor of k.
    """
    tokens, dim, dtype = q.shape[2], q.shape[3], torch.float64 if q.dtype == torch.float64 else torch.float32
    frequency = np.repeat(_frequencies(dim // 2, dtype), 2)
    quarter_rotation = np.zeros((dim, dim), frequency.dtype)
    for m in range(0, dim, 2):
        quarter_rotation[m, m + 1], quarter_rotation[m + 1, m] = 1, -1
    turn = torch.tensor(quarter_rotation, device=q.device).to(q.dtype)
    if isinstance(tokens, int):
        angles = (np.arange(tokens, dtype=frequency.dtype)[:, None] * frequency).astype(np.float64)
        cos, sin = (torch.tensor(table.astype(frequency.dtype), device=q.device)
                    for table in (np.cos(angles), np.sin(angles)))
    else:
        position = torch.ones_like(q[:1, :1, :, :1], dtype=dtype).cumsum(2) - 1.0        # (1, 1, N, 1): 0, 1, 2, ...
        angles = position * torch.tensor(frequency, device=q.device)
        cos, sin = angles.cos(), angles.sin()
    cos, sin, k = cos.to(q.dtype), sin.to(q.dtype), k * scale
    return q * cos + (q @ turn) * sin, k * cos + (k @ turn) * sin


def _frequencies(count: int, dtype: torch.dtype) -> np.ndarray:
    """Return the frequencies of `rotary_angles`, rounded as there: a difference grows with the number of tokens.

    It uses no tensor, because exporters record every operation on tensors."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    step = float(kind(1) / kind(max(1, count - 1)))
    exponents = [step * m if m < count // 2 or count == 1 else 1 - step * (count - 1 - m) for m in range(count)]
    return np.array([10000.0 ** -float(kind(e)) for e in exponents]).astype(kind)
