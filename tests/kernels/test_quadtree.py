"""The quad-tree solve: against the dense matrix, its guarantees, its memory, compilers and flop counters."""
import itertools
from functools import partial

import pytest
import torch
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import quadtree_solve, why_not
from subquad.kernels.quadtree_solve import portable
from subquad.kernels.quadtree_solve.reference import quadtree_matrix
from subquad.kernels.trees import (
    PARAMETRIZATIONS,
    common_ancestor_levels,
    level_means,
    quadtree_levels,
    third_of_coarsest_cell,
)
from subquad.tools.bench.baselines import loop_quadtree_solve

GRIDS = [(7, 11), (5, 3), (1, 9), (14, 14), (20, 31), (1, 1), (2, 1)]


def problem(height, width, parametrization='laplacian', shift=(0, 0), max_levels=None, dtype=torch.float64, batch=2,
            heads=2, dim=3, scale=4.0):
    g = torch.Generator().manual_seed(height * width)
    levels = quadtree_levels(height, width, max_levels, shift)
    values = [torch.randn(batch, heads, x.height, x.width, dim, generator=g, dtype=torch.float64) for x in levels]
    edges = [scale * torch.randn(batch, heads, x.height, x.width, generator=g, dtype=torch.float64)
             for x in levels[:-1]]
    if parametrization == 'laplacian':
        edges = [edge.abs() for edge in edges]
    return [x.to(dtype).requires_grad_() for x in values], [x.to(dtype).requires_grad_() for x in edges]


def with_gradients(values, edges, **options):
    x = quadtree_solve(values, edges, **options)
    g = torch.Generator().manual_seed(0)
    loss = sum((y.double() * torch.randn(y.shape, generator=g, dtype=torch.float64)).sum() for y in x)
    return [*x, *torch.autograd.grad(loss, [*values, *edges])]


def worst(found, wanted) -> float:
    return max(((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-3)).item()
               for x, y in zip(found, wanted))


@pairwise('grid, parametrization, max_levels, shift', GRIDS, PARAMETRIZATIONS, [None, 3], [(0, 0), (1, 0), (5, 3)])
def test_against_the_dense_matrix(grid, parametrization, max_levels, shift):
    mask = torch.rand(2, *grid, generator=torch.Generator().manual_seed(1)) > 0.3
    for masked in (None, mask):
        values, edges = problem(*grid, parametrization, shift, max_levels)
        options = dict(parametrization=parametrization, shift=shift, mask=masked)
        expected = with_gradients(values, edges, backend='reference', **options)
        for backend in ('portable', 'export'):
            assert worst(with_gradients(values, edges, backend=backend, **options), expected) < 1e-12, backend


@pytest.mark.parametrize('dtype, bound', [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize('parametrization', PARAMETRIZATIONS)
def test_single_and_half_precision(parametrization, dtype, bound):
    values, edges = problem(14, 14, parametrization, dtype=dtype)
    exact = [[x.detach().double().requires_grad_() for x in tensors] for tensors in (values, edges)]
    expected = with_gradients(*exact, parametrization=parametrization, backend='reference')
    found = with_gradients(values, edges, parametrization=parametrization, backend='portable')
    assert worst(found, expected) < bound and found[0].dtype == found[-1].dtype == dtype


def test_strides_and_other_dtypes_of_edges():
    values, edges = problem(7, 11, dim=8)
    expected = with_gradients(values, edges)
    last = [x.detach().permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4).requires_grad_() for x in values]
    found = quadtree_solve(last, edges)
    assert found[0].stride() == last[0].stride()
    assert worst(with_gradients(last, edges), expected) < 1e-12
    half = [x.detach().bfloat16() for x in values]
    assert quadtree_solve(half, [x.float() for x in edges])[0].dtype == torch.bfloat16


@pytest.mark.parametrize('scale', [1.0, 100.0])
def test_rows_of_the_laplacian_sum_to_one(scale):
    values, edges = problem(23, 30, dtype=torch.float32, scale=scale)
    ones = [torch.ones_like(x) for x in values]
    for x in quadtree_solve(ones, edges):
        assert (x - 1).abs().max() < 1e-6
    grown = [edge * 4 ** n for n, edge in enumerate(edges)]
    assert all((x - 1).abs().max() < 1e-6 for x in quadtree_solve(ones, grown))
    # Entries: the solve of unit vectors.
    values, edges = problem(7, 5, dtype=torch.float32, scale=scale, batch=1, heads=1)
    sizes = [x.shape[2] * x.shape[3] for x in values]
    units = [x.reshape(1, 1, *y.shape[2:4], -1) for x, y in zip(torch.eye(sum(sizes)).split(sizes), values)]
    inverse = torch.cat([x.flatten(0, 3) for x in quadtree_solve(units, edges)])
    assert inverse.min() > -1e-7 and (inverse.sum(1) - 1).abs().max() < 1e-6


def test_symmetric_and_skew_are_bounded():
    rho = 0.9
    _, edges = problem(9, 6, 'symmetric', scale=1e6, batch=1, heads=1)
    from subquad.kernels.trees.parametrize import sibling_normalized
    levels = quadtree_levels(9, 6)
    bounded = [sibling_normalized(edge, level, rho) for edge, level in zip(edges, levels)]
    spectrum = torch.linalg.eigvalsh(quadtree_matrix(bounded, 9, 6, 'symmetric', (0, 0)))
    assert 1 - rho - 1e-9 <= spectrum.min() and spectrum.max() <= 1 + rho + 1e-9
    scale, _, _ = portable.coefficients(bounded, levels, 'symmetric')
    assert max(x.max() for x in scale) <= 2 / (1 + (1 - rho ** 2) ** 0.5) + 1e-9          # 1 / the least pivot
    _, edges = problem(9, 6, 'skew', scale=100, batch=1, heads=1)
    matrix = quadtree_matrix(edges, 9, 6, 'skew', (0, 0))
    assert torch.linalg.matrix_norm(matrix.inverse(), 2).max() <= 1 + 1e-6


def test_huge_edges_stay_finite():
    for parametrization, dtype in itertools.product(PARAMETRIZATIONS, (torch.float32, torch.float16, torch.bfloat16)):
        values, edges = problem(12, 12, parametrization, scale=1e4, dtype=dtype)
        assert all(x.isfinite().all() for x in with_gradients(values, edges, parametrization=parametrization))
    values, edges = problem(8, 8, 'symmetric', dtype=torch.float32)
    edges = [torch.full_like(edge, 3e38).requires_grad_() for edge in edges]
    assert all(x.isfinite().all() for x in with_gradients(values, edges, parametrization='symmetric'))


@pytest.mark.parametrize('parametrization', PARAMETRIZATIONS)
def test_padding_does_not_change_valid_leaves(parametrization):
    g = torch.Generator().manual_seed(0)
    mask = torch.zeros(2, 14, 10, dtype=torch.bool)
    mask[0, :9, :10] = mask[1, :14, :3] = True
    for shift in ((0, 0), third_of_coarsest_cell(14, 10)):
        levels = quadtree_levels(14, 10, None, shift)
        x = torch.randn(2, 4, 14, 10, generator=g)
        outputs = []
        for padding in (0.0, 1e3, float('inf'), float('nan')):
            inside = torch.where(mask[:, None], x, padding)
            values = [v.permute(0, 2, 3, 1)[:, None] for v in level_means(inside, levels, mask)]
            edges = [v.square().sum(-1) for v in values[:-1]]
            edges = [torch.where(inside[:, :1] == padding, padding, edges[0]), *edges[1:]] if padding else edges
            outputs.append(quadtree_solve(values, edges, parametrization=parametrization, mask=mask, shift=shift)[0])
        assert all((outputs[0] - y)[:, 0][mask].abs().max() < 1e-6 for y in outputs[1:])


def test_a_padded_image_has_the_result_of_the_image_alone():
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(1, 4, 16, 16, generator=g), torch.zeros(1, 16, 16, dtype=torch.bool)
    mask[:, :11, :13] = True
    edge = torch.rand(1, 1, 16, 16, generator=g) * 3

    def solved(x, edge, mask):
        levels = quadtree_levels(*x.shape[2:])
        values = [v.permute(0, 2, 3, 1)[:, None] for v in level_means(x, levels, mask)]
        edges = [part for part in level_means(edge, levels, mask)[:-1]]
        return quadtree_solve(values, edges, mask=mask)[0]

    inside = solved(x, edge, mask)[:, :, :11, :13]
    torch.testing.assert_close(inside, solved(x[..., :11, :13], edge[..., :11, :13], None), rtol=1e-5, atol=1e-6)


def test_level_means():
    levels = quadtree_levels(5, 7, None, (1, 2))
    x = torch.arange(35.0).view(1, 1, 5, 7)
    pyramid = level_means(x, levels)
    assert [tuple(p.shape[2:]) for p in pyramid] == [level[:2] for level in levels]
    torch.testing.assert_close(pyramid[-1], x.mean((2, 3), keepdim=True))
    torch.testing.assert_close(pyramid[1][0, 0, 0, 0], x[0, 0, :1, :2].mean())           # row 0 alone: shifted by one
    mask = torch.zeros(1, 5, 7, dtype=torch.bool)
    mask[0, 2, 3] = True
    assert level_means(x, levels, mask)[-1].item() == x[0, 0, 2, 3]


@pytest.mark.parametrize('parametrization, edge, rho, expected', [
    ('symmetric', lambda n: 1e6, 0.5, [95, 5, 0, 0, 0, 0, 0]),
    ('symmetric', lambda n: 1e6, 0.9, [77, 15, 5, 2, 1, 0, 0]),
    ('symmetric', lambda n: 1e6, 1 - 1e-7, [63, 16, 8, 5, 3, 2, 2]),
    ('laplacian', lambda n: 1, 0.5, [70, 24, 5, 1, 0, 0, 0]),
    ('laplacian', lambda n: 100, 0.5, [4, 9, 19, 30, 24, 10, 4]),
    ('laplacian', lambda n: 4 * 4 ** n, 0.5, [31, 15, 10, 7, 6, 9, 22]),
    ('skew', lambda n: 2, 0.5, [33, 27, 12, 11, 7, 6, 5])])
def test_range(parametrization, edge, rho, expected):
    """Table of the model card: percent of a leaf's weight by level of the common ancestor, 64 x 64 leaves."""
    levels = quadtree_levels(64, 64)
    values = [torch.zeros(1, 1, x.height, x.width, 1, dtype=torch.float64) for x in levels]
    values[0][0, 0, 27, 36] = 1
    edges = [torch.full_like(x[..., 0], edge(n)) for n, x in enumerate(values[:-1])]
    row = quadtree_solve(values, edges, parametrization=parametrization, rho=rho)[0][0, 0, :, :, 0].abs()
    height = common_ancestor_levels(levels, 27, 36)
    shares = torch.stack([row[height == n].sum() for n in range(7)]) / row.sum()
    assert [round(100 * share) for share in shares.tolist()] == expected


def saved_bytes(call) -> int:
    """Return the bytes of distinct memory that autograd keeps until the backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call()
    del output
    return sum(kept.values())


def test_adjoint_saves_half_of_the_memory_of_autograd():
    values, edges = problem(56, 56, dtype=torch.float32, heads=2, dim=32)
    expected = loop_quadtree_solve(*values, *edges)
    torch.testing.assert_close(quadtree_solve(values, edges)[0], expected, rtol=1e-4, atol=1e-5)
    ours, loop = saved_bytes(partial(quadtree_solve, values, edges)), saved_bytes(partial(loop_quadtree_solve, *values,
                                                                                          *edges))
    assert ours <= 0.5 * loop
    assert ours < 1.1 * sum(x.numel() * 4 for x in values)                # x, and a number an edge


def test_compilers_and_flop_counters_see_the_operator():
    values, edges = problem(6, 5, dtype=torch.float32)
    torch.library.opcheck(torch.ops.subquad.quadtree_solve_portable_fwd, (values, edges, 'laplacian', [0, 0]))
    torch.library.opcheck(torch.ops.subquad.quadtree_solve_portable_fwd, (values[:1], [], 'skew', [3, 1]))
    compiled = torch.compile(lambda v, e: quadtree_solve(v, e)[0].square().sum(), fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(values, edges), quadtree_solve(values, edges)[0].square().sum())
    with FlopCounterMode(display=False) as counter:
        x = quadtree_solve(values, edges)
    nodes = sum(x.numel() for x in values)
    assert counter.get_total_flops() == 5 * nodes
    with FlopCounterMode(display=False) as counter:
        x[0].sum().backward()
    assert counter.get_total_flops() == 9 * nodes


def _flat_solve(*x, count, parametrization):
    return tuple(quadtree_solve(x[:count], x[count:], parametrization=parametrization, shift=(1, 0)))


def test_gradcheck():
    for parametrization in PARAMETRIZATIONS:
        values, edges = problem(3, 5, parametrization, shift=(1, 0), dim=2, batch=1, scale=1.0)
        solve = partial(_flat_solve, count=len(values), parametrization=parametrization)
        assert torch.autograd.gradcheck(solve, (*values, *edges))


def test_wrong_arguments_are_refused():
    values, edges = problem(6, 5)
    with pytest.raises(ValueError, match='at least one level'):
        quadtree_solve([], [])
    with pytest.raises(ValueError, match=r'each level except the last \(3\), got 2'):
        quadtree_solve(values, edges[:2])
    with pytest.raises(ValueError, match='6 x 5 leaves has 4 levels, got 5'):
        quadtree_solve([*values, values[-1]], [*edges, edges[-1]])
    with pytest.raises(ValueError, match=r'values\[1\] must have shape \(2, 2, 3, 3, 3\)'):
        quadtree_solve([values[0], values[0]], edges[:1])
    with pytest.raises(ValueError, match=r'edges\[0\] must have shape'):
        quadtree_solve(values, [edges[1], *edges[1:]])
    with pytest.raises(ValueError, match="'laplacian', 'symmetric', 'skew', got 'dense'"):
        quadtree_solve(values, edges, parametrization='dense')
    with pytest.raises(ValueError, match='mask must have shape'):
        quadtree_solve(values, edges, mask=torch.ones(2, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match='rho must be between 0 and 1'):
        quadtree_solve(values, edges, parametrization='symmetric', rho=1.5)
    with pytest.raises(ValueError, match='shift must be two integers'):
        quadtree_solve(values, edges, shift=(-1, 0))
    with pytest.raises(TypeError, match='must share a dtype'):
        quadtree_solve([values[0].float(), *values[1:]], edges)
    with pytest.raises(ValueError, match='at least one leaf'):
        quadtree_solve([values[0][:, :, :0]], [])
    broken = [edge.detach().clone() for edge in edges]
    broken[1][0, 0, 0, 0] = float('nan')
    with pytest.raises(ValueError, match=r'edges\[1\] has a number that is not finite'):
        quadtree_solve(values, broken)
    broken[1][0, 0, 0, 0] = 1
    broken[0][:] = -1
    with pytest.raises(ValueError, match=r"edges\[0\] must not be negative with parametrization='laplacian', got -1"):
        quadtree_solve(values, broken)
    assert not quadtree_solve([values[0] * float('nan'), *values[1:]], edges)[0].isfinite().any()    # the user's own
    assert 'on cpu' in why_not('quadtree_solve', values[0])
