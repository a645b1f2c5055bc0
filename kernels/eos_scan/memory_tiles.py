"""What Triton kernels that loop over tokens share: a program holds a tile of one memory in registers, all of its K rows
and some of its D columns, and goes along one line in one direction. Import late: this imports Triton."""
from typing import Any, Dict, List, Optional, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from .problem import DIRECTIONS

# Triton would compile a kernel again where one of these is 1 or divisible by 16.
SIZES = ('lines', 'heads', 'length', 'keys', 'dim', 'parts', 'backwards')


@triton.jit
def place(index, lines, heads, parts, backwards):
    """Return the number of the direction, the line, its batch and head, the part of the columns, and whether the
    direction runs from the last token, for the program of this index.

    backwards: 1 if the first direction runs from the last token, else 0."""
    group, part = index // parts, index % parts
    number, line = group // lines, (group % lines).to(tl.int64)
    return number, line, line // heads, line % heads, part, backwards + number


@triton.jit
def load_vector(pointer, index, mask):
    """Load a vector of one token, and zeros where `mask` is false, in float32."""
    return tl.load(pointer + index, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def outer(x, y):
    return x[:, None] * y[None, :]


class Lines:
    """Launch of a kernel of an operator on i (B, H, T, D) with memories of `keys` rows.

    columns: of a tile at most; by default as many as one warp holds, or 16."""

    def __init__(self, kernel: str, i: Tensor, keys: int, direction: str, columns: Optional[int] = None):
        batch, heads, self.length, self.dim = i.shape
        self.keys, self.lines, self.directions = keys, batch * heads, len(DIRECTIONS[direction])
        block_k = launch.padded_power_of_two(keys)
        # Sums over the rows of a tile in one warp need no barrier.
        block_d = min(columns or max(16, 512 // block_k), launch.padded_power_of_two(self.dim))
        self.parts = launch.cdiv(self.dim, block_d)
        self.programs = launch.programs(self.directions * self.lines * self.parts)
        # In the order of SIZES.
        self.sizes = (self.lines, heads, self.length, keys, self.dim, self.parts, int(DIRECTIONS[direction][0]))
        self.constants: Dict[str, Any] = {'BLOCK_K': block_k, 'BLOCK_D': block_d,
                                          **launch.options(kernel, i.dtype, block_d, block_k)}

    def columns(self, i: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for a vector (D,) of each token and direction."""
        return i.new_empty((self.directions, *i.shape), dtype=dtype)

    def rows(self, i: Tensor) -> Tensor:
        """Return memory for a vector (K,) of each token, direction and part of the columns."""
        return i.new_empty((self.directions * self.parts, *i.shape[:3], self.keys), dtype=torch.float32)


def strides(*tensors: Tensor) -> List[int]:
    """Return the strides of batch, head and token of each tensor."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def broadcast_strides(x: Optional[Tensor], rank: int) -> Sequence[int]:
    """Return the strides of x, 0 where it has a size of 1; zeros for None."""
    return (0,) * rank if x is None else [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride())]


def dense(x: Optional[Tensor]) -> Optional[Tensor]:
    """Return a memory in float32 as kernels index it."""
    return None if x is None else x.float().contiguous()


def total(parts: Tensor) -> Tensor:
    """Add up the first dimension."""
    return parts[0] if len(parts) == 1 else parts.sum(0)
