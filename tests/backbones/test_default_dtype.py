"""Modules of float32 are the same under any default dtype of PyTorch."""
import pytest
import torch

from subquad import kernels
from subquad.backbones.mixers.choices import MIXERS, find_mixer
from subquad.backbones.mixers.eos_codes import PRESETS
from subquad.backbones.mixers.tree_sequence import Nodes
from subquad.backbones.weights.ppma_keys import rotary_angles
from subquad.kernels.quadtree_attention.portable import nodes_of
from subquad.kernels.trees import quadtree_levels

NAMES = [name for name in (*MIXERS, *(f'eos:{name}' for name in PRESETS)) if name != 'identity']


@pytest.fixture(params=[torch.float64, torch.float16, torch.bfloat16])
def default_dtype(request):
    """Returns a context that sets the default dtype."""
    class Default:
        def __enter__(self):
            torch.set_default_dtype(request.param)

        def __exit__(self, *_):
            torch.set_default_dtype(torch.float32)

    return Default()


def _mixer(name, seed):
    torch.manual_seed(seed)
    return find_mixer(name)(stage=0, block=1, dim=16, num_heads=2, dtype=torch.float32)


@pytest.mark.parametrize('name', NAMES)
def test_mixers(name, default_dtype):
    first, second, x = _mixer(name, 0), _mixer(name, 1), torch.randn(2, 5, 6, 16)
    expected = first(x)
    with default_dtype:
        torch.testing.assert_close(first(x), expected)
        other = _mixer(name, 0)
    for key, value in first.state_dict().items():
        if torch.equal(value, second.state_dict()[key]):               # it is not drawn at random
            torch.testing.assert_close(other.state_dict()[key], value, msg=key)


def test_counts_of_leaves_and_angles(default_dtype):
    """float16 has no numbers above 65504, and bfloat16 only every second one above 256."""
    angles, levels = rotary_angles(32), tuple(quadtree_levels(300, 301))
    nodes_of.cache_clear()
    with default_dtype:
        assert nodes_of(1, levels, torch.device('cpu')).counts.max() == 300 * 301
        torch.testing.assert_close(rotary_angles(32), angles)
        assert {count.dtype for count in Nodes(9, 2, 1, None, torch.device('cpu')).counts} == {torch.float32}
    nodes_of.cache_clear()


def test_operators_of_models(default_dtype):
    q, k, v = torch.randn(3, 1, 2, 4, 5, 8)
    steps = -torch.rand(1, 2, 4, 5)
    for backend in ('portable', 'export', 'reference'):
        expected = kernels.polyline_attention(q, k, v, steps, steps, backend=backend)
        with default_dtype:
            torch.testing.assert_close(kernels.polyline_attention(q, k, v, steps, steps, backend=backend), expected)
