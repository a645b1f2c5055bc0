"""Triton kernels of operators with step logs against the float64 reference: values, gradients, extremes; and their
registration with PyTorch. They run on a GPU, or without one in Triton's interpreter."""
import pytest
import torch
from operator_cases import CALLS, DEVICE, TOLERANCE, assert_as_exact, attention_inputs, run, skip_without_triton
from pairwise import pairwise, slow
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels
from subquad.kernels.common import launch

skip_without_triton()

# Linear attention runs the kernels of scans. Criss-cross attention, in test_decay_triton.py, runs those of decay.
TESTED = [name for name in CALLS if name.partition('-')[0] in ('polyline', 'decay', 'scan') or name == 'linear-both']
SOME = ['polyline-additive-both', 'polyline-multiplicative-both', 'decay-additive-column', 'decay-multiplicative-row',
        'scan-both']
EVERY_OPERATOR = [*SOME, 'crisscross-additive-both']


def _inputs(height, width, dtype=torch.float32, batch=1, heads=2, dim=8, dim_v=8):
    return attention_inputs(height, width, dtype, batch, heads, dim, dim_v, dim ** -0.5, torch.float32, DEVICE)


def _run(call, inputs, backend, layout=lambda x: x):
    y, grads = run(call, inputs, backend, layout)
    return [y, *grads]


def _check(call, inputs, tolerance=None, **options):
    """Compare output and gradients of the kernels with those of the reference on the same numbers in float64."""
    expected = _run(call, [x.double() for x in inputs], 'reference')
    actual = _run(call, inputs, 'triton', **options)
    assert actual[0].dtype == inputs[2].dtype
    assert_as_exact(actual, expected, tolerance or TOLERANCE[inputs[0].dtype])


@pytest.mark.parametrize('name', TESTED)
def test_values_and_gradients(name):
    _check(CALLS[name], _inputs(*((2, 3) if name == 'linear-both' else (3, 5))))


@pairwise('name, grid', SOME, [(7, 3), (1, 9), (5, 1), (1, 1), (2, 18)], together=1)
def test_grids(name, grid):
    """Grids that are tall, of one row, of one column, of one token, and with two tiles per row."""
    _check(CALLS[name], _inputs(*grid, heads=1))


@pairwise('name, dtype', SOME, [torch.float16, torch.bfloat16], together=1)
def test_half_types(name, dtype):
    _check(CALLS[name], _inputs(3, 4, dtype, heads=1))


@pairwise('name, tiles', SOME, [1, 2], together=1)
def test_gradients_of_step_logs_of_zero(name, tiles, monkeypatch):
    if tiles > 1:
        monkeypatch.setattr(launch, 'LARGEST_TILE', {kernel: {4: (16,) * 3} for kernel in launch.LARGEST_TILE})
    q, k, v, a, b = _inputs(*((3, 4) if tiles == 1 else (19, 2) if 'column' in name else (2, 19)), heads=1)
    _check(CALLS[name], [q, k, v, torch.zeros_like(a), b * (b < -0.5)])
    _check(CALLS[name], [q, k, v, a * (a < -0.5), torch.zeros_like(b)])


@pairwise('name, dims', ['polyline-additive-both', 'decay-additive-row', 'scan-v2h'], [(16, 8), (24, 40), (128, 96)],
          together=1)
def test_head_dimensions(name, dims):
    _check(CALLS[name], _inputs(2, 3, heads=1, dim=dims[0], dim_v=dims[1]))


@pytest.mark.parametrize('name', ['decay-additive-row', 'decay-multiplicative-column', 'polyline-additive-both', *slow(
    'polyline-multiplicative-both', 'polyline-additive-v2h', 'polyline-additive-h2v')])
def test_lines_of_several_tiles(name, monkeypatch):
    """Tiles of 16 test running softmaxes, and the backward pass tile by tile."""
    monkeypatch.setattr(launch, 'LARGEST_TILE', {kernel: {4: (16,) * 3} for kernel in launch.LARGEST_TILE})
    _check(CALLS[name], _inputs(*((37, 2) if 'column' in name else (2, 37)), heads=1))


@pytest.mark.parametrize('shape', [(34, 2), *slow((40, 3), (3, 49))])
def test_scan_of_several_tiles(shape, monkeypatch):
    from subquad.kernels.polyline_scan import triton
    monkeypatch.setattr(triton, 'LONGEST', 16)
    _check(CALLS['scan-both'], _inputs(*shape, heads=1, dim_v=3))


def test_scan_in_three_dimensions():
    x = torch.randn(1, 1, 2, 3, 4, 6, device=DEVICE)
    logs = [-torch.rand(1, 1, 2, 3, 4, device=DEVICE) for _ in range(3)]

    def call(x, a, b, c, backend):
        return kernels.polyline_scan(x, a, b, c, paths='both', backend=backend)
    expected = _run(call, [t.double() for t in (x, *logs)], 'reference')
    for actual, wanted in zip(_run(call, (x, *logs), 'triton'), expected):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_long_scan():
    """A line of 65,536 tokens is exact, because kernels multiply decays and never sum their logs."""
    x, a = torch.randn(1, 1, 1, 65536, 1, device=DEVICE), -torch.rand(1, 1, 1, 65536, device=DEVICE)
    a[..., 30000:30100] = -1e-6
    y = kernels.polyline_scan(x, a, a, backend='triton')
    expected = kernels.polyline_scan(x.double(), a.double(), a.double(), backend='portable')
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', SOME)
def test_extreme_steps(name):
    """Step logs 0, tiny, -80 and -inf together, values and gradients. The gradient at a step of exactly 0 is one-sided
    here and 0 in the reference, and a step that is clamped has none: those of the steps are only finite."""
    inputs = _inputs(3, 5)
    g = torch.Generator().manual_seed(0)
    values = torch.tensor([0.0, -1e-6, -80.0, -float('inf'), -0.5])
    for n in (3, 4):
        inputs[n] = values[torch.randint(0, 5, inputs[n].shape, generator=g)].to(DEVICE)
    expected = _run(CALLS[name], [x.double() for x in inputs], 'reference')
    actual = _run(CALLS[name], inputs, 'triton')
    for n, (x, y) in enumerate(zip(actual, expected)):
        assert (x is None) == (y is None) and (x is None or x.isfinite().all()), n
        if n < 4 and x is not None:
            assert (x.double() - y).abs().max() <= 1e-5 * y.abs().max().clamp(min=1), n


def test_sums_of_large_steps_are_rounded_once():
    """Small steps that follow many of -80 have the error of one rounding, not of a sum of roundings."""
    inputs = _inputs(1, 40, heads=1)
    inputs[3][..., 1:21] = -80.0
    y = kernels.decay_attention(*inputs[:4], backend='triton')
    expected = kernels.decay_attention(*(x.double() for x in inputs[:4]), backend='reference')
    assert (y.double() - expected).abs().max() <= 2e-4


def test_peaked_logits_far_from_a_decayed_maximum():
    q, k, v, a, b = _inputs(3, 4)
    k[..., -1, -1, :] = 300 * q[..., 0, 0, :]
    inputs = q, k, v, torch.full_like(a, -60.0), torch.full_like(b, -60.0)
    y = kernels.polyline_attention(*inputs, backend='triton')
    expected = kernels.polyline_attention(*(x.double() for x in inputs), backend='reference')
    assert (y.double() - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize('name', EVERY_OPERATOR)
def test_strided_and_empty_inputs(name):
    def layout(x):
        """Rows and columns exchanged in memory; the last dimension, too, where there is one."""
        return x.permute(0, 3, 1, 2, *range(4, x.ndim)).contiguous().permute(0, 2, 3, 1, *range(4, x.ndim))
    _check(CALLS[name], _inputs(3, 4, heads=1), layout=layout)
    q, k, v, a, b = _inputs(3, 4)
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    torch.testing.assert_close(CALLS[name](*turned, a, b, 'triton'), CALLS[name](q, k, v, a, b, 'triton'))
    for cut in (lambda x: x[:0], lambda x: x[:, :, :0], lambda x: x[:, :, :, :0]):
        empty = [cut(x) for x in (q, k, v, a, b)]
        assert CALLS[name](*empty, 'triton').shape == empty[2].shape


def test_results_are_the_same_every_time():
    inputs = _inputs(3, 5, heads=1)
    for name in ('polyline-additive-both', 'scan-both'):
        first, second = (_run(CALLS[name], inputs, 'triton') for _ in range(2))
        assert all(x is y or torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.skipif(DEVICE == 'cpu', reason='70,000 programs take minutes in the interpreter')
@pytest.mark.parametrize('name', EVERY_OPERATOR)
def test_more_groups_than_a_short_grid_axis_holds(name):
    _check(CALLS[name], _inputs(1, 2, batch=35_000, heads=2))


def test_half_types_do_not_overflow_between_passes():
    q = torch.full((1, 1, 8, 8, 1), 1e-3, dtype=torch.float16, device=DEVICE)
    k = torch.full_like(q, 40)
    a = torch.full((1, 1, 8, 8), -1e-6, dtype=torch.float16, device=DEVICE)
    y = kernels.polyline_linear_attention(q, k, k, a, a, backend='triton')
    expected = kernels.polyline_linear_attention(q, k, k, a, a, backend='reference')
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=0)


def test_launches_use_the_first_axis_of_the_grid():
    assert launch.programs(100_000) == (100_000,)           # the other axes end at 65,535
    with pytest.raises(ValueError, match='2,147,483,648 programs.*at most 2,147,483,647'):
        launch.programs(2 ** 31)
    launch.check_line(65536, 32 * 128)
    with pytest.raises(ValueError, match='65,536 tokens, 32,768 elements apart, spans 2'):
        launch.check_line(65536, 128 * 256)


# --- what PyTorch sees

def _op_arguments():
    q, k, v, a, b = _inputs(2, 3, heads=1)
    sa, sb = a.cumsum(-1), b.cumsum(-2)

    def leaf(*tensors):
        return [x.detach().clone().requires_grad_() for x in tensors]
    ops = torch.ops.subquad
    yield ops.polyline_attention_fwd, (*leaf(q, k, v, sa, sb), 'additive', 'both', True)
    yield ops.polyline_attention_fwd, (q, k, v, sa, sb, 'multiplicative', 'v2h', False)
    yield ops.decay_attention_fwd, (*leaf(q, k, v, a), 'row', 'additive', True)
    yield ops.polyline_scan_fwd, (*leaf(v, a), 3, torch.float32)
    out, first, lse = ops.polyline_attention_fwd(q, k, v, sa, sb, 'additive', 'both', True)
    yield ops.polyline_attention_bwd, (v, q, k, v, sa, sb, out, first, lse, 'additive', 'both')
    out, statistics = ops.decay_attention_fwd(q, k, v, a, 'row', 'additive', True)
    yield ops.decay_attention_bwd, (v, q, k, v, a, out, statistics, 'row', 'additive')
    yield ops.polyline_scan_bwd, (v, v, a, 3)


@pytest.mark.parametrize('n', range(7))
def test_opcheck(n):
    op, arguments = list(_op_arguments())[n]
    torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize('name, op, count', [
    ('polyline-additive-both', 'polyline_attention_fwd', 1), ('decay-additive-row', 'decay_attention_fwd', 1),
    ('crisscross-additive-both', 'crisscross_attention_fwd', 1), ('scan-v2h', 'polyline_scan_fwd', 2)])
def test_compile_sees_one_operator(name, op, count):
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if 'subquad' in str(node.target))
        return graph.forward
    inputs = _inputs(2, 3, heads=1)
    compiled = torch.compile(lambda *x: CALLS[name](*x, 'triton'), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), CALLS[name](*inputs, 'triton'))
    assert len(seen) == count and all(op in target for target in seen)


def test_compiled_gradients():
    inputs = _inputs(2, 3, heads=1)
    compiled = torch.compile(CALLS['polyline-additive-both'], fullgraph=True, backend='aot_eager')
    for x, y in zip(_run(compiled, inputs, 'triton'), _run(CALLS['polyline-additive-both'], inputs, 'triton')):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize('name, forward, backward', [
    ('polyline-additive-both', 2 * 2 * 15 ** 2 * (8 + 4), 2 * 2 * 15 ** 2 * (3 * 8 + 2 * 4)),
    ('decay-additive-column', 2 * 2 * 15 * 3 * (8 + 4), 2 * 2 * 15 * 3 * (3 * 8 + 2 * 4)),
    ('scan-v2h', 2 * 6 * 2 * 15 * 4, 2 * 16 * 2 * 15 * 4)])
def test_flop_counters_count(name, forward, backward):
    inputs = [x.requires_grad_() for x in _inputs(3, 5, dim_v=4)]
    with FlopCounterMode(display=False) as counter:
        y = CALLS[name](*inputs, 'triton')
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == backward


def test_backward_without_saved_tensors_is_refused():
    q, k, v, a, b = _inputs(2, 3)
    y, first, lse = torch.ops.subquad.polyline_attention_fwd(q.requires_grad_(), k, v, a.cumsum(-1), b.cumsum(-2),
                                                             'additive', 'both', False)
    assert first.numel() == lse.numel() == 0
    with pytest.raises(RuntimeError, match='save=False'):
        y.sum().backward()
