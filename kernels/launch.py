"""How the Triton kernels are launched: tiles, warps, pipeline stages and layouts. Does not import Triton."""
import os
from typing import Any, Dict, Sequence, Tuple

import torch
from torch import Tensor

# (warps, pipeline stages) by kernel, compute capability and side of the tile. An architecture's row is written from a
# measurement there; none has been made yet, so all take the default: as many warps as keep the largest tile (128
# channels, float32) in registers, by the compiler's report (`subquad kernels --compile cuda:90`).
CONFIGS: Dict[str, Dict[str, Dict[int, Tuple[int, int]]]] = {
    'polyline_attention_fwd': {'default': {16: (1, 2), 32: (4, 2), 64: (8, 2)}},
    'polyline_attention_bwd': {'default': {16: (4, 1), 32: (8, 1), 64: (8, 1)}},
    'decay_attention_fwd': {'default': {16: (1, 2), 32: (4, 2), 64: (8, 2)}},
    'decay_attention_bwd': {'default': {16: (4, 1), 32: (8, 1), 64: (8, 1)}},
    'polyline_scan_fwd': {'default': {16: (2, 1), 32: (4, 1), 64: (4, 1), 128: (4, 1), 256: (4, 1), 512: (4, 1)}},
    'polyline_scan_bwd': {'default': {16: (2, 1), 32: (4, 1), 64: (4, 1), 128: (4, 1), 256: (4, 1), 512: (4, 1)}},
}
TILES = (16, 32, 64)
# decay_attention: a longer line is worked on tile by tile.
LONGEST_LINE = TILES[-1]
# What a tile costs beside its elements, in units of its side: why 64 beats 4 x 16 where both fill a line.
_TILE_OVERHEAD = 8


def tile(length: int, largest: int = TILES[-1]) -> int:
    """Side of the tiles that cover a line of `length` tokens: little waste, few tiles."""
    return min((t for t in TILES if t <= largest), key=lambda t: (-(-length // t) * (t + _TILE_OVERHEAD), t))


def padding(length: int) -> float:
    """Tokens that tiles cover for each token of a line."""
    side = tile(length)
    return -(-length // side) * side / max(1, length)


def options(kernel: str, side: int, device: torch.device) -> Dict[str, int]:
    """Launch options of a kernel on a device for tiles of this side."""
    table = CONFIGS[kernel]
    arch = ('sm_{}{}'.format(*torch.cuda.get_device_capability(device))
            if device.type == 'cuda' and torch.version.hip is None else 'default')
    warps, stages = table.get(arch, table['default'])[side]
    return {'num_warps': warps, 'num_stages': stages}


def block(dim: int) -> int:
    """Channels of a tile for heads of `dim`: the next power of two that a matrix unit takes."""
    return max(16, 1 << (dim - 1).bit_length())


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of any device."""
    return os.environ.get('TRITON_INTERPRET', '0').lower() in ('1', 'true', 'yes', 'on', 'y')


def numerics(dtype: torch.dtype) -> Dict[str, Any]:
    """Constants of a kernel that multiplies tensors of `dtype`: float32 products follow PyTorch's own TF32 switch."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
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
