"""Compile the Triton kernels ahead of time, for a GPU that this machine need not have, and read their resource use."""
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .common.launch import interpreted
from .trees import quadtree_levels

_TARGET = re.compile(r'cuda:(7[0-9]|8[0-9]|9[0-9]|1[0-2][0-9])|hip:gfx(9|10|11|12)[0-9a-f]{2}')


@dataclass(frozen=True)
class Resources:
    """Resource use of one launch of a kernel.

    Attributes:
        registers: registers per thread; None if the target's tools do not report them.
        stack: bytes of stack per thread, which spilled registers use; None if the target's tools do not report them.
        shared: bytes of shared memory per program.
    """
    kernel: str
    constants: str
    warps: int
    registers: Optional[int]
    stack: Optional[int]
    shared: int


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


def _usage(kernel) -> Dict[str, int]:
    """Read REG and STACK of a compiled kernel with cuobjdump, which comes with Triton."""
    import triton
    tool = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / 'cuobjdump'
    tool = str(tool) if tool.exists() else shutil.which('cuobjdump')
    if 'cubin' not in kernel.asm or tool is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(kernel.asm['cubin'])
        file.flush()
        text = subprocess.run([tool, '-res-usage', file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r'(REG|STACK):(\d+)', text)}


def compile_all(calls: Mapping[str, Callable[[], Tensor]], target: str) -> Dict[str, List[Resources]]:
    """Compile every kernel that the calls launch on meta tensors, and return its resource use by name of the call.

    Raises:
        Exception: a kernel does not compile (Triton's own exceptions).
    """
    result: Dict[str, List[Resources]] = {}
    for name, call in calls.items():
        with compiling_for(target) as kernels:
            call()
        result[name] = []
        for kernel in kernels:
            usage, constants = _usage(kernel), {}
            if hasattr(kernel.src, 'constants'):
                constants = {kernel.src.fn.arg_names[key[0]]: value for key, value in kernel.src.constants.items()}
            shown = ', '.join(f'{key} {value}' for key, value in constants.items()
                              if key in ('BLOCK', 'BLOCK_D', 'BLOCK_V', 'SIDE', 'LEVELS'))
            result[name].append(Resources(kernel.metadata.name.strip('_'), shown, kernel.metadata.num_warps,
                                          usage.get('REG'), usage.get('STACK'), kernel.metadata.shared))
    return result


def cases(dtypes=(torch.float32, torch.bfloat16), dims=(16, 32, 64, 128), lengths=(14, 28, 56)) -> Dict[str, Callable]:
    """Return calls that launch every kernel with every tile and launch option of `launch`, on meta tensors."""
    calls: Dict[str, Callable] = {}
    for dtype in dtypes:
        for dim in dims:
            kind = f'{str(dtype).removeprefix("torch.")}, {dim} channels'
            for name, call, *args in _cases_of(lengths):
                calls[f'{name}, {kind}'] = partial(call, dtype, dim, *args)
    return calls


def _cases_of(lengths: Sequence[int]) -> Iterator[Tuple]:
    """Name, function and arguments of each case, without dtype and channels."""
    mask_modes = ('additive', 'multiplicative')
    for length in lengths:
        for mask_mode in mask_modes:
            yield f'polyline_attention, {mask_mode}, {length} x {length}', _polyline, length, mask_mode, 'both'
            yield f'decay_attention, {mask_mode}, lines of {length}', _decay, length, mask_mode
        for paths in ('v2h', 'h2v'):
            yield f'polyline_attention, {paths}, {length} x {length}', _polyline, length, 'additive', paths
    for mask_mode in mask_modes:
        yield f'decay_attention, {mask_mode}, lines of 100', _decay, 100, mask_mode
    for length in (*lengths, 100, 256, 600):
        yield f'polyline_scan, lines of {length}', _scan, length
    for latents in (1, 8):
        for keys in ('keys', 'mapped keys'):
            yield (f'separable_attention, {latents} latent, {keys}, 32 x 32', _separable, 32, latents,
                   keys == 'mapped keys')
    # Trees of one tile, and trees of tiles of either side.
    for side, parametrization in ((7, 'symmetric'), (14, 'laplacian'), (28, 'skew'), (200, 'laplacian')):
        yield f'quadtree_solve, {parametrization}, {side} x {side}', _quadtree, side, parametrization


def _attention_inputs(dtype: torch.dtype, dim: int, length: int) -> Tuple[List[Tensor], List[Tensor]]:
    """q, k, v and a gradient; sums of step logs along rows and along columns."""
    tensors = [torch.empty(2, 4, length, length, dim, dtype=dtype, device='meta') for _ in range(4)]
    return tensors, [torch.empty(2, 4, length, length, device='meta') for _ in range(2)]


def _polyline(dtype: torch.dtype, dim: int, length: int, mask_mode: str, paths: str) -> None:
    from .polyline_attention import triton
    (q, k, v, grad), (sa, sb) = _attention_inputs(dtype, dim, length)
    triton.forward(q, k, v, sa, sb, mask_mode, paths, False)
    saved = triton.forward(q, k, v, sa, sb, mask_mode, paths, True)
    triton.backward(grad, q, k, v, sa, sb, *saved, mask_mode, paths)


def _decay(dtype: torch.dtype, dim: int, length: int, mask_mode: str) -> None:
    from .decay_attention import triton
    (q, k, v, grad), (sums, _) = _attention_inputs(dtype, dim, length)
    saved = triton.forward(q, k, v, sums, 'row', mask_mode, True)
    triton.backward(grad, q, k, v, sums, *saved, 'row', mask_mode)


def _scan(dtype: torch.dtype, dim: int, length: int) -> None:
    from .polyline_scan import triton
    x = torch.empty(2, 4, length, 3, dim, dtype=dtype, device='meta')
    steps = torch.empty(2, 4, length, 3, device='meta')
    triton.backward(triton.forward(x, steps, 2, torch.float32), x, steps, 2)


def _separable(dtype: torch.dtype, dim: int, side: int, latents: int, key_map: bool) -> None:
    from .separable_attention import triton
    x = torch.empty(2, side, side, dim, dtype=dtype, device='meta')
    query, weight = x.new_empty(2, side, side, latents), x.new_empty(dim, dim) if key_map else None
    _, statistics, summed = triton.forward(query, x, x, weight, None, (2, 2), 'pixel')
    triton.backward(x, query, x, x, weight, None, statistics, summed, (2, 2), 'pixel')


def _quadtree(dtype: torch.dtype, dim: int, side: int, parametrization: str) -> None:
    from .quadtree_solve import triton
    levels, heads = quadtree_levels(side, side), 4
    values = [torch.empty(2, x.height, x.width, heads, dim, dtype=dtype, device='meta').permute(0, 3, 1, 2, 4)
              for x in levels]
    edges = [torch.empty(2, x.height, x.width, heads, device='meta').permute(0, 3, 1, 2) for x in levels[:-1]]
    solution = triton.forward(values, edges, parametrization, (0, 0))
    triton.backward(values, solution, edges, parametrization, (0, 0))
