"""Test torch.compile with several image sizes. `dynamic=False` saves time: a dynamic graph takes longer to compile."""
import pytest
import timm
import torch
from functorch.compile import make_boxed_func
from helpers import assert_close
from pairwise import pairwise, slow
from torch._dynamo.backends.common import aot_autograd

from subquad.backbones.mixers import EosMixer
from subquad.backbones.mobilevitv2 import to_even_size
from subquad.backbones.weights import load_weights, save_state_dict
from subquad.backbones.weights.convert import convert


def _two_sizes(name, **options):
    model = timm.create_model(name).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=False, **options)
    with torch.no_grad():
        for size in ((64, 64), (96, 64)):
            x = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
            assert_close(compiled(x), model(x), 1e-4)


def test_a_compiled_network_takes_a_second_size_without_inductor():
    """Inductor compiles C++ code, which takes minutes."""
    _two_sizes('test_mobilevitv2', backend='aot_eager')


def test_odd_maps_of_any_size_are_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(to_even_size, dynamic=True, backend='aot_eager')
    for size in ((5, 7), (9, 4)):
        x = torch.rand(1, 3, *size)
        assert_close(compiled(x), to_even_size(x), 1e-6)


@pytest.mark.long
@pytest.mark.parametrize('name', ['test_mobilevitv2', 'test_ppma', 'test_myo', 'test_lcsm'])
def test_a_compiled_network_takes_a_second_size(name):
    _two_sizes(name)


def _graphs(module, x):
    """Compile a training step in one graph, compare it with the module, and return the operators of its two graphs."""
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == 'call_function'])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    found = []
    for run in (module, compiled):
        y = run(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
    for expected, actual in zip(*found):
        assert_close(actual, expected, 1e-4)
    assert len(graphs) == 2
    return graphs


@pytest.mark.parametrize('mixer', ['gla', 's4d', *slow('deltanet', '1-1-1-6', '1-6-1-0', '0-0-0-0', 'mamba')])
def test_a_recurrence_is_one_operator_of_the_compiled_graph(mixer):
    """Each of the passes over columns and rows is one operator forward and one backward, at any length of the lines.

    With complex e and s, there is one for each direction.
    """
    torch.manual_seed(0)
    module, counts, count = EosMixer(32, 2, mixer, expand_dim=4), [], 4 if mixer == 's4d' else 2
    for size in ((6, 7), (9, 150)):              # 150 tokens are more than one chunk
        graphs = _graphs(module, torch.randn(1, *size, 32, requires_grad=True))
        assert [sum(name.startswith('subquad.') for name in graph) for graph in graphs] == [count] * 2
        counts.append([len(graph) for graph in graphs])
    assert counts[0] == counts[1] and max(counts[0]) < 200 * count


@pairwise('wrap, file', ['{}', 'module.{}', '_orig_mod.module.{}', 'net.{}'], ['w.pth', 'w.safetensors'], together=1)
def test_weights_of_compiled_models_load_and_convert(file, wrap, tmp_path):
    """torch.compile puts `_orig_mod.` before the names of what it compiles, a whole model or its parts."""
    model = timm.create_model('test_ppma', num_classes=4)
    state, path = model.state_dict(), tmp_path / file
    model.stages[0].blocks[0] = torch.compile(model.stages[0].blocks[0])
    names = {wrap.format(key): value for key, value in torch.compile(model).state_dict().items()}
    assert all('_orig_mod.' in key for key in names) and any('.blocks.0._orig_mod.' in key for key in names)
    save_state_dict(names, path) if file.endswith('safetensors') else torch.save({'model': names}, path)
    other = timm.create_model('test_ppma', num_classes=4)
    load_weights(other, path)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    if wrap == '{}':
        assert convert(path, tmp_path / 'converted.safetensors', other).weights.keys() == state.keys()


def test_a_model_with_compiled_parts_loads_its_own_weights():
    model = timm.create_model('test_ppma')
    model.head = torch.compile(model.head, backend='eager')
    assert any('_orig_mod.' in key for key in model.state_dict())
    model.load_state_dict(model.state_dict())
