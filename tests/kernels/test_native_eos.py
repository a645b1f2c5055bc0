"""The recurrence in C++ against its float64 loop: values, gradients, sizes, dtypes, directions, strides, memories."""
import pytest
import torch
from eos_cases import DELTA, NAMES, SHAPES, call, inputs, values_and_gradients
from helpers import assert_close
from operator_cases import TOLERANCE
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels, prepare
from subquad.kernels import eos_elementwise, native
from subquad.kernels.eos_elementwise import native as operator
from subquad.kernels.eos_scan import DecayGenerator

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f'no native operators: {native.why_not()}')
ELEMENTWISE = [name for name in NAMES if name not in DELTA and 'bank' not in name]      # without complex numbers
REAL = [name for name in ELEMENTWISE if 'theta' not in name and name != 'constant modes']


def _check(name, tensors, direction, **options):
    expected = values_and_gradients(name, [x.double() for x in tensors], 'reference', direction, **options)
    actual = values_and_gradients(name, tensors, 'native', direction, **options)
    # A sum over the whole line has one large and many small gradients.
    for x, y, like in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], [None, *tensors]):
        assert like is None or x.dtype == like.dtype
        assert_close(x, y, TOLERANCE[tensors[0].dtype])


@pairwise('name, direction, length, sizes', ELEMENTWISE, ['forward', 'reverse', 'both'], [2, 7, 70],
          [(4, 5), (1, 8), (6, 40), (16, 32), (3, 70)])
def test_values_and_gradients(name, direction, length, sizes):
    _check(name, inputs(name, length, *sizes, dtype=torch.float32), direction)


@pairwise('name, direction, sizes', REAL, ['forward', 'reverse', 'both'], [(4, 5), (16, 32), (1, 70)])
def test_bfloat16_with_memories_in_float32(name, direction, sizes):
    tensors = [x.float() if shape[0] in '-+' else x.bfloat16()
               for x, shape in zip(inputs(name, 21, *sizes), SHAPES[name])]
    if 'sigmoid' in name or 'e and s' in name or name == 'log_o':
        tensors = [x if shape in ('BHTD', 'BHTK') and n < 3 else x.float() for n, (x, shape) in
                   enumerate(zip(tensors, SHAPES[name]))]
        if 'sigmoid' not in name:
            tensors = [x.float() for x in tensors]
    _check(name, tensors, direction)


@pairwise('name, direction, length', REAL, ['forward', 'reverse'], [1, 40])
def test_first_and_last_memory(name, direction, length):
    state = torch.randn(2, 3, 4, 5, requires_grad=direction == 'forward')
    _check(name, inputs(name, length, dtype=torch.float32), direction, initial_state=state, output_state=True)


@pytest.mark.parametrize('name', ['kd', 'sigmoid k', 'exponential'])
def test_gradients_of_the_first_memory(name):
    tensors, found = inputs(name, 37, batch=2, dtype=torch.float32), []
    for backend in ('native', 'reference'):
        dtype = torch.float32 if backend == 'native' else torch.float64
        state = torch.ones(2, 3, 4, 5, dtype=dtype, requires_grad=True)
        y, last = call(name, [x.to(dtype) for x in tensors], backend, initial_state=state, output_state=True)
        found.append(torch.autograd.grad(y.sum() + 2 * last.sum(), state)[0])
    assert_close(found[0], found[1])


@pytest.mark.parametrize('direction', ['forward', 'both'])
@pytest.mark.parametrize('name', ['k', 'kd', 'sigmoid k', 'exponential'])
def test_any_strides(name, direction):
    tensors = inputs(name, 11, dtype=torch.float32)
    strided = [torch.stack([x] * 2, -1).transpose(0, 1).contiguous().transpose(0, 1)[..., 1] for x in tensors]
    assert not strided[0].is_contiguous()
    (y, grads), (expected, expected_grads) = (values_and_gradients(name, x, 'native', direction)
                                              for x in (strided, tensors))
    assert all(torch.equal(a, b) for a, b in zip([*y, *grads], [*expected, *expected_grads]))
    view = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x for x in tensors]
    assert torch.equal(call(name, view, 'native', direction), expected[0])


@pytest.mark.parametrize('name', ['k', 'd', 'kd'])
@pytest.mark.parametrize('direction', ['forward', 'reverse', 'both'])
def test_strong_decays(name, direction):
    # A step of -14 has a gradient of about 1e-6, all of whose digits count.
    tensors = inputs(name, 40, 3, 5, 1, 3, torch.float32, decay=100.)
    _check(name, tensors, direction)
    logs = [4 * x - 10 for x in inputs(name, 40, 3, 5, 1, 3, torch.float32)[3:]]
    tensors = [*tensors[:3], *logs]
    wanted = values_and_gradients(name, [x.double() for x in tensors], 'reference', direction)[1][3:]
    for x, y in zip(values_and_gradients(name, tensors, 'native', direction)[1][3:], wanted):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize('form, tau', [('sigmoid', 0.01), ('sigmoid', 0.5), ('sigmoid', 16.0), ('exponential', 1.0)])
def test_clamped_generated_decays_have_no_gradient(form, tau):
    i, e, s = inputs('ones', 9, 1, 3, 1, 1, torch.float32)
    z = torch.tensor([-2e3, -1300.0, -1200.0, -60.0, -1.0, -0.5, 0.0, 1.0, 70.0])
    z = (z if form == 'sigmoid' else z.abs()).view(1, 1, 9, 1)
    found = []
    for backend, dtype in (('reference', torch.float64), ('native', torch.float32)):
        given = [x.to(dtype).requires_grad_() for x in (z, torch.full((1, 1, 3), 1.25))]
        y = eos_elementwise(*(x.to(dtype) for x in (i, e, s)), generator=DecayGenerator(*given, 'k', form, tau),
                            backend=backend)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), given)])
    for x, y in zip(found[1], found[0]):
        assert_close(x, y)


@pytest.mark.parametrize('n, value', [(0, torch.nan), (1, torch.inf), (2, torch.nan), (3, torch.nan)])
@pytest.mark.parametrize('direction', ['forward', 'both'])
def test_numbers_that_are_not_finite(n, value, direction):
    tensors = inputs('k', 9, dtype=torch.float32)
    tensors[n][1, 2, 4, 3] = value
    y, expected = call('k', tensors, 'native', direction), call('k', [x.double() for x in tensors], 'reference',
                                                              direction)
    assert not expected.isfinite().all()
    # With an infinite value, the reference subtracts infinity from infinity, where it counts a token once.
    assert torch.equal(y.isfinite(), expected.isfinite())


def test_empty_batches():
    for shape in ((0, 2, 6, 3), (2, 2, 0, 3)):
        i, e = torch.zeros(shape), torch.zeros(*shape[:3], 4)
        assert eos_elementwise(i, e, e, log_o_k=-e, backend='native').shape == shape


@pytest.mark.parametrize('name', ['k', 'constant', 'exponential'])
def test_registration_with_pytorch(name):
    tensors = inputs(name, 6, batch=2, dtype=torch.float32)
    counts = []
    for backend in ('native', 'portable'):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with FlopCounterMode(display=False) as counter:
            call(name, leaves, backend, 'both').sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    for kind in ('test_schema', 'test_faketensor', 'test_aot_dispatch_dynamic', 'test_autograd_registration'):
        torch.library.opcheck(torch.ops.subquad.eos_elementwise_native_fwd, _node_arguments(name, tensors),
                              test_utils=kind)


def _node_arguments(name, tensors):
    """Return what a call hands to the node."""
    seen, node = [], kernels.eos_elementwise.__globals__['_native_forward']
    kernels.eos_elementwise.__globals__['_native_forward'] = lambda *args: seen.append(args) or node(*args)
    try:
        call(name, [x.clone().requires_grad_() for x in tensors], 'native', output_state=True)
    finally:
        kernels.eos_elementwise.__globals__['_native_forward'] = node
    return tuple(x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in seen[0])


def test_without_memory(monkeypatch):
    monkeypatch.setattr(operator, 'function', lambda name: lambda arguments: native.NO_MEMORY)
    with pytest.raises(MemoryError, match='eos_elementwise'):
        call('k', inputs('k', 5, dtype=torch.float32), 'native')


@pytest.mark.parametrize('grid', [(5, 7), (1, 1), (1, 9), (17, 1)])
@pytest.mark.parametrize('options', [dict(dim=32, num_heads=2), dict(dim=30, num_heads=3, expand_dim=5, tau=2.0),
                                     dict(dim=48, num_heads=1, mixer='1-3-1-4', expand_dim=3)])
def test_prepared_mixer(grid, options):
    from subquad.backbones.mixers import EosMixer
    torch.manual_seed(0)
    mixer, x = EosMixer(**options).eval(), torch.randn(2, *grid, options['dim'])
    mixer.decay_scale = 2.0
    for p in mixer.norm.parameters():
        torch.nn.init.normal_(p)
    with torch.no_grad(), kernels.use_backend('portable'):
        expected = mixer(x)
    prepared = prepare(torch.nn.Sequential(mixer).eval())
    assert type(prepared[0]).__name__ == 'NativeAxesMixer'
    with torch.no_grad():
        assert_close(prepared(x), expected, 2e-5)
        assert prepared(x[:0]).shape == x[:0].shape
        with torch.autocast('cpu', torch.bfloat16):
            assert_close(prepared(x), expected, 5e-2)
        with kernels.use_backend('portable'):
            assert_close(prepared(x), expected, 2e-5)
        mask = torch.ones(2, *grid, dtype=torch.bool)
        assert_close(mixer(x, mask), expected, 2e-5)
    assert prepared(x).requires_grad


@pytest.mark.parametrize('options', [dict(mixer='mamba'), dict(mixer='retnet'), dict(mode='raster'),
                                     dict(gated=False), dict(mixer='1-2-1-4'), dict(mixer='1-3-1-3'),
                                     dict(mixer='1-3-0-4')])
def test_other_mixers_stay(options):
    from subquad.backbones.mixers import EosMixer
    mixer, x = EosMixer(16, 2, **options).eval(), torch.randn(1, 4, 5, 16)
    with torch.no_grad():
        expected = mixer(x)
        assert_close(prepare(torch.nn.Sequential(mixer).eval())(x), expected)
    assert type(mixer) is EosMixer
