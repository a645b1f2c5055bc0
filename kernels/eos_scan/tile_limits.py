"""What the Triton kernels that hold a memory in registers take and store. This module needs no Triton."""
from typing import Optional

# Rows of the largest memory.
LARGEST_KEYS = 128
# Tokens between the memories that a forward kernel stores for a backward kernel.
SPACING = 16


def memory_too_large(keys: int) -> Optional[str]:
    """Return why the kernels cannot take memories of so many rows; None if they can."""
    if keys <= LARGEST_KEYS:
        return None
    return f'the kernels take memories of at most {LARGEST_KEYS} rows (K), and these have {keys}.'
