"""Every operator on every backend takes a batch without images, with and without a backward pass."""
import eos_cases
import operator_cases
import pytest
import torch

from subquad import kernels
from subquad.kernels.dispatch import OPERATORS
from subquad.kernels.trees import cached_path, quadtree_levels

TOKENS, MAP, BIAS = torch.zeros(0, 2, 6, 8), torch.zeros(0, 4, 6, 8), torch.randn(3, 2, 2, 2)
GRID, LEVELS = torch.zeros(0, 2, 4, 5, 8), quadtree_levels(4, 5)
VALUES = [torch.zeros(0, 2, level.height, level.width, 3) for level in LEVELS]
EDGES = [torch.zeros(0, 2, level.height, level.width) for level in LEVELS[:-1]]
STEPS, BLOCKS = torch.zeros(0, 2, 4, 5), torch.zeros(0, 5, 1, 1)
# Operator -> (call(*tensors, backend=...), tensors); the first dimension of inputs is the batch.
CALLS = {
    'crisscross_attention': (kernels.crisscross_attention, [GRID, GRID, GRID, STEPS, STEPS]),
    'decay_attention': (kernels.decay_attention, [GRID, GRID, GRID, STEPS]),
    'depthwise_conv': (kernels.depthwise_conv, [MAP, torch.randn(8, 1, 3, 3), torch.randn(8), MAP]),
    'polyline_attention': (kernels.polyline_attention, [GRID, GRID, GRID, STEPS, STEPS]),
    'polyline_linear_attention': (kernels.polyline_linear_attention, [GRID, GRID, GRID, STEPS, STEPS]),
    'polyline_scan': (kernels.polyline_scan, [GRID, STEPS, STEPS]),
    'quadtree_attention': (kernels.quadtree_attention, [GRID, GRID, GRID, BIAS]),
    'quadtree_solve': (lambda *tensors, backend: kernels.quadtree_solve(
        tensors[:len(VALUES)], tensors[len(VALUES):], backend=backend)[0], [*VALUES, *EDGES]),
    'rotary_embedding': (lambda q, k, backend: torch.cat(kernels.rotary_embedding(
        q, k, q.new_zeros(6, 4, 2), backend=backend)), [TOKENS, TOKENS]),
    'separable_attention': (kernels.separable_attention, [MAP[..., :1], MAP, MAP]),
    'tree_solve': (lambda b, c, u, backend: kernels.tree_solve(cached_path(5), None, b, c, u, backend=backend),
                   [BLOCKS, BLOCKS, BLOCKS]),
    **{f'eos {name}': (
        lambda *tensors, backend, name=name: eos_cases.call(name, tensors, backend, output_state=True)[0],
        [x[:0] if 'B' in shape else x for shape, x in zip(eos_cases.SHAPES[name], eos_cases.inputs(name, 6))])
       for name in eos_cases.NAMES},
}
CASES = [(name, backend) for name in CALLS for backend in ('reference', 'portable', 'export', 'triton')
         if name != 'tree_solve' or backend in ('reference', 'portable')]


def test_every_operator_has_a_case():
    assert {name for name in CALLS if not name.startswith('eos')} | {'eos_elementwise', 'eos_matmul'} == set(OPERATORS)


@pytest.mark.parametrize('name, backend', CASES)
def test_an_empty_batch_has_an_empty_result_and_a_gradient(name, backend):
    call, tensors = CALLS[name]
    if backend == 'triton' and not kernels.dispatch._TRITON_INSTALLED:
        pytest.skip('Triton is not installed')
    inputs = [x.detach().to(operator_cases.DEVICE, torch.float32).requires_grad_() for x in tensors]
    y = call(*inputs, backend=backend)
    assert y.shape[0] == 0 and y.requires_grad
    y.sum().backward()
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in inputs)
    with torch.no_grad():
        assert call(*inputs, backend=backend).shape == y.shape
