"""Every operator on every backend takes a batch without images, with and without a backward pass."""
import eos_cases
import operator_cases
import pytest
import torch

from subquad import kernels
from subquad.kernels.dispatch import OPERATORS

# Operator -> (call(*tensors, backend=...), tensors); the first dimension of inputs is the batch.
CALLS = {
    **{name: (call, arguments(0)) for name, (call, arguments) in operator_cases.CASES.items()
       if not name.startswith('eos')},
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
