"""Quad-tree attention: against dense matrices, padding, arguments, compilers and flop counters."""
from functools import partial

import pytest
import torch
from helpers import assert_close
from pairwise import pairwise
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import quadtree_attention
from subquad.kernels.quadtree_attention import portable
from subquad.kernels.trees import PARAMETRIZATIONS, quadtree_levels

GRIDS = [(7, 11), (1, 9), (8, 8), (5, 2), (1, 1)]


def inputs(height, width, batch=2, heads=3, dim=4, edge_dim=5, levels=3, static=False, dtype=torch.float64):
    """Return q, k, v and bias, with heads as slices of channels-last tokens; q and k are None for static edges."""
    g = torch.Generator().manual_seed(100 * height + width)

    def tokens(dim):
        x = torch.randn(batch, height, width, heads * dim, generator=g, dtype=torch.float64).to(dtype)
        return x.unflatten(3, (heads, dim)).permute(0, 3, 1, 2, 4)
    bias = torch.randn(levels, 2, 2, heads, generator=g, dtype=torch.float64)
    q, k, v = (tokens(n) for n in (edge_dim, edge_dim, dim))
    return None if static else 2 * q, None if static else k, v, bias.to(torch.promote_types(dtype, torch.float32))


def copies(tensors):
    """Return copies that require gradients, with the strides of the tensors."""
    return [None if x is None else x.detach().clone().requires_grad_() for x in tensors]


def gradients(y, leaves):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.autograd.grad((y.double() * weight).sum(), [x for x in leaves if x is not None], allow_unused=True,
                               materialize_grads=True)


def with_gradients(tensors, call=quadtree_attention, **options):
    """Return the output and the gradients of all tensors that are not None."""
    leaves = copies(tensors)
    y = call(*leaves, **options)
    return [y, *gradients(y, leaves)]


@pairwise('grid, parametrization, forest', GRIDS, PARAMETRIZATIONS, [
    ((0, 0), None), ((1, 0), None), ((5, 3), 3), ((2, 2), 1)])
def test_against_dense_matrices(grid, parametrization, forest):
    shift, max_levels = forest
    mask = torch.rand(2, *grid, generator=torch.Generator().manual_seed(1)) > 0.3
    for masked in (None, mask):
        for static in (False, True):
            tensors = inputs(*grid, static=static)
            options = dict(parametrization=parametrization, shift=shift, max_levels=max_levels, mask=masked, rho=0.9)
            expected = with_gradients(tensors, backend='reference', **options)
            for backend in ('portable', 'export'):
                found = with_gradients(tensors, backend=backend, **options)
                for x, y in zip(found, expected):
                    assert (x - y).abs().max() <= 1e-10 * max(1, y.abs().max()), (backend, masked is None, static)


@pytest.mark.parametrize('dtype, bound', [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize('parametrization', PARAMETRIZATIONS)
def test_single_and_half_precision(parametrization, dtype, bound):
    tensors = inputs(14, 13, dtype=dtype)
    expected = with_gradients([x.double() for x in tensors], parametrization=parametrization, backend='reference')
    found = with_gradients(tensors, parametrization=parametrization)
    assert found[0].dtype == dtype and [x.dtype for x in found[1:]] == [x.dtype for x in tensors]
    for x, y in zip(found, expected):
        assert_close(x, y, bound)


def test_on_triton_the_layer_is_the_same():
    pytest.importorskip('triton')
    tensors = inputs(5, 6, batch=1, heads=1, dtype=torch.float32)
    mask = torch.rand(1, 5, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    options = dict(mask=mask, shift=(1, 1), parametrization='symmetric')
    expected = with_gradients(tensors, **options)
    for x, y in zip(with_gradients(tensors, backend='triton', **options), expected):
        assert_close(x, y, 1e-5)


def test_any_strides_give_the_order_of_tokens():
    tensors = inputs(5, 7, dtype=torch.float32)
    expected = with_gradients(tensors)
    assert expected[0].permute(0, 2, 3, 1, 4).is_contiguous()
    for layout in (lambda x: x.contiguous(), lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        found = with_gradients([layout(x) for x in tensors[:3]] + [tensors[3]])
        assert found[0].stride() == expected[0].stride()
        for x, y in zip(found, expected):
            assert_close(x, y, 1e-6)


@pytest.mark.parametrize('padding', [1e3, float('inf'), float('nan')])
@pytest.mark.parametrize('parametrization', PARAMETRIZATIONS)
def test_padding_has_no_effect_and_no_gradient(parametrization, padding):
    q, k, v, bias = inputs(9, 6, dtype=torch.float32)
    mask = torch.zeros(2, 9, 6, dtype=torch.bool)
    mask[0, :5, :4] = mask[1, :9, :2] = True
    where = mask[:, None, :, :, None]
    options = dict(mask=mask, parametrization=parametrization, shift=(1, 2))
    expected = with_gradients((q, k, v, bias), **options)
    found = with_gradients([torch.where(where, x, padding) for x in (q, k, v)] + [bias], **options)
    inside = where.expand_as(v)
    assert_close(found[0][inside], expected[0][inside], 1e-6)
    leaves = copies((q, k, v, bias))
    y = quadtree_attention(*leaves, **options)
    grads = torch.autograd.grad(y[inside].sum(), leaves)
    assert all(not grad[~where.expand_as(grad)].any() for grad in grads[:3]) and grads[3].isfinite().all()


def test_more_levels_than_biases_share_the_last():
    q, k, v, bias = inputs(9, 9, levels=2)
    shared = torch.cat([bias, *[bias[1:]] * 5])
    assert_close(quadtree_attention(q, k, v, bias), quadtree_attention(q, k, v, shared), 1e-12)


def test_compilers_see_one_operator():
    tensors = inputs(6, 5, batch=1, dtype=torch.float32)
    forward = torch.ops.subquad.quadtree_attention_portable_fwd
    for static, mask, rest in ((False, None, ('laplacian', 0.9, [1, 0], None)),
                               (True, torch.rand(1, 6, 5) > 0.3, ('skew', 0.9, [0, 0], 2))):
        q, k, v, bias = copies(inputs(6, 5, batch=1, static=static, dtype=torch.float32))
        torch.library.opcheck(forward, (q, k, v, bias, mask, *rest, True))
        q, k, v, bias = (None if x is None else x.detach() for x in (q, k, v, bias))
        torch.library.opcheck(forward, (q, k, v, bias, mask, *rest, False))
        saved = forward(q, k, v, bias, mask, *rest, True)
        torch.library.opcheck(torch.ops.subquad.quadtree_attention_portable_bwd.default,
                              (torch.randn_like(v), q, k, bias, mask, *saved, *rest))
    compiled = torch.compile(quadtree_attention, fullgraph=True, backend='aot_eager')
    for x, y in zip(with_gradients(tensors, compiled), with_gradients(tensors)):
        assert_close(x, y, 1e-6)


def test_symbolic_sizes():
    def shifted(q, k, v, bias):
        return quadtree_attention(q, k, v, bias, shift=(1, 0))
    compiled = torch.compile(shifted, fullgraph=True, backend='aot_eager', dynamic=True)
    for grid, batch in (((9, 12), 2), ((10, 11), 3), ((5, 5), 2)):
        tensors = inputs(*grid, batch=batch, dtype=torch.float32)
        for x, y in zip(with_gradients(tensors, compiled), with_gradients(tensors, shifted)):
            assert_close(x, y, 1e-6)


def test_flop_counter():
    leaves = copies(inputs(6, 5))
    nodes = 2 * 3 * 4 * sum(level.height * level.width for level in quadtree_levels(6, 5))
    with FlopCounterMode(display=False) as counter:
        y = quadtree_attention(*leaves)
    assert counter.get_total_flops() == 5 * nodes
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 9 * nodes


def test_gradcheck():
    for parametrization in PARAMETRIZATIONS:
        leaves = copies(inputs(3, 5, batch=1, heads=1, dim=2, edge_dim=2))
        call = partial(quadtree_attention, parametrization=parametrization, shift=(1, 0))
        assert torch.autograd.gradcheck(call, leaves)


def test_inference_keeps_nothing_and_training_no_leaf_of_its_own():
    tensors = inputs(16, 16, dim=8, edge_dim=8, dtype=torch.float32)
    with torch.no_grad():
        out, *saved = torch.ops.subquad.quadtree_attention_portable_fwd(*tensors, None, 'laplacian', 0.9, [0, 0], None,
                                                                        False)
    assert [x.numel() for x in saved] == [0, 0] and out.shape == tensors[2].shape
    options = portable.Options('laplacian', 0.9, (0, 0), None)
    inner, logits = portable.saved_shapes(tensors[0], tensors[2], options)
    leaves, heads = 2 * 16 * 16, 3
    assert inner == (leaves // 3, heads * 24) and logits == (leaves + leaves // 3 - 2, heads)


def test_wrong_arguments_are_refused():
    q, k, v, bias = inputs(6, 5)
    with pytest.raises(ValueError, match=r'q must have shape \(2, 3, 6, 5, 5\)'):
        quadtree_attention(q[:, :2], k, v, bias)
    with pytest.raises(ValueError, match='k must have shape'):
        quadtree_attention(q, k[..., :2], v, bias)
    with pytest.raises(TypeError, match='k must be a tensor, got NoneType'):
        quadtree_attention(q, None, v, bias)
    with pytest.raises(ValueError, match=r'bias must have shape \(3, 2, 2, 3\)'):
        quadtree_attention(q, k, v, bias[..., :2])
    with pytest.raises(ValueError, match='bias must have at least one level'):
        quadtree_attention(q, k, v, bias[:0])
    with pytest.raises(ValueError, match="'laplacian', 'symmetric', 'skew', got 'dense'"):
        quadtree_attention(q, k, v, bias, parametrization='dense')
    with pytest.raises(ValueError, match='rho must be between 0 and 1'):
        quadtree_attention(q, k, v, bias, rho=0)
    with pytest.raises(ValueError, match='shift must be two integers'):
        quadtree_attention(q, k, v, bias, shift=(1,))
    with pytest.raises(ValueError, match='max_levels must be'):
        quadtree_attention(q, k, v, bias, max_levels=0)
    with pytest.raises(ValueError, match='mask must have shape'):
        quadtree_attention(q, k, v, bias, mask=torch.ones(2, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match='at least one leaf'):
        quadtree_attention(None, None, v[:, :, :0], bias)
    with pytest.raises(TypeError, match='int64'):
        quadtree_attention(q, k, v.long(), bias)
    broken = k.clone()
    broken[0, 0, 5, 4] = float('nan')
    with pytest.raises(ValueError, match=r'edges\[0\] has a number that is not finite'):
        quadtree_attention(q, broken, v, bias)
    assert not quadtree_attention(q, k, v * float('nan'), bias).isfinite().any()                 # the user's own
