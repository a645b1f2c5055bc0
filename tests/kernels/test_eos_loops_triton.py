"""Triton kernels of the recurrences that go token by token, `eos_matmul` and `eos_elementwise` with an oscillation of
full rank, against the float64 loop. They run on a GPU, or without one in Triton's interpreter."""
import pytest
import torch
from eos_cases import DELTA, FULL_RANK, call, inputs, values_and_gradients
from operator_cases import DEVICE, TOLERANCE, skip_without_triton
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels

skip_without_triton()

NAMES = [*DELTA, *FULL_RANK]
SOME = ['delta k', 'log_o', 'sigmoid k', 'exponential']


def _inputs(name, length, keys=4, dim=5, batch=1, heads=2, dtype=torch.float32, decay=1.0):
    return [x.to(DEVICE) for x in inputs(name, length, keys, dim, batch, heads, dtype, decay)]


def _check(name, tensors, direction='forward', tolerance=None, views=None, **options):
    """Compare outputs and gradients with those of the reference on the same numbers in float64."""
    dtype = tensors[0].dtype
    tolerance = tolerance or TOLERANCE[dtype]
    expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference', direction,
                                                    **options)
    outputs, grads = values_and_gradients(name, views or tensors, 'triton', direction, **options)
    assert outputs[0].dtype == dtype
    largest = max(x.abs().max() for x in expected_grads)
    for n, (actual, wanted) in enumerate(zip(outputs, expected)):
        assert actual.isfinite().all() and (actual - wanted).abs().max() <= tolerance * max(1, wanted.abs().max()), n
    for n, (actual, wanted, given) in enumerate(zip(grads, expected_grads, tensors)):
        assert actual.dtype == given.dtype and actual.shape == given.shape and actual.isfinite().all(), n
        if name in DELTA and n == 3 and given.shape[3] == 1:
            continue                     # a key of one channel, normalized, is 1 or -1: its gradient is rounding alone
        # Gradients that cancel are held to the scale of the others.
        scale = wanted.abs().max().clamp(min=0.05 * largest)
        assert (actual - wanted).abs().max() <= tolerance * (1 if dtype == torch.float32 else 2) * scale, n


def _state(tensors, keys, requires_grad=False):
    i = tensors[0]
    g = torch.Generator().manual_seed(1)
    state = torch.randn(*i.shape[:2], keys, i.shape[3], generator=g).to(DEVICE)
    return state.requires_grad_(requires_grad)


@pairwise('name, direction', NAMES, ['forward', 'reverse', 'both'], together=1)
def test_values_and_gradients(name, direction):
    """Lines of one token, and with a part of a chunk of stored memories."""
    for length in (1, 7):
        _check(name, _inputs(name, length, batch=2 if length == 1 else 1), direction)


@pairwise('name, direction', NAMES, ['forward', 'reverse'], together=1)
def test_initial_and_final_state(name, direction):
    tensors = _inputs(name, 6)
    _check(name, tensors, direction, initial_state=_state(tensors, 4), output_state=True)


@pytest.mark.parametrize('name', SOME)
def test_gradients_of_the_initial_state(name):
    tensors = _inputs(name, 18, heads=1)
    found = []
    for backend in ('reference', 'triton'):
        state = _state(tensors, 4, True)
        given = [x.double() for x in tensors] if backend == 'reference' else tensors
        y, last = call(name, given, backend, initial_state=state, output_state=True)
        found.append(torch.autograd.grad((y * y.detach()).sum() + (last * last.detach()).sum(), state)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pairwise('name, size, direction', ['delta k', 'sigmoid d'], [
    (2, 1, 1), (14, 3, 8), (33, 8, 3), (65, 16, 1), (3, 128, 64), (2, 64, 128), (3, 32, 32)],
    ['forward', 'reverse', 'both'], together=1)
def test_sizes(name, size, direction):
    """Lines around a chunk, memories with rows and columns that fill no tile, and of several tiles."""
    _check(name, _inputs(name, *size, heads=1, decay=0.3), direction)


@pytest.mark.long
@pytest.mark.parametrize('length', [1, 2, 7, 14, 33, 64, 65, 130])
@pytest.mark.parametrize('keys', [1, 3, 8, 16, 32, 64, 128])
@pytest.mark.parametrize('name', SOME)
def test_all_sizes(name, length, keys):
    for n, dim in enumerate((1, 3, 8, 16, 32, 64, 128)):
        direction = ('forward', 'reverse', 'both')[(n + length) % 3]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            _check(name, _inputs(name, length, keys, dim, heads=1, dtype=dtype, decay=0.1), direction)


@pairwise('name, dtype', NAMES, [torch.float16, torch.bfloat16], together=1)
def test_half_types(name, dtype):
    _check(name, _inputs(name, 9, 8, 8, heads=1, dtype=dtype, decay=0.2), 'both')


@pytest.mark.parametrize('name', ['delta k', 'sigmoid k', 'sigmoid d'])
def test_strided_views(name):
    tensors = _inputs(name, 4, batch=2)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x for x in tensors]
    views[0] = torch.stack([views[0]] * 2, -1)[..., 1]
    assert not any(x.is_contiguous() for x in views if x.ndim == 4)
    expected = call(name, tensors, 'triton')
    assert torch.equal(call(name, views, 'triton'), expected)
    leaves = [x.detach().requires_grad_() for x in views], [x.detach().requires_grad_() for x in tensors]
    found = [torch.autograd.grad(call(name, x, 'triton'), x, expected.mT.contiguous().mT) for x in leaves]
    assert all(torch.equal(x, y) for x, y in zip(*found))


@pytest.mark.parametrize('name', ['delta k', 'log_o', 'exponential'])
def test_decays_of_any_size(name):
    """Steps of 1, exp(-60) and 0 side by side: the result stays right, and no gradient is infinite."""
    tensors = _inputs(name, 20, heads=1)
    for n in range(3, len(tensors)):
        if (tensors[n] <= 0).all():
            choice = torch.randint(0, 4, tensors[n].shape)
            tensors[n] = torch.tensor([0.0, -60.0, -torch.inf, -0.5])[choice].to(DEVICE)
    _check(name, tensors)


@pytest.mark.parametrize('form, tau', [('sigmoid', 0.01), ('sigmoid', 0.5), ('sigmoid', 16.0), ('exponential', 1.0)])
def test_clamped_generated_decays_have_no_gradient(form, tau):
    i, e, s = _inputs('ones', 9, 1, 1, 1, 1)
    z = torch.tensor([-2e3, -1300.0, -1200.0, -60.0, -1.0, -0.5, 0.0, 1.0, 70.0])
    z = (z if form == 'sigmoid' else z.abs()).view(1, 1, 9, 1).to(DEVICE)
    found = []
    for backend, dtype in (('reference', torch.float64), ('triton', torch.float32)):
        given = [x.to(dtype).requires_grad_() for x in (z, torch.full((1, 1, 1), 1.25, device=DEVICE))]
        generator = kernels.eos_scan.DecayGenerator(*given, 'k', form, tau)
        y = kernels.eos_elementwise(*(x.to(dtype) for x in (i, e, s)), generator=generator, backend=backend)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), given)])
    for actual, expected in zip(*found[::-1]):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    assert found[0][1].count_nonzero() > 0


def test_programs_that_work_on_several_lines(monkeypatch):
    from subquad.kernels.eos_elementwise import triton_full_rank
    monkeypatch.setattr(triton_full_rank, 'RESIDENT', 3)
    for name in ('log_o', 'sigmoid d'):
        _check(name, _inputs(name, 3, batch=2), 'both')


def test_results_are_the_same_every_time():
    for name in ('delta k', 'sigmoid d'):
        tensors = _inputs(name, 3, dim=20, heads=1)
        first, second = (values_and_gradients(name, tensors, 'triton', 'both') for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip((*first[0], *first[1]), (*second[0], *second[1])))


@pytest.mark.parametrize('name', NAMES)
def test_lines_without_tokens(name):
    tensors = _inputs(name, 0)
    y, last = call(name, tensors, 'triton', output_state=True)
    assert y.shape == tensors[0].shape and last.shape == (*y.shape[:2], 4, 5)


# --- what PyTorch sees

def _op_arguments():
    ops, (i, e, s, a, b, gk) = torch.ops.subquad, _inputs('delta k', 3, heads=1)
    state = _state([i], 4)

    def leaves(*tensors):
        return [x if x is None else x.detach().clone().requires_grad_() for x in tensors]
    yield ops.eos_matmul_fwd, (*leaves(i, e, s, a, b, gk, state), 'reverse', 64, True, True)
    yield ops.eos_matmul_fwd, (i, e, s, a, b, None, None, 'both', 64, False, False)
    _, read, last = ops.eos_matmul_fwd(i, e, s, a, b, gk, state, 'forward', 64, True, True)
    yield ops.eos_matmul_bwd, (i, last, i, e, s, a, b, gk, state, read, 'forward', 64)
    yield ops.eos_matmul_bwd, (i, None, i, e, s, a, b, None, None, read, 'forward', 64)
    z, weight = e.unsqueeze(-1), torch.rand(1, 1, 5, device=DEVICE)
    full = (i, e, s, None, i.abs().neg(), z, weight, state, 'sigmoid', 4.0)
    yield ops.eos_elementwise_full_fwd, (*leaves(*full[:8]), *full[8:], 'reverse', True, True)
    _, states, last = ops.eos_elementwise_full_fwd(*full, 'forward', True, True)
    yield ops.eos_elementwise_full_bwd, (i, last, *full[:8], states, *full[8:], 'forward')
    static = e.new_ones(1, 4, 5)
    plain = (i, static, static, gk, None, None, None, None, 'exponential', 1.0)
    yield ops.eos_elementwise_full_fwd, (*plain, 'both', False, False)
    _, states, _ = ops.eos_elementwise_full_fwd(*plain, 'both', True, False)
    yield ops.eos_elementwise_full_bwd, (i, None, *plain[:8], states, *plain[8:], 'both')


@pytest.mark.parametrize('n', range(8))
def test_opcheck(n):
    op, arguments = list(_op_arguments())[n]
    torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize('name, op', [('delta k', 'eos_matmul_fwd'), ('sigmoid k', 'eos_elementwise_full_fwd')])
def test_compile_sees_one_operator(name, op):
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if 'subquad' in str(node.target))
        return graph.forward
    tensors = _inputs(name, 3)
    compiled = torch.compile(lambda *x: call(name, x, 'triton'), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*tensors), call(name, tensors, 'triton'))
    assert len(seen) == 1 and op in seen[0]


@pytest.mark.parametrize('name, forward, backward', [('delta k', 5, 12), ('sigmoid k', 3, 8)])
def test_flop_counters_count(name, forward, backward):
    tensors = [x.requires_grad_() for x in _inputs(name, 3)]
    with FlopCounterMode(display=False) as counter:
        y = call(name, tensors, 'triton', 'both')
    assert counter.get_total_flops() == forward * 2 * 2 * 3 * 2 * 4 * 5
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == backward * 2 * 2 * 3 * 2 * 4 * 5


@pytest.mark.parametrize('name', ['delta', 'sigmoid k'])
def test_memories_that_are_too_large_are_refused(name):
    message = r'the kernels take memories of at most 128 rows \(K\), and these have 129'
    with pytest.raises(ValueError, match=message):
        call(name, _inputs(name, 2, 129), 'triton')
