"""Compile the Triton kernels ahead of time, for a GPU that this machine need not have."""
import re
from contextlib import contextmanager
from functools import partial
from typing import Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from .common.launch import interpreted
from .eos_scan.tile_limits import triton_chunk
from .trees import quadtree_levels

_TARGET = re.compile(r'cuda:(7[0-9]|8[0-9]|9[0-9]|1[0-2][0-9])|hip:gfx(9|10|11|12)[0-9a-f]{2}')


def _pairs(constants: Mapping[str, int]) -> int:
    """Pairs of queries and keys in a tile."""
    return constants['BLOCK'] ** 2 * constants.get('ROWS', 1)


def _grid_pairs(constants: Mapping[str, int]) -> int:
    """Pairs of a tile of ROWS x COLS queries and one of KEY_ROWS x COLS keys, blocks of a grid both."""
    return constants['ROWS'] * constants['COLS'] * constants['KEY_ROWS'] * constants['COLS']


def _elements(constants: Mapping[str, int]) -> int:
    return constants['BLOCK'] * constants['BLOCK_D']


# What a kernel works on, and how many of these its programs take in one pass of each innermost loop (or in all, without
# loops), as functions of its constants.
ITEMS: Dict[str, Tuple[str, Callable[[Mapping[str, int]], int]]] = {
    **{f'polyline_attention_{part}': ('pair', _grid_pairs) for part in ('fwd', 'bwd_query', 'bwd_key')},
    **{f'polyline_attention_running_{part}': ('pair', _pairs) for part in ('fwd', 'bwd')},
    **{f'decay_attention_{part}{line}': ('pair', _pairs)
       for part in ('fwd', 'bwd', 'transposed') for line in ('', '_line')},
    'polyline_scan_fwd': ('element', _elements),
    'polyline_scan_bwd': ('element', _elements),
    'row_products': ('element', _elements),
    **{f'eos_elementwise_{part}': ('token', lambda c: c['BLOCK']) for part in ('fwd', 'bwd', 'memory')},
    **{f'separable_attention_{name}': ('element', lambda c: c['BLOCK_N'] * c['BLOCK_D'])
       for name in ('fwd_context', 'fwd_apply', 'bwd_value')},
    **{f'separable_attention_{name}': ('logit', lambda c: c['BLOCK_Q'] * c['BLOCK_L'])
       for name in ('fwd_softmax', 'bwd_query')},
    'quadtree_solve_up': ('element', lambda c: c['SIDE'] ** 2 * c['BLOCK_D']),
    'quadtree_solve_upper': ('element', lambda c: c['SIDE'] ** 2 * c['BLOCK_D']),
    'quadtree_solve_down': ('element', lambda c: c['SIDE'] ** 2 * c['BLOCK_D']),
}


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
        for length in (lengths[-1], 100):
            yield f'crisscross_attention, {mask_mode}, lines of {length}', _crisscross, length, mask_mode
    for length in (*lengths, 100, 256, 600):
        yield f'polyline_scan, lines of {length}', _scan, length
    for latents in (1, 8):
        for keys in ('keys', 'mapped keys'):
            yield (f'separable_attention, {latents} latent, {keys}, 32 x 32', _separable, 32, latents,
                   keys == 'mapped keys')
    for window, form in ((3, 'residual and GELU'), (5, 'sum')):
        yield f'depthwise_conv, {window} x {window}, {form}', _depthwise, window, form
    yield 'rotary_embedding, 14 x 14', _rotary
    for form in ('no step logs', 'states', 'both directions'):
        yield f'eos_matmul, {form}', _eos_matmul, form
    for form in ('sigmoid', 'exponential', 'constant'):
        yield f'eos_elementwise, full rank, {form}', _eos_full_rank, form
    for length, direction, steps in (*((length, 'both', 'rows') for length in lengths), (100, 'forward', 'rows'),
                                     *((length, 'both', 'rows and columns') for length in (lengths[-1], 100))):
        yield f'eos_elementwise, {direction}, steps of {steps}, lines of {length}', _eos, length, direction, steps
    # Trees of one tile, and trees of tiles of either side.
    for side, parametrization in ((7, 'symmetric'), (14, 'laplacian'), (28, 'skew'), (200, 'laplacian')):
        yield f'quadtree_solve, {parametrization}, {side} x {side}', _quadtree, side, parametrization


def _attention_inputs(dtype: torch.dtype, dim: int, length: int) -> Tuple[List[Tensor], List[Tensor]]:
    """q, k, v and a gradient; step logs, or their sums, along rows and along columns."""
    tensors = [torch.empty(2, 4, length, length, dim, dtype=dtype, device='meta') for _ in range(4)]
    return tensors, [torch.empty(2, 4, length, length, device='meta') for _ in range(2)]


def _polyline(dtype: torch.dtype, dim: int, length: int, mask_mode: str, paths: str) -> None:
    from .polyline_attention import triton
    (q, k, v, grad), (sa, sb) = _attention_inputs(dtype, dim, length)
    triton.forward(q, k, v, sa, sb, mask_mode, paths, False)
    saved = triton.forward(q, k, v, sa, sb, mask_mode, paths, True)
    triton.backward(grad, q, k, v, sa, sb, *saved, mask_mode, paths)


def _decay(dtype: torch.dtype, dim: int, length: int, mask_mode: str) -> None:
    from .decay_attention import triton, triton_backward
    (q, k, v, grad), (steps, _) = _attention_inputs(dtype, dim, length)
    saved = triton.forward(q, k, v, steps, 'row', mask_mode, True)
    triton_backward.backward(grad, q, k, v, steps, *saved, 'row', mask_mode)


def _crisscross(dtype: torch.dtype, dim: int, length: int, mask_mode: str) -> None:
    from .crisscross_attention import triton
    (q, k, v, grad), steps = _attention_inputs(dtype, dim, length)
    saved = triton.forward(q, k, v, *steps, mask_mode, 'both', True)
    triton.backward(grad, [q, k, v, *steps], list(saved), mask_mode, 'both')


def _scan(dtype: torch.dtype, dim: int, length: int) -> None:
    from .polyline_scan import triton
    x = torch.empty(2, 4, length, 3, dim, dtype=dtype, device='meta')
    steps = torch.empty(2, 4, length, 3, device='meta')
    triton.backward(triton.forward(x, steps, 2, torch.float32), x, steps, 2)


def _separable(dtype: torch.dtype, dim: int, side: int, latents: int, key_map: bool) -> None:
    from .separable_attention import triton, triton_backward
    x = torch.empty(2, side, side, dim, dtype=dtype, device='meta')
    query, weight = x.new_empty(2, side, side, latents), x.new_empty(dim, dim) if key_map else None
    _, statistics, summed = triton.forward(query, x, x, weight, None, (2, 2), 'pixel')
    triton_backward.backward(x, query, x, x, weight, None, statistics, summed, (2, 2), 'pixel')


def _depthwise(dtype: torch.dtype, dim: int, window: int, form: str) -> None:
    from .depthwise_conv import triton
    x = torch.empty(2, 14, 14, dim, dtype=dtype, device='meta')
    weight, gelu = x.new_empty(dim, 1, window, window), 'GELU' in form
    triton.forward(x, weight, x.new_empty(dim), x if form == 'sum' else None, gelu, gelu)
    triton.backward(x, x, weight, gelu, gelu, True, True)


def _rotary(dtype: torch.dtype, dim: int) -> None:
    from .rotary_embedding import triton
    q = torch.empty(2, 196, 4, dim, dtype=dtype, device='meta').transpose(1, 2)
    triton.forward(q, q, torch.empty(196, dim // 2, 2, device='meta'), 0.25, False)


def _eos_matmul(dtype: torch.dtype, keys: int, form: str) -> None:
    from .eos_matmul import triton
    i, grad = (torch.empty(2, 4, 56, max(32, keys), dtype=dtype, device='meta') for _ in range(2))
    e, s, a, b = (torch.empty(2, 4, 56, keys, dtype=dtype, device='meta') for _ in range(4))
    gk = None if form == 'no step logs' else torch.empty(2, 4, 56, keys, device='meta')
    state = torch.empty(2, 4, keys, max(32, keys), device='meta') if form == 'states' else None
    direction = 'both' if form == 'both directions' else 'forward'
    _, read, last = triton.forward(i, e, s, a, b, gk, state, direction, True, state is not None)
    triton.backward(grad, None if state is None else last, i, e, s, a, b, gk, state, read, direction)


def _eos_full_rank(dtype: torch.dtype, keys: int, form: str) -> None:
    """sigmoid: z along K. exponential: z along D, with states. constant: o, e and s (H, K, D)."""
    from .eos_elementwise import triton_full_rank
    from .eos_scan.problem import RealProblem
    i, grad = (torch.empty(2, 4, 56, max(32, keys), dtype=dtype, device='meta') for _ in range(2))
    e, weight = i.new_empty(2, 4, 56, keys), torch.empty(4, keys, i.shape[3], device='meta')
    state = torch.empty(2, *weight.shape, device='meta')
    z, s, state = {'sigmoid': (e.unsqueeze(-1), e, None), 'exponential': (i.unsqueeze(-2), e, state),
                   'constant': (weight.new_empty((1,) * 5), weight.to(dtype), None)}[form]
    expand = e if form != 'constant' else s
    problem = RealProblem(i, expand, s, None, None, z, weight, 'k', 'exponential' if form != 'sigmoid' else form, 16.0,
                          state)
    _, states, last = triton_full_rank.forward(problem, 'forward', True, state is not None)
    triton_full_rank.backward(grad, last if state is not None else None, problem, states, 'forward')


def _quadtree(dtype: torch.dtype, dim: int, side: int, parametrization: str) -> None:
    from .quadtree_solve import triton
    levels, heads = quadtree_levels(side, side), 4
    values = [torch.empty(2, x.height, x.width, heads, dim, dtype=dtype, device='meta').permute(0, 3, 1, 2, 4)
              for x in levels]
    edges = [torch.empty(2, x.height, x.width, heads, device='meta').permute(0, 3, 1, 2) for x in levels[:-1]]
    solution = triton.forward(values, edges, parametrization, (0, 0))
    triton.backward(values, solution, edges, parametrization, (0, 0))


def _eos(dtype: torch.dtype, dim: int, length: int, direction: str, steps: str) -> None:
    from .eos_elementwise import triton, triton_backward
    i, e = (torch.empty(2, length, 4, n, dtype=dtype, device='meta').transpose(1, 2) for n in (dim, max(16, dim // 2)))
    logs = [torch.empty(x.shape, device='meta') if name in steps else None
            for x, name in ((e, 'rows'), (i, 'columns'))]
    chunk = triton_chunk(dtype, length, 64)
    _, states, _ = triton.forward(i, e, e, *logs, None, direction, chunk, True, False)
    triton_backward.backward(i, None, i, e, e, *logs, None, states, direction, chunk)
