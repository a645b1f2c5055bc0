"""The recurrence by its definition in float64, token by token, with the K x K oscillation written out."""
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE, bounded
from ..eos_elementwise.reference import in_directions
from ..eos_scan.problem import Output, per_token


def recur(i: Tensor, e: Tensor, s: Tensor, o: Tensor, state: Tensor) -> Tuple[Tensor, Tensor]:
    """Run along T: i (B, H, T, D); e, s (B, H, T, K); o (B, H, T, K, K); state (B, H, K, D)."""
    outputs = []
    for t in range(i.shape[2]):
        state = o[:, :, t] @ state + e[:, :, t, :, None] * i[:, :, t, None, :]
        outputs.append((s[:, :, t, None, :] @ state).squeeze(-2))
    return torch.stack(outputs, 2), state


def eos_matmul(i: Tensor, e: Tensor, s: Tensor, a: Tensor, b: Tensor, gk: Optional[Tensor], scale: float,
               direction: str, initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    x, e, s, a, b = (x.to(REFERENCE_DTYPE) for x in (i, e, s, a, b))
    diagonal = torch.ones_like(e) if gk is None else bounded(per_token(gk).to(REFERENCE_DTYPE)).exp().expand_as(e)
    o = diagonal.diag_embed() + b[..., :, None] * a[..., None, :]
    state = (x.new_zeros(*x.shape[:2], e.shape[3], x.shape[3]) if initial_state is None
             else initial_state.to(REFERENCE_DTYPE))
    y, state = in_directions(recur, direction, (x, e, s, o), state)
    if direction == 'both':
        y = y - (s * e).sum(-1, keepdim=True) * x
    return (y * scale).to(i.dtype), state if i.dtype == REFERENCE_DTYPE else state.float()
