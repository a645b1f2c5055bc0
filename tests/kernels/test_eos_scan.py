"""`eos_elementwise` and `eos_matmul` against their float64 loop: values, gradients, sizes, dtypes, directions."""
import pytest
import torch
from eos_cases import NAMES, call, inputs, values_and_gradients
from helpers import assert_close
from pairwise import pairwise

from subquad.kernels import eos_elementwise
from subquad.kernels.eos_elementwise import portable
from subquad.kernels.eos_scan import DecayGenerator, chunks, full_rank, small_memories

STATEFUL = [name for name in NAMES if 'theta' not in name and 'bank' not in name and name != 'constant modes']
SMALL = NAMES[:NAMES.index('constant bank')]                  # of rank one: the others never take this loop


def _check(name, tensors, backend, tolerance=1e-10, direction='forward', **options):
    expected, expected_grads = values_and_gradients(name, tensors, 'reference', direction, **options)
    outputs, grads = values_and_gradients(name, tensors, backend, direction, **options)
    for actual, wanted in zip([*outputs, *grads], [*expected, *expected_grads]):
        assert actual.dtype == wanted.dtype and actual.shape == wanted.shape and actual.isfinite().all()
        assert (actual - wanted).abs().max() <= tolerance * max(1, wanted.abs().max())


# --- values and gradients

@pairwise('backend, name, direction', ['portable', 'export'], NAMES, ['forward', 'reverse', 'both'])
def test_values_and_gradients(name, direction, backend):
    """Lines of one token, of one chunk, and of several with a part of one at the end."""
    for length in (1, 7, 70):
        _check(name, inputs(name, length, batch=2 if length < 70 else 1), backend, direction=direction, chunk=16)


@pairwise('backend, name, direction', ['portable', 'export'], NAMES, ['forward', 'reverse'])
def test_initial_and_final_state(name, direction, backend):
    for length in (1, 5, 70):
        tensors, state = inputs(name, length, batch=1), torch.randn(1, 3, 4, 5, dtype=torch.float64)
        if name not in STATEFUL:
            state = torch.complex(state, torch.randn_like(state))
        if direction == 'forward':
            state.requires_grad_()
        _check(name, tensors, backend, direction=direction, chunk=16, initial_state=state, output_state=True)


@pytest.mark.parametrize('name', ['kd', 'scalar', 'sigmoid d', 'delta k'])
def test_gradients_of_the_initial_state(name):
    tensors, state = inputs(name, 70, batch=1), torch.randn(1, 3, 4, 5, dtype=torch.float64)
    weight = torch.randn(1, 3, 70, 5, dtype=torch.float64), torch.randn_like(state)
    found = []
    for backend in ('reference', 'portable', 'export'):
        start = state.clone().requires_grad_()
        y, last = call(name, tensors, backend, initial_state=start, output_state=True, chunk=32)
        found.append(torch.autograd.grad((y * weight[0]).sum() + (last * weight[1]).sum(), start)[0])
    for grad in found[1:]:
        torch.testing.assert_close(grad, found[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize('name', NAMES)
def test_gradcheck(name):
    tensors = [x.requires_grad_() for x in inputs(name, 5, 2, 2, 1, 1)]
    assert torch.autograd.gradcheck(lambda *x: call(name, x, 'portable'), tensors)
    assert torch.autograd.gradcheck(lambda *x: call(name, x, 'portable', 'both'), tensors)


@pytest.mark.parametrize('name', ['kd', 'constant', 'sigmoid k', 'delta k'])
def test_many_blocks_equal_one(name, monkeypatch):
    tensors = inputs(name, 150, batch=3)
    for elements in (1, 500, 4000):
        monkeypatch.setattr(chunks, 'BLOCK_ELEMENTS', elements)
        monkeypatch.setattr(full_rank, 'BLOCK_ELEMENTS', elements)
        for direction in ('forward', 'reverse', 'both'):
            _check(name, tensors, 'portable', direction=direction, chunk=16)


@pytest.fixture
def loops(monkeypatch):
    """Let any number of lines with memories of up to 4 numbers take the loop, and return the list of its runs."""
    runs, forward = [], small_memories.forward
    monkeypatch.setattr(portable, 'LEAST_LINES', 1)
    monkeypatch.setattr(portable, 'LARGEST_MEMORY', 4)
    monkeypatch.setattr(small_memories, 'forward', lambda *args: runs.append(args) or forward(*args))
    return runs


@pytest.mark.parametrize('direction', ['forward', 'reverse', 'both'])
@pytest.mark.parametrize('name', SMALL)
def test_the_loop_over_tokens_for_small_memories(name, direction, loops):
    tensors = inputs(name, 70, 2, 1, 2, 2)
    _check(name, tensors, 'portable', direction=direction, chunk=16)
    assert bool(loops) is not (name == 'ones' and direction == 'both')       # a sum over all tokens
    tensors = [x.float() for x in tensors]
    expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference', direction)
    outputs, grads = values_and_gradients(name, tensors, 'portable', direction)
    tolerance = 5e-5 if 'bank' in name else 1e-5           # constant angles: the gradient is a sum over all phases
    for actual, wanted in zip([*outputs, *grads], [*expected, *expected_grads]):
        assert_close(actual, wanted, tolerance)


@pytest.mark.parametrize('elements', [1, 300, 1000])
@pytest.mark.parametrize('name', ['k', 'd', 'kd', 'scalar', 'constant'])
def test_many_blocks_of_small_memories_equal_one(name, elements, loops, monkeypatch):
    """Blocks of one line, of a part of the heads, and of a part of the batch."""
    monkeypatch.setattr(small_memories, 'BLOCK_ELEMENTS', elements)
    for direction in ('forward', 'reverse', 'both'):
        _check(name, inputs(name, 70, 2, 1, 3, 3), 'portable', direction=direction, chunk=16)
        assert loops.pop()


@pytest.mark.parametrize('direction', ['forward', 'reverse'])
@pytest.mark.parametrize('elements', [1, 1 << 18])
def test_states_of_the_loop_for_small_memories(elements, direction, loops, monkeypatch):
    monkeypatch.setattr(small_memories, 'BLOCK_ELEMENTS', elements)
    state = torch.randn(2, 3, 2, 1, dtype=torch.float64, requires_grad=direction == 'forward')
    _check('k', inputs('k', 70, 2, 1, 2), 'portable', direction=direction, initial_state=state, output_state=True)
    assert loops


@pytest.mark.parametrize('direction', ['forward', 'reverse', 'both'])
def test_gradients_of_strong_decays_in_the_loop_for_small_memories(direction, loops):
    """A step of -14 has a gradient of about 1e-6, all of whose digits count."""
    i, e, s, g = (x.float() for x in inputs('k', 40, 1, 1, 2, 3))
    tensors = [i, e, s, g * 4 - 10]
    *_, wanted = values_and_gradients('k', [x.double() for x in tensors], 'reference', direction)[1]
    *_, actual = values_and_gradients('k', tensors, 'portable', direction)[1]
    assert loops
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize('form, tau', [('sigmoid', 0.01), ('sigmoid', 0.5), ('sigmoid', 16.0), ('exponential', 1.0)])
def test_clamped_generated_decays_have_no_gradient(form, tau):
    i, e, s = inputs('ones', 9, 1, 1, 1, 1)
    z = torch.tensor([-2e3, -1300.0, -1200.0, -60.0, -1.0, -0.5, 0.0, 1.0, 70.0], dtype=torch.float64)
    z = (z if form == 'sigmoid' else z.abs()).view(1, 1, 9, 1)
    weight = torch.full((1, 1, 1), 1.25, dtype=torch.float64)
    found = []
    for backend in ('reference', 'portable', 'export'):
        given = [x.clone().requires_grad_() for x in (z, weight)]
        y = eos_elementwise(i, e, s, generator=DecayGenerator(*given, 'k', form, tau), backend=backend)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), given)])
    for actual in found[1:]:
        for x, expected in zip(actual, found[0]):
            torch.testing.assert_close(x, expected, rtol=1e-11, atol=1e-11)
    assert found[0][1].count_nonzero() > 0


def test_the_printed_backward_pass_is_wrong():
    """The paper prints G_t m_t' for the gradient of the oscillation, where m_{t-1} belongs, and no o' in type 2."""
    i, e, s, g = inputs('k', 12, batch=1, heads=1)
    _, (*_, right) = values_and_gradients('k', [i, e, s, g], 'portable')
    dy = torch.linspace(-1, 1, i.numel(), dtype=torch.float64).view(i.shape)
    memory, adjoint = torch.zeros(12, 4, 5, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.float64)
    o = g[0, 0].exp()
    for t in range(12):
        memory[t] = (o[t, :, None] * memory[t - 1] if t else 0) + e[0, 0, t, :, None] * i[0, 0, t]
    printed, corrected = torch.zeros(12, 4, dtype=torch.float64), torch.zeros(12, 4, dtype=torch.float64)
    for t in reversed(range(12)):
        adjoint = adjoint + s[0, 0, t, :, None] * dy[0, 0, t]
        printed[t] = (adjoint * memory[t]).sum(-1) * o[t]
        corrected[t] = (adjoint * memory[t - 1]).sum(-1) * o[t] if t else 0
        adjoint = o[t, :, None] * adjoint
    assert_close(right[0, 0], corrected, 1e-12)
    assert (right[0, 0] - printed).abs().max() > 0.1

    i, e, s, a, b = inputs('delta', 12, batch=1, heads=1)
    _, (di, *_) = values_and_gradients('delta', [i, e, s, a, b], 'portable')
    a, grads = torch.nn.functional.normalize(a, dim=-1)[0, 0], []
    for transposed in (True, False):                                         # right, and as printed
        adjoint, wanted = torch.zeros(4, 5, dtype=torch.float64), torch.zeros(12, 5, dtype=torch.float64)
        for t in reversed(range(12)):
            adjoint = adjoint + s[0, 0, t, :, None] * dy[0, 0, t]
            wanted[t] = adjoint.T @ e[0, 0, t]
            o = torch.eye(4, dtype=torch.float64) + b[0, 0, t, :, None] * a[t]
            adjoint = (o.T if transposed else o) @ adjoint
        grads.append(wanted)
    assert_close(di[0, 0], grads[0], 1e-12)
    assert (di[0, 0] - grads[1]).abs().max() > 0.1


# --- precision and sizes

@pytest.mark.parametrize('name', NAMES)
def test_float32(name):
    """Chunks equal the loop within 1e-5, gradients included."""
    tensors = inputs(name, 130, 16, 8, 1, 2, torch.float32)
    expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference')
    outputs, grads = values_and_gradients(name, tensors, 'portable')
    for actual, wanted in zip([*outputs, *grads], [*expected, *expected_grads]):
        assert_close(actual, wanted, 1e-5)


@pairwise('backend, name, dtype', ['portable', 'export'], [name for name in NAMES if 'bank' not in name],
          [torch.bfloat16, torch.float16])
def test_half_types(name, dtype, backend):
    tolerance = 3e-2 if dtype == torch.bfloat16 else 4e-3
    tensors = inputs(name, 80, 8, 8, 1, 2, dtype, 0.2)
    expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference', 'both')
    (y,), grads = values_and_gradients(name, tensors, backend, 'both')
    assert y.dtype == dtype
    assert_close(y, expected[0], tolerance)
    for actual, wanted, x in zip(grads, expected_grads, tensors):
        assert actual.dtype == x.dtype
        assert_close(actual, wanted, 2 * tolerance)


@pytest.mark.parametrize('keys, dim', [(1, 1), (1, 16), (16, 1), (3, 5), (64, 32), (128, 128)])
@pytest.mark.parametrize('name', ['kd', 'scalar', 'sigmoid d', 'delta k'])
def test_widths(name, keys, dim):
    _check(name, inputs(name, 20, keys, dim, 1, 2), 'portable', direction='both')


@pytest.mark.parametrize('name', ['k', 'kd', 'scalar', 'constant', 'log_o', 'exponential', 'delta k'])
def test_decays_of_any_size(name):
    """Steps of 1, exp(-60) and 0 side by side: the result stays right, and no gradient is infinite."""
    tensors = inputs(name, 100, 8, 6, 1, 2, torch.float32)
    for n in range(3, len(tensors)):
        if (tensors[n] <= 0).all():
            choice = torch.randint(0, 4, tensors[n].shape)
            tensors[n] = torch.tensor([0.0, -60.0, -torch.inf, -0.5])[choice]
    expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference')
    for backend in ('portable', 'export'):
        outputs, grads = values_and_gradients(name, tensors, backend)
        for actual, wanted in zip([*outputs, *grads], [*expected, *expected_grads]):
            assert_close(actual, wanted, 1e-5)


@pytest.mark.parametrize('direction', ['forward', 'reverse', 'both'])
@pytest.mark.parametrize('name', ['k', 'd', 'kd', 'scalar', 'scalar and d', 'delta k', 'delta scalar'])
def test_small_steps_behind_large_ones_keep_their_digits(name, direction):
    """Ten steps of exp(-60), then small ones: sums of all steps have no digits of the small ones in float32."""
    for length, chunk in ((64, 64), (256, 128)):
        tensors = inputs(name, length, 8, 6, 1, 2, torch.float32, 0.02)
        for log in tensors[3 if 'delta' not in name else 5:]:
            for start in range(20, length, 64):
                log[:, :, start:start + 10] = -60.0
        expected = call(name, [x.double() for x in tensors], 'reference', direction)
        for backend in ('portable', 'export'):
            assert_close(call(name, tensors, backend, direction, chunk=chunk), expected, 1e-5)


@pytest.mark.parametrize('name', ['k', 'kd', 'scalar', 'constant theta', 'sigmoid k', 'delta'])
def test_long_lines(name):
    """After 65,536 tokens the result still equals that of the loop from the last memories."""
    tensors = inputs(name, 65536, 4, 3, 1, 1, torch.float32, 0.01)
    if name == 'delta':
        tensors[4] = -torch.nn.functional.normalize(tensors[3], dim=-1)
    y, last = call(name, tensors, 'portable', output_state=True)
    assert y.isfinite().all()
    start, middle = ([x[:, :, part] if x.ndim > 2 and x.shape[2] == 65536 else x for x in tensors]
                     for part in (slice(65000), slice(65000, None)))
    _, state = call(name, start, 'portable', output_state=True)
    expected, expected_last = call(name, [x.double() for x in middle], 'reference', output_state=True,
                                   initial_state=state.to(torch.complex128 if state.is_complex() else torch.float64))
    assert_close(y[:, :, 65000:], expected, 1e-4 if name == 'constant theta' else 1e-5)
    assert_close(*(torch.view_as_real(x) if x.is_complex() else x for x in (last, expected_last)), 1e-4)


@pytest.mark.parametrize('name', NAMES)
def test_lines_without_tokens(name):
    tensors = inputs(name, 0)
    state = torch.ones(2, 3, 4, 5)
    for backend in ('reference', 'portable', 'export'):
        y, last = call(name, tensors, backend, initial_state=state, output_state=True)
        assert y.shape == (2, 3, 0, 5) and (last.real if last.is_complex() else last).double().equal(state.double())


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize('name', NAMES)
def test_dtypes_of_lines_without_tokens_are_those_of_others(name, dtype):
    precise = torch.float64 if dtype is torch.float64 else torch.float32
    wanted = dtype, precise if name in STATEFUL else precise.to_complex()
    if name in ('complex bank', 'constant bank') and dtype is torch.bfloat16:
        pytest.skip('there are no complex numbers of bfloat16')
    for backend in ('reference', 'portable', 'export'):
        for length in (0, 1, 3):
            for state in (None, torch.ones(2, 3, 4, 5, dtype=dtype)):
                found = call(name, inputs(name, length, dtype=dtype), backend, initial_state=state, output_state=True)
                assert tuple(x.dtype for x in found) == wanted, (backend, length, state is None)


# --- directions

@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
def test_reverse_flips_and_bidirectional_adds(name, backend):
    tensors = inputs(name, 20)
    flipped = [x.flip(2) if x.ndim > 2 and x.shape[2] == 20 else x for x in tensors]
    reverse = call(name, tensors, backend, 'reverse')
    torch.testing.assert_close(reverse, call(name, flipped, backend).flip(2), rtol=1e-11, atol=1e-11)
    both = call(name, tensors, backend, 'both')
    # Lines of one token have the diagonal alone.
    own = torch.cat([call(name, [x[:, :, t:t + 1] if x.ndim > 2 and x.shape[2] == 20 else x for x in tensors], backend)
                     for t in range(20)], 2)
    torch.testing.assert_close(both, call(name, tensors, backend) + reverse - own, rtol=1e-11, atol=1e-11)


def test_scale():
    for name in ('k', 'delta k', 'sigmoid k'):
        tensors = inputs(name, 20)
        for backend in ('reference', 'portable', 'export'):
            torch.testing.assert_close(call(name, tensors, backend, scale=0.25), 0.25 * call(name, tensors, backend))


# --- layouts

@pytest.mark.parametrize('name', ['kd', 'sigmoid d', 'delta k'])
def test_strided_views(name):
    tensors = inputs(name, 20)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x for x in tensors]
    views[0] = torch.stack([views[0]] * 2, -1)[..., 1]
    assert not views[0].is_contiguous()
    torch.testing.assert_close(call(name, views, 'portable'), call(name, tensors, 'portable'), rtol=1e-12, atol=1e-12)


def test_autocast_keeps_the_precision():
    tensors = inputs('k', 40, dtype=torch.float32)
    expected = call('k', tensors, 'portable')
    with torch.autocast('cpu', torch.bfloat16):
        assert_close(call('k', tensors, 'portable'), expected, 1e-6)
        assert_close(call('k', tensors, 'export'), expected, 1e-5)
