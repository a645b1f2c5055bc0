"""Native separable attention, and the native product of prepared networks, against float64."""
import pytest
import torch
import torch.nn.functional as F
from operator_cases import TOLERANCE, assert_as_exact, weighted_sum
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels
from subquad.kernels import native
from subquad.kernels.native.product import packed_bias, packed_weight, product
from subquad.kernels.separable_attention.native import native_attention, native_forward

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f'no native operators: {native.why_not()}')
GRIDS = [(2, (5, 7)), (2, (1, 9)), (2, (9, 1)), (2, (1, 1)), ((3, 2), (7, 6)), (4, (3, 5)), (1, (3, 5)),
         ((4, 1), (4, 9))]
LAYOUTS = {
    'dense': lambda x: x,
    'channels first': lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    'strided': lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
}


def _inputs(grid, latents=1, dim=8, mapped=None, values=None, batch=2, dtype=torch.float32):
    """Return query, key, value, key_weight, key_bias; `mapped`: channels of keys that a weight maps to dim."""
    g = torch.Generator().manual_seed(dim + sum(grid) + latents)
    shapes = [(batch, *grid, latents), (batch, *grid, mapped or dim), (batch, *(values or grid), dim),
              (dim, mapped), (dim,)][:5 if mapped else 3]
    tensors = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    return tensors if mapped else [*tensors, None, None]


def _run(inputs, backend, layout=lambda x: x, **options):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    y = kernels.separable_attention(*map(layout, leaves[:3]), key_weight=leaves[3], key_bias=leaves[4],
                                    backend=backend, **options)
    weighted_sum(y).backward()
    return [y.detach()] + [x.grad for x in leaves if x is not None]


def _double(inputs):
    return [None if x is None else x.double() for x in inputs]


def _check(inputs, layout=lambda x: x, **options):
    dtype = inputs[2].dtype
    expected = _run(_double(inputs), 'reference', **options)
    assert_as_exact(_run(inputs, 'native', layout, **options), expected, TOLERANCE[dtype])
    with torch.no_grad():                                                 # no gradient, and no node
        y = kernels.separable_attention(*map(layout, inputs[:3]), key_weight=inputs[3], key_bias=inputs[4],
                                        backend='native', **options)
    assert y.dtype == dtype
    assert_as_exact([y], expected[:1], TOLERANCE[dtype])


@pairwise('grid, sampling, latents, dim, mapped, dtype, layout', GRIDS, ['pixel', 'patch'], [1, 3], [8, 3, 70],
          [None, 5], [torch.float32, torch.bfloat16], list(LAYOUTS))
def test_separable_values_and_gradients(grid, sampling, latents, dim, mapped, dtype, layout):
    patch, size = grid
    _check(_inputs(size, latents, dim, mapped, dtype=dtype), LAYOUTS[layout], patch_size=patch, sampling=sampling)


@pairwise('values, mapped, sampling', [(4, 6), (6, 2), (5, 3), (1, 1), (2, 1)], [None, 6], ['pixel', 'patch'])
def test_separable_cross_attention(values, mapped, sampling):
    _check(_inputs((4, 4), 2, values=values, mapped=mapped), patch_size=2, sampling=sampling)


def test_separable_empty_batches():
    inputs = _inputs((4, 5), batch=0)
    assert _run(inputs, 'native', patch_size=2)[0].shape == (0, 4, 5, 8)


@pytest.mark.parametrize('name, value', [('query', torch.nan), ('query', torch.inf), ('query', -torch.inf),
                                         ('key', torch.inf), ('key', torch.nan), ('value', torch.nan),
                                         ('value', torch.inf), ('value', -torch.inf)])
def test_separable_numbers_that_are_not_finite(name, value):
    # Other groups stay finite. In portable, their scores of these tokens exist and are 0.
    inputs = dict(zip(('query', 'key', 'value'), _inputs((4, 6))))
    inputs[name][0, 1, 2, 0] = value
    with torch.no_grad():
        y = kernels.separable_attention(**inputs, patch_size=2, backend='native')
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            group = {key: x[:, i::2, j::2] for key, x in inputs.items()}
            a, b = y[:, i::2, j::2], kernels.separable_attention(**group, patch_size=1, backend='portable')
            assert torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan())


def test_separable_keys_are_normalized():
    query, key, value, weight, bias = _inputs((4, 6), mapped=5)
    statistics = torch.tensor([[0.5, 2.0], [-1.0, 0.3]])
    normalized = (key - statistics[:, 0, None, None, None]) * statistics[:, 1, None, None, None]
    expected = kernels.separable_attention(*(x.double() for x in (query, normalized, value)), backend='reference',
                                           key_weight=weight.double(), key_bias=bias.double(), patch_size=2)
    y = native_attention(query, key, value, weight, bias, (2, 2), 'pixel', statistics)
    assert_as_exact([y], [expected], 1e-5)


def test_separable_large_logits():
    inputs = _inputs((4, 6))
    inputs[0][:, 1, 2] += 1e4
    _check(inputs, patch_size=2)


def test_separable_second_derivative():
    inputs = [x.double().float().requires_grad_() for x in _inputs((4, 5))[:3]]
    results = []
    for backend in ('native', 'portable'):
        y = kernels.separable_attention(*inputs, patch_size=2, backend=backend)
        grads = torch.autograd.grad(weighted_sum(y), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs))
    assert_as_exact(results[0], [x.double() for x in results[1]], 1e-5)


def test_separable_registration():
    query, key, value, *_ = _inputs((3, 4))
    arguments = query, key.requires_grad_(), value, None, None, 2, 2, 'pixel'
    torch.library.opcheck(native_forward, arguments)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        kernels.separable_attention(query, key, value, patch_size=2, backend='native')
    assert counter.get_total_flops() > 0
    compiled = torch.compile(lambda *x: kernels.separable_attention(*x, patch_size=2), fullgraph=True, backend='eager')
    with torch.no_grad():
        assert torch.equal(compiled(query, key, value), kernels.separable_attention(query, key, value, patch_size=2))


def _normalized(x, weight, bias, eps):
    mean, square = x.mean((1, 2, 3), keepdim=True), x.var((1, 2, 3), correction=0, keepdim=True)
    return (x - mean) * (square + eps).rsqrt() * weight + bias


@pairwise('grid, batch, channels, before, act, residual, strided', [(5, 7), (1, 1), (1, 9), (14, 14)], [0, 1, 3],
          [(8, 16), (3, 1), (20, 33), (70, 48)], ['', 'norm', 'silu'], ['none', 'silu', 'gelu'], *[[False, True]] * 2)
def test_product_values(grid, batch, channels, before, act, residual, strided):
    g = torch.Generator().manual_seed(sum(channels))
    dim, out = channels
    x = torch.randn(batch, dim, *grid, generator=g).permute(0, 2, 3, 1)
    x = x if strided else x.contiguous()
    weight, bias, extra = (torch.randn(shape, generator=g) for shape in (channels[::-1], out, (batch, *grid, out)))
    norm = [torch.randn(dim, generator=g) for _ in range(2)]
    options = dict(act=act, act_before=before == 'silu', residual=extra if residual else None)
    z = x.double()
    if before == 'norm':
        options.update(norm_weight=norm[0], norm_bias=norm[1], eps=1e-3)
        z = _normalized(z, *norm, 1e-3)
    expected = F.linear(F.silu(z) if before == 'silu' else z, weight.double(), bias.double())
    expected = {'none': expected, 'silu': F.silu(expected), 'gelu': F.gelu(expected)}[act] + (extra if residual else 0)
    with torch.no_grad():
        y, statistics = product(x, packed_weight(weight), packed_bias(bias), out, **options)
    assert y.shape == expected.shape and len(statistics) == (batch if before == 'norm' else 0)
    if batch:
        assert (y - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def test_product_shares_few_tokens_among_threads():
    torch.manual_seed(0)
    x, weight, bias, threads = torch.randn(1, 7, 9, 40), torch.randn(100, 40), torch.randn(100), torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(product(x, packed_weight(weight), packed_bias(bias), 100, act_before=True)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_product_of_an_image_far_from_zero():
    torch.manual_seed(0)
    x, weight, norm = 1e3 + torch.randn(2, 40, 30, 24), torch.randn(8, 24), (torch.ones(24), torch.zeros(24))
    y, statistics = product(x, packed_weight(weight), packed_bias(torch.zeros(8)), 8, norm_weight=norm[0],
                            norm_bias=norm[1])
    assert (statistics[:, 1] * x.double().flatten(1).std(1) - 1).abs().max() < 1e-4
    expected = F.linear(_normalized(x.double(), *norm, 1e-5), weight.double())
    assert (y - expected).abs().max() < 1e-3


def test_product_numbers_that_are_not_finite():
    x, weight = torch.ones(1, 2, 3, 4), torch.ones(3, 4)
    x[0, 1, 1, 2], x[0, 0, 2, 0] = torch.nan, -torch.inf
    y = product(x, packed_weight(weight), packed_bias(torch.zeros(3)), 3)[0]
    assert torch.equal(y.isnan(), F.linear(x, weight).isnan()) and torch.equal(y.isinf(), F.linear(x, weight).isinf())


def test_product_registration():
    x, weight, norm = torch.randn(2, 3, 4, 5), torch.randn(6, 5), torch.ones(5)
    torch.library.opcheck(torch.ops.subquad.product_native_fwd, (
        x, packed_weight(weight), packed_bias(torch.zeros(6)), 6, 'silu', False, norm, norm, 1e-5, None),
        test_utils=('test_schema', 'test_faketensor', 'test_aot_dispatch_dynamic'))
    with FlopCounterMode(display=False) as counter:
        product(x, packed_weight(weight), packed_bias(torch.zeros(6)), 6)
    assert counter.get_total_flops() == 2 * 24 * 5 * 6
