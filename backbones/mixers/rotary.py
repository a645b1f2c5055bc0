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


def export_tables(dim: int, device=None, dtype=None) -> Tuple[Tensor, Tensor]:
    """Constants of `rotate_flat`: the frequency of every channel (D,) and the quarter turn of every pair (D, D)."""
    frequency = 10000.0 ** -torch.linspace(0, 1, dim // 2, device=device, dtype=dtype).repeat_interleave(2)
    turn = torch.tensor([[0., 1.], [-1., 0.]], device=device, dtype=dtype)
    return frequency, torch.block_diag(*[turn] * (dim // 2))


def rotate_flat(x: Tensor, frequency: Tensor, quarter_turn: Tensor) -> Tensor:
    """`rotate` for exporters: rank 4 throughout, no complex numbers, no strided slices. x: (B, heads, N, D)."""
    position = torch.ones_like(x[:1, :1, :, :1]).cumsum(2) - 1                       # (1, 1, N, 1): 0, 1, 2, ...
    angles = position * frequency.to(x.dtype)
    return x * angles.cos() + (x @ quarter_turn.to(x.dtype)) * angles.sin()
