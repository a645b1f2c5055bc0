"""Rotary position embedding over the flattened token index, as the published PPMA has it."""
from typing import Tuple

import torch
from torch import Tensor

from ..inference import plain_inference


def rotary_angles(tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """n * 10000^(-linspace(0, 1, dim / 2)) for token n: (tokens, dim / 2)."""
    frequency = 10000.0 ** -torch.linspace(0, 1, dim // 2, device=device, dtype=dtype)
    return torch.arange(tokens, device=device, dtype=dtype)[:, None] * frequency


def rotate(q: Tensor, k: Tensor, angles: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """Turn the pairs (x[2m], x[2m+1]) of q and k by angles[n, m], and scale k.

    q, k: (B, heads, N, D), angles: (N, D / 2)."""
    if q.dtype == angles.dtype and not torch.compiler.is_compiling():
        turn = torch.polar(torch.ones_like(angles), angles)                          # complex (N, D / 2)
        return _turn(q, turn), _turn(k, turn * scale)
    # Compilers and half types: complex numbers are not for them.
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

    def turned(x):
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return turned(q), turned(k) * scale


def _turn(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    # In inference the product is written head by head, as the operators want it: one pass less.
    out = pairs.new_empty(pairs.shape) if plain_inference(x) else None
    return torch.view_as_real(torch.mul(pairs, turn, out=out)).flatten(-2)


def rotate_flat(x: Tensor) -> Tensor:
    """`rotate` without scale for exporters: rank 4 throughout, no complex numbers, no strided slices.

    The tables are literals, which become constants of the graph. x: (B, heads, N, D)."""
    dim, dtype = x.shape[-1], torch.float64 if x.dtype == torch.float64 else torch.float32
    exponents = [m // 2 / max(1, dim // 2 - 1) for m in range(dim)]
    frequency = torch.tensor([10000.0 ** -e for e in exponents], dtype=dtype, device=x.device)
    quarter_turn = [[0.0] * dim for _ in range(dim)]
    for m in range(0, dim, 2):
        quarter_turn[m][m + 1], quarter_turn[m + 1][m] = 1.0, -1.0
    position = torch.ones_like(x[:1, :1, :, :1], dtype=dtype).cumsum(2) - 1          # (1, 1, N, 1): 0, 1, 2, ...
    angles = position * frequency
    turned = x @ torch.tensor(quarter_turn, dtype=x.dtype, device=x.device)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)
