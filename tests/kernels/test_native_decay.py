"""The native rotary embedding, decay attention and polyline scan against the float64 references."""
import pytest
import torch
from operator_cases import TOLERANCE, assert_as_exact, weighted_sum
from pairwise import pairwise

from subquad import kernels
from subquad.kernels import native

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f'no native operators: {native.why_not()}')
DTYPES = [torch.float32, torch.bfloat16]


def _heads(batch, heads, tokens, dim, dtype=torch.float32, count=2):
    """Return slices (B, heads, N, D) of one tensor (B, N, count heads D), as a projection makes them."""
    g = torch.Generator().manual_seed(tokens + dim)
    x = torch.randn(batch, tokens, count * heads * dim, generator=g).to(dtype)
    return [y.unflatten(2, (heads, dim)).transpose(1, 2) for y in x.chunk(count, -1)]


# --- rotary embedding

def _table(tokens, dim, dtype=torch.float32):
    angles = torch.linspace(0, 3, tokens * dim // 2, dtype=dtype).view(tokens, dim // 2)
    return torch.stack([angles.cos(), angles.sin()], -1)


def _rotate(q, k, table, backend):
    """Return rotated q and k, and their gradients."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    outputs = kernels.rotary_embedding(q, k, table, 0.3, backend=backend)
    return [y.detach() for y in (*outputs, *torch.autograd.grad(
        weighted_sum(outputs[0]) + weighted_sum(outputs[1]) * 2, (q, k)))]


@pairwise('batch, heads, tokens, dim, dtype, layout', [1, 2], [1, 3], [1, 7, 130], [2, 8, 30, 32],
          DTYPES, ['heads of a token', 'tokens of a head', 'channels apart'])
def test_rotary_embedding(batch, heads, tokens, dim, dtype, layout):
    q, k = _heads(batch, heads, tokens, dim, dtype)
    table = _table(tokens, dim)
    expected = _rotate(q.double(), k.double(), table.double(), 'reference')
    if layout != 'heads of a token':
        q = q.contiguous()
    if layout == 'channels apart':
        k = k.mT.contiguous().mT
    actual = _rotate(q, k, table, 'native')
    assert all(y.dtype == dtype for y in actual)
    for y, exact in zip(actual, expected, strict=True):
        assert_as_exact([y], [exact], TOLERANCE[dtype])


def test_rotary_embedding_writes_in_the_order_of_the_reader():
    q, k = (x.detach().requires_grad_() for x in _heads(2, 3, 5, 8))
    outputs = kernels.rotary_embedding(q, k, backend='native')
    assert all(y.is_contiguous() for y in outputs)
    grads = torch.autograd.grad(outputs, (q, k), outputs)
    assert all(x.transpose(1, 2).is_contiguous() for x in grads)


def test_second_derivatives_of_rotary_embedding():
    q, k = (x.detach().requires_grad_() for x in _heads(1, 2, 5, 8))
    seconds = []
    for backend in ('native', 'portable'):
        loss = sum(y.pow(3).sum() for y in kernels.rotary_embedding(q, k, scale=0.3, backend=backend))
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        seconds += torch.autograd.grad(sum(x.pow(2).sum() for x in first), (q, k))
    torch.testing.assert_close(seconds[:2], seconds[2:])


def test_rotary_embedding_of_numbers_that_are_not_finite():
    q, k = _heads(1, 2, 3, 18)
    q[0, 1, 2, 0], q[0, 1, 1, 17], k[0, 0, 1, 3] = torch.nan, torch.inf, -torch.inf
    for a, b in zip(*(kernels.rotary_embedding(q, k, backend=backend) for backend in ('native', 'portable'))):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isfinite(), b.isfinite())


def test_rotary_embedding_without_images():
    q, k = (x[:0].requires_grad_() for x in _heads(1, 2, 3, 8))
    outputs = kernels.rotary_embedding(q, k, backend='native')
    assert [x.shape for x in (*outputs, *torch.autograd.grad(outputs, (q, k), outputs))] == [q.shape] * 4


def test_registration_of_rotary_embedding():
    q, k = (x.detach().requires_grad_() for x in _heads(1, 2, 5, 4))
    torch.library.opcheck(torch.ops.subquad.rotary_embedding_native_fwd, (q, k, _table(5, 4), 0.3, False))
