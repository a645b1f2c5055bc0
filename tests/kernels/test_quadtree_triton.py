"""Triton kernels of the quad-tree solve against the float64 reference: values, gradients, grids, tiles and strides; and
their registration with PyTorch. They run on a GPU, or without one in Triton's interpreter."""
import pytest
import torch
from operator_cases import DEVICE, TOLERANCE, skip_without_triton, weighted_sum
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import quadtree_solve
from subquad.kernels.trees import PARAMETRIZATIONS, quadtree_levels

skip_without_triton()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new tensors with NaN, so that elements which no kernel writes are found."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty

    def fill(x):
        return x.fill_(float('nan')) if x.is_floating_point() else x
    monkeypatch.setattr(torch, 'empty_like', lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, 'new_empty', lambda *args, **kwargs: fill(new_empty(*args, **kwargs)))


def _inputs(height, width, parametrization='laplacian', shift=(0, 0), max_levels=None, dtype=torch.float32,
            edge_dtype=None, batch=1, heads=1, dim=8):
    """Return values and edges of every level; edges of the Laplacian are positive."""
    g = torch.Generator().manual_seed(height * 100 + width)
    levels = quadtree_levels(height, width, max_levels, shift)
    values = [torch.randn(batch, heads, x.height, x.width, dim, generator=g) for x in levels]
    edges = [2 * torch.randn(batch, heads, x.height, x.width, generator=g) for x in levels[:-1]]
    if parametrization == 'laplacian':
        edges = [edge.abs() for edge in edges]
    return [x.to(DEVICE, dtype) for x in values], [x.to(DEVICE, edge_dtype or dtype) for x in edges]


def _run(values, edges, backend, layout=lambda x: x, **options):
    """Return x of every level, gradients of values, gradients of edges."""
    leaves = [x.detach().clone().requires_grad_() for x in (*values, *edges)]
    arguments = [layout(x) for x in leaves]
    solution = quadtree_solve(arguments[:len(values)], arguments[len(values):], backend=backend, **options)
    sum(weighted_sum(y) for y in solution).backward()
    grads = [x.grad for x in leaves]
    return [y.detach() for y in solution], grads[:len(values)], grads[len(values):]


def _check(values, edges, layout=lambda x: x, **options):
    expected = _run([x.double() for x in values], [x.double() for x in edges], 'reference', **options)
    actual = _run(values, edges, 'triton', layout, **options)
    tolerance = max(TOLERANCE.get(x.dtype, 0) for x in (*values, *edges))
    for kind, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        largest = max((x.abs().max() for x in wanted), default=0)
        for n, (x, y) in enumerate(zip(found, wanted, strict=True)):
            assert x.dtype == (edges if kind == 2 else values)[n].dtype and x.isfinite().all(), (kind, n)
            # Gradients that cancel are held to the scale of the others.
            scale = y.abs().max().clamp(min=0.05 * largest)
            twice = kind and tolerance > 1e-5                       # gradients pass through rounded numbers, too
            assert (x.double() - y).abs().max() <= tolerance * (2 if twice else 1) * scale, (kind, n)


@pairwise('parametrization, grid_and_shift', PARAMETRIZATIONS, [
    ((1, 1), (0, 0)), ((1, 1), (5, 3)), ((1, 9), (0, 0)), ((1, 9), (5, 3)), ((9, 1), (5, 3)), ((5, 3), (0, 0)),
    ((5, 3), (5, 3)), ((7, 11), (0, 0)), ((7, 11), (5, 3)), ((14, 14), (0, 0)), ((14, 14), (2, 1))], together=1)
def test_trees_in_one_tile(parametrization, grid_and_shift):
    grid, shift = grid_and_shift
    _check(*_inputs(*grid, parametrization, shift), parametrization=parametrization, shift=shift)


@pairwise('parametrization, grid, shift', PARAMETRIZATIONS, [(14, 14), (9, 20), (17, 9)], [(0, 0), (5, 3)],
          together=1)
def test_trees_of_several_tiles(parametrization, grid, shift):
    _check(*_inputs(*grid, parametrization, shift), parametrization=parametrization, shift=shift)


@pairwise('parametrization, sides, dtype', PARAMETRIZATIONS, [(2,), (2, 4), (4,)],
          [torch.float32, torch.bfloat16, torch.float16], together=1)
def test_tiles_of_tiles(parametrization, sides, dtype, monkeypatch):
    """The kernels sweep up and down several times, with float32 between the launches."""
    from subquad.kernels.quadtree_solve import triton
    monkeypatch.setattr(triton, 'SIDES', sides)
    _check(*_inputs(3, 6, parametrization, (1, 3), dtype=dtype, dim=16), parametrization=parametrization, shift=(1, 3))


@pytest.mark.parametrize('parametrization, grid, shift, levels', [
    ('laplacian', (7, 11), (0, 0), 2), ('symmetric', (7, 11), (5, 3), 3), ('skew', (1, 9), (5, 3), 2),
    ('skew', (5, 3), (5, 3), 1), ('symmetric', (14, 14), (0, 0), 3), ('laplacian', (12, 20), (5, 3), 3),
    ('skew', (3, 40), (1, 0), 6)], ids=str)
def test_forests(parametrization, grid, shift, levels):
    _check(*_inputs(*grid, parametrization, shift, levels), parametrization=parametrization, shift=shift)


@pytest.mark.parametrize('grid, levels, first_tree', [((3, 8), 2, 2), ((2, 40), 6, 32)], ids=str)
def test_trees_of_a_forest_do_not_meet(grid, levels, first_tree):
    """Also those in one tile, whose common ancestors do not exist: a NaN stays in its tree."""
    values, edges = _inputs(*grid, max_levels=levels)
    values[0][..., 0, 0, :] = float('nan')
    leaves, *_ = quadtree_solve(values, edges, backend='triton')
    assert leaves[..., 0, :first_tree, :].isnan().all() and leaves[..., first_tree:, :].isfinite().all()


@pairwise('parametrization, dtypes', PARAMETRIZATIONS, [
    (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64), (torch.float32, torch.float16)], together=1)
def test_dtypes_of_values_and_edges(parametrization, dtypes):
    _check(*_inputs(7, 6, parametrization, dtype=dtypes[0], edge_dtype=dtypes[1]), parametrization=parametrization)


@pairwise('parametrization, dim', PARAMETRIZATIONS, [1, 16, 20, 32, 70], together=1)
def test_head_dimensions(parametrization, dim):
    """Heads of one channel, of a power of two or not, and of more channels than a tile takes."""
    _check(*_inputs(5, 3, parametrization, dim=dim, heads=2), parametrization=parametrization)


@pairwise('parametrization, order', PARAMETRIZATIONS, [(0, 2, 3, 1, 4), (0, 1, 4, 2, 3), (4, 3, 2, 1, 0)], together=1)
def test_strides(order, parametrization):
    """Tensors with channels last, channels first or all dimensions reversed in memory need no copy."""
    def layout(x):
        places = order if x.ndim == 5 else [n for n in order if n < 4]
        back = [places.index(n) for n in range(x.ndim)]
        return x.permute(places).contiguous().permute(back)
    values, edges = _inputs(5, 6, parametrization, batch=2, heads=2, dim=4)
    _check(values, edges, layout, parametrization=parametrization)
    values = [layout(x) for x in values]
    for x, y in zip(values, quadtree_solve(values, [layout(x) for x in edges], parametrization=parametrization,
                                           backend='triton')):
        assert y.stride() == x.stride() and y.data_ptr() != x.data_ptr()


def test_gradients_and_values_that_share_memory():
    """Broadcast values and the gradient of a sum have strides of 0."""
    values, edges = _inputs(5, 6, batch=2, heads=2)
    values = [x[:, :, :1, :1].expand_as(x) for x in values]
    edges = [x[:1].expand_as(x).requires_grad_() for x in edges]
    found, wanted = (torch.autograd.grad(sum(x.sum() for x in quadtree_solve(values, edges, backend=backend)), edges)
                     for backend in ('triton', 'portable'))
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    x = quadtree_solve(values, edges, backend='triton')
    for found, wanted in zip(x, quadtree_solve(values, edges, backend='portable')):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('grid, shift', [((14, 14), (0, 0)), ((1, 20), (5, 3)), ((12, 10), (5, 3))], ids=str)
def test_rows_sum_to_one(grid, shift):
    """Rows of the Laplacian's inverse sum to 1, with edges up to 100 and with edges of 4 * 4^level."""
    levels = quadtree_levels(*grid, None, shift)
    g = torch.Generator().manual_seed(0)
    ones = [torch.ones(1, 1, x.height, x.width, 1, device=DEVICE) for x in levels]
    for largest in (100.0, None):
        edges = [(largest * torch.rand(x.shape[:-1], generator=g)).to(DEVICE) if largest else
                 torch.full(x.shape[:-1], 4.0 * 4 ** n, device=DEVICE) for n, x in enumerate(ones[:-1])]
        for x in quadtree_solve(ones, edges, shift=shift, backend='triton'):
            assert (x - 1).abs().max() <= 1e-6


def test_large_edges_and_none():
    values, edges = _inputs(6, 7)
    for edge in edges:
        edge[..., ::2] = 0
        edge[..., 1::3] = 1e6
    x = quadtree_solve(values, edges, backend='triton')
    for found, wanted in zip(x, quadtree_solve([v.double() for v in values], [e.double() for e in edges],
                                               backend='reference')):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_results_are_the_same_every_time():
    values, edges = _inputs(5, 3, heads=2)
    first, second = (_run(values, edges, 'triton') for _ in range(2))
    assert all(torch.equal(x, y) for one, other in zip(first, second) for x, y in zip(one, other))


@pytest.mark.parametrize('cut', [lambda x: x[:0], lambda x: x[:, :0]])
def test_empty_tensors(cut):
    values, edges = ([cut(x) for x in tensors] for tensors in _inputs(3, 4))
    solution, *gradients = _run(values, edges, 'triton')
    assert [x.shape for x in solution] == [x.shape for x in values] == [x.shape for x in gradients[0]]
    edges = _inputs(3, 4)[1]
    values = [x.new_zeros((*x.shape, 0)) for x in (*edges, edges[-1][..., :1, :1])]       # heads without channels
    assert all((x == 0).all() for x in _run(values, edges, 'triton')[2])


# --- launches


def test_images_beyond_32_bit_offsets_are_refused():
    from subquad.kernels.quadtree_solve import triton
    values = [torch.empty(1, 64, 8192 >> n, 8192 >> n, 1, device='meta') for n in range(2)]
    with pytest.raises(ValueError, match='spans 2.31 elements'):
        triton.forward(values, [values[0][..., 0]], 'laplacian', [0, 0])


# --- what PyTorch sees

@pytest.mark.parametrize('parametrization, shift, levels', [('laplacian', (0, 0), None), ('skew', (5, 3), 2)])
def test_opcheck(parametrization, shift, levels):
    values, edges = _inputs(2, 3, parametrization, shift, levels, dim=2, edge_dtype=torch.float64)
    values = [x.permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2) for x in values]
    ops = torch.ops.subquad
    solution = ops.quadtree_solve_fwd(values, edges, parametrization, list(shift))
    torch.library.opcheck(ops.quadtree_solve_bwd.default, (values, solution, edges, parametrization, list(shift)))
    leaves = [[x.detach().clone().requires_grad_() for x in tensors] for tensors in (values, edges)]
    torch.library.opcheck(ops.quadtree_solve_fwd.default, (*leaves, parametrization, list(shift)))


def test_compiles_to_one_graph():
    def call(values, edges):
        return quadtree_solve(values, edges, shift=(1, 0), backend='triton')
    values, edges = _inputs(5, 4, shift=(1, 0))
    compiled = torch.compile(call, backend='aot_eager', fullgraph=True)
    for x, y in zip(compiled(values, edges), call(values, edges)):
        torch.testing.assert_close(x, y)


def test_flop_counter():
    values, edges = _inputs(4, 4)
    with FlopCounterMode(display=False) as counter:
        x = quadtree_solve([v.requires_grad_() for v in values], edges, backend='triton')
    assert counter.get_total_flops() == 5 * (16 + 4 + 1) * 8
    with FlopCounterMode(display=False) as counter:
        x[0].sum().backward()
    assert counter.get_total_flops() == 9 * (16 + 4 + 1) * 8
