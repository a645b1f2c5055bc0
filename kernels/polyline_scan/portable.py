"""Polyline scan in plain PyTorch: one axis after the other, each by chunks (PPMA, Algorithm 1).

Within a chunk of an axis, the symmetric scan is a small matrix product. From chunk to chunk two states are carried, one
in each direction, as in a chunked linear recurrence. Time and memory are O(N) for a fixed chunk.
"""
from typing import List

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.numerics import bounded, compute_dtype, empty_result, log_decay, ranges

CHUNK = 32
# An axis of up to this length is one chunk, because carries would cost more than the larger matrix.
SINGLE_CHUNK = 64
# Elements scanned at a time if there are several groups, so that temporaries reuse memory.
GROUP_ELEMENTS = 1_000_000
# Elements scanned at a time within a group, for the same reason.
LINE_ELEMENTS = 1_000_000


def dense_axis_scan(x: Tensor, steps: Tensor) -> Tensor:
    """Compute `axis_scan` with one L x L matrix per line, without loops, for short axes and for export."""
    return torch.bmm(log_decay(steps.cumsum(-1), -1).exp_(), x)


def axis_scan(x: Tensor, steps: Tensor) -> Tensor:
    """Compute y[j] = sum_l exp(-|S[j] - S[l]|) x[l] for each line. x: (n, L, D), steps: (n, L)."""
    lines, length, dim = x.shape
    if length <= SINGLE_CHUNK:
        return dense_axis_scan(x, steps)
    padding = -length % CHUNK
    if padding:
        x, steps = F.pad(x, (0, 0, 0, padding)), F.pad(steps, (0, padding))
    chunks = x.shape[1] // CHUNK
    x, steps = x.view(lines, chunks, CHUNK, dim), steps.view(lines, chunks, CHUNK)
    sums = steps.cumsum(-1)                                                  # counted from the chunk's start
    y = torch.matmul(log_decay(sums, -1).exp_(), x)
    total, first = sums[..., -1:], sums[..., :1]
    before = _carry(y[:, :, -1].clone(), total[..., 0])                              # enters chunk n from the left
    # A state enters a chunk from the right through the step that leads to the next chunk's first token.
    after = _carry(y[:, :, 0].flip(1), _into_next(total - first, steps).flip(1)).flip(1)
    entering = F.pad(steps[:, 1:, :1], (0, 0, 0, 1))                         # (n, chunks, 1): next chunk's first step
    y = y.addcmul_(sums.exp()[..., None], before[:, :, None])
    y = y.addcmul_((total - sums + entering).exp()[..., None], after[:, :, None])
    y = y.view(lines, chunks * CHUNK, dim)
    return y[:, :length] if padding else y


def _into_next(span: Tensor, steps: Tensor) -> Tensor:
    """Return the log decay from a chunk's first token to the next chunk's: (n, chunks, 1) -> (n, chunks)."""
    return span[..., 0] + F.pad(steps[:, 1:, 0], (0, 1))


def _carry(last: Tensor, decay: Tensor) -> Tensor:
    """Return the state before each chunk: s[0] = 0, s[n+1] = exp(decay[n]) s[n] + last[n]. last, s: (n, chunks, D)."""
    chunks = last.shape[1]
    if chunks <= SINGLE_CHUNK:
        # s[n] = sum over m < n of exp(decay[m+1] + ... + decay[n-1]) last[m], as one small matrix per line.
        # The difference of neighbors is exactly 0: `sums - decay` is not, because it is rounded.
        sums = decay.cumsum(1)
        logs = F.pad(sums[:, :-1], (1, 0))[:, :, None] - sums[:, None, :]
        later = torch.ones(chunks, chunks, dtype=torch.bool, device=last.device).triu()
        return torch.bmm(logs.masked_fill(later, -torch.inf).exp(), last)
    factor = decay.exp()[..., None]
    state, states = torch.zeros_like(last[:, 0]), []
    for n in range(last.shape[1]):
        states.append(state)
        state = torch.addcmul(last[:, n], factor[:, n], state)
    return torch.stack(states, 1)


def scan_along(x: Tensor, steps: Tensor, dim: int, scan) -> Tensor:
    """Apply `scan` to every line of x (G, ..., D) along grid dimension `dim`, a few at a time; steps: (G, ...)."""
    x, steps = x.transpose(dim, -2), steps.transpose(dim, -1)                # (G, ..., lines, L, D), (G, ..., lines, L)
    step = max(1, LINE_ELEMENTS * x.shape[-3] // max(1, x.numel()))
    if scan is dense_axis_scan or torch.compiler.is_compiling():
        step = x.shape[-3]
    parts = []
    for lines in ranges(x.shape[-3], step):
        part = x[..., lines, :, :]
        y = scan(part.flatten(0, -3), steps[..., lines, :].flatten(0, -2))
        parts.append(y.reshape(part.shape))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -3)).transpose(dim, -2)


def _scan_groups(x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    """Apply `scan_grid` to a few groups at a time. x: (G, [Z,] H, W, D); logs along W, H [, Z]: (G, [Z,] H, W)."""
    step = max(1, GROUP_ELEMENTS * len(x) // x.numel())
    if step >= len(x) or torch.compiler.is_compiling():
        return scan_grid(x, logs, paths, axis_scan)
    if torch.is_grad_enabled():
        return torch.cat([scan_grid(x[g], [steps[g] for steps in logs], paths, axis_scan)
                          for g in ranges(len(x), step)])
    output = torch.empty_like(x)
    for g in ranges(len(x), step):
        output[g] = scan_grid(x[g], [steps[g] for steps in logs], paths, axis_scan)
    return output


def scan_grid(x: Tensor, logs: List[Tensor], paths: str, scan) -> Tensor:
    """Scan x (G, [Z,] H, W, D) on the given paths, each axis with `scan`; logs along W, H [, Z]: (G, [Z,] H, W)."""
    dims = [x.ndim - 2 - n for n in range(len(logs))]
    passes = list(zip(logs, dims))
    results = []
    for name, sequence in (('v2h', passes[::-1]), ('h2v', passes)):
        if paths in (name, 'both'):
            y = x
            for steps, dim in sequence:
                y = scan_along(y, steps, dim, scan)
            results.append(y)
    return results[0] + results[1] if len(results) == 2 else results[0]


def polyline_scan(x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    if x.numel() == 0:
        return empty_result(x, *logs)
    dtype = compute_dtype(x.dtype)
    logs = [bounded(by_group(steps.to(dtype))) for steps in logs]
    return _scan_groups(by_group(x.to(dtype)), logs, paths).reshape(x.shape).to(x.dtype)


def polyline_scan_export(x: Tensor, logs: List[Tensor], paths: str) -> Tensor:
    """Scan with one dense matrix per axis, without loops; in two dimensions tensors but x have rank 4 at most."""
    dtype = compute_dtype(x.dtype)
    logs = [bounded(by_group(steps.to(dtype))) for steps in logs]
    return scan_grid(by_group(x.to(dtype)), logs, paths, dense_axis_scan).reshape(x.shape).to(x.dtype)


def by_group(x: Tensor) -> Tensor:
    """Reshape (B, heads, ...) to (B * heads, ...)."""
    return x.reshape(-1, *x.shape[2:])
