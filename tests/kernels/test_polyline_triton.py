"""Triton kernels of polyline attention: the query's own logit as the reference, and the fallback where it overflows."""
import pytest
import torch
from operator_cases import CALLS, DEVICE, TOLERANCE, assert_as_exact, attention_inputs, run, skip_without_triton
from pairwise import pairwise

from subquad import kernels
from subquad.kernels.common import launch

skip_without_triton()

NAMES = [name for name in CALLS if name.startswith('polyline')]
BOTH = ['polyline-additive-both', 'polyline-multiplicative-both']


def _inputs(height, width, dtype=torch.float32, batch=1, heads=1, dim=8, dim_v=8):
    return attention_inputs(height, width, dtype, batch, heads, dim, dim_v, dim ** -0.5, torch.float32, DEVICE)


def _check(name, inputs, tolerance=None):
    """Compare output and gradients with those of the reference on the same numbers in float64."""
    expected, wanted = run(CALLS[name], [x.double() for x in inputs], 'reference')
    actual, grads = run(CALLS[name], inputs, 'triton')
    assert_as_exact((actual, *grads), (expected, *wanted), tolerance or TOLERANCE[inputs[0].dtype])


@pytest.fixture
def replaced(monkeypatch):
    """Numbers of the (batch, head) groups that the running-maximum kernels computed after the others, per launch."""
    from subquad.kernels.polyline_attention import triton_running
    found = []

    def recorded(kernel, output):
        class Recorder:
            def __getitem__(self, programs):
                def start(*args, **options):
                    assert options['FLAGGED']
                    before = args[output].clone()
                    args[output].fill_(torch.nan)              # only groups that are computed again lose this
                    kernel[programs](*args, **options)
                    again = args[output].isfinite().flatten(2).all(-1).flatten().nonzero().flatten().tolist()
                    found.append(again)
                    args[output].copy_(torch.where(args[output].isnan(), before, args[output]))
                return start
        return Recorder()
    for name, output in (('fwd', 5), ('bwd', 8)):
        name = f'_polyline_attention_running_{name}_kernel'
        monkeypatch.setattr(triton_running, name, recorded(getattr(triton_running, name), output))
    return found


def _exceeding(nats, dtype=torch.float32, step=-0.01):
    """Inputs of two groups; in the second, the last query's logit with the first key exceeds its own by `nats`."""
    q, k, v, a, b = _inputs(3, 4, dtype, heads=2)
    q[:, 1, ..., 0] = 0
    q[:, 1, -1, -1] = 0
    k[:, 1, ..., 0] = 0
    q[:, 1, -1, -1, 0] = k[:, 1, 0, 0, 0] = nats ** 0.5
    return q, k, v, torch.full_like(a, step), torch.full_like(b, step)


@pairwise('name, grid', NAMES, [(3, 5), (2, 18)], together=1)
def test_running_maximum_alone(name, grid, monkeypatch):
    """The kernels that float16 and wide heads take, in float32."""
    monkeypatch.setattr(launch, 'own_logit_reference', lambda *_: False)
    _check(name, _inputs(*grid))


@pytest.mark.parametrize('name, grid', [
    *((name, (7, 7)) for name in NAMES), (BOTH[0], (1, 8)), (BOTH[1], (8, 1)),
    *(pytest.param(name, grid, marks=pytest.mark.slow) for name, grid in (
        (BOTH[0], (9, 20)), (BOTH[1], (20, 5)), (BOTH[0], (17, 9)), (BOTH[0], (2, 33))))])
def test_tiles_of_several_rows(name, grid, replaced):
    """Tiles of 8 and 16 columns, rows that end inside a tile, and grids that are read by columns."""
    _check(name, _inputs(*grid))
    assert replaced and not any(replaced)


@pytest.mark.parametrize('grid', [(5, 18), (18, 5)])
def test_several_tiles_of_8_columns(grid, replaced, monkeypatch):
    """Read by rows, whose tokens are side by side, and by columns."""
    from subquad.kernels.polyline_attention import triton
    monkeypatch.setattr(triton, '_columns', lambda height, width, _: (-width, 8))
    _check(BOTH[0], _inputs(*grid))
    assert replaced and not any(replaced)


@pytest.mark.parametrize('name', NAMES)
def test_bfloat16(name, replaced):
    _check(name, _inputs(5, 6, torch.bfloat16))
    assert replaced and not any(replaced)


@pairwise('name, nats', NAMES, [30, 79, 81, 500], together=1)
def test_logits_that_exceed_the_own_one(name, nats, replaced):
    """80 above the own logit is the limit. No group but the one with this logit is computed again."""
    _check(name, _exceeding(float(nats)), 2e-5)
    assert replaced and all(groups == ([1] if nats > 80 else []) for groups in replaced)


@pytest.mark.parametrize('name', BOTH)
def test_logits_that_exceed_the_own_one_in_bfloat16(name, replaced):
    """Values alone: the gradients of saturated logits are differences of rounded outputs, times keys of 22."""
    inputs = _exceeding(500.0, torch.bfloat16)
    y, grads = run(CALLS[name], inputs, 'triton')
    expected, _ = run(CALLS[name], [x.double() for x in inputs], 'reference')
    assert (y.double() - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
    assert all(x.isfinite().all() for x in grads)
    assert replaced and all(groups == [1] for groups in replaced)


def test_masks_may_take_an_excess_back(replaced):
    """A path of 5 steps of -2 brings 85 down to 75. No mask brings 500 down: its weight is 0 times an overflow."""
    _check('polyline-additive-both', _exceeding(85.0, step=-2.0), 2e-5)
    assert replaced == [[]] * len(replaced)
    replaced.clear()
    _check('polyline-additive-both', _exceeding(500.0, step=-80.0), 2e-5)
    assert replaced == [[1]] * len(replaced)


@pytest.mark.parametrize('nats, groups', [(65, []), (75, [1])])
def test_masks_that_leave_different_sums(nats, groups, replaced):
    """L~ ends at the steps of row 0, L does not: sums that differ by more than e^69 would lose weights under L~."""
    inputs = _exceeding(float(nats))
    inputs[3][:, :, 0] = -80
    _check('polyline-additive-both', inputs, 2e-5)
    assert replaced == [groups] * len(replaced)


def test_values_that_overflow_with_their_weights(replaced):
    """Weights of e^79 fit float32, but their products with values of 1e6 do not."""
    q, k, v, a, b = _exceeding(79.0)
    inputs = q, k, v * 1e6, a, b
    y = kernels.polyline_attention(*inputs, backend='triton')
    expected = kernels.polyline_attention(*(x.double() for x in inputs), backend='reference')
    assert (y.double() - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert replaced == [[1]]


@pairwise('name, grid', NAMES, [(4, 7), (1, 20)], together=1)
def test_large_steps_everywhere(name, grid, replaced):
    """Masks of -80 a step leave each query its own key."""
    q, k, v, a, b = _inputs(*grid)
    a, b = torch.full_like(a, -80.0), torch.full_like(b, -80.0)
    expected, _ = run(CALLS[name], [x.double() for x in (q, k, v, a, b)], 'reference')
    y, grads = run(CALLS[name], (q, k, v, a, b), 'triton')
    assert (y.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert all(x.isfinite().all() for x in grads if x is not None)
    assert replaced and not any(replaced)


@pytest.mark.parametrize('name', NAMES)
def test_one_token(name, replaced):
    q, k, v, a, b = _inputs(1, 1)
    y, (dq, dk, dv, _, _) = run(CALLS[name], (30 * q, 30 * k, v, a, b), 'triton')
    factor = 2 if name == 'polyline-multiplicative-both' else 1
    torch.testing.assert_close(y, factor * v)
    assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4 and dv.abs().max() > 0
    assert replaced and not any(replaced)


@pytest.mark.parametrize('own', [True, False])
def test_no_number_hides(own, monkeypatch):
    """NaN and infinite inputs give NaN, as the definition does, not finite numbers of either path."""
    if not own:
        monkeypatch.setattr(launch, 'own_logit_reference', lambda *_: False)
    for bad in (torch.nan, torch.inf):
        q, k, v, a, b = _inputs(2, 3, heads=2)
        k[:, 1, 1, 1, 0] = bad
        y = kernels.polyline_attention(q, k, v, a, b, backend='triton')
        assert y[:, 1].isnan().any() and y[:, 0].isfinite().all()


def test_float16_far_above_the_own_logit():
    inputs = [x.half() for x in _exceeding(79.0)]
    _check('polyline-additive-both', inputs)


def test_fallback_takes_every_flagged_group(replaced, monkeypatch):
    """More groups than programs, and more tiles than parts of a group."""
    from subquad.kernels.polyline_attention import triton
    monkeypatch.setattr(triton, 'FALLBACK_PROGRAMS', 2)
    q, k, v, a, b = _inputs(2, 3, heads=5)
    for head in (1, 3, 4):
        k[:, head, 0, 0] = 120 * q[:, head, 1, 1] / q[:, head, 1, 1].square().sum()
    _check('polyline-additive-both', (q, k, v, a, b), 5e-5)
    assert replaced == [[1, 3, 4]] * len(replaced)


@pytest.mark.parametrize('own', [True, False])
def test_tiles_of_a_row_in_several_launches(own, monkeypatch):
    """The backward pass takes two tiles of a row at a time. Those of the running maximum differ from the forward's."""
    from subquad.kernels.polyline_attention import triton
    monkeypatch.setattr(launch, 'own_logit_reference', lambda *_: own)
    monkeypatch.setattr(launch, 'LARGEST_TILE', {'polyline_attention_running_fwd': {4: (32,) * 3},
                                                 'polyline_attention_running_bwd': {4: (16,) * 3}})
    monkeypatch.setattr(triton, 'SLICES', 2)
    _check('polyline-additive-both', _inputs(2, 37))


def test_flagged_groups_in_several_launches(replaced, monkeypatch):
    """Tiles of 8 columns and, where a group is computed again, of 16."""
    from subquad.kernels.polyline_attention import triton
    monkeypatch.setattr(triton, 'SLICES', 1)
    monkeypatch.setattr(launch, 'LARGEST_TILE', {kernel: {4: (16,) * 3} for kernel in launch.LARGEST_TILE})
    q, k, v, a, b = _inputs(1, 20, heads=2)
    monkeypatch.setattr(triton, '_columns', lambda height, width, _: (height, 8))
    k[:, 1, 0, 0] = 120 * q[:, 1, 0, 19] / q[:, 1, 0, 19].square().sum()
    _check('polyline-additive-both', (q, k, v, 0.01 * a, b), 5e-5)
    assert len(replaced) == 3 and replaced[0] == [1]            # the forward pass, and two tiles of the backward pass


def test_memory_of_the_backward_pass_is_linear(monkeypatch):
    """No launch gets more than SLICES slices of partial sums, for a row of 4,096 tokens."""
    from subquad.kernels.polyline_attention import triton, triton_running
    launched = {}

    class Recorder:
        def __init__(self, name):
            self.found = launched.setdefault(name, [])

        def __getitem__(self, programs):
            return lambda *args, **_: self.found.append((programs[0], next(
                x.shape for x in args if isinstance(x, torch.Tensor) and x.ndim == 4 and x.shape[1] > 2)))
    for module, name in ((triton, 'bwd_query'), (triton, 'bwd_key'), (triton_running, 'running_bwd')):
        monkeypatch.setattr(module, f'_polyline_attention_{name}_kernel', Recorder(name))
    q = torch.empty(1, 1, 1, 4096, 8, device=DEVICE)
    sums = torch.zeros(1, 1, 1, 4096, device=DEVICE)
    triton.backward(q, q, q, q, sums, sums, q, q, sums.new_zeros(3, 1, 1, 4096), 'additive', 'both')
    assert {name: sum(programs for programs, _ in found) for name, found in launched.items()
            if name != 'running_bwd'} == {'bwd_query': 4096 // 16, 'bwd_key': 4096 // 16}
    assert {shape for found in launched.values() for _, shape in found} == {(2, 2 * triton.SLICES + 2, 1, 4096)}
