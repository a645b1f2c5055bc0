"""Derivatives besides the gradient: second derivatives, forward mode, and transforms of torch.func, for every operator.

The table of docs/kernels.md says what works; these tests try it."""
import functools
from pathlib import Path

import pytest
import timm
import torch
from operator_cases import CASES
from torch.autograd import forward_ad

from subquad import kernels
from subquad.kernels.dispatch import OPERATORS, chosen_backend


def _loss(y):
    return (y ** 3 * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def _backward(op, args, tangents, create_graph=False):
    args = [x.clone().requires_grad_() for x in args]
    return args, torch.autograd.grad(_loss(op(*args)), args, create_graph=create_graph)


def _second(op, args, tangents):
    args, grads = _backward(op, args, tangents, create_graph=True)
    return torch.autograd.grad(sum((g * t).sum() for g, t in zip(grads, tangents)), args)


def _forward_ad(op, args, tangents):
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(op(*map(forward_ad.make_dual, args, tangents))).tangent]


def _gradient(op, args):
    return torch.func.grad(lambda *xs: _loss(op(*xs)), argnums=tuple(range(len(args))))(*args)


WAYS = {
    '`backward()`': [lambda *given: _backward(*given)[1]],
    'twice': [_second],
    'forward mode': [
        _forward_ad,
        lambda op, args, tangents: [torch.func.jvp(op, tuple(args), tuple(tangents))[1]],
        lambda op, args, tangents: [torch.func.jacfwd(op)(*args)],
    ],
    '`func.grad`': [
        lambda op, args, tangents: _gradient(op, args),
        lambda op, args, tangents: torch.func.jvp(lambda *xs: _gradient(op, xs), tuple(args), tuple(tangents))[1],
        lambda op, args, tangents: [torch.func.jacrev(op)(*args)],
    ],
    '`func.vmap`': [lambda op, args, tangents: [torch.func.vmap(op)(*(torch.stack([x, 0.9 * x]) for x in args))]],
}


def _result(op, args, tangents, ways):
    """Return 'yes' if all of these ways agree with the reference, and 'raises' if all of them raise an error."""
    found = set()
    for way in ways:
        expected = way(functools.partial(op, backend='reference'), args, tangents)
        try:
            actual = way(op, args, tangents)
        except RuntimeError:
            found.add('raises')
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
            found.add('yes')
    assert len(found) == 1
    return found.pop()


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', CASES)
def test_the_table_of_derivatives(name):
    page = (Path(__file__).parents[2] / 'docs/kernels.md').read_text()
    section = page.split('\n## Derivatives\n')[1].split('\n## ')[0]
    header, _, *rows = [line for line in section.splitlines() if line.startswith('|')]
    assert [cell.strip() for cell in header.split('|')[2:-1]] == list(WAYS)
    rows = {row.split('`')[1]: [cell.strip() for cell in row.split('|')[2:-1]] for row in rows}
    assert set(rows) == set(OPERATORS)
    op, arguments = CASES[name]
    args = arguments(1)
    tangents = [torch.randn_like(x) for x in args]
    assert rows[name.split('-')[0]] == [_result(op, args, tangents, ways) for ways in WAYS.values()]


@pytest.mark.parametrize('name', ['polyline_attention', 'tree_solve', 'eos_matmul'])
def test_a_backend_that_would_drop_tangents_raises(name):
    op, arguments = CASES[name]
    args = arguments(1)
    with pytest.raises(ValueError, match=f"{name}: backend 'portable' has no forward-mode derivatives"):
        _forward_ad(functools.partial(op, backend='portable'), args, args)
    with kernels.use_backend('portable'), pytest.raises(ValueError, match='has no forward-mode derivatives'):
        torch.func.jvp(op, tuple(args), tuple(args))
    with kernels.use_backend('export'):
        assert _forward_ad(op, args, args)[0].abs().max() > 0


def test_gradients_of_tangents_through_blocks():
    """PyTorch's `linalg.solve` has a wrong one."""
    op, arguments = CASES['tree_solve']
    args = arguments(1)
    tangents = [torch.randn_like(x) for x in args]
    actual = torch.func.grad(lambda *xs: _loss(torch.func.jvp(op, xs, tuple(tangents))[1]), argnums=(0, 1, 2, 3))(*args)

    def tangent(*xs):
        """The same tangent by two gradients (of a gradient in its argument `dual`, which is linear)."""
        y = op(*xs)
        dual = torch.zeros_like(y, requires_grad=True)
        grads = torch.autograd.grad(y, xs, dual, create_graph=True)
        return torch.autograd.grad(sum((g * t).sum() for g, t in zip(grads, tangents)), dual, create_graph=True)[0]
    args = [x.clone().requires_grad_() for x in args]
    torch.testing.assert_close(actual, torch.autograd.grad(_loss(tangent(*args)), args))


def test_compilation_alone_is_no_transform():
    inputs = [torch.randn(1, 2, 3, 5, 4) for _ in range(3)] + [-torch.rand(1, 2, 3, 5) for _ in range(2)]
    compiled = torch.compile(kernels.polyline_attention, backend='eager', fullgraph=True)
    assert torch.equal(compiled(*inputs), kernels.polyline_attention(*inputs)), 'not the export form'


def test_transforms_keep_the_portable_form_where_it_is_plain():
    chosen = []
    torch.func.grad(lambda x: (chosen.append([chosen_backend(op, 'auto', x) for op in ('polyline_scan', 'eos_matmul')]),
                               x.sum())[1])(torch.ones(2))
    assert chosen == [['portable', 'export']]


def test_compiled_transforms():
    op, arguments = CASES['polyline_attention']
    args = tuple(arguments(1))
    compiled = torch.compile(lambda *xs: torch.func.jvp(op, xs, args)[1], fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(*args), _forward_ad(op, args, args)[0])


@pytest.mark.parametrize('name', ['test_ppma', 'test_myo', 'test_lcsm'])
def test_tangents_of_models_equal_differences(name):
    model = timm.create_model(name).double().eval()
    x, tangent = (torch.randn(1, 3, 64, 64, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        actual = torch.func.jvp(model, (x,), (tangent,))[1]
        expected = (model(x + 1e-6 * tangent) - model(x - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
