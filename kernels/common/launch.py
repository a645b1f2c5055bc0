"""Launch parameters of the Triton kernels: tiles, warps, pipeline stages and layouts. This module needs no Triton."""
import os
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

Launch = Tuple[int, int, Optional[int]]
# Warps, pipeline stages and, if the compiler's own choice would spill, the maximum of registers per thread, by kernel,
# target and (bytes per element, side of the tile). A row for one target ('cuda:90') needs a measurement on it. None has
# been made yet, so all targets take the default, with which no register spills according to the compiler
# (`subquad kernels --compile cuda:90`).
CONFIGS: Dict[str, Dict[str, Dict[Tuple[int, int], Launch]]] = {
    'polyline_attention_fwd': {'default': {(2, 16): (2, 2, 255), (2, 32): (4, 2, 255),
                                           (4, 16): (4, 1, 255), (4, 32): (8, 1, 255)}},
    'polyline_attention_bwd': {'default': {(2, 16): (4, 1, 255), (2, 32): (4, 1, 255),
                                           (4, 16): (4, 1, 255), (4, 32): (8, 1, 255)}},
    'decay_attention_fwd': {'default': {(2, 16): (1, 2, None), (2, 32): (4, 2, None), (2, 64): (4, 2, None),
                                        (4, 16): (4, 1, 255), (4, 32): (8, 1, 255), (4, 64): (8, 1, 255)}},
    'decay_attention_bwd': {'default': {(2, 16): (4, 1, 255), (2, 32): (4, 1, 255), (2, 64): (8, 1, 255),
                                        (4, 16): (4, 1, 255), (4, 32): (8, 1, 255), (4, 64): (8, 1, 255)}},
    'polyline_scan_fwd': {'default': {(size, side): (8 if side == 512 else 4, 1, None)
                                      for size in (2, 4) for side in (16, 32, 64, 128, 256, 512)}},
    'polyline_scan_bwd': {'default': {(size, side): (8 if side == 512 else 4, 1, None)
                                      for size in (2, 4) for side in (16, 32, 64, 128, 256, 512)}},
    'separable_attention': {'default': {(size, 64): (4, 2, None) for size in (2, 4)}},
    # The number of values at a tile's first level stands in place of a side: 32 per thread.
    'quadtree_solve': {'default': {(size, 1 << n): (max(1, (1 << n) // 1024), 1, None)
                                   for size in (2, 4) for n in range(6, 14)}},
}
TILES = (16, 32, 64)
# Sides of the largest tiles that stay in registers, by kernel and bytes per element, for heads of at most (32, 64, 128)
# channels.
LARGEST_TILE: Dict[str, Dict[int, Tuple[int, int, int]]] = {
    'polyline_attention_fwd': {2: (32, 32, 32), 4: (32, 32, 16)},
    'polyline_attention_bwd': {2: (16, 32, 16), 4: (32, 32, 16)},
    'decay_attention': {2: (64, 32, 32), 4: (64, 32, 16)},
}
# Side of the tiles of decay_attention for lines longer than one tile (64 spilled on sm_80).
LONG_LINE_TILE = 32
# Fixed cost of a tile in units of its side: it makes one tile of 64 cheaper than four of 16.
_TILE_OVERHEAD = 8


# Channels of the widest heads that fit a tile.
LARGEST_HEAD = 128


def head_too_wide(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Optional[str]:
    """Return why attention kernels, which hold tiles of whole heads, cannot take these tensors; None if they can."""
    largest = max(x.shape[-1] for x in (q, k, v))
    if largest > LARGEST_HEAD:
        return f'the kernels take heads of at most {LARGEST_HEAD} channels, and these have {largest}.'
    return None


def largest_tile(kernel: str, dtype: torch.dtype, *dims: int) -> int:
    """Return the side of the largest tile for heads of `dims` channels."""
    return LARGEST_TILE[kernel][dtype.itemsize][(max(dims) > 32) + (max(dims) > 64)]


def tile(length: int, largest: int = TILES[-1]) -> int:
    """Return the side of the tiles that cover a line of `length` tokens with little padding and few tiles."""
    return min((t for t in TILES if t <= largest), key=lambda t: (-(-length // t) * (t + _TILE_OVERHEAD), t))


def padding_ratio(length: int) -> float:
    """Return the tokens that the smallest tiles cover divided by the tokens of a line: at least 1."""
    return -(-length // TILES[0]) * TILES[0] / length


def target() -> Tuple[str, str]:
    """Return the backend and architecture that Triton compiles for, such as ('cuda', '90')."""
    if interpreted():
        return 'interpreter', ''
    import triton
    found = triton.runtime.driver.active.get_current_target()
    return found.backend, str(found.arch)


def options(kernel: str, dtype: torch.dtype, side: int) -> Dict[str, Any]:
    """Return the launch options of a kernel for tiles of this side."""
    backend, arch = target()
    table = CONFIGS[kernel]
    warps, stages, registers = table.get(f'{backend}:{arch}', table['default'])[dtype.itemsize, side]
    limit = {'maxnreg': registers} if registers and backend == 'cuda' else {}
    return {'num_warps': warps, 'num_stages': stages, **limit}


def programs(count: int) -> Tuple[int]:
    """Return a launch grid of `count` programs along its first axis, which holds 2^31 - 1 (the others hold 65,535).

    Raises:
        ValueError: there are too many programs.
    """
    if count >= 2 ** 31:
        raise ValueError(f'the problem takes {count:,} programs, and a launch holds at most {2 ** 31 - 1:,}: split it '
                         'along the batch')
    return (count,)


def check_line(length: int, *token_strides: int) -> None:
    """Check that 32-bit offsets reach every token of a line (offsets of lines have 64 bits).

    Raises:
        ValueError: a line spans 2^31 elements or more.
    """
    if (length + TILES[-1]) * max(token_strides) >= 2 ** 31:
        raise ValueError(f'a line of {length:,} tokens, {max(token_strides):,} elements apart, spans 2^31 elements or '
                         'more, which the kernels do not address')


def check_grid(*grids: Tensor) -> None:
    """Check that 32-bit offsets reach every element of an image of (B, H, W, C) (offsets of images have 64 bits).

    Raises:
        ValueError: an image spans nearly 2^31 elements or more.
    """
    for x in grids:
        span = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:]))
        if span >= 2 ** 31 - 2 ** 24:                # blocks reach a little past the end before they are masked
            raise ValueError(f'an image of shape {tuple(x.shape[1:])} with strides {tuple(x.stride()[1:])} spans 2^31 '
                             'elements or nearly so, which the kernels do not address')


def padded_power_of_two(count: int) -> int:
    """Return the side of a tile for `count` channels or tokens: the next power of two, at least 16."""
    return max(16, 1 << (count - 1).bit_length())


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which takes tensors of any device."""
    return os.environ.get('TRITON_INTERPRET', '0').lower() in ('1', 'true', 'yes', 'on', 'y')


def numerics(dtype: torch.dtype) -> Dict[str, Any]:
    """Return constants of a kernel that multiplies tensors of `dtype`; float32 follows PyTorch's TF32 switch."""
    # Reading the older `allow_tf32` fails once a program has set this newer switch.
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == 'tf32'
    return {'UPCAST': interpreted() and dtype == torch.bfloat16, 'PRECISION': 'tf32' if tf32 else 'ieee'}


def token_major(shape: Sequence[int], like: Tensor, dtype: torch.dtype = None) -> Tensor:
    """Return an uninitialized (B, heads, H, W, D) stored as (B, H, W, heads, D): merging heads needs no copy."""
    batch, heads, height, width, dim = shape
    return like.new_empty((batch, height, width, heads, dim), dtype=dtype).permute(0, 3, 1, 2, 4)


def as_token_major(x: Tensor) -> Tensor:
    """Return x (B, heads, H, W, D) in the memory order of `token_major`."""
    return x.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)


def unit_stride(x: Tensor) -> Tensor:
    """Return x, copied only if its last dimension is not dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def dense_like(x: Tensor) -> Tensor:
    """Return an uninitialized, dense tensor of the shape, dtype and device of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def strides(x: Tensor, swapped: bool = False) -> Tuple[int, int, int, int]:
    """Return the strides of batch, head, grid row and grid column; with `swapped`, of columns as rows."""
    batch, heads, row, column, _ = x.stride()
    return (batch, heads, column, row) if swapped else (batch, heads, row, column)
