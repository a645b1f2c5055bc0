"""Kernels on tensors that span more than 2^31 elements. Few of their pages are touched, and only these take memory."""
import functools
import mmap

import pytest
import torch
from pairwise import slow

from subquad import kernels
from subquad.kernels.common import launch
from subquad.kernels.eos_scan import DecayGenerator
from subquad.kernels.trees import quadtree_levels

pytest.importorskip('triton')
if not launch.interpreted():
    pytest.skip('the tensors have no memory on a GPU', allow_module_level=True)

MAP_NORESERVE = 0x4000                     # `mmap` has it since Python 3.13


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
    return torch.cat(kernels.rotary_embedding(q, k, torch.stack([angles.cos(), angles.sin()], -1), backend=backend))


def _conv(x, add, backend):
    weight = torch.linspace(-1, 1, 9 * x.shape[3]).view(-1, 1, 3, 3)
    return kernels.depthwise_conv(x, weight, weight[:, 0, 0, 0], add, gelu=True, backend=backend)


def _eos(i, e, s, log, chunk=64, backend='auto'):
    return kernels.eos_elementwise(i, e, s, log_o_k=log, chunk=chunk, backend=backend)


def _full(i, e, s, z, backend):
    weight = torch.linspace(0, 1, 144).view(3, 3, 16)
    generator = DecayGenerator(z, weight, axis='k', form='sigmoid')
    return kernels.eos_elementwise(i, e, s, generator=generator, backend=backend)


def _matmul(i, e, s, a, b, gk, backend):
    return kernels.eos_matmul(i, e, s, a=a, b=b, gk=gk, backend=backend)


# name: an operator; its arguments; dimensions whose strides may be large, and those whose offsets have 32 bits
CASES = {
    'polyline': (kernels.polyline_attention, _attention, (0, 1, 2), (3,)),
    'polyline-running': (kernels.polyline_attention, lambda: _attention(dim=80), (0, 1, 2), (3,)),
    'decay': (functools.partial(kernels.decay_attention, axis='column'), lambda: _attention(logs=1), (0, 1, 3), (2,)),
    'decay-long': (functools.partial(kernels.decay_attention, axis='row'), lambda: _attention(1, 34, logs=1), (0, 1),
                   (3,)),
    'crisscross': (kernels.crisscross_attention, lambda: _attention(heads=1), (0,), (2, 3)),
    'scan': (kernels.polyline_scan, lambda: _attention()[2:], (0, 1, 2, 3), ()),
    'separable': (functools.partial(kernels.separable_attention, patch_size=2), lambda: _grids(1, 16, 16), (0,),
                  (1, 2)),
    'separable-chunks': (kernels.separable_attention, lambda: _grids(1, 16, 16, height=20, width=30), (0,), (1, 2)),
    'quadtree': (functools.partial(_solve, levels=3), lambda: _tree(3, 4), (0,), (1, 2, 3)),
    'quadtree-tiles': (functools.partial(_solve, levels=6), lambda: _tree(3, 17, heads=1), (0,), (2, 3)),
    'rotary': (_rotary, lambda: [_tokens(3, 3, 20, 16) for _ in range(2)], (0, 1, 2), ()),
    'conv': (_conv, lambda: _grids(16, 16), (0,), (1, 2)),
    'eos': (_eos, lambda: _lines(5, _steps(3, 3, 5, 3)), (0, 1), (2,)),
    'eos-chunks': (functools.partial(_eos, chunk=16), lambda: _lines(18, _steps(3, 3, 18, 3)), (0, 1), (2,)),
    'eos-full': (_full, lambda: _lines(5, _tokens(3, 3, 5, 3)), (0, 1, 2), (3,)),
    'matmul': (_matmul, lambda: _lines(5, *(0.3 * _tokens(3, 3, 5, 3) for _ in range(2)), _steps(3, 3, 5, 3)),
               (0, 1, 2), ()),
}


@pytest.fixture(scope='module')
def memory():
    area = mmap.mmap(-1, 4 * (4 * 2 ** 31 + 2 ** 30), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(area, dtype=torch.float32)


def _spread(tensors, dims, memory):
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


def _run(op, args, grad, backend):
    args = [x.detach().requires_grad_() for x in args]
    y = op(*args, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, args, grad)]


# Another path of a kernel that another case runs.
MORE = ('polyline-running', 'decay-long', 'separable-chunks', 'quadtree-tiles', 'eos-chunks')


@pytest.mark.parametrize('name', [*(name for name in CASES if name not in MORE), *slow(*MORE)])
def test_large_strides(name, memory):
    op, arguments, dims, narrow = CASES[name]
    args = arguments()
    grad = torch.randn_like(op(*args, backend='portable'))
    expected = _run(op, args, grad, 'portable')
    *large, large_grad = _spread([*args, grad], dims, memory)
    torch.testing.assert_close(_run(op, large, large_grad, 'triton'), expected, rtol=1e-4, atol=1e-4)
    for dim in narrow:
        with pytest.raises(ValueError, match=r'spans 2\^31 elements'):
            op(*_spread(args, (dim,), memory), backend='triton')


def test_a_gradient_of_large_strides(memory):
    """Only the backward pass of a recurrence sees it."""
    op, arguments, *_ = CASES['eos']
    args = [x.requires_grad_() for x in arguments()]
    with pytest.raises(ValueError, match=r'a slice of shape \(5, 16\) with strides .* spans 2\^31 elements'):
        op(*args, backend='triton').backward(*_spread([torch.ones(3, 3, 5, 16)], (2,), memory))
