"""Operators in C++ for CPUs, in a library that setup.py compiles where it finds a compiler.

`native.cpp` of an operator's folder takes pointers, sizes and strides, and has no headers of PyTorch. It is compiled
once for each instruction set; the functions of the best one that the processor has are called.
"""
import ctypes
import hashlib
import os
import sysconfig
import warnings
from functools import cache
from pathlib import Path
from typing import Callable, Optional

import torch

DONE, OUT_OF_RANGE, NO_MEMORY = range(3)                       # what the functions return


def load(file: Path) -> Optional[ctypes.CDLL]:
    """Return the library in a file, or None if there is none, or if it was built from other sources than these."""
    if not file.exists():
        return None
    library = ctypes.CDLL(str(file))
    sources = sorted(path for path in Path(__file__).parents[1].glob('*/*') if path.suffix in ('.cpp', '.h'))
    if sources:                                                  # wheels do not have them
        library.subquad_sources.restype = ctypes.c_char_p
        if library.subquad_sources() != hashlib.sha256(
                b''.join(path.read_bytes() for path in sources)).hexdigest().encode():
            warnings.warn('the native operators were built from other sources, and PyTorch takes their place: install '
                          'subquad again (pip install -e .)', stacklevel=2)
            return None
    library.subquad_instruction_sets.restype = ctypes.c_char_p
    # Loops run on the threads of PyTorch: those of a second runtime would compete with them for the cores. This entry
    # to them is libgomp's; with another runtime there is none, and the operators run on one thread.
    torch_library = Path(torch.__file__).parent / 'lib' / 'libtorch_cpu.so'
    entry = getattr(ctypes.CDLL(str(torch_library)), 'GOMP_parallel', None) if torch_library.exists() else None
    if entry is not None:
        ctypes.c_void_p.in_dll(library, 'subquad_parallel').value = ctypes.cast(entry, ctypes.c_void_p).value
    return library


def _instruction_set() -> Optional[str]:
    """Return the instruction set to use: the processor's best one, or what SUBQUAD_INSTRUCTION_SET names."""
    if LIBRARY is None:
        return None
    known = LIBRARY.subquad_instruction_sets().decode().split()
    chosen = os.environ.get('SUBQUAD_INSTRUCTION_SET') or (known[-1] if known else None)
    if chosen not in (*known, None):
        raise ValueError(f"SUBQUAD_INSTRUCTION_SET: unknown {chosen!r}; this processor has {', '.join(known)}")
    return chosen


# Constants, because torch.compile reads what chooses an operator.
LIBRARY = load(Path(__file__).with_name(f"operators{sysconfig.get_config_var('EXT_SUFFIX')}"))
INSTRUCTION_SET = _instruction_set()


@cache
def function(name: str) -> Callable[[bytes], int]:
    """Return the function of an operator for the instruction set in use. It takes the bytes of its C structure."""
    return getattr(LIBRARY, f'{name}_{INSTRUCTION_SET}')


def why_not() -> Optional[str]:
    """Return in one clause why no native operator can run here, or None."""
    if LIBRARY is None:
        return 'the native operators are not built from these sources (see docs/installation.md).'
    return None if INSTRUCTION_SET else 'the native operators need a processor with AVX2.'
