"""Memory and block sizes for operators that work through a large problem block by block."""
from functools import cache
from math import prod
from typing import List, Optional, Sequence

import torch
from torch import Tensor

# Sums of exponentials from here to the reciprocal are exact: numbers of float32 end at 2^-149 and 2^128, and the rest
# is for the number of summands and their products with values.
LEAST_SUM = 2.0 ** -100


def ranges(total: int, step: int) -> List[slice]:
    """Split [0, total) into slices of about equal size, each of at most max(step, 1)."""
    step = max(1, min(total, step))
    step = -(-total // -(-total // step)) if total else 1
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


class Workspace:
    """Memory that all blocks of one call share: a new allocation per block costs more than its arithmetic."""

    def __init__(self, like: Tensor):
        self.like, self.parts = like, {}

    def get(self, name: str, shape: Sequence[int], dtype: Optional[torch.dtype] = None) -> Tensor:
        """Return an uninitialized tensor for `out=`; calls with the same name share memory, and have one dtype."""
        count = prod(shape)
        if name not in self.parts or self.parts[name].numel() < count:
            self.parts[name] = self.like.new_empty(count, dtype=dtype)
        return self.parts[name][:count].view(shape)


@cache
def keep_freed_memory() -> None:
    """Make the C allocator keep up to 62 MB of freed memory, instead of returning it to the system after each block.

    Memory that is returned has to be mapped again page by page. glibc's thresholds follow the largest block freed so
    far (see M_MMAP_THRESHOLD in mallopt(3)), so this function allocates and frees a block of 31 MB.
    """
    torch.empty(31 * 2 ** 20, dtype=torch.uint8)


def sums_are_safe(sums: Tensor) -> bool:
    """Whether sums of exponentials that were not referred to their maximum are exact: none overflowed, and those that
    underflowed are nothing beside their sum. Reading the answer waits for a GPU.

    Args:
        sums: float32 or float64, of weights at least one of which has a log mask of 0.
    """
    low, high = torch.aminmax(sums)
    return LEAST_SUM <= float(low) and float(high) <= 1 / LEAST_SUM      # false for NaN


def packed(x: Tensor) -> Tensor:
    """Return x, as a contiguous copy if it is bfloat16 on a CPU.

    PyTorch's arithmetic on bfloat16 with gaps or repeated numbers works through single numbers, and its copies do not:
    dividing 280 x 56 rows of 16 by a number each takes 0.22 ms, with a copy 0.05 (measured on two cores).
    """
    return x.contiguous() if x.is_cpu and x.dtype == torch.bfloat16 else x
