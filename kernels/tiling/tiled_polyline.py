"""Polyline scan in bands of rows: the scan along columns carries one row of states in each direction."""
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common import checks
from ..common.numerics import bounded, compute_dtype
from ..polyline_scan.portable import axis_scan, scan_along
from .bands import Device, Source, Target, bands, check_grid, check_target, read, total_size, write

_OP = 'polyline_scan_tiled'


class _Columns:
    """A symmetric scan along columns: the rows of states that enter each band from above and from below."""

    def __init__(self) -> None:
        self.before: List[Optional[Tensor]] = [None]     # from above, (G, W, D)
        self.first: List[Tensor] = []                    # the state of a band alone at its first row
        self.span: List[Tensor] = []                     # log decay from the first row to the last, (G, W)
        self.entry: List[Tensor] = []                    # step log of the first row
        self.after: List[Optional[Tensor]] = []          # from below

    def add(self, x: Tensor, steps: Tensor) -> None:
        """Take the next band: x (G, rows, W, D), steps (G, rows, W)."""
        sums = steps.cumsum(1)
        last = ((sums[:, -1:] - sums).exp()[..., None] * x).sum(1)
        if self.before[-1] is not None:
            last = last + sums[:, -1].exp()[..., None] * self.before[-1]
        self.before.append(last)
        self.first.append(((sums - sums[:, :1]).exp()[..., None] * x).sum(1))
        self.span.append(sums[:, -1] - sums[:, 0])
        self.entry.append(steps[:, 0].clone())

    def finish(self) -> None:
        """Compute the states from below, after the last band was added."""
        self.after = [None]
        for n in reversed(range(1, len(self.first))):
            state = self.first[n]
            if self.after[-1] is not None:
                state = state + (self.span[n] + self.entry[n + 1]).exp()[..., None] * self.after[-1]
            self.after.append(state)
        self.after.reverse()

    def scan(self, n: int, x: Tensor, steps: Tensor) -> Tensor:
        """Return the scan of all bands on band n."""
        y, sums = scan_along(x, steps, 1, axis_scan), steps.cumsum(1)
        if self.before[n] is not None:
            y = y + sums.exp()[..., None] * self.before[n][:, None]
        if self.after[n] is not None:
            y = y + (sums[:, -1:] - sums + self.entry[n + 1][:, None]).exp()[..., None] * self.after[n][:, None]
        return y


class _Image(NamedTuple):
    """The arguments, and the names of the paths."""
    x: Source
    log_alpha: Source
    log_beta: Source
    width: int
    paths: List[str]
    device: Device

    def band(self, start: int, stop: int) -> Tuple[Dict[str, Tensor], Tensor, Tensor, Tensor]:
        """Return the inputs of each path's scan along columns, the step logs, all without heads, and x as it is."""
        sources = (('x', self.x), ('log_alpha', self.log_alpha), ('log_beta', self.log_beta))
        given = {name: read(_OP, name, source, 2, start, stop, self.device) for name, source in sources}
        checks.tensors(_OP, dict(x=5, log_alpha=4, log_beta=4), **given)
        x, *logs = given.values()
        checks.shapes(_OP, ('x', x, (*x.shape[:2], stop - start, self.width, x.shape[4]), 'the size'))
        for name, log in zip(('log_alpha', 'log_beta'), logs):
            checks.shapes(_OP, (name, log, x.shape[:-1], 'a step log for each token and head of x'))
            checks.step_logs(_OP, **{name: log})
        dtype = compute_dtype(x.dtype)
        values, (alpha, beta) = x.to(dtype).flatten(0, 1), (bounded(log.to(dtype).flatten(0, 1)) for log in logs)
        inputs = {name: values if name == 'v2h' else scan_along(values, alpha, 2, axis_scan) for name in self.paths}
        return inputs, alpha, beta, x


@torch.no_grad()
def polyline_scan_tiled(
        x: Source,
        log_alpha: Source,
        log_beta: Source,
        out: Target,
        *,
        paths: str = 'v2h',
        rows: int = 64,
        size: Optional[Sequence[int]] = None,
        device: Device = None,
) -> None:
    """Compute `polyline_scan` of an image that is larger than the memory, in bands of rows (two dimensions).

    The inputs are read twice, and each band of the result is written once. The memory holds a few bands, and for each
    band three rows of states. The result equals that of `polyline_scan` up to rounding.
    In float32, both differ from float64 by at most about 1e-5 of the largest result for step logs from -5 on, 4e-5 for
    those from -20 on, and 2e-4 for those down to -80, because differences of sums of step logs are rounded.

    Args:
        x: (B, heads, H, W, D), an array or a function (start, stop) that returns the rows from start to stop,
            (B, heads, stop - start, W, D); float32, float64, float16 or bfloat16.
        log_alpha, log_beta: step logs along W and along H, <= 0, arrays (B, heads, H, W) or functions.
        out: an array of the shape of x with a floating-point dtype, a function (start, stop, band), or None, which
            drops the result.
        paths: 'v2h', 'h2v' or 'both', as for `polyline_scan`.
        rows: rows of a band.
        size: (H, W), needed where x is a function.
        device: device of the arithmetic; None for that of the bands.

    Raises:
        ValueError: a shape, path or number is not allowed. On a CPU also a positive step log.
        TypeError: an input or a dtype is not allowed.
    """
    checks.one_of(_OP, 'paths', paths, checks.PATHS)
    height, width = total_size(_OP, x, size, 'size', (2, 3))
    parts = bands(_OP, 'rows', height, rows)
    for name, array in (('log_alpha', log_alpha), ('log_beta', log_beta), ('out', out)):
        check_grid(_OP, name, array, (height, width), 'x')
    check_target(_OP, 'out', out)
    columns = {name: _Columns() for name in ('v2h', 'h2v') if paths in (name, 'both')}
    image = _Image(x, log_alpha, log_beta, width, list(columns), device)
    for start, stop in parts:
        inputs, _, beta, _ = image.band(start, stop)
        for name, column in columns.items():
            column.add(inputs[name], beta)
    for column in columns.values():
        column.finish()
    for n, (start, stop) in enumerate(parts):
        inputs, alpha, beta, like = image.band(start, stop)
        total = None
        for name, column in columns.items():
            y = column.scan(n, inputs[name], beta)
            y = scan_along(y, alpha, 2, axis_scan) if name == 'v2h' else y
            total = y if total is None else total + y
        write(_OP, 'out', out, 2, start, stop, total.reshape(like.shape).to(like.dtype))
