"""The operator that docs/adding-an-operator.md writes: its files make an operator of the package."""
import importlib
import re
import sys

import pytest
import torch
from helpers import ROOT
from operator_cases import DEVICE, TOLERANCE, weighted_sum

from subquad import kernels
from subquad.kernels import dispatch

PAGE = (ROOT / 'docs' / 'adding-an-operator.md').read_text()
FILES = dict(re.findall(r'^~~~python\n# kernels/token_shift/(\w+\.py)\n(.*?)^~~~$', PAGE,
                        re.MULTILINE | re.DOTALL))


@pytest.fixture(scope='module')
def token_shift(tmp_path_factory):
    folder = tmp_path_factory.mktemp('kernels')
    (folder / 'token_shift').mkdir()
    for name, text in FILES.items():
        (folder / 'token_shift' / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, '__path__', [*kernels.__path__, str(folder)])
        yield importlib.import_module('subquad.kernels.token_shift').token_shift
    del dispatch.OPERATORS['token_shift'], kernels.token_shift
    for name in [name for name in sys.modules if name.startswith('subquad.kernels.token_shift')]:
        del sys.modules[name]


def _inputs(dtype=torch.float32, layout=lambda x: x):
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((2, 7, 5), (5,)))
    return [y.to(DEVICE, dtype).detach().requires_grad_() for y in (layout(x), weight)]


def _values(op, inputs, backend):
    y = op(*inputs, backend=backend)
    return [y, *torch.autograd.grad(weighted_sum(y), inputs)]


@pytest.mark.parametrize('layout', ['dense', 'transposed'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('backend', ['portable', 'export', 'triton'])
def test_values_and_gradients(token_shift, backend, dtype, layout):
    if backend == 'triton':
        pytest.importorskip('triton')
    strided = (lambda x: x) if layout == 'dense' else (lambda x: x.mT.contiguous().mT)
    inputs = _inputs(dtype, strided)
    expected = _values(token_shift, [x.detach().double().requires_grad_() for x in inputs], 'reference')
    for actual, exact in zip(_values(token_shift, inputs, backend), expected):
        assert actual.dtype == dtype
        error = (actual.double() - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCE[dtype]


def test_what_pytorch_sees(token_shift):
    pytest.importorskip('triton')
    torch.library.opcheck(torch.ops.subquad.token_shift_fwd, _inputs())
    compiled = torch.compile(lambda *x: token_shift(*x, backend='triton'), backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(*_inputs()), token_shift(*_inputs()))


def test_the_declaration_is_enough(token_shift):
    pytest.importorskip('triton')
    assert dispatch.OPERATORS['token_shift'].plain
    x, weight = (y.cpu() for y in _inputs())
    assert 'arguments are on cpu' in kernels.why_not('token_shift', x, weight)
    assert torch.func.jvp(token_shift, (x, weight), (x, weight))[1].isfinite().all()
    with pytest.raises(ValueError, match=r'token_shift: weight must have shape \(5,\)'):
        token_shift(x, weight[:3])
