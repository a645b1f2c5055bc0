"""Lines whose expand, oscillation and shrink states are constant in time: convolutions of channels (S4, DSS, TNN).

In a chunk, y_t = sum_j kernel[t - j] i_j with kernel[n] = Re sum_k s_k e_k o_k^n. Between chunks the memory passes, and
exists at the boundaries alone. Nothing has the size of the memories of all tokens.
"""
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import bounded, compute_dtype
from .generator import DecayGenerator

# Tokens of a chunk.
CHUNK = 64
# The fields of `problem.Oscillation`.
Oscillation = Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[DecayGenerator]]
Output = Tuple[Tensor, Optional[Tensor]]


def is_constant(e: Tensor, s: Tensor, oscillation: Oscillation) -> bool:
    """Whether e, s and a complex oscillation are the same for all tokens."""
    log_o_k, log_o_d, log_o, theta, generator = oscillation
    per_token = [x for x in (log_o_k, log_o_d, theta) if x is not None and x.ndim == 4]
    return e.ndim == s.ndim == 3 and not per_token and generator is None and (log_o is None or log_o.ndim == 3)


def _powers(oscillation: Oscillation, like: Tensor, count: int) -> Tensor:
    """Return o^0 ... o^(count - 1), (H, D, K, count), for `like` (H, K, D). Angles multiply in float64."""
    log_o_k, log_o_d, log_o, theta, _ = oscillation
    log = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
    for x, axis in ((log_o_k, -1), (log_o_d, -2)):
        log = log if x is None else log + bounded(x.double()).unsqueeze(axis)
    log = log if log_o is None else log + bounded(log_o.double())
    angle = (theta if theta.ndim == 3 else theta.unsqueeze(-1)).double().expand(like.shape)
    steps = torch.arange(count, dtype=torch.float64, device=like.device)
    return torch.exp(torch.complex(log, angle).mT.unsqueeze(-1) * steps).to(like.dtype)


def _toeplitz(kernel: Tensor) -> Tensor:
    """Return W[t, j] = kernel[t - j], zero for t < j: (..., C) -> (..., C, C)."""
    size = kernel.shape[-1]
    place = torch.arange(size, device=kernel.device)
    return F.pad(kernel, (size - 1, 0))[..., place[:, None] - place + size - 1]


def _forward(x: Tensor, e: Tensor, s: Tensor, powers: Tensor, state: Optional[Tensor], output_state: bool) -> Output:
    """Run over x (H, D, T, B) with e, s (H, D, K), powers (H, D, K, C + 1), state (H, D, K, B); return y and the
    memory."""
    length, size = x.shape[2], powers.shape[3] - 1
    kernel = ((s * e).unsqueeze(-1) * powers[..., :size]).sum(2).real
    count, rest = -(-length // size), length % size
    chunks = F.pad(x, (0, 0, 0, count * size - length)).unflatten(2, (count, size)).transpose(2, 3)   # (H, D, C, n, B)
    y = (_toeplitz(kernel) @ chunks.flatten(3)).view(chunks.shape)
    if count == 1 and state is None and not output_state:
        return y.transpose(2, 3).flatten(2, 3)[:, :, :length], None
    write = e.unsqueeze(-1) * powers[..., :size].flip(3)                                               # (H, D, K, C)
    local = (write @ chunks.flatten(3).to(write.dtype)).unflatten(3, chunks.shape[3:])                 # (H, D, K, n, B)
    memory = torch.zeros_like(local[..., 0, :]) if state is None else state
    entering: List[Tensor] = []
    for n in range(count):
        entering.append(memory)
        if n == count - 1 and rest:                                          # the padding must not decay the last one
            local_rest = write[..., size - rest:] @ chunks[:, :, :rest, n].to(write.dtype)
            memory = powers[..., rest:rest + 1] * memory + local_rest
        else:
            memory = powers[..., size:] * memory + local[..., n, :]
    read = s.unsqueeze(-1) * powers[..., 1:]
    carried = read.mT @ torch.stack(entering, 3).flatten(3)
    y = (y + carried.real.view(y.shape)).transpose(2, 3).flatten(2, 3)[:, :, :length]
    return y, memory if output_state else None


def run_constant(i: Tensor, e: Tensor, s: Tensor, oscillation: Oscillation, ways: Sequence[bool],
                 state: Optional[Tensor], output_state: bool) -> Output:
    """Compute y (B, H, T, D) and, with `output_state`, the last memory (B, H, K, D).

    ways: for each pass whether it runs from the last token to the first."""
    real = compute_dtype(i.dtype)
    e, s = (x.to(real.to_complex()) for x in (e, s))
    powers = _powers(oscillation, e, min(CHUNK, i.shape[2]) + 1)
    x, first = i.to(real).permute(1, 3, 2, 0), e.mT
    state = None if state is None else state.to(e.dtype).permute(1, 3, 2, 0)
    outputs, last = [], None
    for reverse in ways:
        y, last = _forward(x.flip(2) if reverse else x, first, s.mT, powers, state, output_state)
        outputs.append(y.flip(2) if reverse else y)
    y = sum(outputs[1:], outputs[0]).permute(3, 0, 2, 1)
    if len(ways) == 2:
        y = y - (s * e).sum(1).real.unsqueeze(1) * i
    return y.to(i.dtype), None if last is None else last.permute(3, 0, 2, 1)
