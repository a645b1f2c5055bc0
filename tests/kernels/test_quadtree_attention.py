"""Quad-tree attention: against dense matrices, padding, arguments, compilers and flop counters."""

import pytest
import torch

from subquad.kernels import quadtree_attention
from subquad.kernels.trees import PARAMETRIZATIONS

BACKENDS = ('portable', 'export')
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


def with_gradients(tensors, **options):
    """Return the output and the gradients of all tensors that are not None."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    y = quadtree_attention(*leaves, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = torch.autograd.grad((y.double() * weight).sum(), [x for x in leaves if x is not None], allow_unused=True,
                                materialize_grads=True)
    return [y, *grads]


@pytest.mark.parametrize('shift, max_levels', [((0, 0), None), ((1, 0), None), ((5, 3), 3), ((2, 2), 1)], ids=str)
@pytest.mark.parametrize('parametrization', PARAMETRIZATIONS)
@pytest.mark.parametrize('grid', GRIDS, ids=lambda grid: f'{grid[0]}x{grid[1]}')
def test_against_dense_matrices(grid, parametrization, shift, max_levels):
    mask = torch.rand(2, *grid, generator=torch.Generator().manual_seed(1)) > 0.3
    for masked in (None, mask):
        for static in (False, True):
            tensors = inputs(*grid, static=static)
            options = dict(parametrization=parametrization, shift=shift, max_levels=max_levels, mask=masked, rho=0.9)
            expected = with_gradients(tensors, backend='reference', **options)
            for backend in BACKENDS:
                found = with_gradients(tensors, backend=backend, **options)
                for x, y in zip(found, expected):
                    assert (x - y).abs().max() <= 1e-10 * max(1, y.abs().max()), (backend, masked is None, static)
