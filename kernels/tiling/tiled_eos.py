"""Expand-oscillation-shrink recurrences in segments of lines: the memory is carried from segment to segment."""
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ..common import checks
from ..eos_elementwise import eos_elementwise
from ..eos_matmul import eos_matmul
from ..eos_scan import DecayGenerator
from ..eos_scan.problem import own_term
from .bands import Device, Source, Target, bands, is_array, read, total_size, write


def _reader(op: str, given: Dict[str, Any], device: Device) -> Callable[[int, int], Dict[str, Any]]:
    """Return a function that reads a segment of all arguments. Arrays with less than 4 dimensions are constants."""
    given = {name: source for name, source in given.items() if source is not None}

    def segment(name: str, source: Source, start: int, stop: int) -> Tensor:
        if not is_array(source) or len(source.shape) >= 4:
            return read(op, name, source, 2, start, stop, device)
        return read(op, name, source, 0, 0, len(source), device)

    def read_all(start: int, stop: int) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        for name, source in given.items():
            if isinstance(source, DecayGenerator):
                z, weight = (segment(f'{name}.{part}', getattr(source, part), start, stop) for part in ('z', 'weight'))
                found[name] = source._replace(z=z, weight=weight)
            else:
                found[name] = segment(name, source, start, stop)
        return found

    return read_all


def _tiled(op: str, operator: Callable[..., Tuple[Tensor, Tensor]], given: Dict[str, Any],
           out: Target, segment: int, length: Optional[int], reverse: bool, bidirectional: bool,
           state: Optional[Tensor], device: Device, **options: Any) -> Optional[Tensor]:
    """Check the arguments that segments cannot show, run over the segments, write the outputs, and
    return the last memory of one direction."""
    checks.flags(op, reverse=reverse, bidirectional=bidirectional)
    if reverse and bidirectional:
        raise ValueError(f'{op}: reverse and bidirectional exclude each other')
    if bidirectional and state is not None:
        raise ValueError(f'{op}: bidirectional has no state at one end: initial_state needs one '
                         'direction')
    length, = total_size(op, given['i'], None if length is None else (length,), 'length', (2,))
    segments, read_all = bands(op, 'segment', length, segment), _reader(op, given, device)

    def solve(arguments: Dict[str, Any], reverse: bool, state: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        return operator(**arguments, reverse=reverse, initial_state=state, output_state=True, **options)

    if not bidirectional:
        for start, stop in reversed(segments) if reverse else segments:
            y, state = solve(read_all(start, stop), reverse, state)
            write(op, 'out', out, 2, start, stop, y)
        return state
    entering: List[Optional[Tensor]] = [None]            # the memories of the other direction, from the last segment on
    for start, stop in reversed(segments[1:]):
        entering.append(solve(read_all(start, stop), True, entering[-1])[1])
    for start, stop in segments:
        arguments = read_all(start, stop)
        y, state = solve(arguments, False, state)
        back = solve(arguments, True, entering.pop())[0]
        own = own_term(*(arguments[name] for name in 'ies')) * options['scale']
        write(op, 'out', out, 2, start, stop, (y.to(own.dtype) + back.to(own.dtype) - own).to(y.dtype))
    return None


@torch.no_grad()
def eos_elementwise_tiled(
        i: Source,
        e: Source,
        s: Source,
        out: Target,
        *,
        log_o_k: Optional[Source] = None,
        log_o_d: Optional[Source] = None,
        log_o: Optional[Source] = None,
        theta: Optional[Source] = None,
        generator: Optional[DecayGenerator] = None,
        scale: float = 1.0,
        reverse: bool = False,
        bidirectional: bool = False,
        initial_state: Optional[Tensor] = None,
        segment: int = 4096,
        length: Optional[int] = None,
        device: Device = None,
        backend: str = 'auto',
) -> Optional[Tensor]:
    """Compute `eos_elementwise` of lines that are larger than the memory, in segments.

    The memory of the recurrence is carried from segment to segment. Each segment of the result is written once; with
    `bidirectional`, the inputs are read twice, and a memory is kept for each segment. The result equals that of
    `eos_elementwise` up to rounding.

    Args:
        i, e, s, log_o_k, log_o_d, log_o, theta, generator: as for `eos_elementwise`. Arguments with a dimension T, and
            the generator's z, are arrays or functions (start, stop) that return the tokens from start to stop. Those
            that are constant in time are arrays.
        out: an array of the shape of i, or a function (start, stop, segment).
        scale, reverse, bidirectional, initial_state, backend: as for `eos_elementwise`.
        segment: tokens of a segment.
        length: T, needed where i is a function.
        device: device of the arithmetic; None for that of the segments.

    Returns:
        The memory after the last token (with `reverse`, after the first), or None with `bidirectional`.

    Raises:
        ValueError: a shape, size, name or combination of arguments is not allowed.
        TypeError: an input or a dtype is not allowed.
    """
    given = dict(i=i, e=e, s=s, log_o_k=log_o_k, log_o_d=log_o_d, log_o=log_o, theta=theta, generator=generator)
    return _tiled('eos_elementwise_tiled', eos_elementwise, given, out, segment, length, reverse, bidirectional,
                  initial_state, device, scale=scale, backend=backend)


@torch.no_grad()
def eos_matmul_tiled(
        i: Source,
        e: Source,
        s: Source,
        out: Target,
        *,
        a: Source,
        b: Source,
        gk: Optional[Source] = None,
        scale: float = 1.0,
        reverse: bool = False,
        bidirectional: bool = False,
        initial_state: Optional[Tensor] = None,
        segment: int = 4096,
        length: Optional[int] = None,
        device: Device = None,
        backend: str = 'auto',
) -> Optional[Tensor]:
    """Compute `eos_matmul` of lines that are larger than the memory, in segments.

    Args:
        i, e, s, a, b, gk: as for `eos_matmul`, as arrays or functions; see `eos_elementwise_tiled`.
        scale, reverse, bidirectional, initial_state, backend: as for `eos_matmul`.
        out, segment, length, device: as for `eos_elementwise_tiled`.

    Returns:
        The memory after the last token, as `eos_elementwise_tiled` does.

    Raises:
        ValueError, TypeError: as for `eos_elementwise_tiled`.
    """
    return _tiled('eos_matmul_tiled', eos_matmul, dict(i=i, e=e, s=s, a=a, b=b, gk=gk), out, segment, length, reverse,
                  bidirectional, initial_state, device, scale=scale, backend=backend)
