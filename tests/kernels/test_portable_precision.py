"""Portable attention without a maximum: exponentials that leave the range of numbers, bfloat16, autocast."""
import pytest
import torch
from helpers import assert_close, relative_error
from operator_cases import CALLS, TOLERANCE, attention_inputs

from subquad.kernels.common.workspace import sums_are_safe
from subquad.kernels.polyline_attention import portable

SOFTMAX = [name for name in CALLS if name.startswith(('polyline', 'crisscross', 'decay'))]
GRIDS = [(5, 6), (3, 45)]                   # bfloat16 adds the masks of the first by products, those of the second not


def test_sums_outside_the_range_are_refused():
    assert sums_are_safe(torch.tensor([1e-30, 1.0, 1e30]))
    for wrong in (0.0, 1e-31, 1e31, float('inf'), float('nan')):
        assert not sums_are_safe(torch.tensor([1.0, wrong, 2.0]))
    assert sum(GRIDS[0]) <= portable.SMALL_GRID < sum(GRIDS[1])


@pytest.mark.parametrize('excess', [30.0, 79.0, 81.0, 500.0])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('grid', GRIDS)
@pytest.mark.parametrize('name', [name for name in SOFTMAX if 'multiplicative' not in name])
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
