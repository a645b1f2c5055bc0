"""The native rotary embedding, decay attention and polyline scan against the float64 references."""
import pytest
import torch
from operator_cases import TOLERANCE, assert_as_exact, weighted_sum
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

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


# --- decay attention

def _lines(grid, dim, value_dim=None, batch=2, heads=3, dtype=torch.float32, decay=2.0):
    """Return q, k, v, the heads of a token side by side, and step logs."""
    g = torch.Generator().manual_seed(dim + sum(grid))
    q, k, v = (torch.randn(batch, *grid, heads, d, generator=g).to(dtype).permute(0, 3, 1, 2, 4)
               for d in (dim, dim, value_dim or dim))
    return q, k * dim ** -0.5, v, (-decay * torch.rand(batch, heads, *grid, generator=g)).to(dtype)


def _attend(inputs, backend, **options):
    """Return the result of decay attention and its gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = kernels.decay_attention(*inputs, backend=backend, **options)
    return [y.detach(), *torch.autograd.grad(weighted_sum(y), inputs)]


@pairwise('grid, dims, dtype, axis, mask_mode', [(5, 7), (1, 1), (1, 9), (17, 1), (14, 14), (2, 83)],
          [(8, 8), (32, 20), (30, 64)], DTYPES, ['row', 'column'], ['additive', 'multiplicative'])
def test_decay_attention(grid, dims, dtype, axis, mask_mode):
    inputs, options = _lines(grid, *dims, dtype=dtype), dict(axis=axis, mask_mode=mask_mode)
    expected = _attend([x.double() for x in inputs], 'reference', **options)
    for given in (inputs, [x.contiguous() for x in inputs], [x.mT.contiguous().mT for x in inputs]):
        actual = _attend(given, 'native', **options)
        assert all(y.dtype == dtype for y in actual)
        assert_as_exact(actual, expected, TOLERANCE[dtype])


def test_decay_attention_writes_in_the_order_of_the_product():
    y, *grads = _attend(_lines((4, 5), 8), 'native')
    assert all(x.permute(0, 2, 3, 1, 4).is_contiguous() for x in (y, *grads[:3]))


@pytest.mark.parametrize('decay', [80., 300.])
def test_strong_decays_of_decay_attention(decay):
    inputs = _lines((3, 21), 16, decay=decay)
    assert_as_exact(_attend(inputs, 'native'), _attend([x.double() for x in inputs], 'reference'), 1e-5)


@pytest.mark.parametrize('mask_mode', ['additive', 'multiplicative'])
@pytest.mark.parametrize('axis', ['row', 'column'])
def test_decay_attention_far_above_a_tokens_own_logit(axis, mask_mode):
    q, k, v, log = _lines((4, 5), 8)
    q[..., 0], k[..., 0] = 30, 0
    k[:, :, 2, 3, 0] = 500 / 30
    results = [_attend((q, k, v, log), backend, axis=axis, mask_mode=mask_mode) for backend in ('native', 'portable')]
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize('name, value', [('q', torch.nan), ('k', torch.inf), ('v', torch.nan), ('v', -torch.inf)])
def test_decay_attention_of_numbers_that_are_not_finite(name, value):
    inputs = dict(zip(('q', 'k', 'v', 'log_decay'), _lines((4, 5), 8, batch=1)))
    inputs[name][0, 1, 2, 3, 4] = value
    a, b = (kernels.decay_attention(**inputs, backend=backend) for backend in ('native', 'portable'))
    assert torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize('threads', [1, 3])
def test_decay_attention_shares_one_line_among_threads(threads):
    inputs, before = _lines((1, 50), 8, batch=1, heads=1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = kernels.decay_attention(*inputs, backend='native')
    finally:
        torch.set_num_threads(before)
    assert_as_exact([y], [kernels.decay_attention(*(x.double() for x in inputs), backend='reference')], 1e-5)


def test_decay_attention_without_images():
    inputs = [x[:0] for x in _lines((4, 5), 8)]
    assert [x.shape for x in _attend(inputs, 'native')] == [inputs[2].shape, *(x.shape for x in inputs)]


def test_registration_of_decay_attention():
    inputs = [x.detach().requires_grad_() for x in _lines((3, 4), 8)]
    torch.library.opcheck(torch.ops.subquad.decay_attention_native_fwd, (*inputs, 'column', 'additive'))
    counts = []
    for backend in ('native', 'portable'):
        with FlopCounterMode(display=False) as counter:
            _attend(inputs, backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# --- polyline scan

@pairwise('grid, dim, dtype, logs_dtype, paths', [(5, 7), (1, 1), (1, 9), (17, 1), (3, 70), (2, 5, 3)], [1, 8, 20],
          DTYPES, DTYPES, ['both', 'v2h', 'h2v'])
def test_polyline_scan(grid, dim, dtype, logs_dtype, paths):
    g = torch.Generator().manual_seed(dim + sum(grid))
    x = torch.randn(2, *grid, 3, dim, generator=g).to(dtype).movedim(-2, 1)
    logs = (-2 * torch.rand(len(grid), 2, 3, *grid, generator=g)).to(logs_dtype)
    expected = kernels.polyline_scan(x.double(), *logs.double(), paths=paths, backend='reference')
    for given in (x, x.mT.contiguous().mT):
        actual = kernels.polyline_scan(given, *logs, paths=paths, backend='native')
        assert actual.dtype == dtype
        assert_as_exact([actual], [expected], TOLERANCE[dtype])


def test_polyline_scan_with_strong_decays_and_numbers_that_are_not_finite():
    x, logs = torch.randn(1, 2, 6, 7, 8), -300 * torch.rand(2, 1, 2, 6, 7)
    expected = kernels.polyline_scan(x.double(), *logs.double().clamp(min=-80), backend='reference')
    assert_as_exact([kernels.polyline_scan(x, *logs, backend='native')], [expected], 1e-5)
    x[0, 0, 2, 3, 4], x[0, 1, 1, 1, 1] = torch.nan, torch.inf
    a, b = (kernels.polyline_scan(x, *logs / 300, backend=backend) for backend in ('native', 'portable'))
    assert torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan())


def test_gradients_of_the_polyline_scan_are_portable():
    x, *logs = torch.randn(1, 2, 3, 4, 8), *-torch.rand(2, 1, 2, 3, 4)
    with pytest.raises(ValueError, match='no gradient'):
        kernels.polyline_scan(x.requires_grad_(), *logs, backend='native')
    kernels.polyline_scan(x, *logs).sum().backward()
    assert x.grad is not None
    assert kernels.polyline_scan(x.detach()[:0], *(log[:0] for log in logs), backend='native').shape == (0, 2, 3, 4, 8)


def test_registration_of_the_polyline_scan():
    x, *logs = torch.randn(1, 2, 3, 4, 8), *-torch.rand(2, 1, 2, 3, 4)
    torch.library.opcheck(torch.ops.subquad.polyline_scan_native_fwd, (x, logs[0], 3, torch.bfloat16),
                          test_utils=('test_schema', 'test_faketensor', 'test_aot_dispatch_dynamic'))
