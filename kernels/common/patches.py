"""Groups of tokens of a grid: tokens at one place of their patches ('pixel'), or tokens of one patch ('patch')."""
from typing import List, Sequence, Tuple, Union

import torch
from torch import Tensor

SAMPLINGS = ('pixel', 'patch')
Patch = Tuple[int, int]


def patch(op: str, size: Union[int, Sequence[int]]) -> Patch:
    """Return a patch size as (height, width).

    Raises:
        ValueError: the size is not one or two integers of at least 1.
    """
    both = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (tuple, list)) else ()
    if len(both) != 2 or not all(type(n) is int and n >= 1 for n in both):
        raise ValueError(f'{op}: patch_size must be a positive integer or a pair of positive integers, got {size!r}')
    return both


def group_slices(length: int, count: int, sampling: str) -> List[slice]:
    """Return the tokens along an axis of each of `count` places (or patches), without places that have no token."""
    if sampling == 'pixel':
        return [slice(n, length, count) for n in range(min(count, length))]
    side = -(-length // count)
    return [slice(start, min(start + side, length)) for start in range(0, length, side)]


def group_count(length: int, places: int, sampling: str) -> int:
    """Return how many places (or patches) along an axis have tokens."""
    return min(places, length) if sampling == 'pixel' else -(-length // -(-length // places))


def group_index(length: int, count: int, sampling: str, device) -> Tensor:
    """Return (length,) integers: the place (or patch) of each token along an axis."""
    index = torch.arange(length, device=device)
    return index % count if sampling == 'pixel' else index // -(-length // count)


def check_groups(op: str, keys: Sequence[int], values: Sequence[int], patch: Patch, sampling: str) -> None:
    """Check that every group of values has keys, which a smaller grid of keys may lack.

    Raises:
        ValueError: a group of values has no key.
    """
    for axis in (0, 1):
        if group_count(keys[axis], patch[axis], sampling) < group_count(values[axis], patch[axis], sampling):
            raise ValueError(f'{op}: every group needs a key: with patch_size {tuple(patch)}, keys on a {tuple(keys)} '
                             f'grid leave groups of the {tuple(values)} values without keys')


def fold_patches(x: Tensor, patch: Patch, sampling: str) -> Tensor:
    """Fold (B, C, H, W) to (B, C, P, N), one row per group, with reshapes and permutes of rank 4 at most.

    H and W must be multiples of the patch."""
    batch, channels, height, width = x.shape
    images, rows, columns = batch * channels, height // patch[0], width // patch[1]
    if sampling == 'pixel':
        x = x.reshape(images * rows, patch[0], columns, patch[1]).transpose(2, 3)            # (., pi, pj, columns)
        x = x.reshape(images, rows, patch[0] * patch[1], columns).transpose(1, 2)            # (., pi pj, rows, columns)
    else:
        x = x.reshape(images * patch[0], rows, patch[1], columns).transpose(1, 2)            # (. pi, pj, rows, columns)
    return x.reshape(batch, channels, patch[0] * patch[1], rows * columns)


def unfold_patches(x: Tensor, patch: Patch, sampling: str, height: int, width: int) -> Tensor:
    """Invert `fold_patches`: (B, C, P, N) -> (B, C, H, W)."""
    batch, channels = x.shape[:2]
    images, rows, columns = batch * channels, height // patch[0], width // patch[1]
    if sampling == 'pixel':
        x = x.reshape(images, patch[0] * patch[1], rows, columns).transpose(1, 2)            # (., rows, pi pj, columns)
        x = x.reshape(images * rows, patch[0], patch[1], columns).transpose(2, 3)            # (., pi, columns, pj)
    else:
        x = x.reshape(images * patch[0], patch[1], rows, columns).transpose(1, 2)            # (. pi, rows, pj, columns)
    return x.reshape(batch, channels, height, width)
