"""Solves on general trees: against the dense matrix, their gradient, their guarantees, and their special cases (scans
and Gaussians)."""
import math
import random

import pytest
import torch
from helpers import relative_error
from pairwise import pairwise

from subquad.kernels import quadtree_solve, tree_solve
from subquad.kernels.tree_solve.portable import tree_solve as plain_tree_solve
from subquad.kernels.tree_solve.reference import assemble
from subquad.kernels.trees import (
    PARAMETRIZATIONS,
    Tree,
    grid_order,
    quadtree_levels,
    sweeps,
    tree_blocks,
    tree_log_determinant,
    tree_marginal_variances,
    tree_sample,
)


def random_tree(seed: int) -> Tree:
    """Return a tree of 1 to 60 nodes with at most 1 to 5 children, numbered at random; blocks of 1, 2, 4 or mixed."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    nodes, arity, block = choose.randint(1, 60), choose.randint(1, 5), choose.choice((1, 2, 4))
    parents, children = [-1], [0]
    for node in range(1, nodes):
        parent = choose.choice([p for p in range(max(0, node - 12), node) if children[p] < arity] or [node - 1])
        children[parent] += 1
        parents.append(parent)
        children.append(0)
    name = torch.randperm(nodes, generator=g)
    renamed = torch.empty(nodes, dtype=torch.int64)
    for node, parent in enumerate(parents):
        renamed[name[node]] = -1 if parent < 0 else name[parent]
    mixed = choose.random() < 0.4
    return Tree(renamed, torch.randint(1, block + 1, (nodes,), generator=g) if mixed else block)


def problem(seed: int, parametrization: str, dtype=torch.float64):
    tree, g = random_tree(seed), torch.Generator().manual_seed(seed + 1)
    z = torch.randn(2, 3, len(tree), tree.block, tree.block, dtype=dtype, generator=g)
    if parametrization == 'laplacian' and tree.block == 1:
        z = z.abs().to(dtype)
    u = torch.randn(2, 3, len(tree), tree.block, seed % 4 + 1, dtype=dtype, generator=g)
    return (tree, *tree_blocks(tree, z, parametrization), u)


@pairwise('seed, parametrization', range(60), PARAMETRIZATIONS, together=1)
def test_ragged_trees_against_the_dense_matrix(seed, parametrization):
    kind = torch.complex128 if seed % 2 else torch.float64
    tree, a, b, c, u = problem(seed, parametrization, kind)
    expected = tree_solve(tree, a, b, c, u, backend='reference')
    assert relative_error(tree_solve(tree, a, b, c, u), expected) < 1e-12
    single = torch.complex64 if seed % 2 else torch.float32
    low = [None if x is None else x.to(single) for x in (a, b, c, u)]
    assert relative_error(tree_solve(tree, *low).to(kind), expected) < 1e-5
    low = [None if x is None else x.to(kind) for x in low]
    assert relative_error(tree_solve(tree, *low), tree_solve(tree, *low, backend='reference')) < 1e-12


def test_random_trees_cover_paths_mixed_blocks_and_deep_trees():
    trees = [random_tree(seed) for seed in range(60)]
    assert {1, 2, 4} <= {tree.block for tree in trees} and sum(tree.sizes is not None for tree in trees) > 5
    assert any(tree.chain is not None and len(tree) > 20 for tree in trees)
    assert any(len(tree.generations) > 10 for tree in trees) and min(len(tree) for tree in trees) < 3
    assert sum(generation.arity is None for tree in trees for generation in tree.generations) > 60


def printed(tree: Tree, b, c, u):
    """Run the paper's algorithm 1 as printed for its scan 000 (blocks of size 1, A = 1), which drops the minus of B."""
    pivot, right = torch.ones_like(b), u.clone()
    order = torch.cat([generation.nodes for generation in tree.generations]).tolist()
    hat = {}
    for v in reversed(order):
        hat[v] = b[v] / pivot[v]
        right[v] = right[v] / pivot[v]
        parent = int(tree.parents[v])
        if parent >= 0:
            pivot[parent] = pivot[parent] + c[v] * hat[v]
            right[parent] = right[parent] - c[v] * right[v]
    for v in order:
        if tree.parents[v] >= 0:
            right[v] = right[v] + hat[v] * right[int(tree.parents[v])]
    return right


def test_signs_are_those_of_the_equations_and_not_of_the_printed_algorithm():
    tree = Tree.over_sequence(16, 4)
    z = torch.randn(len(tree), 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, b, c = tree_blocks(tree, z, 'symmetric', rho=0.9)
    u = torch.randn(len(tree), 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = torch.linalg.solve(assemble(tree, None, b, c)[0], u[:, :, 0])[..., None]
    assert relative_error(tree_solve(tree, None, b, c, u), dense) < 1e-12
    wrong = printed(tree, b, c, u)
    assert relative_error(wrong, dense) > 1e-2
    assert relative_error(wrong, tree_solve(tree, None, -b, c, u)) < 1e-12        # what it solves


@pairwise('seed, parametrization', [0, 1, 2, 3, 4, 5, 8, 13], PARAMETRIZATIONS, together=1)
def test_adjoint_against_autograd(seed, parametrization):
    tree, *blocks = problem(seed, parametrization, torch.complex128 if seed % 2 else torch.float64)
    blocks = [None if x is None else x.clone().requires_grad_() for x in blocks]
    inputs = [x for x in blocks if x is not None]
    weight = torch.randn_like(blocks[-1])

    def gradients(x):
        return torch.autograd.grad((x * weight.conj()).sum().real, inputs, allow_unused=True)

    found = gradients(tree_solve(tree, *blocks))
    for other in (plain_tree_solve(tree, *_own(tree, blocks)), tree_solve(tree, *blocks, backend='reference')):
        for mine, wanted in zip(found, gradients(other)):
            wanted = torch.zeros_like(mine) if wanted is None else wanted
            assert (mine - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max())


def _own(tree, blocks):
    from subquad.kernels.trees.tree_arguments import own_parts
    return own_parts(tree, *blocks)


@pytest.mark.parametrize('tree', [Tree([3, 3, 4, 4, -1]), Tree.path(5), Tree([2, 2, -1], [1, 2, 2])],
                         ids=['tree', 'path', 'mixed blocks'])
def test_gradcheck(tree):
    z = torch.randn(len(tree), tree.block, tree.block, dtype=torch.float64)
    _, b, c = tree_blocks(tree, z, 'skew')
    a = torch.eye(tree.block, dtype=torch.float64) * 2 + 0.1 * z
    u = torch.randn(2, len(tree), tree.block, 2, dtype=torch.float64)
    inputs = [x.detach().requires_grad_() for x in (a, b, c, u)]
    assert torch.autograd.gradcheck(lambda *x: tree_solve(tree, *x), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: tree_solve(tree, *x), inputs)


@pytest.mark.parametrize('tree', [random_tree(3), random_tree(8), random_tree(11), Tree.path(37),
                                  Tree.over_sequence(20, 3, sizes=2)], ids=lambda tree: f'{len(tree)} nodes')
def test_gaussian(tree):
    z = torch.randn(2, len(tree), tree.block, tree.block, dtype=torch.float64,
                    generator=torch.Generator().manual_seed(0))
    z = z.abs() if tree.block == 1 else z
    a, b, c = tree_blocks(tree, z, 'laplacian')
    dense, rows = assemble(tree, a, b, c)
    inverse = dense.inverse()
    assert relative_error(tree_log_determinant(tree, a, b, c), torch.logdet(dense)) < 1e-12
    variances = tree_marginal_variances(tree, a, b, c)
    for n in range(2):
        diagonal = torch.block_diag(*variances[n])[rows[:, None], rows]
        mask = torch.block_diag(*torch.ones_like(variances[n]))[rows[:, None], rows].bool()
        assert relative_error(diagonal[mask], inverse[n][mask]) < 1e-12
    # Samples are a linear map of the noise, S; their covariance is S S'.
    size = len(tree) * tree.block
    noise = torch.eye(size, dtype=torch.float64)[rows].T.reshape(len(tree), tree.block, -1)
    samples = tree_sample(tree, a, b, c, noise).flatten(1, 2)[:, rows]
    assert relative_error(samples @ samples.mT, inverse) < 1e-12


@pytest.mark.parametrize('parametrization', PARAMETRIZATIONS)
def test_quad_tree_is_a_4_ary_tree_in_morton_order(parametrization):
    g, tree, dim = torch.Generator().manual_seed(0), Tree.over_sequence(256, 4), 2
    levels = quadtree_levels(16, 16)
    values = [torch.randn(1, 1, x.height, x.width, dim, dtype=torch.float64, generator=g) for x in levels]
    edges = [torch.rand(1, 1, x.height, x.width, dtype=torch.float64, generator=g) for x in levels]
    orders = [grid_order(x.height, x.width, 'morton') for x in levels]

    def sequence(grids):
        return torch.cat([x[0, 0].flatten(0, 1)[order] for x, order in zip(grids, orders)])

    z = sequence(edges)[:, None, None]
    a, b, c = tree_blocks(tree, z, parametrization, rho=0.9)
    x = tree_solve(tree, a, b, c, sequence(values)[:, None])[:, 0]
    grids = quadtree_solve(values, edges[:-1], parametrization=parametrization, rho=0.9)
    assert relative_error(sequence(grids), x) < 1e-12


def test_guarantees():
    """Bounds on spectrum, pivots and norms hold for all edges."""
    for seed in range(20):
        tree, rho = random_tree(seed), 0.99
        z = 100 * torch.randn(len(tree), tree.block, tree.block, dtype=torch.complex128)
        identity = torch.eye(tree.block, dtype=z.dtype)
        _, b, c = tree_blocks(tree, z, 'symmetric', rho=rho, hermitian=True)
        spectrum = torch.linalg.eigvalsh(assemble(tree, None, b, c)[0])
        assert 1 - rho - 1e-12 <= spectrum.min() and spectrum.max() <= 1 + rho + 1e-12
        pivots = sweeps.eliminate(tree, identity.expand(b.shape), b, c, b[..., :1]).pivots
        least = min(torch.linalg.eigvalsh(pivot).min() for pivot in pivots)
        assert least >= (1 + math.sqrt(1 - rho ** 2)) / 2 - 1e-12
        a, b, c = tree_blocks(tree, z, 'skew')
        assert torch.linalg.matrix_norm(assemble(tree, a, b, c)[0].inverse(), 2) <= 1 + 1e-6


@pytest.mark.parametrize('tree, block', [(Tree([2, 2, -1]), 1), (Tree([2, 2, -1], 2), 2), (Tree.path(6), 1),
                                         (Tree.path(6, sizes=2), 2)])
def test_errors_name_the_node_that_cannot_be_solved(tree, block):
    z = torch.rand(len(tree), block, block)
    a, b, c = tree_blocks(tree, z)
    u = torch.rand(2, len(tree), block, 3)
    for name, node in (('a', 0), ('b', 1), ('c', 1), ('a', len(tree) - 1)):
        given = {'a': a.clone(), 'b': b.clone(), 'c': c.clone()}
        given[name][node, 0, 0] = float('nan')
        with pytest.raises(ValueError, match=f'{name} of node {node} is not finite'):
            tree_solve(tree, *given.values(), u)
    singular = a.clone()
    singular[0] = 0
    with pytest.raises(ValueError, match=r'the pivot of node 0 \(.*\) is singular'):
        tree_solve(tree, singular, b, c, u)
    b[-1], c[-1] = float('nan'), float('nan')                              # of the root: ignored
    assert tree_solve(tree, a, b, c, u).isfinite().all()
    assert not tree_solve(tree, a, b, c, u * float('nan')).isfinite().any()


@pytest.mark.parametrize('tree, node', [(Tree([2, 2, 4, 4, -1]), 1), (Tree([2, 2, 4, 4, -1], 2), 3), (Tree.path(6), 2),
                                        (Tree.path(6, sizes=2), 4)])
def test_a_regular_matrix_with_a_singular_pivot_is_refused(tree, node):
    shape = (len(tree), tree.block, tree.block)
    a, (b, c), u = torch.eye(tree.block).expand(shape).clone(), torch.rand(2, *shape) + 0.5, torch.rand(*shape[:2], 1)
    a[node] = 0
    with pytest.raises(ValueError, match=rf"pivot of node {node} \(.*\) is singular; .* backend='reference' solves it"):
        tree_solve(tree, a, b, c, u)
    assert tree_solve(tree, a, b, c, u, backend='reference').isfinite().all()


def test_forest_of_paths():
    tree = Tree([2, -1, 4, 5, -1, -1, 7, -1], forest=True)
    assert tree.chain is not None
    b, c = (torch.randn(2, 8, 1, 1, dtype=torch.float64) / 3 for _ in range(2))
    u = torch.randn(2, 8, 1, 2, dtype=torch.float64)
    assert relative_error(tree_solve(tree, None, b, c, u), tree_solve(tree, None, b, c, u, backend='reference')) < 1e-12


def test_entries_outside_of_blocks_are_ignored():
    tree = Tree([2, 2, -1], [1, 2, 2])
    a, b, c = tree_blocks(tree, torch.randn(3, 2, 2), 'laplacian')
    u = torch.randn(3, 2, 1)
    expected = tree_solve(tree, a, b, c, u)
    for x, index in ((a, (0, 1, 0)), (b, (0, 1, 1)), (c, (0, 0, 1)), (u, (0, 1, 0))):
        x[index] = float('nan')
    torch.testing.assert_close(tree_solve(tree, a, b, c, u), expected)
    assert expected[0, 1] == 0


def test_results_have_the_dtype_of_the_arguments():
    tree, z = Tree([2, 2, -1], 2), torch.randn(3, 2, 2)
    u = torch.randn(3, 2, 5)
    expected = tree_solve(tree, *tree_blocks(tree, z), u)
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(tree_solve(tree, *tree_blocks(tree, z), u), expected)
    huge = tree_blocks(tree, torch.full((3, 2, 2), 1e30), 'symmetric')[1]
    assert (huge[:2].abs() > 0.1).all()


def test_paths_take_a_logarithmic_number_of_steps():
    """Cyclic reduction solves a path of 16,384 nodes in 15 steps."""
    calls = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal calls
            calls += 1
            return function(*args, **(kwargs or {}))

    tree = Tree.path(16384)
    z = torch.rand(len(tree), 1, 1)
    a, b, c = tree_blocks(tree, z)
    with Count():
        x = tree_solve(tree, a, b, c, torch.ones(len(tree), 1, 1))
    assert calls < 15 * 100
    torch.testing.assert_close(x, torch.ones_like(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize('parents, sizes, message', [
    ([1, 0], 1, 'cycle'), ([5, -1], 1, 'parent of node 0 is 5'), ([], 1, 'at least one'), ([-2], 1, 'is -2'),
    ([-1, 0], [1, 0], 'got 0 for node 1'), ([-1, 0], [1, 1, 1], 'for each of 2 nodes'),
    ([-1, 0], [1.5, 2.0], 'integer block size'), ([-1, 0, -1], 1, 'nodes 0 and 2 are both roots'),
    ([-1, 0.5], 1, 'integer'), ([2, -1, 0, 1, 0], 1, 'no root is above node 0')])
def test_wrong_trees_are_refused(parents, sizes, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents, sizes)


def test_wrong_arguments_are_refused():
    tree = Tree([2, 2, -1])
    b, u = torch.rand(3, 1, 1), torch.rand(3, 1, 4)
    with pytest.raises(ValueError, match=r'b must be \(\.\.\., 3, 1, 1\).*got \(4, 1, 1\)'):
        tree_solve(tree, None, torch.rand(4, 1, 1), b, u)
    with pytest.raises(TypeError, match='float16'):
        tree_solve(tree, None, b.half(), b, u)
    with pytest.raises(TypeError, match='share a dtype'):
        tree_solve(tree, None, b.double(), b, u)
    with pytest.raises(ValueError, match='must broadcast'):
        tree_solve(tree, None, b.expand(2, 3, 1, 1), b, u.expand(3, 3, 1, 4))
    with pytest.raises(TypeError, match='must be a Tree, got list'):
        tree_solve([2, 2, -1], None, b, b, u)
    with pytest.raises(ValueError, match="'auto', 'portable' or 'reference', got 'triton'"):
        tree_solve(tree, None, b, b, u, backend='triton')
    with pytest.raises(ValueError, match='unknown backend'):
        tree_solve(tree, None, b, b, u, backend='fast')
    with pytest.raises(ValueError, match='arity at least 2'):
        Tree.over_sequence(4, 1)
    with pytest.raises(ValueError, match='parametrization'):
        tree_blocks(tree, b, 'dense')
    for rho in (1.0, 2):
        with pytest.raises(ValueError, match='rho'):
            tree_blocks(tree, b, 'symmetric', rho=rho)
    with pytest.raises(ValueError, match='length must be at least 1'):
        Tree.path(0)
    with pytest.raises(ValueError, match='order must be one of'):
        grid_order(2, 2, 'hilbert')
