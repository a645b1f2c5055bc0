"""Separable attention: every backend against the float64 reference, with gradients; groups, latent tokens, extremes;
registration with PyTorch. Kernels run on a GPU, or without one in Triton's interpreter."""
import pytest
import torch
from operator_cases import DEVICE, TOLERANCE, assert_as_exact, skip_without_triton, weighted_sum
from pairwise import pairwise, slow
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels
from subquad.kernels.common import launch, patches

BACKENDS = ['portable', 'export', 'triton']


def _needs_triton(backend):
    if backend == 'triton':
        skip_without_triton()


def _inputs(height, width, latents=1, dim=8, mapped=None, values=None, batch=2, dtype=torch.float32):
    """Return query, key, value, key_weight, key_bias; `mapped`: channels of keys that a weight maps to dim."""
    g = torch.Generator().manual_seed(height * 100 + width + latents)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)
    weight = (randn(dim, mapped) * mapped ** -0.5, randn(dim)) if mapped else (None, None)
    return [randn(batch, height, width, latents) * 2, randn(batch, height, width, mapped or dim),
            randn(batch, *(values or (height, width)), dim), *weight]


def _run(inputs, backend, layout=lambda x: x, **options):
    """Return the output and all gradients."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    query, key, value = (layout(x) for x in leaves[:3])
    y = kernels.separable_attention(query, key, value, key_weight=leaves[3], key_bias=leaves[4], backend=backend,
                                    **options)
    weighted_sum(y).backward()
    return [y.detach()] + [x.grad for x in leaves if x is not None]


def _check(inputs, backend, **options):
    _needs_triton(backend)
    layout, times = options.pop('layout', lambda x: x), options.pop('times', 1)
    expected = _run([None if x is None else x.double() for x in inputs], 'reference', **options)
    actual = _run(inputs, backend, layout, **options)
    assert actual[0].dtype == inputs[2].dtype and actual[0].shape == inputs[2].shape
    assert_as_exact(actual, expected, TOLERANCE[inputs[2].dtype] * times)


@pairwise('backend, sampling, latents', BACKENDS, ['pixel', 'patch'], [1, 3, 8])
def test_values_and_gradients(backend, sampling, latents):
    _check(_inputs(4, 6, latents), backend, patch_size=2, sampling=sampling)


@pairwise('backend, sampling, grid', BACKENDS, ['pixel', 'patch'], [
    (2, (5, 7)), (2, (1, 9)), (2, (9, 1)), (2, (1, 1)), (1, (1, 13)), (1, (3, 5)), ((4, 1), (4, 9)), ((3, 2), (7, 6)),
    (4, (3, 5))], together=1)
def test_grids(backend, sampling, grid):
    """Grids of odd size, one row, one column, one token; rows as groups; patches larger than the grid."""
    patch, size = grid
    _check(_inputs(*size, mapped=5 if size[0] == 5 else None), backend, patch_size=patch, sampling=sampling)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('values', [(4, 6), (6, 2), (5, 3)])
def test_cross_attention(backend, values):
    _check(_inputs(4, 4, 2, values=values, mapped=6), backend, patch_size=2)


@pairwise('backend, mapped, dtype', BACKENDS, [None, 8], [torch.float16, torch.bfloat16], together=1)
def test_half_types(backend, mapped, dtype):
    _check(_inputs(5, 6, 3, mapped=mapped, dtype=dtype), backend, patch_size=2)


@pytest.mark.parametrize('dim', [1, 24, 70, 130])
@pytest.mark.parametrize('backend', BACKENDS)
def test_channels(backend, dim):
    _check(_inputs(3, 4, dim=dim, batch=1), backend, patch_size=2)


@pytest.mark.parametrize('layout', [lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
                                    lambda x: x.repeat_interleave(2, 2)[:, :, ::2]], ids=['channels first', 'strided'])
@pytest.mark.parametrize('backend', BACKENDS)
def test_strides(backend, layout):
    _check(_inputs(4, 5, 2), backend, patch_size=2, layout=layout)


def _set_blocks(monkeypatch, **sizes):
    """Set sizes of blocks for which the launch table has no row."""
    from subquad.kernels.separable_attention import triton
    for name, size in sizes.items():
        monkeypatch.setattr(triton, name, size)
    monkeypatch.setattr(launch, 'options', lambda *_: {'num_warps': 4})


@pairwise('mapped, size', [None, 6], [(9, 20), (1, 150)], together=1)
def test_several_chunks(size, mapped, monkeypatch):
    """Keys, values and logits take several chunks or blocks, with more keys than values and the reverse."""
    _needs_triton('triton')
    _set_blocks(monkeypatch, CHUNK=16, BLOCK_N=16, MANY_PROGRAMS=1 << 30)
    _check(_inputs(*size, 2, dim=20, mapped=mapped, batch=1), 'triton', patch_size=2)
    _check(_inputs(*size, 1, dim=3, mapped=mapped, values=(4, 6) if size[0] > 1 else (1, 30), batch=1), 'triton',
           patch_size=2)


def test_one_kernel_for_long_groups(monkeypatch):
    """The one-launch kernel takes a long group in several blocks."""
    _needs_triton('triton')
    _set_blocks(monkeypatch, CHUNK=16, BLOCK_N=16, MANY_PROGRAMS=1)
    _check(_inputs(9, 20, 3, dim=20, batch=1), 'triton', patch_size=2)


@pytest.mark.parametrize('backend', ['portable', *slow('triton')])
def test_65536_tokens(backend, monkeypatch):
    if backend == 'triton' and DEVICE == 'cpu':
        _needs_triton(backend)                   # the interpreter takes as long for a small block as for a large one
        _set_blocks(monkeypatch, CHUNK=2048, BLOCK_N=512)
    # Four sums of 16,384 float32 products each reach all gradients of the query.
    _check(_inputs(256, 256, dim=4, batch=1), backend, patch_size=2, times=3)


@pytest.mark.parametrize('sampling', ['pixel', 'patch'])
@pytest.mark.parametrize('size', [(4, 6), (5, 7), (1, 1)])
def test_scores_sum_to_one_in_each_group(size, sampling):
    query, key, value, *_ = _inputs(*size, 3)
    y, scores = kernels.separable_attention(query, key, value, patch_size=2, sampling=sampling, return_scores=True)
    assert scores.shape == query.shape and (scores > 0).all()
    for rows in patches.group_slices(size[0], 2, sampling):
        for columns in patches.group_slices(size[1], 2, sampling):
            torch.testing.assert_close(scores[:, rows, columns].sum((1, 2)), torch.ones(2, 3, device=DEVICE))
    context = (scores.mean(3, keepdim=True) * key)[:, ::2, ::2].sum((1, 2))
    if sampling == 'pixel':
        torch.testing.assert_close(y[:, 0, 0], value[:, 0, 0].relu() * context)


@pytest.mark.parametrize('backend', [*BACKENDS, 'reference'])
def test_permutation_equivariance(backend):
    """Permuted tokens of a sequence give permuted outputs."""
    _needs_triton(backend)
    query, key, value, *_ = _inputs(1, 17, 3)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    y = kernels.separable_attention(query, key, value, backend=backend)
    permuted = kernels.separable_attention(*(x[:, :, order] for x in (query, key, value)), backend=backend)
    torch.testing.assert_close(permuted, y[:, :, order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('backend', BACKENDS)
def test_extreme_scores_stay_finite(backend, dtype):
    inputs = _inputs(4, 6, 2, dtype=dtype)
    inputs[0] = (inputs[0].float().sign() * 1e4).to(dtype)
    _check(inputs, backend, patch_size=2)
    inputs[0][:, 1, 3] = 1e4
    inputs[0][:, :, :3] = -1e4
    _check(inputs, backend, patch_size=2)


@pytest.mark.parametrize('backend', ['portable', 'export', 'triton'])
def test_logits_that_exclude_tokens(backend):
    """Logits of -inf exclude tokens, also a whole first block of them."""
    inputs = _inputs(1, 1200, dim=4, batch=1)
    inputs[0][:, :, :600] = -float('inf')
    _needs_triton(backend)
    query, key, value = inputs[:3]
    y = kernels.separable_attention(query, key, value, backend=backend)
    expected = kernels.separable_attention(query[:, :, 600:], key[:, :, 600:], value[:, :, 600:], backend='reference')
    torch.testing.assert_close(y[:, :, 600:], expected, rtol=1e-5, atol=1e-6)


def test_images_beyond_32_bit_offsets_are_refused():
    """Long lines within 32-bit offsets are accepted, and images beyond them are refused."""
    x = torch.empty(1, 1, 1, 1).expand(1, 1, 65536, 1)
    launch.check_grid(torch.empty(1, 1, 65536, 1025, device='meta')[..., :512], x)
    for shape in ((1, 8192, 8192, 64), (1, 1, 2 ** 26, 64)):
        with pytest.raises(ValueError, match='spans 2.31 elements'):
            launch.check_grid(x, torch.empty(shape, device='meta'))


def test_vmap_without_gradients():
    query, key, value, *_ = (x for x in _inputs(4, 6) if x is not None)
    with torch.no_grad():
        y = torch.vmap(lambda *one: kernels.separable_attention(*(x[None] for x in one), patch_size=2)[0])(
            query, key, value)
    torch.testing.assert_close(y, kernels.separable_attention(query, key, value, patch_size=2))


@pytest.mark.parametrize('mapped', [5, *slow(None)])
def test_the_operator_passes_opcheck(mapped):
    _needs_triton('triton')
    inputs = [None if x is None else x.requires_grad_() for x in _inputs(3, 5, 2, mapped=mapped)]
    torch.library.opcheck(torch.ops.subquad.separable_attention_fwd, (*inputs, 2, 2, 'pixel'))


@pytest.mark.parametrize('backend', ['portable', 'triton'])
def test_compiles_to_one_graph(backend):
    _needs_triton(backend)
    query, key, value, weight, bias = _inputs(4, 6, 2, mapped=5)

    def call(query, key, value):
        return kernels.separable_attention(query, key, value, patch_size=2, key_weight=weight, key_bias=bias,
                                           backend=backend)
    compiled = torch.compile(call, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value), call(query, key, value))


def test_flop_counter_sees_the_map_of_every_key():
    _needs_triton('triton')
    query, key, value, weight, bias = _inputs(4, 6, mapped=5)
    with FlopCounterMode(display=False) as counter:
        y = kernels.separable_attention(query, key.requires_grad_(), value, patch_size=2, key_weight=weight,
                                        key_bias=bias, backend='triton')
    assert counter.get_total_flops() == 2 * (2 * 4 * 6) * 5 * 8
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 4 * (2 * 4 * 6) * 5 * 8


def test_no_tensor_above_rank_4_and_no_im2col():
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            seen.append((str(function), max((x.ndim for x in (out if isinstance(out, (tuple, list)) else [out])
                                             if isinstance(x, torch.Tensor)), default=0)))
            return out
    query, key, value, weight, bias = _inputs(4, 6, 2, mapped=5)
    for backend in ('portable', 'export'):
        for sampling in ('pixel', 'patch'):
            with Watch():
                kernels.separable_attention(query, key, value, patch_size=2, key_weight=weight, key_bias=bias,
                                            sampling=sampling, backend=backend)
    assert seen and max(rank for _, rank in seen) <= 4 and not [name for name, _ in seen if 'im2col' in name]


@pytest.mark.parametrize('change, error, message', [
    (dict(query=torch.zeros(2, 4, 6)), ValueError, 'query must have 4 dimensions'),
    (dict(query=torch.zeros(2, 4, 6, 0)), ValueError, 'one for each latent token'),
    (dict(query=torch.zeros(2, 4, 5, 1)), ValueError, r'key must have shape \(2, 4, 5, 8\)'),
    (dict(query=torch.zeros(2, 0, 6, 1), key=torch.zeros(2, 0, 6, 8)), ValueError, 'query must have at least one tok'),
    (dict(value=torch.zeros(2, 4, 0, 8)), ValueError, 'value must have at least one token'),
    (dict(value=torch.zeros(3, 4, 6, 8)), ValueError, r'value must have the batch size of key \(2\), got 3'),
    (dict(value=torch.zeros(2, 4, 6, 7)), ValueError, r'value must have shape .* \(the channels of key\)'),
    (dict(key=torch.zeros(2, 4, 6, 8).half()), TypeError, 'must share a dtype'),
    (dict(patch_size=0), ValueError, 'patch_size must be a positive integer or a pair of positive integers, got 0'),
    (dict(patch_size=(2, 2, 2)), ValueError, 'patch_size must be'),
    (dict(sampling='token'), ValueError, "sampling must be one of 'pixel', 'patch', got 'token'"),
    (dict(key_bias=torch.zeros(8)), ValueError, 'key_bias needs key_weight'),
    (dict(key_weight=torch.zeros(8, 7)), ValueError, r'key_weight must have shape \(8, 8\)'),
    (dict(key_weight=torch.zeros(8, 8), key_bias=torch.zeros(7)), ValueError, 'key_bias must have shape'),
    (dict(backend='cuda'), ValueError, "unknown backend 'cuda'"),
    (dict(query=torch.zeros(2, 1, 6, 1), key=torch.zeros(2, 1, 6, 8)), ValueError,
     r'every group needs a key: .*keys on a \(1, 6\) grid leave groups of the .* values without keys')])
def test_wrong_arguments_are_refused(change, error, message):
    arguments = dict(query=torch.zeros(2, 4, 6, 1), key=torch.zeros(2, 4, 6, 8), value=torch.zeros(2, 4, 6, 8),
                     patch_size=2) | change
    with pytest.raises(error, match=message):
        kernels.separable_attention(arguments.pop('query'), arguments.pop('key'), arguments.pop('value'), **arguments)
