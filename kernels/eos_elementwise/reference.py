"""The recurrence by its definition in float64, token by token; tests compare all backends with it."""
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..common.numerics import REFERENCE_DTYPE, bounded
from ..eos_scan.generator import generated_logs
from ..eos_scan.problem import Oscillation, Output, keys_of, per_token


def recur(i: Tensor, e: Tensor, s: Tensor, o: Tensor, state: Tensor) -> Tuple[Tensor, Tensor]:
    """Run along T: i (B, H, T, 1, D); e, s, o (B, H, T, K, D); state (B, H, K, D)."""
    outputs = []
    for t in range(i.shape[2]):
        state = o[:, :, t] * state + e[:, :, t] * i[:, :, t]
        outputs.append((s[:, :, t] * state).sum(-2))
    return torch.stack(outputs, 2), state


def double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else REFERENCE_DTYPE)


def oscillation_state(oscillation: Oscillation) -> Tensor:
    """Return o, with sizes of 1 where it is constant: (B, H, T, K, D)."""
    log_o_k, log_o_d, log_o, theta, generator = oscillation
    total = torch.zeros(1, 1, 1, 1, 1, dtype=REFERENCE_DTYPE)
    for log, axis in ((log_o_k, -1), (log_o_d, -2)):
        if log is not None:
            total = total.to(log.device) + bounded(double(per_token(log)).unsqueeze(axis))
    if log_o is not None:
        total = total.to(log_o.device) + bounded(double(log_o if log_o.ndim == 5 else log_o[None, :, None]))
    if generator is not None:
        z = generator.z.unsqueeze(-1 if generator.axis == 'k' else -2)
        total = total.to(z.device) + bounded(
            generated_logs(double(z), double(generator.weight)[:, None], generator.form, generator.tau))
    if theta is None:
        return total.exp()
    angle = theta[None, :, None] if theta.ndim == 3 else per_token(theta).unsqueeze(-1)
    return torch.polar(*torch.broadcast_tensors(total.exp().to(angle.device), double(angle)))


def in_directions(run, direction: str, tokens, state: Tensor) -> Tuple[Tensor, Tensor]:
    """Call run(*tokens, state) -> (y, state) on tensors (B, H, T, ...) as they are, flipped along T, or both ways."""
    y, last = run(*tokens, state) if direction != 'reverse' else (None, None)
    if direction != 'forward':
        back, last = run(*(x.flip(2) for x in tokens), state)
        y = back.flip(2) if y is None else y + back.flip(2)
    return y, last


def eos_elementwise(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, scale: float, direction: str,
                    initial_state: Optional[Tensor], output_state: bool, chunk: int) -> Output:
    o = oscillation_state(oscillation).to(i.device)
    shape = (*i.shape[:3], keys_of(e.shape), i.shape[3])
    x = double(i).unsqueeze(-2)
    e, s = (double(x)[None, :, None] if x.ndim == 3 else double(x).unsqueeze(-1) for x in (e, s))
    e, s, o = (x.expand(shape) for x in (e, s, o))
    state = x.new_zeros(*shape[:2], *shape[3:]) if initial_state is None else double(initial_state)
    y, state = in_directions(recur, direction, (x, e, s, o), state)
    if direction == 'both':
        y = y - (s * e * x).sum(-2)
    state = state.to(torch.complex128) if oscillation.theta is not None else state
    precise = i.dtype == REFERENCE_DTYPE
    if output_state and not precise:
        state = state.to(torch.complex64 if state.is_complex() else torch.float32)
    return ((y.real if y.is_complex() else y) * scale).to(i.dtype), state
