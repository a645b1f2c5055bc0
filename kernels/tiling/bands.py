"""Bands of arrays that are larger than the memory."""
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

# An array with `shape` and slices (a tensor, numpy.memmap, and the arrays of h5py or zarr), or a function
# (start, stop) -> tensor of this band.
Source = Union[Tensor, np.ndarray, Callable[[int, int], Tensor], Any]
# An array that takes slices, or a function (start, stop, band), or None to drop the result.
Target = Union[Tensor, np.ndarray, Callable[[int, int, Tensor], None], Any]
Device = Union[None, str, torch.device]


def is_array(x: Any) -> bool:
    return hasattr(x, 'shape') and hasattr(x, '__getitem__')


def read(op: str, name: str, source: Source, axis: int, start: int, stop: int, device: Device = None) -> Tensor:
    """Return the band [start, stop) of a source along an axis.

    Raises:
        TypeError: the source is neither an array nor a function that returns a tensor.
        ValueError: the array is shorter, or the function returns a band of another length.
    """
    if is_array(source):
        band = source[(slice(None),) * axis + (slice(start, stop),)]
        band = band if isinstance(band, Tensor) else torch.from_numpy(np.array(band))    # a copy: it may be read-only
    elif callable(source):
        band = source(start, stop)
        if not isinstance(band, Tensor):
            raise TypeError(f'{op}: the function {name} must return a tensor, got {type(band).__name__}')
    else:
        raise TypeError(f'{op}: {name} must be an array or a function of (start, stop), got {type(source).__name__}')
    if band.ndim <= axis or band.shape[axis] != stop - start:
        raise ValueError(f'{op}: {name} must have {stop - start} entries from {start} to {stop} in dimension {axis}, '
                         f'got a band of shape {tuple(band.shape)}')
    return band.detach().to(device) if device is not None else band.detach()


def check_grid(op: str, name: str, array: Any, sizes: Sequence[int], what: str) -> None:
    """Check that an array has these sizes in dimensions 2 and 3. Functions and None pass.

    Raises:
        ValueError: it has others.
    """
    if is_array(array) and tuple(array.shape[2:4]) != tuple(sizes):
        raise ValueError(f'{op}: {name} must have the height and width of {what}, {tuple(sizes)}, got '
                         f'{tuple(array.shape)}')


def check_target(op: str, name: str, target: Target) -> None:
    """Check that a target can take floating-point numbers.

    Raises:
        TypeError: the target is neither an array nor a function nor None, or it is an array of integers or booleans.
    """
    if target is None or callable(target) and not is_array(target):
        return
    if not is_array(target):
        raise TypeError(f'{op}: {name} must be an array or a function of (start, stop, band), got '
                        f'{type(target).__name__}')
    dtype = getattr(target, 'dtype', None)
    if isinstance(dtype, torch.dtype):
        whole = not (dtype.is_floating_point or dtype.is_complex)
    else:
        whole = getattr(dtype, 'kind', 'f') in 'biu'
    if whole:
        raise TypeError(f'{op}: {name} must have a floating-point dtype, got {dtype}, which truncates the results')


def write(op: str, name: str, target: Target, axis: int, start: int, stop: int, band: Tensor) -> None:
    """Write the band [start, stop) along an axis. None as target drops it.

    Raises:
        TypeError: the target is neither an array nor a function, or it is an array of integers or booleans.
        ValueError: the array has another shape than the band outside of the axis, or is shorter.
    """
    check_target(op, name, target)
    if is_array(target):
        index = (slice(None),) * axis + (slice(start, stop),)
        others = [(*x.shape[:axis], *x.shape[axis + 1:]) for x in (target, band)]
        if others[0] != others[1] or target.shape[axis] < stop:
            raise ValueError(f'{op}: {name} must have the shape of the result, which is {tuple(band.shape)} from '
                             f'{start} to {stop} in dimension {axis}, got {tuple(target.shape)}')
        target[index] = band if isinstance(target, Tensor) else band.cpu().numpy()
    elif target is not None:
        target(start, stop, band)


def total_size(op: str, source: Source, given: Optional[Sequence[int]], name: str, axes: Tuple[int, ...]
               ) -> Tuple[int, ...]:
    """Return the sizes of a source along some axes, from its shape, or those given for a function.

    Raises:
        ValueError: the source is a function and no size is given, or a size differs from the array's or is below 1.
    """
    if given is not None and not isinstance(given, (list, tuple)):
        raise ValueError(f'{op}: {name} must be {len(axes)} integers of at least 1, got {given!r}')
    own = None
    if is_array(source) and len(source.shape) > max(axes):
        own = tuple(int(source.shape[axis]) for axis in axes)
    if given is None and own is None:
        raise ValueError(f'{op}: {name} is needed where the input is a function')
    if given is not None and own is not None and tuple(given) != own:
        raise ValueError(f'{op}: {name} must be that of the input, {own}, got {tuple(given)}')
    sizes = own if own is not None else tuple(given)
    if len(sizes) != len(axes) or not all(type(n) is int and n >= 1 for n in sizes):
        raise ValueError(f'{op}: {name} must be {len(axes)} integers of at least 1, got {sizes}')
    return sizes


def bands(op: str, name: str, length: int, step: int) -> List[Tuple[int, int]]:
    """Return the start and the end of bands of at most `step` of `length` entries.

    Raises:
        ValueError: the step is below 1.
    """
    if type(step) is not int or step < 1:
        raise ValueError(f'{op}: {name} must be an integer of at least 1, got {step!r}')
    return [(start, min(start + step, length)) for start in range(0, length, step)]
