"""Argument checks shared by the operators: each names the argument, what came and what is allowed."""
from typing import Mapping, Optional, Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def one_of(op: str, name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def tensors(op: str, ranks: Mapping[str, int], **given: Optional[Tensor]) -> None:
    """Every tensor has its rank, a floating dtype the operators take, and lives on the first one's device."""
    device = None
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f'{op}: {name} must be a tensor, got {type(tensor).__name__}')
        if tensor.ndim != ranks[name]:
            raise ValueError(f'{op}: {name} must have {ranks[name]} dimensions, got shape {tuple(tensor.shape)}')
        if tensor.dtype not in DTYPES:
            allowed = ', '.join(str(d).removeprefix('torch.') for d in DTYPES)
            raise TypeError(f'{op}: {name} has dtype {tensor.dtype}; allowed: {allowed}')
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(f'{op}: {name} is on {tensor.device}, the other arguments on {device}')


def same_dtype(op: str, **given: Tensor) -> None:
    kinds = [tensor.dtype for tensor in given.values()]
    if any(kind != kinds[0] for kind in kinds):
        raise TypeError(f"{op}: {', '.join(given)} must share a dtype, got {', '.join(map(str, kinds))}")


def shape(op: str, name: str, tensor: Tensor, expected: Sequence[int], why: str) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f'{op}: {name} must have shape {tuple(expected)} ({why}), got {tuple(tensor.shape)}')


def attention(op: str, q: Tensor, k: Tensor, v: Tensor, **logs: Tensor) -> None:
    """q, k: (B, heads, H, W, D); v: (B, heads, H, W, Dv); each of logs: (B, heads, H, W)."""
    tensors(op, {'q': 5, 'k': 5, 'v': 5, **dict.fromkeys(logs, 4)}, q=q, k=k, v=v, **logs)
    same_dtype(op, q=q, k=k, v=v)
    if q.shape[-1] < 1:
        raise ValueError(f'{op}: q and k must have at least one channel, got shape {tuple(q.shape)}')
    shape(op, 'k', k, q.shape, 'as q')
    shape(op, 'v', v, (*q.shape[:-1], v.shape[-1]), 'as q but for the last dimension')
    for name, log in logs.items():
        shape(op, name, log, q.shape[:-1], 'a step log for each token and head of q')
