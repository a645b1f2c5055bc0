"""The selective scan along paths over a grid: every backend against the float64 reference."""
import pytest
import torch
from operator_cases import DEVICE, TOLERANCE, assert_as_exact, run, skip_without_triton
from pairwise import pairwise

from subquad import kernels
from subquad.kernels import native
from subquad.kernels.eos_elementwise import eos_elementwise

ALL = ('right', 'down', 'left', 'up')
NAMES = ('u', 'delta', 'a', 'b', 'c', 'skip', 'bias')


def _inputs(grid, channels, states, paths, dtype=torch.float32, batch=2):
    g = torch.Generator().manual_seed(channels + states)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)
    of_path = (len(paths), channels)
    u, delta = normal(batch, *grid, channels), normal(batch, *grid, *of_path)
    b, c = normal(batch, *grid, len(paths), 2 * states + 1)[..., 1:].chunk(2, -1)        # strided, as in networks
    rates = -2 * torch.rand(*of_path, states, generator=g, dtype=torch.float64)
    return [x.to(DEVICE, dtype) for x in (u, delta, rates, b, c, normal(*of_path), normal(*of_path))]


def _scan(paths):
    return lambda *args: kernels.selective_scan(*args[:-1], paths=paths, backend=args[-1])


@pairwise('backend, grid, channels, states, paths, dtype', ['native', 'portable', 'export', 'triton'],
          [(5, 4), (1, 9), (7, 1), (1, 1)], [16, 5, 37], [1, 2, 5], [ALL, ('left',), ('up', 'right'), ('down', 'down')],
          [torch.float32, torch.bfloat16])
def test_values_and_gradients(backend, grid, channels, states, paths, dtype):
    if backend == 'triton':
        skip_without_triton()
    if backend == 'native' and native.why_not():
        pytest.skip(native.why_not())
    inputs = _inputs(grid, channels, states, paths, dtype)
    y, grads = run(_scan(paths), [x.double() for x in inputs], 'reference')
    actual, found = run(_scan(paths), inputs, backend)
    assert actual.dtype == dtype
    # Graphs leave out the decays of a line of one token.
    found = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found)]
    # Sums over chunks of the portable recurrence cost a digit of the decays' gradient.
    assert_as_exact([actual, *found], [y, *grads], TOLERANCE[dtype] * (2 if backend == 'portable' else 1))
    with torch.no_grad():
        assert_as_exact([_scan(paths)(*inputs, backend)], [y], TOLERANCE[dtype])


@pytest.mark.parametrize('states', [1, 16])
def test_long_lines(states):
    # Longer than the pieces of the native loop; both threads, several tiles of channels.
    inputs = _inputs((25, 24), 40, states, ALL)
    expected = _scan(ALL)(*(x.double() for x in inputs), 'reference')
    assert_as_exact([_scan(ALL)(*inputs, 'auto')], [expected], 1e-5)


def test_a_path_is_a_recurrence_on_a_line():
    # Down a column, then the next one; a reversed path goes the other way.
    u, delta, a, b, c, *_ = _inputs((3, 4), 8, 1, ('up',), torch.float64)
    step = torch.nn.functional.softplus(delta[..., 0, :])
    lines = [x.transpose(1, 2).flatten(1, 2).flip(1)[:, None] for x in (step * u, b[..., 0, :], c[..., 0, :], step)]
    y = eos_elementwise(*lines[:3], log_o_d=lines[3] * a[0, :, 0], backend='reference')
    y = y[:, 0].flip(1).unflatten(1, (4, 3)).transpose(1, 2)
    torch.testing.assert_close(kernels.selective_scan(u, delta, a, b, c, paths=('up',)), y)


def test_no_tensor_of_all_tokens_channels_and_states():
    inputs = _inputs((16, 16), 32, 16, ALL, batch=1)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profiler:
        _scan(ALL)(*inputs, 'auto')
    largest = max(event.self_cpu_memory_usage for event in profiler.key_averages())
    assert largest < 4 * 16 * 16 * 32 * 16


def test_extreme_steps():
    u, delta, a, b, c, skip, bias = _inputs((4, 4), 8, 2, ALL)
    delta, a = delta * 40, a * 30                          # steps of 0 to 160, decays down to exp(-80)
    expected = _scan(ALL)(*(x.double() for x in (u, delta, a, b, c, skip, bias)), 'reference')
    assert_as_exact([_scan(ALL)(u, delta, a, b, c, skip, bias, 'auto')], [expected], 1e-5)


def test_a_number_that_is_not_finite_is_kept():
    inputs = _inputs((4, 4), 8, 1, ('right',))
    inputs[0][0, 1, 2, 3] = float('nan')
    y = _scan(('right',))(*inputs, 'auto')
    assert y[0, 1, 2:, 3].isnan().all() and y[0, 2:, :, 3].isnan().all()
    assert y[0, 0].isfinite().all() and y[0, ..., :3].isfinite().all() and y[1].isfinite().all()


@pytest.mark.parametrize('change, error, message', [
    (dict(paths=('right', 'diagonal')), ValueError, "paths must be one of 'right', .*, got 'diagonal'"),
    (dict(paths=()), ValueError, 'at least one path'),
    (dict(paths=('right',)), ValueError, r'delta .*\(2, 3, 4, 1, 8\)'),
    (dict(a=torch.ones(2, 8, 3)), ValueError, 'a must not be positive'),
    (dict(u=torch.zeros(2, 4, 8)), ValueError, 'u must have 4 dimensions'),
    (dict(b=torch.zeros(2, 3, 4, 2, 3, dtype=torch.float16)), TypeError, 'b'),
    (dict(c=torch.zeros(2, 3, 4, 2, 1)), ValueError, 'c .*a number for each token, path and state'),
])
def test_wrong_arguments(change, error, message):
    inputs = [x.cpu() for x in _inputs((3, 4), 8, 3, ('right', 'up'))]
    with pytest.raises(error, match=message):
        kernels.selective_scan(**{**dict(zip(NAMES, inputs), paths=('right', 'up')), **change})
