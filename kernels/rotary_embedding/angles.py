"""Angles of the rotary embedding over the flattened token index, as in the published PPMA, and rotations for graphs."""
from functools import lru_cache
from typing import Optional, Tuple

import numpy as np
import torch
from torch import Tensor


def rotary_angles(tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Angles n * 10000^(-linspace(0, 1, dim / 2)) of every token n: (tokens, dim / 2)."""
    frequency = 10000.0 ** -torch.linspace(0, 1, dim // 2, device=device, dtype=dtype)
    return torch.arange(tokens, device=device, dtype=dtype)[:, None] * frequency


def rotary_table(tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of `rotary_angles`: (tokens, dim / 2, 2)."""
    angles = rotary_angles(tokens, dim, device, dtype)
    return torch.stack((angles.cos(), angles.sin()), -1)


@lru_cache(maxsize=16)
def kept_table(*key) -> Tensor:
    """Keep the tables of the last few sizes: a network needs one for each stage, 5 MB for 67,000 tokens of 8 pairs."""
    with torch.inference_mode(False), torch.no_grad():   # training could not save a tensor made in inference mode
        return rotary_table(*key)


def rotate_flat(q: Tensor, k: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """Rotate by the angles of `rotary_table` for exporters, with tensors of rank 4 or less.

    There are no complex numbers and no strided slices. The tables are literals, which become
    constants of the graph, unless the number of tokens is dynamic.

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


def rotate_real(q: Tensor, k: Tensor, table: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """Compute the same with real numbers, by operations that compilers fuse and exporters know."""
    cos, sin = table.unbind(-1)

    def rotated(x: Tensor, factor: float) -> Tensor:
        first, second = x.to(table.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
        return (pairs * factor).flatten(-2).to(x.dtype)

    return rotated(q, 1.0), rotated(k, scale)


def rotary_embedding_export(q: Tensor, k: Tensor, table: Optional[Tensor], scale: float) -> Tuple[Tensor, Tensor]:
    """Rotate by constants of the graph if there is no table, with tensors of rank 4 or less."""
    if table is None:
        return rotate_flat(q, k, scale)
    flat = rotate_real(q.flatten(0, 1), k.flatten(0, 1), table, scale)
    return tuple(x.reshape(q.shape) for x in flat)
