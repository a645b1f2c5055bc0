"""Test LCSM in float16 and bfloat16: sums over whole images, and the parameters that stay in float32."""
import pytest
import timm
import torch

from subquad.backbones.mixers import EosMixer
from subquad.backbones.mixers.scan import ScanMixer

SYSTEMS = ['s4', 's4d', 's5', 'dss', 'tnn']
# Bound of the relative error of a dtype: eight times the largest error of a rounded number.
BOUND = {torch.float16: 8 * 2.0 ** -11, torch.bfloat16: 8 * 2.0 ** -8}


def mixer(name, mode='raster', **options):
    torch.manual_seed(0)
    return EosMixer(32, 2, name, mode, **options).eval()


def tokens(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) + 0.5


def error(found, expected):
    assert found.isfinite().all()
    return ((found.float() - expected).norm() / expected.norm()).item()


def own_dtypes(model):
    """The dtypes of all parameters and buffers of recurrences that belong to no linear layer."""
    return {tensor.dtype for name, part in model.named_modules()
            if 'recurrence' in name and not isinstance(part, torch.nn.Linear)
            for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]}


@pytest.mark.parametrize('mode, size', [('raster', (56, 56)), ('forward', (1, 3136)), ('axis', (2, 3136))])
@pytest.mark.parametrize('name', ['linear_attention', 'lrpe', '1-10-1-1', '1-10-1-3', '1-11-1-3'])
def test_sums_without_decay_stay_finite_in_float16(name, mode, size):
    made, x = mixer(name, mode), tokens(1, *size, 32)
    made.value.weight.data.mul_(8)
    made.value.bias.data.fill_(8)
    with torch.no_grad():
        expected = made(x)
        assert made.recurrence.scan(*line(made, x)).abs().max() > torch.finfo(torch.float16).max
        with torch.autocast('cpu', torch.float16):
            assert error(made(x), expected) < BOUND[torch.float16]
        found = made.half()(x.half())
    assert found.dtype == torch.float16 and error(found, expected) < BOUND[torch.float16]


def line(made, x):
    """Arguments of the recurrence for one line of all tokens."""
    def heads(y):
        return y.reshape(1, -1, 2, y.shape[3] // 2).transpose(1, 2)
    return heads(made.value(x)), {name: heads(y) for name, y in made.recurrence.tokens(x).items()}


def test_gradients_of_long_sums_are_finite_in_float16():
    made, x = mixer('linear_attention'), tokens(1, 56, 56, 32)
    made.value.bias.data.fill_(4)
    expected = torch.autograd.grad(made(x).square().mean() * 1024, list(made.parameters()))
    made.half()
    found = torch.autograd.grad(made(x.half()).float().square().mean() * 1024, list(made.parameters()))
    for (name, _), one, other in zip(made.named_parameters(), found, expected):
        assert one.isfinite().all() and (one.float() - other).norm() < 0.05 * other.norm() + 1e-3, name


@pytest.mark.parametrize('dtype', BOUND, ids=str)
@pytest.mark.parametrize('name', [*SYSTEMS, 'mamba', 'rwkv4', 'hgrn', 'lrpe', '1-11-1-3', '1-0-1-0', '0-0-0-0'])
@pytest.mark.parametrize('mode', ['raster', 'axis'])
def test_converted_mixers_are_as_exact_as_their_tokens(name, dtype, mode):
    made, x = mixer(name, mode), tokens(1, 48, 48, 32)
    with torch.no_grad():
        expected = made(x)
        assert error(made.to(dtype)(x.to(dtype)), expected) < BOUND[dtype]


@pytest.mark.parametrize('name', [*SYSTEMS, 'mamba', 'rwkv4', 'hgrn', 'lrpe', 'retnet', '1-0-1-0', '1-6-1-0'])
def test_parameters_of_recurrences_stay_in_float32(name):
    options = {} if name in ('rwkv4', 'hgrn') else {'expand_dim': 4}
    model = timm.create_model('test_lcsm', mixer=name, **options)
    before = {key: value.clone() for key, value in model.state_dict().items() if 'recurrence' in key}
    for converted in (model.bfloat16(), model.half(), model.to('cpu', torch.bfloat16), model.type(torch.float16)):
        assert own_dtypes(converted) == {torch.float32} and converted.head.fc.weight.dtype != torch.float32
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()
               if key in before and value.dtype == torch.float32)
    assert own_dtypes(timm.create_model('test_lcsm', mixer=name, dtype=torch.bfloat16, **options)) == {torch.float32}
    assert own_dtypes(model.double()) == {torch.float64} and own_dtypes(model.to('meta')) == {torch.float64}
    assert own_dtypes(model.float()) == {torch.float32} and all(p.is_meta for p in model.parameters())


def test_a_scan_in_bfloat16_keeps_its_rates():
    torch.manual_seed(0)
    made, x = ScanMixer(16, 32).eval(), tokens(1, 784, 16)
    with torch.no_grad():
        expected = made(x)
        assert error(made.bfloat16()(x.bfloat16()), expected) < BOUND[torch.bfloat16]
