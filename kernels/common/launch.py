"""Launch parameters of the Triton kernels: tiles, warps, pipeline stages and layouts. This module needs no Triton."""
import os
from functools import lru_cache
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import launch_table

TILES = (16, 32, 64)
# Sides of the largest tiles that stay in registers, by kernel and bytes per element, for heads of at most (32, 64, 128)
# channels.
LARGEST_TILE: Dict[str, Dict[int, Tuple[int, int, int]]] = {
    'polyline_attention_running_fwd': {2: (32, 32, 32), 4: (32, 32, 16)},
    'polyline_attention_running_bwd': {2: (16, 16, 16), 4: (32, 32, 16)},
    'decay_attention': {2: (64, 32, 32), 4: (32, 32, 16)},
    # Lines longer than one tile. Backward tiles of 64 spill on sm_80.
    'decay_attention_long_fwd': {2: (64, 16, 16), 4: (32, 32, 16)},
    'decay_attention_long_bwd': {2: (32, 16, 16), 4: (32, 16, 16)},
}
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
    driver = triton.runtime.driver.active
    return _target_of(driver, driver.get_current_device())


@lru_cache(maxsize=64)                  # asking the driver takes longer than the rest of a launch's options
def _target_of(driver: Any, device: int) -> Tuple[str, str]:
    found = driver.get_current_target()
    return found.backend, str(found.arch)


def options(kernel: str, dtype: torch.dtype, side: int, channels: int) -> Dict[str, Any]:
    """Return the launch options of a kernel from `launch_table`.

    Args:
        kernel: its name in the table.
        dtype: of its tensors.
        side: of its tiles, or what stands in place of a side.
        channels: of its tiles, padded: BLOCK_D, or the larger of BLOCK_D and BLOCK_V.

    Raises:
        ValueError: the table has no row for these tiles, or SUBQUAD_LAUNCH_TABLE names a file that cannot be used.
    """
    backend, arch = target()
    size = launch_table.Size(dtype.itemsize, channels, side)
    warps, stages, registers = launch_table.find(launch_table.Key(kernel, size), backend, arch)
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


def check_grid(*grids: Tensor, first: int = 1) -> None:
    """Check that 32-bit offsets reach every element of an image of (B, H, W, C) (offsets of images have 64 bits).

    Args:
        grids: tensors of that shape, or of any other one.
        first: the first dimension whose offsets have 32 bits.

    Raises:
        ValueError: an image spans nearly 2^31 elements or more.
    """
    for x in grids:
        shape, strides = tuple(x.shape[first:]), x.stride()[first:]
        span = sum((size - 1) * stride for size, stride in zip(shape, strides))
        if span >= 2 ** 31 - 2 ** 24:                # blocks reach a little past the end before they are masked
            what = 'an image' if first == 1 else 'a slice'
            raise ValueError(f'{what} of shape {shape} with strides {strides} spans 2^31 elements or nearly so, which '
                             'the kernels do not address')


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up. On the host, `triton.cdiv` takes several microseconds."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def padded_power_of_two(count: int) -> int:
    """Return the side of a tile for `count` channels or tokens: the next power of two, at least 16."""
    return max(16, next_power_of_2(count))


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
    batch, heads, row, column = x.stride()[:4]
    return (batch, heads, column, row) if swapped else (batch, heads, row, column)


def own_logit_reference(dtype: torch.dtype, *dims: int) -> bool:
    """Whether polyline attention with heads of `dims` channels may refer its exponentials to the query's own logit.

    Weights exceed 1 where a logit exceeds the own one, and float16 overflows 11 nats above it. Wider heads do not fit
    the registers of the backward kernels.
    """
    return dtype in (torch.bfloat16, torch.float32) and max(dims) <= 64


def fits_tile(kernel: str, dtype: torch.dtype, length: int, *dims: int) -> bool:
    """Whether a line of `length` tokens fits the largest tile for heads of `dims` channels."""
    return length <= largest_tile(kernel, dtype, *dims)


def heads_last(x: Tensor) -> Tensor:
    """Return an uninitialized tensor like x (B, heads, H, W), stored as (B, H, W, heads)."""
    batch, heads, height, width = x.shape
    return x.new_empty((batch, height, width, heads)).permute(0, 3, 1, 2)


def token_order(x: Tensor) -> Tensor:
    """Return an uninitialized tensor like x (B, heads, N, D), stored as (B, N, heads, D)."""
    batch, heads, tokens, dim = x.shape
    return x.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
