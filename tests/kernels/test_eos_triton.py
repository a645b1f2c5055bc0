"""Triton kernels of `eos_elementwise` for oscillations of rank one against the float64 loop: values, gradients, sizes,
extremes, and what PyTorch sees. They run on a GPU, or without one in Triton's interpreter."""
import pytest
import torch
from eos_cases import inputs, values_and_gradients
from helpers import assert_close
from operator_cases import DEVICE, TOLERANCE, skip_without_triton
from pairwise import pairwise, slow
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import eos_elementwise

skip_without_triton()

STEPS = ['ones', 'k', 'd', 'kd', 'scalar', 'constant', 'constant scalar', 'scalar and d']
DIRECTIONS = ['forward', 'reverse', 'both']


def _check(name, tensors, direction='forward', tolerance=None, **options):
    """Compare outputs and gradients with those of the reference on the same numbers in float64."""
    tolerance = tolerance or TOLERANCE[tensors[0].dtype]
    expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference', direction,
                                                    **options)
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    outputs, grads = values_and_gradients(name, [x.to(DEVICE) for x in tensors], 'triton', direction, **options)
    assert outputs[0].dtype == tensors[0].dtype
    for n, (actual, wanted) in enumerate(zip(outputs, expected)):
        assert_close(actual.cpu(), wanted, tolerance, f'output {n}')
    largest = max(x.abs().max() for x in expected_grads)
    for n, (actual, wanted, x) in enumerate(zip(grads, expected_grads, tensors)):
        assert actual.dtype == x.dtype and actual.isfinite().all()
        # Gradients that are zero but for rounding (those of the step of a single token, say) have the others' scale.
        scale = wanted.abs().max().clamp(min=0.01 * largest)
        twice = 1 if x.dtype == torch.float32 else 2                         # they pass through rounded products, too
        assert (actual.cpu().double() - wanted).abs().max() <= twice * tolerance * scale, n


def _inputs(name, length, keys=4, dim=5, dtype=torch.float32, batch=1, heads=2, decay=1.0):
    return inputs(name, length, keys, dim, batch, heads, dtype, decay)


# --- values and gradients

@pairwise('name, direction', STEPS, DIRECTIONS, together=1)
def test_values_and_gradients(name, direction):
    """A tile with several lines, and a line of several chunks with a part of one at the end."""
    _check(name, _inputs(name, 7, batch=3), direction)
    _check(name, _inputs(name, 36, heads=1), direction, chunk=16)


@pytest.mark.parametrize('length', [1, 2, 14, 16, 33])
def test_lengths(length):
    """Both directions and both steps, in lines of one chunk of every size up to 64."""
    _check('kd', _inputs('kd', length, heads=1), 'both')


@pairwise('direction, length', ['forward', 'reverse'], [5, 36], together=1)
def test_initial_and_final_state(direction, length):
    tensors, state = _inputs('kd', length, heads=1), torch.randn(1, 1, 4, 5)
    _check('kd', tensors, direction, chunk=16, initial_state=state, output_state=True)
    weight = [torch.randn(1, 1, length, 5), torch.randn(1, 1, 4, 5)]
    found = []
    for backend, dtype in (('reference', torch.float64), ('triton', torch.float32)):
        start, *given = (x.to(DEVICE, dtype) for x in (state, *tensors))
        start.requires_grad_()
        i, e, s, g, h = given
        y, last = eos_elementwise(i, e, s, log_o_k=g, log_o_d=h, reverse=direction == 'reverse', initial_state=start,
                                  output_state=True, chunk=16, backend=backend)
        assert last.dtype == dtype
        loss = sum((x * w.to(x)).sum() for x, w in zip((y, last), weight))
        found.append(torch.autograd.grad(loss, start)[0])
    assert_close(found[1], found[0], 1e-5)


@pytest.mark.parametrize('name', ['theta', 'constant theta'])
def test_angles(name):
    _check(name, _inputs(name, 20, heads=1), 'both')


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ['kd', 'scalar'])
def test_half_types(name, dtype):
    _check(name, _inputs(name, 14, 8, 8, dtype, batch=2, heads=1, decay=0.2), 'both')
    _check(name, _inputs(name, 66, 8, 8, dtype, heads=1, decay=0.2), 'reverse', chunk=64)


@pytest.mark.parametrize('width', [(16, 3), (130, 1), *slow((1, 1), (1, 130))], ids=str)
def test_widths(width):
    """One block of channels, and several blocks along either axis, within chunks and across them."""
    _check('kd', _inputs('kd', 6, *width, heads=1), 'both')
    _check('kd', _inputs('kd', 20, *width, heads=1), 'forward', output_state=True)


@pytest.mark.parametrize('direction', DIRECTIONS)
def test_decays_of_any_size(direction):
    """Steps of 1, exp(-60) and 0 side by side: no factor overflows."""
    tensors = _inputs('kd', 36, 8, 6, heads=1)
    for n in (3, 4):
        choice = torch.randint(0, 4, tensors[n].shape)
        tensors[n] = torch.tensor([0.0, -60.0, -torch.inf, -0.5])[choice]
    _check('kd', tensors, direction, chunk=16)


def test_small_steps_behind_large_ones():
    """The gradient of a weight of exp(-80) is as small as the weight, beside others of 1."""
    i, e, s, g = _inputs('k', 24, heads=1)
    g[:, :, :8], g[:, :, 8:], g[:, :, 16] = -80.0, -1e-4, -60.0
    found = []
    for backend in ('reference', 'triton'):
        given = [x.to(DEVICE, torch.float64 if backend == 'reference' else torch.float32) for x in (i, e, s, g)]
        given[3].requires_grad_()
        y = eos_elementwise(*given[:3], log_o_k=given[3], backend=backend)
        found.append((y.detach(), torch.autograd.grad(y.sum(), given[3])[0]))
    assert_close(found[1][0], found[0][0], 2e-6)
    assert_close(found[1][1][:, :, 16], found[0][1][:, :, 16], 1e-5)         # of the order of 1e-26
    assert found[0][1][:, :, 16].abs().max() < 1e-24


@pytest.mark.long
@pytest.mark.parametrize('direction', DIRECTIONS)
@pytest.mark.parametrize('length', [1, 2, 7, 14, 16, 33, 56, 64, 65, 130, 200])
def test_sizes(length, direction):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for keys, dim in ((1, 1), (3, 8), (16, 32), (64, 16), (8, 128), (128, 3)):
            for name in ('k', 'kd'):
                tensors = _inputs(name, length, keys, dim, dtype, batch=2, decay=0.2)
                _check(name, tensors, direction, initial_state=None)
                if direction != 'both':
                    _check(name, tensors, direction, initial_state=torch.randn(2, 2, keys, dim), output_state=True)


# --- layouts

def test_strided_views():
    tensors = [x.to(DEVICE) for x in _inputs('kd', 20, batch=2)]
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    views[0] = torch.stack([views[0]] * 2, -1)[..., 1]
    views[3] = views[3].mT.contiguous().mT
    _check('kd', tensors, 'both')
    results = [eos_elementwise(*x[:3], log_o_k=x[3], log_o_d=x[4], bidirectional=True, backend='triton')
               for x in (tensors, views)]
    assert torch.equal(*results)


def test_results_are_the_same_every_time():
    tensors = [x.to(DEVICE) for x in _inputs('kd', 20, heads=1)]
    first, second = (values_and_gradients('kd', tensors, 'triton') for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip([*first[0], *first[1]], [*second[0], *second[1]]))


def test_lines_without_tokens():
    tensors = [x.to(DEVICE) for x in _inputs('k', 0)]
    y, last = eos_elementwise(*tensors[:3], log_o_k=tensors[3], output_state=True, backend='triton')
    assert y.shape == (1, 2, 0, 5) and not last.any() and last.shape == (1, 2, 4, 5)


# --- dispatch, and what PyTorch sees


def test_without_decay_both_directions_are_two_products():
    assert _operators(lambda i, e, s: eos_elementwise(i, e, s, bidirectional=True, backend='triton'), 3) == []


def _operators(function, count):
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if 'subquad' in str(node.target))
        return graph.forward
    tensors = [x.to(DEVICE) for x in _inputs('kd', 7)[:count]]
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend=backend)(*tensors), function(*tensors))
    return seen


def test_compile_sees_one_operator():
    seen = _operators(lambda i, e, s, g, h: eos_elementwise(i, e, s, log_o_k=g, log_o_d=h, bidirectional=True,
                                                            backend='triton'), 5)
    assert len(seen) == 1 and 'eos_elementwise_fwd' in seen[0]


def _op_arguments():
    i, e, s, g, h = (x.to(DEVICE) for x in _inputs('kd', 20, heads=1))
    state, op = torch.randn(1, 1, 4, 5, device=DEVICE), torch.ops.subquad.eos_elementwise_fwd

    def leaf(*tensors):
        return [x.detach().clone().requires_grad_() for x in tensors]
    yield op, (*leaf(i, e, s, g, h, state), 'forward', 32, True, True)
    yield op, (*leaf(i, e, s), None, g[:, :, :1, :1].expand(1, 1, 20, 5), None, 'both', 32, True, False)
    yield op, (i, e, s, g, None, None, 'reverse', 32, False, False)
    _, states, final = op(i, e, s, g, h, state, 'reverse', 32, True, True)
    yield torch.ops.subquad.eos_elementwise_bwd, (i, final, i, e, s, g, h, state, states, 'reverse', 32)


@pytest.mark.parametrize('n', range(4))
def test_opcheck(n):
    op, arguments = list(_op_arguments())[n]
    torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize('length', [20, 65])
def test_flop_counters_count(length):
    tensors = [x.to(DEVICE).requires_grad_() for x in _inputs('kd', length, heads=1)]
    inside, memory = 2 * length * (length if length <= 32 else 16) * (4 + 5), 2 * length * 4 * 5 * (length > 64)
    with FlopCounterMode(display=False) as counter:
        y = eos_elementwise(*tensors[:3], log_o_k=tensors[3], log_o_d=tensors[4], backend='triton')
    assert counter.get_total_flops() == inside + 2 * memory
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 5 * inside // 2 + 4 * memory
