"""Orders of the tokens of a grid."""
from typing import Dict, Tuple

from torch import Tensor

# Name -> whether columns come one after the other, instead of rows, and whether the order is reversed.
PATHS: Dict[str, Tuple[bool, bool]] = {
    'right': (False, False), 'down': (True, False), 'left': (False, True), 'up': (True, True)}


def to_lines(x: Tensor, columns_first: bool) -> Tensor:
    """Flatten a grid (B, H, W, C) to lines with one head, (B, 1, T, C)."""
    return (x.transpose(1, 2) if columns_first else x).flatten(1, 2).unsqueeze(1)


def to_grid(x: Tensor, like: Tensor, columns_first: bool) -> Tensor:
    """Undo `to_lines`: (B, 1, T, C) -> (B, H, W, C), with H and W of `like`."""
    height, width = like.shape[1:3]
    return (x[:, 0].unflatten(1, (width, height)).transpose(1, 2) if columns_first
            else x[:, 0].unflatten(1, (height, width)))


def token_rows(x: Tensor) -> Tuple[Tensor, int, int, int]:
    """Return x (B, H, W, ..., C) and its strides of images, tokens and paths.

    It is a copy unless its channels are dense and all its tokens have one stride.
    """
    batch, row, column, *path, channel = x.stride()
    _, height, width, *_, channels = x.shape
    if channel != 1 and channels > 1 or row != width * column and height > 1 and width > 1:
        return token_rows(x.contiguous())
    return x, batch, column if width > 1 else row, *(path or [0])
