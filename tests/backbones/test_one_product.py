"""In inference on Triton, one product gives q, k, v and the decay of a mixer: the values of the separate layers, also
after a weight changes in any way."""
import copy
import importlib.util
import pickle

import pytest
import torch
from helpers import relative_error

from subquad import kernels
from subquad.backbones.blocks import ConvNorm, conv_norm_act_folded
from subquad.backbones.mixers import PolylineMixer
from subquad.kernels.common import launch

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@pytest.fixture(autouse=True)
def needs_triton():
    if not (importlib.util.find_spec('triton') and (DEVICE == 'cuda' or launch.interpreted())):
        pytest.skip('there is neither a GPU nor the interpreter of Triton')


def _mixer(**options):
    mixer = PolylineMixer(12, 3, attention='crisscross', **options).to(DEVICE)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    return mixer.eval()


def _products(mixer, x):
    """Return q, k, v and the step logs from one product, and from the layers."""
    with torch.no_grad(), kernels.use_backend('triton'):
        assert mixer._takes_one_product(x, export=False)
        return mixer._one_product(x), (mixer.q(x), mixer.k(x), mixer.v(x), *mixer.decay_logs(x))


def _check(mixer, x, tolerance=1e-5):
    joined, separate = _products(mixer, x)
    for actual, expected in zip(joined, separate, strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert relative_error(actual, expected) <= tolerance


@pytest.mark.parametrize('options', [dict(), dict(shared_decay=True), dict(paths='rmt'), dict(paths='none')], ids=str)
def test_values_of_the_separate_layers(options):
    mixer, x = _mixer(**options), torch.randn(2, 3, 5, 12, device=DEVICE)
    _check(mixer, x)
    with torch.no_grad(), kernels.use_backend('reference'):
        expected = mixer(x)
    with torch.no_grad(), kernels.use_backend('triton'):
        assert relative_error(mixer(x), expected) <= 1e-4


def test_the_decay_scale_is_used():
    mixer, x = _mixer(), torch.randn(1, 3, 5, 12, device=DEVICE)
    before = _products(mixer, x)[0][3:]
    mixer.decay_scale = 2.0
    _check(mixer, x)
    for actual, expected in zip(_products(mixer, x)[0][3:], before):
        assert relative_error(actual, expected / 2) <= 1e-6


def test_a_changed_weight_is_used_at_once():
    """Also one that changes without a trace, or is another tensor: nothing is kept from an earlier pass."""
    mixer, x = _mixer(), torch.randn(1, 3, 5, 12, device=DEVICE)
    _check(mixer, x)
    with torch.no_grad():
        mixer.q.weight.mul_(2)
        _check(mixer, x)
        mixer.k.weight.data.copy_(torch.randn_like(mixer.k.weight))              # changes no version counter
        mixer.decay.A_log.data.add_(1)
        _check(mixer, x)
    mixer.load_state_dict({key: torch.randn_like(value) * 0.3 for key, value in mixer.state_dict().items()})
    _check(mixer, x)
    mixer.v.weight = torch.nn.Parameter(torch.randn_like(mixer.v.weight))
    _check(mixer, x)
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        with torch.no_grad():
            other.v.bias.add_(1)
        _check(other, x)
        _check(mixer, x)
    _check(mixer.half(), x.half(), 4e-3)
    _check(mixer.float(), x)


def test_layers_stay_apart_elsewhere():
    """With gradients, on other backends, in export, and with hooks, adapters or parametrizations."""
    mixer, x = _mixer(), torch.randn(1, 3, 5, 12, device=DEVICE)
    with kernels.use_backend('triton'):
        assert not mixer._takes_one_product(x, export=False)                     # gradients are enabled
    with torch.no_grad():
        with kernels.use_backend('portable'):
            assert not mixer._takes_one_product(x, export=False)
        with kernels.use_backend('triton'):
            assert mixer._takes_one_product(x, export=False) and not mixer._takes_one_product(x, export=True)
            handle = mixer.k.register_forward_hook(lambda module, inputs, output: output + 1)
            assert not mixer._takes_one_product(x, export=False)
            handle.remove()
            torch.nn.utils.parametrizations.weight_norm(mixer.v)
            assert not mixer._takes_one_product(x, export=False)


@pytest.mark.parametrize('bias', [True, False])
def test_a_folded_norm_has_the_same_values_on_any_device(bias):
    """The form for a GPU, by norms of the weight and of the bias, on this device."""
    layer = ConvNorm(5, 6).eval()
    for tensor in (*layer.parameters(), layer.norm.running_mean):
        torch.nn.init.normal_(tensor)
    torch.nn.init.uniform_(layer.norm.running_var, 0.5, 2)
    layer.conv.bias = layer.conv.bias if bias else None
    x = torch.randn(2, 5, 7, 6)
    expected = layer.norm(layer.conv(x))

    class ElsewhereParameter(torch.nn.Parameter):
        is_cpu = False
    layer.conv.weight = ElsewhereParameter(layer.conv.weight.detach())
    assert not layer.conv.weight.is_cpu
    with torch.no_grad():
        assert relative_error(conv_norm_act_folded(layer.conv, layer.norm, layer.act, x), expected) <= 1e-5
