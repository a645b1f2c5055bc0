"""How the Triton kernels are launched: tiles, warps, pipeline stages and layouts. Does not import Triton."""
import os
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

# Warps, pipeline stages and, where the compiler's own choice would spill, the registers a thread may take, by kernel,
# target and (bytes of an element, side of the tile). A target's own row ('cuda:90') is to be written from a measurement
# there; none has been made yet, so all take the default: no register spills, by the compiler's report
# (`subquad kernels --compile cuda:90`).
Launch = Tuple[int, int, Optional[int]]
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
    # In place of a side: numbers at a tile's first level, 32 for each thread.
    'quadtree_solve': {'default': {(size, 1 << n): (max(1, (1 << n) // 1024), 1, None)
                                   for size in (2, 4) for n in range(6, 14)}},
}
TILES = (16, 32, 64)
# The largest tiles that stay in registers: by kernel and bytes of an element, the side for heads of at most
# (32, 64, 128) channels.
LARGEST_TILE: Dict[str, Dict[int, Tuple[int, int, int]]] = {
    'polyline_attention_fwd': {2: (32, 32, 32), 4: (32, 32, 16)},
    'polyline_attention_bwd': {2: (16, 32, 16), 4: (32, 32, 16)},
    'decay_attention': {2: (64, 32, 32), 4: (64, 32, 16)},
}
# decay_attention: tiles of lines that are longer than one (64 spilled on sm_80).
LONG_LINE_TILE = 32
# What a tile costs beside its elements, in units of its side: why 64 beats 4 x 16 where both fill a line.
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
    """Side of the largest tile for heads of `dims` channels."""
    return LARGEST_TILE[kernel][dtype.itemsize][(max(dims) > 32) + (max(dims) > 64)]


def tile(length: int, largest: int = TILES[-1]) -> int:
    """Side of the tiles that cover a line of `length` tokens: little waste, few tiles."""
    return min((t for t in TILES if t <= largest), key=lambda t: (-(-length // t) * (t + _TILE_OVERHEAD), t))


def padding(length: int) -> float:
    """Tokens that the smallest tiles cover for each token of a line."""
    return -(-length // TILES[0]) * TILES[0] / length


def target() -> Tuple[str, str]:
    """Backend and architecture that Triton compiles for now, such as ('cuda', '90')."""
    if interpreted():
        return 'interpreter', ''
    import triton
    found = triton.runtime.driver.active.get_current_target()
    return found.backend, str(found.arch)


def options(kernel: str, dtype: torch.dtype, side: int) -> Dict[str, Any]:
    """Launch options of a kernel for tiles of this side."""
    backend, arch = target()
    table = CONFIGS[kernel]
    warps, stages, registers = table.get(f'{backend}:{arch}', table['default'])[dtype.itemsize, side]
    limit = {'maxnreg': registers} if registers and backend == 'cuda' else {}
    return {'num_warps': warps, 'num_stages': stages, **limit}


def programs(count: int) -> Tuple[int]:
    """A launch grid of `count` programs: all along its first axis, whose limit is 2^31 - 1 and not 65,535.

    Raises:
        ValueError: too many.
    """
    if count >= 2 ** 31:
        raise ValueError(f'the problem takes {count:,} programs, and a launch holds at most {2 ** 31 - 1:,}: split it '
                         'along the batch')
    return (count,)


def check_line(length: int, *token_strides: int) -> None:
    """Offsets from the start of a line of tokens are 32-bit numbers (those of the lines are 64-bit).

    Raises:
        ValueError: a line that spans more.
    """
    if (length + TILES[-1]) * max(token_strides) >= 2 ** 31:
        raise ValueError(f'a line of {length:,} tokens, {max(token_strides):,} elements apart, spans 2^31 elements or '
                         'more, which the kernels do not address')


def check_grid(*grids: Tensor) -> None:
    """Offsets within one image (B, H, W, C) are 32-bit numbers (those of images are 64-bit).

    Raises:
        ValueError: an image that spans more.
    """
    for x in grids:
        span = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:]))
        if span >= 2 ** 31 - 2 ** 24:                # blocks reach a little past the end before they are masked
            raise ValueError(f'an image of shape {tuple(x.shape[1:])} with strides {tuple(x.stride()[1:])} spans 2^31 '
                             'elements or nearly so, which the kernels do not address')


def block(dim: int) -> int:
    """Channels of a tile for heads of `dim`: the next power of two that a matrix unit takes."""
    return max(16, 1 << (dim - 1).bit_length())


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of any device."""
    return os.environ.get('TRITON_INTERPRET', '0').lower() in ('1', 'true', 'yes', 'on', 'y')


def numerics(dtype: torch.dtype) -> Dict[str, Any]:
    """Constants of a kernel that multiplies tensors of `dtype`: float32 products follow PyTorch's own TF32 switch."""
    # Not `allow_tf32`: reading it fails once a program has set the newer switch.
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == 'tf32'
    return {'UPCAST': interpreted() and dtype == torch.bfloat16, 'PRECISION': 'tf32' if tf32 else 'ieee'}


def token_major(shape: Sequence[int], like: Tensor, dtype: torch.dtype = None) -> Tensor:
    """Uninitialised (B, heads, H, W, D) whose memory runs (B, H, W, heads, D): heads merge into channels for free."""
    batch, heads, height, width, dim = shape
    return like.new_empty((batch, height, width, heads, dim), dtype=dtype).permute(0, 3, 1, 2, 4)


def as_token_major(x: Tensor) -> Tensor:
    """x: (B, heads, H, W, D) in the memory order of `token_major`."""
    return x.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)


def unit_stride(x: Tensor) -> Tensor:
    """x, copied only where its last dimension isn't dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor, swapped: bool = False) -> Tuple[int, int, int, int]:
    """Strides of batch, head, grid row and grid column; `swapped` reads the grid by columns."""
    batch, heads, row, column, _ = x.stride()
    return (batch, heads, column, row) if swapped else (batch, heads, row, column)
