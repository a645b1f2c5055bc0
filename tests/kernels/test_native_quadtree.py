"""Native quad-tree attention: against the dense matrix, padding, numbers out of range, and the prepared mixer."""
import pytest
import torch
from operator_cases import TOLERANCE
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad import kernels, prepare
from subquad.backbones.mixers import TreeMixer
from subquad.kernels import native, quadtree_attention
from subquad.kernels.quadtree_attention import native_forward
from subquad.kernels.trees import PARAMETRIZATIONS

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f'no native operators: {native.why_not()}')


def _inputs(grid, dim=8, edge_dim=8, batch=2, heads=3, dtype=torch.float32, strided=False):
    """Return q, k, v and bias; `strided` tensors are views of every second row of larger ones."""
    g = torch.Generator().manual_seed(dim + sum(grid))
    q, k, v = (torch.randn(batch, grid[0] * 2, grid[1], heads, n + 3, generator=g).to(dtype)[..., :n].permute(
        0, 3, 1, 2, 4)[:, :, ::2] for n in (edge_dim, edge_dim, dim))
    if not strided:
        q, k, v = (x.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4) for x in (q, k, v))
    return 2 * q, k, v, torch.randn(3, 2, 2, heads, generator=g)


def _assert_close(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1e-3)


@pairwise('grid, dims, dtype, parametrization, tree, static, masked',
          [(7, 11), (1, 1), (1, 9), (17, 1), (16, 16)], [(16, 8), (30, 5), (3, 20)], [torch.float32, torch.bfloat16],
          PARAMETRIZATIONS, [((0, 0), None), ((5, 3), None), ((1, 2), 3), ((0, 1), 1)], *[[False, True]] * 2)
def test_attention_of_trees(grid, dims, dtype, parametrization, tree, static, masked):
    q, k, v, bias = _inputs(grid, *dims, dtype=dtype, strided=masked)
    q, k = (None, None) if static else (q, k)
    mask = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0)) > 0.4 if masked else None
    options = dict(parametrization=parametrization, shift=tree[0], max_levels=tree[1], mask=mask)
    exact = [None if x is None else x.double() for x in (q, k, v, bias)]
    expected = quadtree_attention(*exact, backend='reference', **options)
    y = quadtree_attention(q, k, v, bias, backend='native', **options)
    _assert_close(y, expected, dtype)
    assert y.permute(0, 2, 3, 1, 4).is_contiguous()


@pytest.mark.parametrize('batch, heads', [(1, 5), (3, 2)])
def test_groups_of_heads_share_the_threads(batch, heads):
    tensors = _inputs((33, 40), 20, batch=batch, heads=heads)
    whole = quadtree_attention(*tensors, backend='native')
    q, k, v, bias = tensors
    for h in range(heads):
        one = slice(h, h + 1)
        alone = quadtree_attention(q[:, one], k[:, one], v[:, one], bias[..., one], backend='native')
        _assert_close(whole[:, one], alone, torch.float32)


def test_attention_under_padding_that_is_not_finite():
    q, k, v, bias = _inputs((9, 6))
    mask = torch.zeros(2, 9, 6, dtype=torch.bool)
    mask[0, :5, :4] = mask[1, :9, :2] = True
    where = mask[:, None, :, :, None]
    expected = quadtree_attention(q, k, v, bias, mask=mask, backend='portable')
    padded = (torch.where(where, x, torch.nan) for x in (q, k, v))
    _assert_close(quadtree_attention(*padded, bias, mask=mask, backend='native'), expected, torch.float32)


@pytest.mark.parametrize('value', [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite(value):
    q, k, v, bias = _inputs((5, 7))
    v[1, 2, 3, 4, 5] = value
    a, b = (quadtree_attention(q, k, v, bias, backend=backend) for backend in ('native', 'portable'))
    assert torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan())
    k[0, 0, 4, 6] = torch.nan
    with pytest.raises(ValueError, match=r'edges\[0\] has a number that is not finite'):
        quadtree_attention(q, k, v, bias, backend='native')


@pytest.mark.parametrize('scale', [1e3, 1e-3])
def test_attention_with_large_and_small_logits_far_above_others(scale):
    q, k, v, bias = _inputs((8, 9))
    for parametrization in PARAMETRIZATIONS:
        expected = quadtree_attention(*(x.double() for x in (q * scale, k, v, bias)), parametrization=parametrization,
                                      backend='reference')
        _assert_close(quadtree_attention(q * scale, k, v, bias, parametrization=parametrization, backend='native'),
                      expected, torch.float32)


def test_empty_batches():
    q, k, v, bias = _inputs((4, 5))
    assert quadtree_attention(q[:0], k[:0], v[:0], bias, backend='native').shape == (0, 3, 4, 5, 8)


@pytest.mark.parametrize('dim', [16, 5])
def test_attention_with_a_gate(dim):
    q, k, v, bias = _inputs((6, 7), dim)
    gate = 5 * _inputs((6, 8), dim, strided=True)[2][:, :, :, :7]
    options = 'laplacian', 0.9, [1, 0], None
    expected = torch.nn.functional.silu(gate.double()) * quadtree_attention(
        *(x.double() for x in (q, k, v, bias)), shift=(1, 0), backend='reference')
    _assert_close(native_forward(q, k, v, bias, None, *options, gate), expected, torch.float32)
    v[0, 1, 2, 3, 4] = torch.nan                                # PyTorch takes over
    y = native_forward(q, k, v, bias, None, *options, gate)
    assert y[0, 1].isnan().any()
    _assert_close(y[1], expected[1], torch.float32)


def test_registration_with_pytorch():
    q, k, v, bias = _inputs((3, 4))
    torch.library.opcheck(torch.ops.subquad.quadtree_attention_native_fwd,
                          (q, k, v, bias, None, 'laplacian', 0.9, [0, 0], None, v),
                          test_utils=('test_schema', 'test_faketensor', 'test_aot_dispatch_dynamic'))
    counts = []
    for backend in ('native', 'portable'):
        with FlopCounterMode(display=False) as counter:
            quadtree_attention(q, k, v, bias, backend=backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize('options', [dict(), dict(static_edges=True, shift_grid=True),
                                     dict(parametrization='skew', max_levels=3)])
def test_prepared_mixer(options):
    torch.manual_seed(0)
    mixer, x = TreeMixer(32, 2, **options).eval(), torch.randn(2, 5, 7, 32)
    mixer.decay_scale = 2.0
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    mask[1, 3:] = False
    with torch.no_grad(), kernels.use_backend('portable'):
        expected, padded = mixer(x), mixer(x, mask)
    prepared = prepare(torch.nn.Sequential(mixer).eval())
    assert type(prepared[0]).__name__ == 'NativeTreeMixer'
    with torch.no_grad():
        assert (prepared(x) - expected).abs().max() < 1e-6
        assert (prepared[0](x, mask) - padded).abs().max() < 1e-6
        with kernels.use_backend('portable'):
            assert (prepared(x) - expected).abs().max() < 1e-6
    assert prepared(x).requires_grad
