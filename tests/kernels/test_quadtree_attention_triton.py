"""Triton kernels of quad-tree attention without gradients, against the float64 reference and the composed operator; and
their launches. They run on a GPU, or without one in Triton's interpreter."""
import pytest
import torch
from dispatches import Dispatches
from operator_cases import DEVICE, TOLERANCE, skip_without_triton
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import quadtree_attention
from subquad.kernels.trees import PARAMETRIZATIONS

skip_without_triton()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new tensors with NaN, so that elements which no kernel writes are found."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def fill(x):
        return x.fill_(float('nan')) if x.is_floating_point() and x.device.type != 'meta' else x
    monkeypatch.setattr(torch, 'empty_like', lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, 'new_empty', lambda *args, **kwargs: fill(new_empty(*args, **kwargs)))


def _inputs(height, width, dtype=torch.float32, batch=2, heads=2, dim=4, edge_dim=5, static=False, device=DEVICE):
    """Return q, k, v and bias, with heads as slices of channels-last tokens; q and k are None for static edges."""
    g = torch.Generator().manual_seed(100 * height + width)

    def tokens(dim):
        x = torch.randn(batch, height, width, heads, dim, generator=g)
        return x.to(device, dtype).permute(0, 3, 1, 2, 4)
    q, k = (None, None) if static else (2 * tokens(edge_dim), tokens(edge_dim))
    return q, k, tokens(dim), torch.randn(3, 2, 2, heads, generator=g).to(device)


def _check(inputs, **options):
    """Compare with the reference in float64, and return the result."""
    expected = quadtree_attention(*(None if x is None else x.double() for x in inputs), backend='reference', **options)
    y = quadtree_attention(*inputs, backend='triton', **options)
    assert y.dtype == inputs[2].dtype and y.permute(0, 2, 3, 1, 4).is_contiguous()
    assert (y.double() - expected).abs().max() <= TOLERANCE[y.dtype] * expected.abs().max()
    return y


@pairwise('grid_and_tree, parametrization, dtype, static', [
    ((1, 1), (0, 0), None), ((1, 1), (5, 3), None), ((7, 11), (0, 0), None), ((7, 11), (5, 3), None),
    ((1, 9), (5, 3), 2), ((9, 1), (0, 0), None), ((5, 3), (2, 2), 1), ((3, 17), (1, 0), 5)],
    PARAMETRIZATIONS, [torch.float32, torch.bfloat16, torch.float16], [False, True])
def test_one_tile(grid_and_tree, parametrization, dtype, static):
    grid, shift, levels = grid_and_tree
    _check(_inputs(*grid, dtype, static=static), parametrization=parametrization, shift=shift, max_levels=levels)


@pairwise('parametrization, grid_and_tree', PARAMETRIZATIONS, [((3, 19), (0, 0), None), ((2, 33), (3, 5), 6)],
          together=1)
def test_tiles_of_tiles(parametrization, grid_and_tree):
    grid, shift, levels = grid_and_tree
    _check(_inputs(*grid, torch.bfloat16, batch=1), parametrization=parametrization, shift=shift,
           max_levels=levels)


@pytest.mark.parametrize('dim, edge_dim', [(1, 1), (20, 8), (3, 40)])
def test_channels(dim, edge_dim):
    """Heads of one channel, and tokens of more channels than a block."""
    _check(_inputs(3, 5, dim=dim, edge_dim=edge_dim))


@pytest.mark.parametrize('layout', ['slices', 'heads first'])
def test_strides(layout):
    """Queries and keys may be slices of the tokens of one product. Other layouts are copied."""
    q, k, v, bias = _inputs(5, 6)
    if layout == 'slices':
        q, k, v = torch.cat([x.permute(0, 2, 3, 1, 4).flatten(3) for x in (q, k, v)], 3).split([10, 10, 8], 3)
        q, k, v = (x.unflatten(3, (2, -1)).permute(0, 3, 1, 2, 4) for x in (q, k, v))
        assert not q.permute(0, 2, 3, 1, 4).is_contiguous()
    else:
        q, k, v = (x.contiguous() for x in (q, k, v))
    y = _check((q, k, v, bias))
    composed = quadtree_attention(q, k, v, bias.requires_grad_(), backend='triton')
    assert composed.requires_grad and (y - composed).abs().max() <= 1e-5


def test_empty_batch():
    inputs = _inputs(3, 4, batch=0)
    assert quadtree_attention(*inputs, backend='triton').shape == inputs[2].shape


def test_trees_of_a_forest_do_not_meet():
    q, k, v, bias = _inputs(2, 12)
    for x in (q, k, v):
        x[..., 0, 0, :] = float('nan')
    kernel = torch.ops.subquad.quadtree_attention_fwd
    if DEVICE == 'cpu':                                   # results there are checked
        with pytest.raises(ValueError, match=r'edges\[0\] has a number that is not finite'):
            kernel(q, k, v, bias, 'laplacian', 0.9, [0, 0], 2)
        q, k, _, _ = _inputs(2, 12)
    y = kernel(q, k, v, bias, 'laplacian', 0.9, [0, 0], 3)
    assert y[..., :4, :].isnan().all() and y[..., 4:, :].isfinite().all()


def test_small_weights_are_not_zero():
    """softplus(-30) is 9e-14, where log(1 + e^z) would be 0 in float32."""
    _, _, v, bias = _inputs(4, 4, static=True)
    v = v * 1e14
    v[..., :2, :2, :] = 0
    y = quadtree_attention(None, None, v, torch.full_like(bias, -30.0), backend='triton')
    expected = quadtree_attention(None, None, v.double(), torch.full_like(bias, -30.0).double(), backend='reference')
    torch.testing.assert_close(y[..., :2, :2, :].double(), expected[..., :2, :2, :], rtol=1e-4, atol=0)


# --- launches and what PyTorch sees

@pytest.mark.parametrize('side, most', [(7, 3), (14, 3), (56, 6), (200, 6)])
def test_few_launches(side, most, monkeypatch):
    """Whatever the number of levels: means and edges take two launches, and one more for tiles of tiles."""
    from subquad.kernels.quadtree_attention import triton as attention
    from subquad.kernels.quadtree_solve import triton as solve
    launches = Dispatches(inside=True)

    class Kernel:
        def __getitem__(self, programs):
            return self

        def __call__(self, *args, **options):
            launches.names['kernel'] += 1
    for module in (attention, solve):
        for name in [name for name in vars(module) if name.endswith('_kernel')]:
            monkeypatch.setattr(module, name, Kernel())
    inputs = _inputs(side, side, torch.bfloat16, heads=4, dim=16, edge_dim=8, device='meta')
    with launches:
        quadtree_attention(*inputs, backend='triton')
    assert 0 < launches.count <= most, launches.names


def test_opcheck():
    for static, rest in ((False, ('laplacian', 0.9, [1, 0], None)), (True, ('symmetric', 0.9, [0, 0], 2)),
                         (False, ('skew', 0.9, [0, 0], 1))):
        torch.library.opcheck(torch.ops.subquad.quadtree_attention_fwd, (*_inputs(3, 2, batch=1, static=static), *rest),
                              test_utils=('test_schema', 'test_faketensor', 'test_aot_dispatch_dynamic'))


def test_compiles_to_one_graph():
    inputs = _inputs(3, 4)
    compiled = torch.compile(quadtree_attention, backend='aot_eager', fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs, backend='triton'), quadtree_attention(*inputs, backend='triton'))


def test_flop_counter():
    with FlopCounterMode(display=False) as counter:
        quadtree_attention(*_inputs(4, 4), backend='triton')
    assert counter.get_total_flops() == 5 * (16 + 4 + 1) * 2 * 2 * 4
