"""Kernels on tensors that span more than 2^31 elements. Few of their pages are touched, and only these take memory."""
import pytest
import torch
from pairwise import slow

pytest.importorskip('triton')

from lab.large_strides import CALLS, check, sparse_memory, spread
from subquad.kernels.common import launch

if not launch.interpreted():
    pytest.skip('the tensors have no memory on a GPU', allow_module_level=True)

# One call of each operator; the others run other paths of the same kernels.
FIRST = ('polyline', 'decay', 'crisscross', 'scan', 'separable', 'quadtree', 'rotary', 'conv', 'eos', 'eos-full',
         'matmul', 'selective')


@pytest.fixture(scope='module')
def memory():
    return sparse_memory()


@pytest.mark.parametrize('name', [*FIRST, *slow(*(name for name in CALLS if name not in FIRST))])
def test_large_strides(name, memory):
    call = CALLS[name]
    check(call, memory)
    for dim in call.narrow:
        with pytest.raises(ValueError, match=r'spans 2\^31 elements'):
            call.operator(*spread(call.arguments(), (dim,), memory), backend='triton')


def test_a_gradient_of_large_strides(memory):
    """Only the backward pass of a recurrence sees it."""
    call = CALLS['eos']
    args = [x.requires_grad_() for x in call.arguments()]
    with pytest.raises(ValueError, match=r'a slice of shape \(5, 16\) with strides .* spans 2\^31 elements'):
        call.operator(*args, backend='triton').backward(*spread([torch.ones(3, 3, 5, 16)], (2,), memory))
