"""Compile the Triton kernels ahead of time, for a GPU that this machine need not have."""
import re
from contextlib import contextmanager
from functools import partial
from typing import Callable, Dict, Iterator, List

import torch

from .common.launch import interpreted
from .dispatch import OPERATORS

_TARGET = re.compile(r'cuda:(7[0-9]|8[0-9]|9[0-9]|1[0-2][0-9])|hip:gfx(9|10|11|12)[0-9a-f]{2}')


@contextmanager
def compiling_for(target: str) -> Iterator[List]:
    """Compile for `target` within the block, and launch nothing.

    The context manager yields a list, to which Triton adds each kernel it compiles. Call the kernels with tensors on
    the meta device.

    Args:
        target: such as 'cuda:90' or 'hip:gfx942'.

    Raises:
        RuntimeError: Triton runs in its interpreter, which compiles nothing.
        ValueError: the target is not a known one.
    """
    if interpreted():
        raise RuntimeError('TRITON_INTERPRET is set: the interpreter compiles nothing; unset it')
    import triton
    from triton.backends.compiler import GPUTarget
    backend, _, arch = target.partition(':')
    if not _TARGET.fullmatch(target):
        raise ValueError('target must be like cuda:90 (70 to 129) or hip:gfx942 (gfx9.., gfx10.., gfx11.., gfx12..), '
                         f'got {target!r}')
    warp = 64 if arch.startswith('gfx9') else 32
    gpu = GPUTarget(backend, int(arch) if backend == 'cuda' else arch, warp)
    compiled: List = []

    class NoDriver:
        """The part of a driver that compilation needs."""
        def get_current_target(self):
            return gpu

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    launch = triton.runtime.jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled.append(launch(self, *args, grid=grid, warmup=True, **options))
        for key in list(self.device_caches):            # a later block may compile for another target
            del self.device_caches[key]

    triton.runtime.jit.JITFunction.run = compile_only
    triton.runtime.driver.set_active(NoDriver())
    try:
        yield compiled
    finally:
        triton.runtime.jit.JITFunction.run = launch
        triton.runtime.driver.set_active(None)          # the next launch looks for it again


def cases(dtypes=(torch.float32, torch.bfloat16), dims=(16, 32, 64, 128), lengths=(14, 28, 56)) -> Dict[str, Callable]:
    """Return calls that launch every kernel with every tile and launch option of `launch`, on meta tensors."""
    calls: Dict[str, Callable] = {}
    for dtype in dtypes:
        for dim in dims:
            kind = f'{str(dtype).removeprefix("torch.")}, {dim} channels'
            for operator in OPERATORS.values():
                for name, call in operator.launches(lengths):
                    calls[f'{name}, {kind}'] = partial(call, dtype, dim)
    return calls
