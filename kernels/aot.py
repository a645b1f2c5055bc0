"""Compile the Triton kernels ahead of time, for a GPU that need not be there, and read what they take of it."""
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional

import torch
from torch import Tensor

from .common.launch import interpreted

_TARGET = re.compile(r'cuda:(7[0-9]|8[0-9]|9[0-9]|1[0-2][0-9])|hip:gfx(9|10|11|12)[0-9a-f]{2}')


@dataclass(frozen=True)
class Resources:
    """What one launch of a kernel takes. Registers a thread, stack (bytes of spilled registers a thread), shared memory
    (bytes a program); None where the target's tools don't tell."""
    kernel: str
    constants: str
    warps: int
    registers: Optional[int]
    stack: Optional[int]
    shared: int


@contextmanager
def recorded(target: str) -> Iterator[List]:
    """Within the block Triton compiles for `target` ('cuda:90', 'hip:gfx942') and launches nothing; the compiled
    kernels gather in the list that is yielded. Launch with tensors on the meta device.

    Raises:
        RuntimeError: Triton runs in its interpreter, which compiles nothing.
        ValueError: a target that isn't one.
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
        """As much of a driver as compilation asks for."""
        def get_current_target(self):
            return gpu

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    launch = triton.runtime.jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled.append(launch(self, *args, grid=grid, warmup=True, **options))
        for key in list(self.device_caches):       # a later block may compile for another target
            del self.device_caches[key]

    triton.runtime.jit.JITFunction.run = compile_only
    triton.runtime.driver.set_active(NoDriver())
    try:
        yield compiled
    finally:
        triton.runtime.jit.JITFunction.run = launch
        triton.runtime.driver.set_active(None)          # found anew at the next launch


def _usage(kernel) -> Dict[str, int]:
    """REG and STACK of a compiled kernel by cuobjdump, which comes with Triton."""
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
    """What every kernel takes that the calls launch (on meta tensors).

    Raises:
        Exception: Triton's, for a kernel that does not compile.
    """
    result: Dict[str, List[Resources]] = {}
    for name, call in calls.items():
        with recorded(target) as kernels:
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
    """Calls that launch every kernel with every tile and launch option of `launch`, on meta tensors."""
    from .decay_attention import triton as decay
    from .polyline_attention import triton as polyline
    from .polyline_scan import triton as scan
    from .quadtree_solve import triton as quadtree
    from .separable_attention import triton as separable
    from .trees import quadtree_levels
    calls: Dict[str, Callable] = {}

    def attention(dtype, dim, length):
        tensors = [torch.empty(2, 4, length, length, dim, dtype=dtype, device='meta') for _ in range(4)]
        return tensors, [torch.empty(2, 4, length, length, device='meta') for _ in range(2)]

    def polyline_call(dtype, dim, length, mask, paths):
        (q, k, v, grad), (sa, sb) = attention(dtype, dim, length)
        polyline.forward(q, k, v, sa, sb, mask, paths, False)
        polyline.backward(grad, q, k, v, sa, sb, *polyline.forward(q, k, v, sa, sb, mask, paths, True), mask, paths)

    def decay_call(dtype, dim, length, mask):
        (q, k, v, grad), (sums, _) = attention(dtype, dim, length)
        decay.backward(grad, q, k, v, sums, *decay.forward(q, k, v, sums, 'row', mask, True), 'row', mask)

    def scan_call(dtype, dim, length):
        x = torch.empty(2, 4, length, 3, dim, dtype=dtype, device='meta')
        steps = torch.empty(2, 4, length, 3, device='meta')
        scan.backward(scan.forward(x, steps, 2, torch.float32), x, steps, 2)

    def separable_call(dtype, dim, side, latents, key_map):
        x = torch.empty(2, side, side, dim, dtype=dtype, device='meta')
        query, weight = x.new_empty(2, side, side, latents), x.new_empty(dim, dim) if key_map else None
        _, statistics, summed = separable.forward(query, x, x, weight, None, (2, 2), 'pixel')
        separable.backward(x, query, x, x, weight, None, statistics, summed, (2, 2), 'pixel')

    def quadtree_call(dtype, dim, side, parametrisation):
        levels, heads = quadtree_levels(side, side), 4
        values = [torch.empty(2, x.height, x.width, heads, dim, dtype=dtype, device='meta').permute(0, 3, 1, 2, 4)
                  for x in levels]
        edges = [torch.empty(2, x.height, x.width, heads, device='meta').permute(0, 3, 1, 2) for x in levels[:-1]]
        solution = quadtree.forward(values, edges, parametrisation, (0, 0))
        quadtree.backward(values, solution, edges, parametrisation, (0, 0))

    def add(name, call, *args):
        calls[name] = lambda: call(*args)

    for dtype in dtypes:
        for dim in dims:
            kind = f'{str(dtype).removeprefix("torch.")}, {dim} channels'
            for length in lengths:
                for mask in ('logit', 'product'):
                    add(f'polyline_attention, {mask}, {length} x {length}, {kind}', polyline_call, dtype, dim, length,
                        mask, 'both')
                    add(f'decay_attention, {mask}, lines of {length}, {kind}', decay_call, dtype, dim, length, mask)
                for paths in ('v2h', 'h2v'):
                    add(f'polyline_attention, {paths}, {length} x {length}, {kind}', polyline_call, dtype, dim, length,
                        'logit', paths)
            for mask in ('logit', 'product'):
                add(f'decay_attention, {mask}, lines of 100, {kind}', decay_call, dtype, dim, 100, mask)
            for length in (*lengths, 100, 256, 600):
                add(f'polyline_scan, lines of {length}, {kind}', scan_call, dtype, dim, length)
            for latents in (1, 8):
                for keys in ('keys', 'mapped keys'):
                    add(f'separable_attention, {latents} latent, {keys}, 32 x 32, {kind}', separable_call, dtype, dim,
                        32, latents, keys == 'mapped keys')
            # Trees of one tile, of tiles of either side.
            for side, parametrisation in ((7, 'symmetric'), (14, 'laplacian'), (28, 'skew'), (200, 'laplacian')):
                add(f'quadtree_solve, {parametrisation}, {side} x {side}, {kind}', quadtree_call, dtype, dim, side,
                    parametrisation)
    return calls
