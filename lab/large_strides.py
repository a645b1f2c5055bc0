"""Small calls of all operators with Triton kernels, and the same calls on tensors that span more than 2^31 elements.

Few pages of these tensors are touched, and only these take memory.
"""
import mmap
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels
from subquad.kernels.eos_scan import DecayGenerator
from subquad.kernels.prepared import bias_act, group_norm, layer_norm, path_sums
from subquad.kernels.trees import quadtree_levels

_MAP_NORESERVE = 0x4000                     # `mmap` has it since Python 3.13


class Call(NamedTuple):
    """A call of an operator: operator(*arguments(), backend=...) -> Tensor."""
    operator: Callable[..., Tensor]
    arguments: Callable[[], List[Tensor]]
    large: Tuple[int, ...]         # dimensions whose strides may be large
    narrow: Tuple[int, ...]        # dimensions whose offsets have 32 bits


def _tokens(*shape):
    return torch.randn(shape)


def _steps(*shape):
    return -0.1 - 0.5 * torch.rand(shape)


def _attention(height=3, width=3, dim=8, logs=2, heads=3):
    shape = (3, heads, height, width)
    return [*(0.5 * _tokens(*shape, dim) for _ in range(3)), *(_steps(*shape) for _ in range(logs))]


def _lines(length, *others):
    return [_tokens(3, 3, length, 16), *(_tokens(3, 3, length, 3) for _ in range(2)), *others]


def _grids(*channels, height=5, width=5):
    return [_tokens(3, height, width, n) for n in channels]


def _solve(*args, backend, levels):
    x = kernels.quadtree_solve(args[:levels], args[levels:], parametrization='skew', backend=backend)
    return torch.cat([x.flatten(2, 3) for x in x], 2)


def _tree(height, width, heads=3):
    levels = [(3, heads, *level[:2]) for level in quadtree_levels(height, width)]
    return [*(_tokens(*level, 4) for level in levels), *(0.3 * _tokens(*level) for level in levels[:-1])]


def _rotary(q, k, backend):
    angles = torch.linspace(0, 3, q.shape[2])[:, None].expand(-1, q.shape[3] // 2)
    table = torch.stack([angles.cos(), angles.sin()], -1).to(q)
    return torch.cat(kernels.rotary_embedding(q, k, table, backend=backend))


def _conv(x, add, backend):
    weight = torch.linspace(-1, 1, 9 * x.shape[3]).view(-1, 1, 3, 3).to(x)
    return kernels.depthwise_conv(x, weight, weight[:, 0, 0, 0], add, gelu=True, backend=backend)


def _conv_weight(x, weight, bias, backend):
    return kernels.depthwise_conv(x, weight, bias, residual=True, backend=backend)


def _eos(i, e, s, log, log_d=None, backend='auto', **options):
    return kernels.eos_elementwise(i, e, s, log_o_k=log, log_o_d=log_d, backend=backend, **options)


def _full(i, e, s, z, backend):
    weight = torch.linspace(0, 1, 144).view(3, 3, 16).to(i)
    generator = DecayGenerator(z, weight, axis='k', form='sigmoid')
    return kernels.eos_elementwise(i, e, s, generator=generator, backend=backend)


def _full_states(i, e, s, state, backend):
    weight = torch.linspace(0, 1, 144).view(3, 3, 16).to(i)
    generator = DecayGenerator(i.square(), weight, axis='d', form='exponential')
    return torch.cat(kernels.eos_elementwise(i, e, s, generator=generator, initial_state=state, output_state=True,
                                             backend=backend), 2)


def _matmul(i, e, s, a, b, gk, backend, **options):
    return kernels.eos_matmul(i, e, s, a=a, b=b, gk=gk, backend=backend, **options)


def _matmul_states(i, e, s, a, b, state, backend):
    return torch.cat(kernels.eos_matmul(i, e, s, a=a, b=b, initial_state=state, output_state=True, chunk=16,
                                        backend=backend), 2)


def _products(length):
    return _lines(length, *(0.3 * _tokens(3, 3, length, 3) for _ in range(2)))


def _mapped(query, key, value, backend):
    weight = torch.linspace(-1, 1, 16 * 16).view(16, 16).to(key)
    return kernels.separable_attention(query, key, value, key_weight=weight, backend=backend)


def _selective(u, delta, b, c, backend):
    rates = -torch.linspace(1, 2, 4 * 20 * 3).view(4, 20, 3).to(u)
    return kernels.selective_scan(u, delta, rates, b, c, rates[..., 0], rates[..., 1],
                                  paths=('right', 'down', 'left', 'up'), backend=backend)


def _paths(height, width):
    return [_tokens(3, height, width, 20), *(_tokens(3, height, width, 4, n) for n in (20, 3, 3))]


# Operators of prepared networks have neither a gradient nor a backend.

@torch.no_grad()
def _layer_norm(x, add, weight, bias, backend):
    if backend == 'triton':
        return torch.cat(layer_norm(x, weight, bias, 1e-5, add, bias))
    return torch.cat([F.layer_norm(x + add, bias.shape, weight, bias, 1e-5), x + add + bias])


@torch.no_grad()
def _group_norm(x, add, weight, bias, backend):
    if backend == 'triton':
        return torch.cat(group_norm(x, weight, bias, 1e-5, add, bias))
    y = F.group_norm((x + add).permute(0, 3, 1, 2), 1, weight, bias, 1e-5)
    return torch.cat([y.permute(0, 2, 3, 1), x + add + bias])


@torch.no_grad()
def _bias_act(x, bias, backend):
    return bias_act(x, bias, 'gelu') if backend == 'triton' else F.gelu(x + bias)


@torch.no_grad()
def _path_sums(z, a_log, backend):
    if backend == 'triton':
        return path_sums(z, a_log, 2.0, True)
    alpha, beta = -a_log.exp() / 2 * F.softplus(z).unflatten(3, (2, -1)).permute(3, 0, 1, 2, 4)
    return torch.stack([alpha.cumsum(2), beta.cumsum(1)]).permute(0, 1, 4, 2, 3)


@torch.no_grad()
def _quadtree_attention(q, k, v, bias, backend):
    return kernels.quadtree_attention(q, k, v, bias, backend=backend)


CALLS: Dict[str, Call] = {
    'polyline': Call(kernels.polyline_attention, _attention, (0, 1, 2), (3,)),
    'polyline-multiplicative': Call(partial(kernels.polyline_attention, mask_mode='multiplicative', paths='v2h'),
                                    _attention, (0, 1, 2), (3,)),
    'polyline-running': Call(kernels.polyline_attention, lambda: _attention(dim=80), (0, 1, 2), (3,)),
    'polyline-running-multiplicative': Call(
        partial(kernels.polyline_attention, mask_mode='multiplicative'), lambda: _attention(3, 5, dim=80, heads=1),
        (0, 2), (3,)),
    'decay': Call(partial(kernels.decay_attention, axis='column'), lambda: _attention(logs=1), (0, 1, 3), (2,)),
    'decay-multiplicative': Call(partial(kernels.decay_attention, mask_mode='multiplicative'),
                                 lambda: _attention(logs=1), (0, 1, 2), (3,)),
    'decay-long': Call(partial(kernels.decay_attention, axis='row'), lambda: _attention(1, 34, logs=1), (0, 1), (3,)),
    'crisscross': Call(kernels.crisscross_attention, lambda: _attention(heads=1), (0,), (2, 3)),
    'crisscross-long': Call(kernels.crisscross_attention, lambda: _attention(34, 1, heads=1), (0,), (2,)),
    'scan': Call(kernels.polyline_scan, lambda: _attention()[2:], (0, 1, 2, 3), ()),
    'scan-long': Call(kernels.polyline_scan, lambda: _attention(1, 67, dim=20, heads=1)[2:], (0, 3), ()),
    'separable': Call(partial(kernels.separable_attention, patch_size=2), lambda: _grids(1, 16, 16), (0,), (1, 2)),
    'separable-chunks': Call(kernels.separable_attention, lambda: _grids(1, 16, 16, height=20, width=30), (0,), (1, 2)),
    'separable-keys': Call(_mapped, lambda: _grids(3, 16, 16, height=7), (0,), (1, 2)),
    'quadtree': Call(partial(_solve, levels=3), lambda: _tree(3, 4), (0,), (1, 2, 3)),
    'quadtree-tiles': Call(partial(_solve, levels=6), lambda: _tree(3, 17, heads=1), (0,), (2, 3)),
    'rotary': Call(_rotary, lambda: [_tokens(3, 3, 20, 16) for _ in range(2)], (0, 1, 2), ()),
    'conv': Call(_conv, lambda: _grids(16, 16), (0,), (1, 2)),
    'conv-weight': Call(_conv_weight, lambda: [*_grids(20), _tokens(20, 1, 5, 5), _tokens(20)], (0,), ()),
    'eos': Call(_eos, lambda: _lines(5, _steps(3, 3, 5, 3)), (0, 1), (2,)),
    'eos-chunks': Call(partial(_eos, chunk=16), lambda: _lines(34, _steps(3, 3, 34, 3)), (0, 1), (2,)),
    'eos-both': Call(partial(_eos, chunk=16, bidirectional=True),
                     lambda: _lines(34, _steps(3, 3, 34, 3), _steps(3, 3, 34, 16)), (0, 1), (2,)),
    'eos-full': Call(_full, lambda: _lines(5, _tokens(3, 3, 5, 3)), (0, 1, 2), (3,)),
    'eos-full-states': Call(_full_states, lambda: _lines(19, _tokens(3, 3, 3, 16)), (0, 1, 2), ()),
    'matmul': Call(_matmul, lambda: [*_products(5), _steps(3, 3, 5, 3)], (0, 1, 2), ()),
    'matmul-both': Call(partial(_matmul, bidirectional=True, chunk=16),
                        lambda: [*_products(19), _steps(3, 3, 19, 3)], (0, 1, 2), ()),
    'matmul-states': Call(_matmul_states, lambda: [*_products(19), _tokens(3, 3, 3, 16)], (0, 1, 2), ()),
    'selective': Call(_selective, lambda: _paths(3, 5), (0,), ()),
    'selective-long': Call(_selective, lambda: _paths(5, 9), (0,), ()),
    'layer-norm': Call(_layer_norm, lambda: [*_grids(20, 20), _tokens(20), _tokens(20)], (0, 1, 2), ()),
    'group-norm': Call(_group_norm, lambda: [*_grids(90, 90, width=7), _tokens(90), _tokens(90)], (0, 1, 2), ()),
    'bias-act': Call(_bias_act, lambda: [*_grids(20), _tokens(20)], (0, 1, 2), ()),
    'path-sums': Call(_path_sums, lambda: [*_grids(6, height=20, width=67), _tokens(3)], (0,), (1, 2)),
    'quadtree-attention': Call(_quadtree_attention, lambda: [*(_tokens(3, 2, 5, 9, n) for n in (8, 8, 20)),
                                                             _tokens(3, 2, 2, 2)], (0,), ()),
}


def sparse_memory() -> Tensor:
    """Return 9 * 2^30 float32 numbers, whose pages take memory once they are written."""
    area = mmap.mmap(-1, 4 * (4 * 2 ** 31 + 2 ** 30), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(area, dtype=torch.float32)


def spread(tensors: Sequence[Tensor], dims: Sequence[int], memory: Tensor) -> List[Tensor]:
    """Return the tensors with a stride of less than 2^31 in each of the dimensions, of which the last one has an offset
    of more."""
    result = []
    for n, x in enumerate(tensors):
        large = [dim for dim in dims if dim < x.ndim and x.shape[dim] > 2]
        strides = list(torch.empty([1 if dim in large else size for dim, size in enumerate(x.shape)]).stride())
        for place, dim in enumerate(large):
            strides[dim] = 2 ** 31 // (x.shape[dim] - 1) + 2 ** 20 * 4 ** place
        result.append(memory.as_strided(x.shape, strides, n * 2 ** 16).copy_(x) if large else x)
    assert all(map(torch.equal, result, tensors))                            # no two numbers share an address
    return result


def _run(call: Call, args: Sequence[Tensor], grad: Tensor, backend: str) -> List[Tensor]:
    args = [x.detach().requires_grad_() for x in args]
    y = call.operator(*args, backend=backend)
    return [y.detach(), *(torch.autograd.grad(y, args, grad) if y.requires_grad else ())]


def check(call: Call, memory: Tensor) -> None:
    """Compare the kernels on tensors that `memory` holds with PyTorch on small tensors.

    Raises:
        AssertionError: outputs or gradients differ.
    """
    args = call.arguments()
    grad = torch.randn_like(call.operator(*args, backend='portable'))
    expected = _run(call, args, grad, 'portable')
    *large, large_grad = spread([*args, grad], call.large, memory)
    torch.testing.assert_close(_run(call, large, large_grad, 'triton'), expected, rtol=1e-4, atol=1e-4)
