"""Values, layouts and sizes that operators do not support: errors name the argument, or all backends agree."""
from functools import partial

import pytest
import torch
from torch import nn

from subquad import kernels
from subquad.kernels.common import checks, launch
from subquad.kernels.trees import (
    Tree,
    leaf_counts,
    level_means,
    quadtree_levels,
    tree_blocks,
    tree_log_determinant,
    tree_sample,
)

BACKENDS = ['reference', 'portable', 'export', 'triton']


def _inputs(height, width, dim=4, dtype=torch.float32):
    g = torch.Generator().manual_seed(height + width)
    q, k, v = (torch.randn(1, 2, height, width, dim, generator=g, dtype=dtype) for _ in range(3))
    a, b = (torch.randn(1, 2, height, width, generator=g, dtype=dtype) * 0.5 for _ in range(2))
    return q, k, v, a, b


OPERATORS = {
    'polyline_scan': lambda q, k, v, a, b, **kw: kernels.polyline_scan(v, a, b, paths='both', **kw),
    'polyline_linear_attention': lambda q, k, v, a, b, **kw: kernels.polyline_linear_attention(q, k, v, a, b, **kw),
    'polyline_attention': lambda q, k, v, a, b, **kw: kernels.polyline_attention(q, k, v, a, b, **kw),
    'decay_attention': lambda q, k, v, a, b, **kw: kernels.decay_attention(q, k, v, a, **kw),
    'crisscross_attention': lambda q, k, v, a, b, **kw: kernels.crisscross_attention(q, k, v, a, b, **kw)}


# --- step logs

@pytest.mark.parametrize('name', OPERATORS)
def test_positive_step_logs_are_refused(name):
    q, k, v, a, b = _inputs(5, 8)
    a, b = -a.abs(), -b.abs()
    first = 'log_decay' if name == 'decay_attention' else 'log_alpha'
    for backend in ('auto', 'reference', 'portable', 'export'):
        OPERATORS[name](q, k, v, a, b, backend=backend)
        for wrong in (a.clone(), a.clone().half(), nn.Parameter(a.clone())):
            wrong.data[0, 1, 2, 3] = 0.25
            with pytest.raises(ValueError, match=f'{name}: {first} must not be positive .*, got 0.25$'):
                OPERATORS[name](q, k, v, wrong, b, backend=backend)
    if name != 'decay_attention':
        with pytest.raises(ValueError, match=f'{name}: log_beta must not be positive'):
            OPERATORS[name](q, k, v, a, -b)
    OPERATORS[name](q, k, v, torch.full_like(a, -torch.inf), torch.zeros_like(b))
    OPERATORS[name](*(x[:0] for x in (q, k, v, a, b)))


def test_positive_step_logs_along_depth():
    x, log = torch.randn(1, 1, 2, 3, 4, 2), -torch.rand(1, 1, 2, 3, 4)
    with pytest.raises(ValueError, match='polyline_scan: log_gamma must not be positive'):
        kernels.polyline_scan(x, log, log, -log)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('name', OPERATORS)
def test_positive_step_logs_count_as_zero_where_they_cannot_be_read(name, backend, monkeypatch):
    """On a GPU and in graphs values are not checked: all backends give the same results and gradients."""
    if backend == 'triton' and not launch.interpreted():
        pytest.skip('no GPU is used here, and Triton was imported without TRITON_INTERPRET=1')
    monkeypatch.setattr(checks, 'step_logs', lambda op, **logs: None)
    results = []
    for chosen, bound in ((backend, torch.inf), ('reference', 0.0)):
        inputs = [x.clone() for x in (_inputs(3, 4, 2) if backend == 'triton' else _inputs(6, 9))]
        inputs[3:] = [x.clamp(max=bound) for x in inputs[3:]]
        for x in inputs:
            x.requires_grad_()
        y = OPERATORS[name](*inputs, backend=chosen)
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        results.append((y.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs], inputs[3:]))
    (y, grads, steps), (expected, expected_grads, _) = results
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    for n, (actual, wanted) in enumerate(zip(grads, expected_grads)):
        if n >= 3:                      # at a bound the gradient is that of the side within; beyond it there is none
            positive = steps[n - 3] > 0
            assert positive.any() and not actual[positive].any()
            actual, wanted = actual[~positive], wanted[~positive]
        torch.testing.assert_close(actual, wanted, rtol=2e-4, atol=2e-4)


def test_a_large_map_of_positive_step_logs(monkeypatch):
    """With 50 x 80 steps of both signs, the chunked scan once returned 4e16."""
    monkeypatch.setattr(checks, 'step_logs', lambda op, **logs: None)
    _, _, v, a, b = _inputs(50, 80)
    expected = kernels.polyline_scan(v, a.clamp(max=0), b.clamp(max=0), paths='both', backend='reference')
    y = kernels.polyline_scan(v, a, b, paths='both', backend='portable')
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('name', OPERATORS)
def test_graphs_accept_positive_step_logs(name):
    """Compiled, exported and under vmap, positive step logs raise no error and count as 0."""
    q, k, v, a, b = _inputs(4, 6)
    expected = OPERATORS[name](q, k, v, a.clamp(max=0), b.clamp(max=0))
    call = OPERATORS[name]
    compiled = torch.compile(lambda *x: call(*x), backend='eager', fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, a, b), expected, rtol=1e-4, atol=1e-5)

    class Module(nn.Module):
        def forward(self, *x):
            return call(*x)
    batch = torch.export.Dim('batch', min=1, max=64)
    several = tuple(torch.cat([x, x]) for x in (q, k, v, a, b))
    exported = torch.export.export(Module(), several, dynamic_shapes=(((({0: batch},) * 5),)))
    torch.testing.assert_close(exported.module()(q, k, v, a, b), expected, rtol=1e-4, atol=1e-5)
    vmapped = torch.vmap(lambda *x: call(*x, backend='export'))(*(x[None] for x in (q, k, v, a, b)))
    torch.testing.assert_close(vmapped[0], expected, rtol=1e-4, atol=1e-5)


# --- trees

def _tree_problem(height=5, width=6):
    levels = quadtree_levels(height, width)
    values = [torch.randn(2, 2, level.height, level.width, 3) for level in levels]
    return levels, values, [torch.rand(value.shape[:-1]) for value in values[:-1]]


@pytest.mark.parametrize('backend', ['auto', 'reference', 'portable', 'export'])
def test_negative_edges_of_a_laplacian(backend):
    _, values, edges = _tree_problem()
    edges[1][1, 0, 2, 1] = -0.5
    with pytest.raises(ValueError, match=r'quadtree_solve: edges\[1\] must not be negative .*, got -0.5$'):
        kernels.quadtree_solve(values, edges, backend=backend)
    for parametrization in ('symmetric', 'skew'):
        kernels.quadtree_solve(values, edges, parametrization=parametrization, backend=backend)
    mask = torch.ones(2, 5, 6, dtype=torch.bool)
    mask[1, 4:, 2:4] = False                              # what that edge would lead to
    assert kernels.quadtree_solve(values, edges, mask=mask, backend=backend)[0].isfinite().all()


def test_negative_weights_of_tree_blocks():
    tree, z = Tree([2, 2, -1]), torch.rand(3, 1, 1)
    z[2] = -1                                             # of the root: ignored
    tree_blocks(tree, z)
    for wrong in (z.clone(), z.to(torch.complex64)):
        wrong[1] = -2
        with pytest.raises(ValueError, match='tree_blocks: z must not be negative .*, got -2$'):
            tree_blocks(tree, wrong)
        tree_blocks(tree, wrong, 'skew')
    tree_blocks(Tree([2, 2, -1], 2), torch.randn(3, 2, 2))       # Z Z' is positive


@pytest.mark.parametrize('mask, error, message', [
    (torch.ones(2, 5, 6), TypeError, 'mask must be a tensor of dtype torch.bool, .* got dtype torch.float32'),
    (torch.ones(2, 5, 6, dtype=torch.uint8), TypeError, 'got dtype torch.uint8'),
    ([[True]], TypeError, 'mask must be .* got list'),
    (torch.ones(2, 6, 5, dtype=torch.bool), ValueError, r'mask must have shape .*, got \(2, 6, 5\)'),
    (torch.ones(2, 5, 6, dtype=torch.bool, device='meta'), ValueError, 'mask is on meta')], ids=str)
def test_wrong_padding_masks_are_refused(mask, error, message):
    levels, values, edges = _tree_problem()
    with pytest.raises(error, match=message):
        kernels.quadtree_solve(values, edges, mask=mask)
    for call in (level_means, leaf_counts):
        with pytest.raises(error, match=f'^{call.__name__}: .*{message}'):
            call(*((values[0][..., 0], levels) if call is level_means else (levels, values[0])), mask)


# --- layouts and sizes

def _all_calls():
    """Yield the name of an argument and a call that applies `change` to it, for every public operator."""
    q, k, v, a, b = _inputs(5, 6)
    a, b = -a.abs(), -b.abs()
    _, values, edges = _tree_problem()
    tree, blocks, u = Tree([2, 2, -1]), torch.full((2, 3, 1, 1), 0.1), torch.rand(2, 3, 1, 2)
    query, key, value = torch.randn(1, 4, 6, 9).split([1, 4, 4], -1)
    yield 'x', lambda change: kernels.polyline_scan(change(v), a, b)
    yield 'log_alpha', lambda change: kernels.polyline_scan(v, change(a), b)
    for name, call in OPERATORS.items():
        if name != 'polyline_scan':
            yield 'q', lambda change, call=call: call(change(q), k, v, a, b)
            yield 'v', lambda change, call=call: call(q, k, change(v), a, b)
            log = 'log_decay' if name == 'decay_attention' else 'log_alpha'
            yield log, lambda change, call=call: call(q, k, v, change(a), b)
    line, steps = q[:, :, 0], a[:, :, 0, :, None]
    yield 'i', lambda change: kernels.eos_elementwise(change(line), line, line)
    yield 's', lambda change: kernels.eos_elementwise(line, line, change(line))
    yield 'log_o_k', lambda change: kernels.eos_elementwise(line, line, line, log_o_k=change(steps))
    yield 'b', lambda change: kernels.eos_matmul(line, line, line, a=line, b=change(line))
    yield 'query', lambda change: kernels.separable_attention(change(query), key, value)
    yield 'key', lambda change: kernels.separable_attention(query, change(key), value)
    yield 'value', lambda change: kernels.separable_attention(query, key, change(value))
    yield r'values\[0\]', lambda change: kernels.quadtree_solve([change(values[0]), *values[1:]], edges)
    yield r'edges\[0\]', lambda change: kernels.quadtree_solve(values, [change(edges[0]), *edges[1:]])
    yield 'b', lambda change: kernels.tree_solve(tree, None, change(blocks), blocks, u)
    yield 'u', lambda change: kernels.tree_solve(tree, None, blocks, blocks, change(u))
    yield 'tree_log_determinant: b', lambda change: tree_log_determinant(tree, None, change(blocks), blocks)
    yield 'tree_sample: noise', lambda change: tree_sample(tree, None, blocks, blocks, change(u))


CALLS = list(_all_calls())


@pytest.mark.parametrize('n', range(len(CALLS)))
def test_what_is_no_dense_tensor_of_numbers_is_refused(n):
    name, call = CALLS[n]
    call(lambda x: x)
    for change, message in ((lambda x: [1.0], 'must be a .*tensor, got list'),
                            (lambda x: x.long(), 'int64|must share a dtype')):
        with pytest.raises(TypeError, match=message):
            call(change)
    refused = f'(^|: ){name} must be a dense tensor, got a'
    with pytest.raises(TypeError, match=f'{refused} tensor of layout torch.sparse_coo'):
        call(lambda x: x.to_sparse())
    with pytest.raises(TypeError, match=f'{refused} (nested tensor|tensor of layout)'):
        call(lambda x: torch.nested.nested_tensor(list(x)))


@pytest.mark.parametrize('options, message', [
    (dict(gelu='no'), "gelu must be True or False, got 'no'"),
    (dict(residual=1), 'residual must be True or False, got 1'),
])
def test_flags_of_the_convolution(options, message):
    with pytest.raises(TypeError, match=f'depthwise_conv: {message}'):
        kernels.depthwise_conv(torch.rand(1, 4, 5, 8), torch.rand(8, 1, 3, 3), torch.rand(8), **options)


@pytest.mark.parametrize('options, error, message', [
    (dict(patch_size=True), ValueError, 'patch_size must be a positive integer or a pair .*, got True'),
    (dict(patch_size=(2, True)), ValueError, 'patch_size must be a positive integer or a pair'),
    (dict(return_scores='no'), TypeError, "return_scores must be True or False, got 'no'"),
])
def test_options_of_separable_attention(options, error, message):
    x = torch.rand(1, 4, 6, 8)
    with pytest.raises(error, match=f'separable_attention: {message}'):
        kernels.separable_attention(x[..., :1], x, x, **options)


@pytest.mark.parametrize('scale, error', [('2', TypeError), (True, TypeError), (float('nan'), ValueError)])
def test_the_scale_of_the_rotation(scale, error):
    q = torch.rand(1, 2, 6, 8)
    with pytest.raises(error, match='rotary_embedding: scale must be a finite number, got'):
        kernels.rotary_embedding(q, q, torch.rand(6, 4, 2), scale)


@pytest.mark.parametrize('options, message', [
    (dict(rho='no'), "rho must be a finite number, got 'no'"), (dict(max_levels=True), 'max_levels must be an integer'),
    (dict(max_levels='2'), 'max_levels must be an integer'), (dict(shift=2), 'shift must be two integers'),
    (dict(shift=(True, 0)), 'shift must be two integers'), (dict(shift='12'), 'shift must be two integers'),
])
def test_options_of_quad_trees(options, message):
    _, v, edges = _tree_problem()
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.quadtree_attention(None, None, v[0], torch.rand(2, 2, 2, v[0].shape[1]), **options)
    if 'max_levels' not in options:
        with pytest.raises((TypeError, ValueError), match=message):
            kernels.quadtree_solve(v, edges, parametrization='symmetric', **options)


def test_expanded_tensors_whose_result_exceeds_the_memory_are_refused():
    """Views of one number with strides of 0 have results of 4 TB."""
    side = 1 << 20
    one = torch.zeros(1, 1, 1, 1, 1)
    x, log = one.expand(1, 1, side, side, 1), one[..., 0].expand(1, 1, side, side)
    told = r'has a shape of \(.*1048576.*\), and a result of that shape takes 4,398 GB; cpu has '
    for call in (partial(kernels.polyline_scan, x, log, log), partial(kernels.polyline_attention, x, x, x, log, log),
                 partial(kernels.decay_attention, x, x, x, log),
                 partial(kernels.crisscross_attention, x, x, x, log, log),
                 partial(kernels.polyline_linear_attention, x, x, x, log, log),
                 partial(kernels.separable_attention, x[0], x[0], x[0]),
                 partial(kernels.separable_attention, x[0, :, :1, :1], x[0, :, :1, :1], x[0]),
                 partial(kernels.quadtree_solve, [x], [])):
        with pytest.raises(ValueError, match=told):
            call()
    tree, wide, high = Tree([2, 2, -1]), torch.zeros(side, 1, 3, 1, 1), torch.zeros(1, side, 3, 1, 1)
    with pytest.raises(ValueError, match='leading dimensions of all arguments, has a shape of .* takes 13,194 GB'):
        kernels.tree_solve(tree, None, wide, wide, high)


def test_meta_tensors_take_no_memory():
    x = torch.empty(1 << 20, 1, 1 << 10, 1 << 10, 1, device='meta')
    assert kernels.polyline_attention(x, x, x, x[..., 0], x[..., 0]).shape == x.shape
