"""What the Triton kernels that hold a memory in registers take and store. This module needs no Triton."""
from typing import Optional

import torch

from .chunks import SINGLE_CHUNK

# Rows of the largest memory.
LARGEST_KEYS = 128
# Tokens between the memories that a forward kernel stores for a backward kernel.
SPACING = 16


def memory_too_large(keys: int) -> Optional[str]:
    """Return why the kernels cannot take memories of so many rows; None if they can."""
    if keys <= LARGEST_KEYS:
        return None
    return f'the kernels take memories of at most {LARGEST_KEYS} rows (K), and these have {keys}.'


def triton_chunk(dtype: torch.dtype, length: int, chunk: int) -> int:
    """Return the tokens of a chunk of the kernels for rank one. Shorter lines are one chunk.

    Larger tiles do not stay in registers, in float32 or with memories that pass their boundaries.
    """
    half = dtype.itemsize == 2
    single = SINGLE_CHUNK if half else 32
    return single if length <= single else min(chunk, 32 if half else 16)
