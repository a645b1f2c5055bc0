"""Compile the Triton kernels ahead of time, for a GPU that need not be here.

The calls of `cases` launch all kernels.
"""
import re
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad import kernels
from subquad.kernels.common.checks import MASK_MODES
from subquad.kernels.common.launch import interpreted
from subquad.kernels.eos_scan import DecayGenerator
from subquad.kernels.prepared import bias_act, group_norm, layer_norm, path_sums
from subquad.kernels.trees import quadtree_levels

_TARGET = re.compile(r'cuda:(7[0-9]|8[0-9]|9[0-9]|1[0-2][0-9])|hip:gfx(9|10|11|12)[0-9a-f]{2}')

# --- compilation


class _OwnCode(TorchDispatchMode):
    """Run this package's operators on meta tensors, where PyTorch would only ask for shapes."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return getattr(operator, 'on_device', operator)(*args, **(kwargs or {}))


@contextmanager
def compiling_for(target: str) -> Iterator[List]:
    """Compile for `target` within the block, and launch nothing.

    The context manager yields a list, to which Triton adds each kernel it compiles. Call the
    operators with tensors on the meta device.

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
        raise ValueError('target must be like cuda:90 (70 to 129) or hip:gfx942 (gfx9.., gfx10.., '
                         f'gfx11.., gfx12..), got {target!r}')
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
        with kernels.use_backend('triton'), _OwnCode():
            yield compiled
    finally:
        triton.runtime.jit.JITFunction.run = launch
        triton.runtime.driver.set_active(None)          # the next launch looks for it again


# --- calls, which are functions of the dtype and the number of channels

def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device='meta', requires_grad=True)


def _tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor (B, heads, N, channels), stored as (B, N, heads, channels)."""
    return _new(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)


def _differentiated(outputs: Any) -> None:
    """Run the backward pass of one or several outputs."""
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])


def _attention(op: Callable, side: int, steps: int, dtype: torch.dtype, dim: int, **options: str
               ) -> None:
    grid = (2, 4, side, side)
    inputs = [_new(*grid, dim, dtype=dtype) for _ in range(3)] + [_new(*grid) for _ in range(steps)]
    with torch.no_grad():
        op(*inputs, **options)
    _differentiated(op(*inputs, **options))


def _scan(length: int, dtype: torch.dtype, dim: int) -> None:
    x, logs = _new(2, 4, length, 3, dim, dtype=dtype), [_new(2, 4, length, 3) for _ in range(2)]
    _differentiated(kernels.polyline_scan(x, *logs))


def _separable(latents: int, mapped: bool, dtype: torch.dtype, dim: int) -> None:
    query, key, value = (_new(2, 32, 32, n, dtype=dtype) for n in (latents, dim, dim))
    weight = _new(dim, dim, dtype=dtype) if mapped else None
    _differentiated(kernels.separable_attention(query, key, value, patch_size=2, key_weight=weight))


def _solve(side: int, parametrization: str, dtype: torch.dtype, dim: int) -> None:
    levels = quadtree_levels(side, side)
    values = [_new(2, *level[:2], 4, dim, dtype=dtype).permute(0, 3, 1, 2, 4) for level in levels]
    edges = [_new(2, *level[:2], 4).permute(0, 3, 1, 2) for level in levels[:-1]]
    _differentiated(kernels.quadtree_solve(values, edges, parametrization=parametrization))


def _tree_attention(side: int, parametrization: str, dtype: torch.dtype, dim: int) -> None:
    """Without gradients; with them, the kernels of `_solve` run."""
    q, k, v = (_new(2, side, side, 4, n, dtype=dtype).permute(0, 3, 1, 2, 4) for n in (8, 8, dim))
    with torch.no_grad():
        kernels.quadtree_attention(q, k, v, _new(12, 2, 2, 4), parametrization=parametrization)


def _convolution(window: int, fused: bool, dtype: torch.dtype, dim: int) -> None:
    """Fused with GELU and the residual, or with a sum."""
    shapes = (2, 14, 14, dim), (dim, 1, window, window), (dim,)
    x, weight, bias = (_new(*shape, dtype=dtype) for shape in shapes)
    add = None if fused else x
    _differentiated(kernels.depthwise_conv(x, weight, bias, add, gelu=fused, residual=fused))


def _rotary(dtype: torch.dtype, dim: int) -> None:
    q, k = (_tokens(2, 4, 196, dim, dtype=dtype) for _ in range(2))
    _differentiated(kernels.rotary_embedding(q, k, _new(196, dim // 2, 2).detach(), 0.25))


def _prepared(op: str, dtype: torch.dtype, dim: int) -> None:
    """Operators of prepared networks, which have no gradient."""
    x = _new(2, 14, 14, dim, dtype=dtype).detach()
    weight = x[0, 0, 0]
    if op == 'path_sums':
        for sums in (False, True):
            path_sums(x, weight[:dim // 2], 1.0, sums)
        return
    if op == 'bias_act':
        for act in ('none', 'gelu', 'silu'):
            bias_act(x, weight, act)
        return
    for given in ((), (x, weight)):
        (layer_norm if op == 'layer_norm' else group_norm)(x, weight, weight, 1e-6, *given)


def _delta_rule(form: str, dtype: torch.dtype, keys: int) -> None:
    i, state = _new(2, 4, 56, max(32, keys), dtype=dtype), form == 'states'
    e, s, a, b = (_new(2, 4, 56, keys, dtype=dtype) for _ in range(4))
    _differentiated(kernels.eos_matmul(
        i, e, s, a=a, b=b, gk=None if form == 'no step logs' else _new(2, 4, 56, keys),
        bidirectional=form == 'both directions', output_state=state,
        initial_state=_new(2, 4, keys, i.shape[3]) if state else None))


def _full_rank(form: str, dtype: torch.dtype, keys: int) -> None:
    """sigmoid: z along K. exponential: z along D, with states. constant: o, e and s (H, K, D)."""
    i, e = (_new(2, 4, 56, n, dtype=dtype) for n in (max(32, keys), keys))
    weight = _new(4, keys, i.shape[3])
    if form == 'constant':
        e, options = _new(*weight.shape, dtype=dtype), {'log_o': weight}
    elif form == 'sigmoid':
        options = {'generator': DecayGenerator(e, weight, 'k')}
    else:
        options = {'generator': DecayGenerator(i, weight, 'd', form), 'output_state': True,
                   'initial_state': _new(2, *weight.shape)}
    _differentiated(kernels.eos_elementwise(i, e, e, **options))


def _selective(dtype: torch.dtype, states: int) -> None:
    u, delta = _new(2, 14, 14, 96, dtype=dtype), _new(2, 14, 14, 4, 96, dtype=dtype)
    b, c = (_new(2, 14, 14, 4, states, dtype=dtype) for _ in range(2))
    _differentiated(kernels.selective_scan(u, delta, _new(4, 96, states), b, c, _new(4, 96), _new(4, 96),
                                           paths=('right', 'down', 'left', 'up')))


def _rank_one(length: int, direction: str, steps: str, dtype: torch.dtype, dim: int) -> None:
    i, e = (_tokens(2, 4, length, n, dtype=dtype) for n in (dim, max(16, dim // 2)))
    _differentiated(kernels.eos_elementwise(
        i, e, e, log_o_k=_new(*e.shape), log_o_d=_new(*i.shape) if 'columns' in steps else None,
        bidirectional=direction == 'both'))


def _calls(lengths: Sequence[int]) -> Iterator[Tuple[str, Callable]]:
    """Yield a name and a call for each form of each operator, on lines or grids of these lengths."""
    for length in lengths:
        for form in (*MASK_MODES, 'v2h', 'h2v'):
            yield f'polyline_attention, {form}, {length} x {length}', partial(
                _attention, kernels.polyline_attention, length, 2,
                **({'mask_mode': form} if form in MASK_MODES else {'paths': form}))
    for op, steps, sizes in ((kernels.decay_attention, 1, (*lengths, 100)),
                             (kernels.crisscross_attention, 2, (lengths[-1], 100))):
        for length in sizes:
            for mask_mode in MASK_MODES:
                yield (f'{op.__name__}, {mask_mode}, lines of {length}',
                       partial(_attention, op, length, steps, mask_mode=mask_mode))
    for length in (*lengths, 100, 256, 600):
        yield f'polyline_scan, lines of {length}', partial(_scan, length)
    for latents in (1, 8):
        for keys in ('keys', 'mapped keys'):
            yield (f'separable_attention, {latents} latent, {keys}, 32 x 32',
                   partial(_separable, latents, keys == 'mapped keys'))
    # Trees of one tile, and trees of tiles of either side.
    for side, form in ((7, 'symmetric'), (14, 'laplacian'), (28, 'skew'), (200, 'laplacian')):
        yield f'quadtree_solve, {form}, {side} x {side}', partial(_solve, side, form)
    for side, form in ((7, 'skew'), (56, 'laplacian')):
        yield f'quadtree_attention, {form}, {side} x {side}', partial(_tree_attention, side, form)
    yield 'depthwise_conv, 3 x 3, residual and GELU', partial(_convolution, 3, True)
    yield 'depthwise_conv, 5 x 5, sum', partial(_convolution, 5, False)
    yield 'rotary_embedding, 14 x 14', _rotary
    for op in ('bias_act', 'layer_norm', 'group_norm', 'path_sums'):
        yield f'{op}, 14 x 14', partial(_prepared, op)
    for form in ('no step logs', 'states', 'both directions'):
        yield f'eos_matmul, {form}', partial(_delta_rule, form)
    for form in ('sigmoid', 'exponential', 'constant'):
        yield f'eos_elementwise, full rank, {form}', partial(_full_rank, form)
    yield 'selective_scan, four paths', _selective
    for length, direction, steps in (
            *((length, 'both', 'rows') for length in lengths), (100, 'forward', 'rows'),
            *((length, 'both', 'rows and columns') for length in (lengths[-1], 100))):
        yield (f'eos_elementwise, {direction}, steps of {steps}, lines of {length}',
               partial(_rank_one, length, direction, steps))


def cases(dtypes=(torch.float32, torch.bfloat16), dims=(16, 32, 64, 128), lengths=(14, 28, 56)
          ) -> Dict[str, Callable]:
    """Return calls on meta tensors that launch every kernel with all tiles and launch options."""
    kinds = {str(dtype).removeprefix('torch.'): dtype for dtype in dtypes}
    return {f'{name}, {kind}, {dim} channels': partial(call, dtype, dim)
            for kind, dtype in kinds.items() for dim in dims for name, call in _calls(lengths)}


# What the loops of a kernel work on, by the beginning of its name, and how many of these a program
# takes in one pass of each innermost loop (or in all, without loops), as a function of its
# constants. Of two beginnings, the longer counts.
ITEMS: Mapping[str, Tuple[str, Callable[[Mapping[str, int]], int]]] = {
    'polyline_attention': ('pair', lambda c: c['ROWS'] * c['COLS'] ** 2 * c['KEY_ROWS']),
    'polyline_attention_running': ('pair', lambda c: c['BLOCK'] ** 2),
    'decay_attention': ('pair', lambda c: c['BLOCK'] ** 2),
    'polyline_scan': ('element', lambda c: c['BLOCK'] * c['BLOCK_D']),
    'row_products': ('element', lambda c: c['BLOCK'] * c['BLOCK_D']),
    'separable_attention_fwd_context': ('element', lambda c: c['BLOCK_N'] * c['BLOCK_D']),
    'separable_attention_fwd_apply': ('element', lambda c: c['BLOCK_N'] * c['BLOCK_D']),
    'separable_attention_bwd_value': ('element', lambda c: c['BLOCK_N'] * c['BLOCK_D']),
    'separable_attention_fwd_softmax': ('logit', lambda c: c['BLOCK_Q'] * c['BLOCK_L']),
    'separable_attention_bwd_query': ('logit', lambda c: c['BLOCK_Q'] * c['BLOCK_L']),
    'quadtree_solve': ('element', lambda c: c['SIDE'] ** 2 * c['BLOCK_D']),
    'quadtree_means': ('element', lambda c: c['SIDE'] ** 2 * c['BLOCK_C']),
    'quadtree_edges': ('edge', lambda c: c['BLOCK']),
    'eos_elementwise_fwd': ('token', lambda c: c['BLOCK']),
    'eos_elementwise_bwd': ('token', lambda c: c['BLOCK']),
    'eos_elementwise_memory': ('token', lambda c: c['BLOCK']),
}
