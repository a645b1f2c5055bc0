"""Working through a large problem by blocks, with the same memory for every block."""
from functools import cache
from math import prod
from typing import List, Sequence

import torch
from torch import Tensor

# exp(s) for |s| <= 60 neither overflows nor underflows in float32, nor do sums of a million such numbers.
SAFE_LOGIT = 60.0


def ranges(total: int, step: int) -> List[slice]:
    """[0, total) in pieces of about the same size, of at most `step` (or 1)."""
    step = max(1, min(total, step))
    step = -(-total // -(-total // step)) if total else 1
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


class Workspace:
    """Memory that the blocks of one call reuse: fresh memory for each costs more than the arithmetic on it."""

    def __init__(self, like: Tensor):
        self.like, self.parts = like, {}

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        """An uninitialised tensor to hand to `out=`, the same memory at every call with this name."""
        count = prod(shape)
        if name not in self.parts or self.parts[name].numel() < count:
            self.parts[name] = self.like.new_empty(count)
        return self.parts[name][:count].view(shape)


@cache
def keep_freed_memory() -> None:
    """Teach the C allocator to keep up to 62 MB of freed memory, which it would give back to the kernel after each
    block and take again page by page.

    glibc's thresholds follow the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD): free one of 31 MB, unused.
    """
    torch.empty(31 * 2 ** 20, dtype=torch.uint8)


def exponentials_are_safe(q: Tensor, k: Tensor) -> List[bool]:
    """For each group, whether a softmax of (q k' + log mask) may skip its subtraction of the maximum.

    With |q| |k| <= 60 no exponential is above e^60, and the one whose log mask is 0, which every row has, keeps the
    row's sum above e^-60. On a GPU the answer would have to be waited for, so there it is no.

    Args:
        q, k: (G, ..., D).
    """
    if q.device.type != 'cpu':
        return [False] * len(q)
    ones = q.new_ones(q.shape[-1])           # a product with ones: sums over so short a dimension are slow
    squares = [torch.mv(x.reshape(-1, x.shape[-1]).square(), ones).view(len(x), -1).amax(1) for x in (q, k)]
    return (squares[0] * squares[1] <= SAFE_LOGIT ** 2).tolist()
