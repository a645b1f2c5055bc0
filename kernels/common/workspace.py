"""Memory and block sizes for operators that work through a large problem block by block."""
from functools import cache
from math import prod
from typing import List, Sequence

import torch
from torch import Tensor

# exp(s) for |s| <= 60 neither overflows nor underflows in float32, and neither do sums of a million such numbers.
SAFE_LOGIT = 60.0


def ranges(total: int, step: int) -> List[slice]:
    """Split [0, total) into slices of about equal size, each of at most max(step, 1)."""
    step = max(1, min(total, step))
    step = -(-total // -(-total // step)) if total else 1
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


class Workspace:
    """Memory that all blocks of one call share: a new allocation per block costs more than its arithmetic."""

    def __init__(self, like: Tensor):
        self.like, self.parts = like, {}

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return an uninitialized tensor for `out=`; calls with the same name share memory."""
        count = prod(shape)
        if name not in self.parts or self.parts[name].numel() < count:
            self.parts[name] = self.like.new_empty(count)
        return self.parts[name][:count].view(shape)


@cache
def keep_freed_memory() -> None:
    """Make the C allocator keep up to 62 MB of freed memory, instead of returning it to the system after each block.

    Memory that is returned has to be mapped again page by page. glibc's thresholds follow the largest block freed so
    far (see M_MMAP_THRESHOLD in mallopt(3)), so this function allocates and frees a block of 31 MB.
    """
    torch.empty(31 * 2 ** 20, dtype=torch.uint8)


def exponentials_are_safe(q: Tensor, k: Tensor) -> List[bool]:
    """Whether the softmax of (q k' + log mask) may skip the subtraction of the maximum, for each group.

    With |q| |k| <= 60 no exponential exceeds e^60. Every row has one log mask of 0, so every row's sum is at least
    e^-60. On a GPU the answer is always False, because reading it would wait for the device.

    Args:
        q, k: (G, ..., D).
    """
    if q.device.type != 'cpu':
        return [False] * len(q)
    ones = q.new_ones(q.shape[-1])           # a product with ones is faster than a sum over so short a dimension
    squares = [torch.mv(x.reshape(-1, x.shape[-1]).square(), ones).view(len(x), -1).amax(1) for x in (q, k)]
    return (squares[0] * squares[1] <= SAFE_LOGIT ** 2).tolist()
