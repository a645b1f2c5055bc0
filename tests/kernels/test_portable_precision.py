"""Portable operators in the precision that their speed comes from: attention without a maximum, recurrences with decays
above 1, bfloat16, autocast."""
import pytest
import torch
from eos_cases import call as call_eos
from eos_cases import inputs as eos_inputs
from eos_cases import values_and_gradients
from helpers import assert_close, relative_error
from operator_cases import CALLS, TOLERANCE, attention_inputs
from pairwise import pairwise

from subquad import kernels
from subquad.kernels.eos_scan import chunks
from subquad.kernels.eos_scan.chunks import LEAST_SUM

SOFTMAX = [name for name in CALLS if name.startswith(('polyline', 'crisscross', 'decay'))]
GRIDS = [(5, 6), (3, 45)]                   # bfloat16 adds the masks of the first by products, those of the second not


@pairwise('name, grid, dtype, excess', [name for name in SOFTMAX if 'multiplicative' not in name], GRIDS,
          [torch.float32, torch.bfloat16], [30.0, 79.0, 81.0, 500.0])
def test_logits_far_above_the_own_one(name, grid, dtype, excess):
    """One key's logit exceeds all others by `excess`, in exact numbers of bfloat16."""
    q, k, v, a, b = attention_inputs(*grid, dtype)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[:, :, -1, -1, 0] = 1, excess
    with torch.inference_mode():
        y = CALLS[name](q, k, v, a, b, 'portable')
        expected = CALLS[name](*(x.double() for x in (q, k, v, a, b)), 'reference')
    assert_close(y, expected, TOLERANCE[dtype])


@pytest.mark.parametrize('grid', GRIDS)
@pytest.mark.parametrize('name', SOFTMAX)
def test_inference_in_bfloat16_is_close_to_float64(name, grid):
    inputs = attention_inputs(*grid, torch.bfloat16)
    expected = CALLS[name](*(x.double() for x in inputs), 'reference')
    with torch.no_grad():
        y = CALLS[name](*inputs, 'portable')
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize('name', ['polyline-additive-both', 'crisscross-additive-both', 'decay-additive-row'])
def test_bfloat16_is_used_in_inference_only(name):
    """A backward pass computes the weights again in float32, so the forward pass before it does too."""
    inputs = attention_inputs(5, 6, torch.bfloat16)
    with torch.no_grad():
        half, single = CALLS[name](*inputs, 'portable'), CALLS[name](*(x.float() for x in inputs), 'portable')
    trained = CALLS[name](*(x.clone().requires_grad_() for x in inputs), 'portable').detach()
    assert torch.equal(trained, single.bfloat16())
    assert not torch.equal(half, trained)


@pytest.mark.parametrize('name', SOFTMAX)
def test_autocast_does_not_change_float32(name):
    """Autocast casts a layer's products, not those inside of an operator."""
    inputs = attention_inputs(5, 6, torch.float32)
    expected = CALLS[name](*inputs, 'portable')
    with torch.autocast('cpu', torch.bfloat16):
        y = CALLS[name](*inputs, 'portable')
    assert y.dtype == torch.float32 and relative_error(y, expected) <= 1e-6


def test_a_mask_that_overflows_in_the_shared_exponential_is_exact():
    """exp(q k') alone is infinite where the mask brings the weight back to a number."""
    q, k, v, a, b = attention_inputs(4, 5, torch.float32)
    k[:, :, -1, -1] = 100 * q[:, :, 0, 0] / q[:, :, 0, 0].square().sum(-1, keepdim=True)     # logit 100 at token 0
    a, b = torch.full_like(a, -30.0), torch.full_like(b, -30.0)
    with torch.inference_mode():
        y = CALLS['polyline-additive-both'](q, k, v, a, b, 'portable')
    assert_close(y, CALLS['polyline-additive-both'](*(x.double() for x in (q, k, v, a, b)), 'reference'), 1e-4)


# --- recurrences

EOS = ['k', 'd', 'kd', 'scalar', 'constant', 'scalar and d', 'ones', 'theta']


@pytest.mark.parametrize('length', [14, 56, 150])
@pytest.mark.parametrize('name', EOS)
def test_recurrences_in_bfloat16_are_close_to_float64(name, length):
    """Lines of one chunk and of several, in one direction and in both, as inference runs them."""
    tensors = eos_inputs(name, length, 16, 8, 1, 2, torch.bfloat16, 0.2)
    for direction in ('both', 'forward', 'reverse'):
        expected = call_eos(name, [x.double() for x in tensors], 'reference', direction)
        with torch.no_grad():
            y = call_eos(name, tensors, 'portable', direction)
        assert y.dtype == torch.bfloat16
        assert_close(y, expected, 3e-2)


@pytest.mark.parametrize('name, direction', [('k', 'both'), ('scalar', 'both'), ('kd', 'forward')])
def test_recurrences_use_bfloat16_in_inference_only(name, direction):
    tensors = eos_inputs(name, 56, 16, 8, 1, 2, torch.bfloat16, 0.2)
    with torch.no_grad():
        half = call_eos(name, tensors, 'portable', direction)
        single = call_eos(name, [x.float() for x in tensors], 'portable', direction)
    trained = call_eos(name, [x.clone().requires_grad_() for x in tensors], 'portable', direction).detach()
    assert torch.equal(trained, single.bfloat16())
    assert not torch.equal(half, trained)
    # Decays that need factors of at most 1 run in float32.
    tensors[3:] = [x - 5 for x in tensors[3:]]
    with torch.no_grad():
        half = call_eos(name, tensors, 'portable')
        single = call_eos(name, [x.float() for x in tensors], 'portable')
    assert torch.equal(half, single.bfloat16())


@pairwise('name, length, excess', ['k', 'd', 'kd', 'scalar', 'constant', 'delta k', 'delta constant'], [40, 100],
          [0.999, 1.001])
def test_decays_at_the_bound_of_quotients(name, length, excess):
    """Sums of step logs of a chunk just above LEAST_SUM, and below it, where another form takes over."""
    tensors = eos_inputs(name, length, 8, 6, 1, 2, torch.float32)
    size = min(length, 64)
    for n in range(3, len(tensors)):
        if (tensors[n] <= 0).all():
            tensors[n] = torch.full_like(tensors[n], LEAST_SUM / size * excess)
            logs = tensors[n] if tensors[n].ndim == 4 else tensors[n][None, :, None]
            assert chunks.layout(length, 64, logs).quotients == (excess < 1)
    for direction in ('forward', 'both'):
        expected, expected_grads = values_and_gradients(name, [x.double() for x in tensors], 'reference', direction)
        outputs, grads = values_and_gradients(name, tensors, 'portable', direction)
        assert_close(outputs[0], expected[0], 1e-5)
        for actual, wanted, x in zip(grads, expected_grads, tensors):
            # The gradient of a constant step log is the small difference of large sums, in either form.
            assert_close(actual, wanted, 1e-5 if x.ndim == 4 else 1e-4)


def test_step_logs_that_are_not_numbers_reach_the_output():
    i, e, s, g = eos_inputs('k', 30, dtype=torch.float32)
    g[0, 0, 3, 0] = torch.nan
    assert not chunks.layout(30, 64, g).quotients
    y = call_eos('k', [i, e, s, g], 'portable')
    assert y[0, 0, 3:].isnan().all() and y[1].isfinite().all()


@pytest.mark.parametrize('scale, most', [(1.0, 0.006), (3.0, 0.01)])
def test_inference_in_bfloat16_is_as_precise_as_products_in_bfloat16(scale, most):
    """docs/kernels.md has the figures, also those of PyTorch's fused attention, which does not round logits."""
    q, k, v = (torch.randn(2, 4, 14, 14, 32).bfloat16() for _ in range(3))
    k, none = (k * scale * 32 ** -0.5).bfloat16(), torch.zeros(2, 4, 14, 14).bfloat16()
    tokens = [x.flatten(2, 3) for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in tokens), scale=1.0)
    y = kernels.polyline_attention(q, k, v, none, none, backend='portable').flatten(2, 3)
    products = (tokens[0] @ tokens[1].mT).softmax(-1) @ tokens[2]
    error, expected = ((x.double() - exact).norm() / exact.norm() for x in (y, products))
    assert error < most and error < 1.25 * expected
