"""Test MambaVision against the published network: parameters, MACs, outputs, gradients, slips and weight files."""
import json

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from safetensors import safe_open
from torch import nn

from subquad import kernels
from subquad.backbones.mambavision import MambaVision
from subquad.backbones.mixers.mambavision import MambaVisionMixer
from subquad.backbones.weights import checkpoint_filter_fn
from subquad.tools.engine.counting.counts import count

GOLDEN = sorted(path.name for path in DATA.glob('mambavision_*.safetensors'))
# Parameters, and GMACs at 224 without the scans and the products of attention.
PUBLISHED = {'mambavision_tiny': (31_794_248, 4.460), 'mambavision_tiny2': (35_104_008, 5.106),
             'mambavision_small': (50_140_584, 7.482), 'mambavision_base': (97_685_288, 14.956),
             'mambavision_large': (227_961_048, 34.843), 'mambavision_large2': (241_554_824, 37.503),
             'mambavision_large2_512': (241_554_824, None), 'mambavision_large3_256': (739_570_472, None),
             'mambavision_large3_512': (739_570_472, None)}


@pytest.mark.parametrize('name', PUBLISHED)
def test_parameters_equal_the_published_ones(name):
    model = timm.create_model(name, device='meta')
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name][0]


@pytest.mark.parametrize('name', ['mambavision_tiny', *slow(*[name for name, (_, macs) in PUBLISHED.items() if macs
                                                              and name != 'mambavision_tiny'])])
def test_macs_equal_the_published_ones(name):
    assert count(name, 224, 224)['macs_without_attention'] / 1e9 == pytest.approx(PUBLISHED[name][1], rel=0.01)


def _golden(name):
    with safe_open(DATA / name, 'pt') as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()['config'])


def _part(golden, prefix):
    return {key.removeprefix(prefix): value for key, value in golden.items() if key.startswith(prefix)}


def _network(golden, config, **options):
    model = MambaVision(dim=config['dim'], in_dim=config['in_dim'], depths=config['depths'],
                        num_heads=config['num_heads'][2:], mlp_ratio=config['mlp_ratio'],
                        layer_scale=config.get('layer_scale'), num_classes=config['num_classes'], output_norms=True,
                        **{'window_size': config['window_size'][2:], **options}).eval()
    model.load_state_dict(_part(golden, 'state/'))
    return model


@pytest.mark.parametrize('backend', ['auto', 'reference', 'portable', 'export'])
@pytest.mark.parametrize('name', GOLDEN)
def test_outputs_and_gradients_equal_those_of_the_published_network(name, backend):
    golden, config = _golden(name)
    model, image = _network(golden, config), golden['input'].requires_grad_()
    with kernels.use_backend(backend):
        _, stages = model.forward_intermediates(image)
        _, normed = model.forward_intermediates(image, norm=True)
        logits = model(image)
        (logits * golden['cotangent']).sum().backward()
    for n in range(4):
        assert_close(stages[n], golden[f'stage{n + 1}'], 2e-5, f'stage{n + 1}')
        assert_close(normed[n], golden[f'outnorm{n}'], 2e-5, f'outnorm{n}')
    assert_close(logits, golden['logits'], 2e-5, 'logits')
    gradients = _part(golden, 'grad/')
    assert_close(image.grad, gradients.pop('input'), 5e-5, 'input')
    parameters = {key: value for key, value in model.named_parameters() if not key.startswith('output_norms.')}
    expected = checkpoint_filter_fn(gradients, model)
    assert parameters.keys() == expected.keys()
    for key, value in parameters.items():
        assert_close(value.grad, expected[key], 5e-5, key)


@pytest.mark.parametrize('size', [(33, 45), (64, 64), (70, 50)])
def test_inference_equals_training_at_odd_sizes(size):
    model, x = timm.create_model('test_mambavision', num_classes=3).eval(), torch.randn(2, 3, *size)
    with torch.no_grad():
        fast = model.forward_features(x)
    assert_close(fast, model.forward_features(x), 1e-5)
    assert fast.shape[2:] == tuple(-(-n // 32) for n in size)


def test_windows_are_cut_in_raster_order():
    """Both stages, with a function of each token's neighbours in place of the blocks, against slices of the map."""
    stage = timm.create_model('test_mambavision', window_size=(3, 2)).stages[2]
    stage.downsample, stage.blocks = nn.Identity(), nn.Sequential(_Cumulative())
    x = torch.randn(2, 4, 5, 7)
    padded, y = F.pad(x, (0, 2, 0, 1)), torch.zeros(2, 4, 6, 9)
    for row in (0, 3):
        for column in (0, 3, 6):
            window = padded[:, :, row:row + 3, column:column + 3]
            y[:, :, row:row + 3, column:column + 3] = window.flatten(2).cumsum(2).unflatten(2, (3, 3))
    assert_close(stage(x), y[:, :, :5, :7], 1e-6)


class _Cumulative(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


# ---- slips between the paper and the code, and choices that both make

def _error(golden_name='mambavision_odd.safetensors', change=lambda model: None, **options):
    golden, config = _golden(golden_name)
    model = _network(golden, config, **options)
    change(model)
    with torch.no_grad():
        return relative_error(model(golden['input']), golden['logits'])


def _scans(model):
    return [module for module in model.modules() if isinstance(module, MambaVisionMixer)]


def test_the_bias_of_the_steps_counts_twice():
    def once(model):
        for mixer in _scans(model):
            mixer.scan.bias_factor = 1
    assert _error(change=once) > 0.1


def test_the_convolution_of_the_scan_is_not_causal():
    def causal(model):
        for mixer in _scans(model):
            mixer.conv.padding = (0,)
            mixer.conv.register_forward_pre_hook(lambda module, args: F.pad(args[0], (2, 0)))
    assert _error(change=causal) > 0.1


def test_gelu_of_the_convolutions_is_the_tanh_form():
    def exact(model):
        for stage in model.stages[:2]:
            for block in stage.blocks:
                block.conv1.act = nn.GELU()
    assert 1e-5 < _error(change=exact) < 1e-2 and _error() < 1e-5


def test_the_window_size_is_a_part_of_the_weights():
    assert _error(window_size=(4, 2)) > 0.1


def test_initial_steps_and_weight_decay_are_those_of_the_code():
    model = timm.create_model('test_mambavision')
    scan = model.stages[2].blocks[0].mixer.scan
    assert not scan.dt_bias.any() and scan.dt_proj.weight.std() < 0.03
    assert_close(scan.A_log.exp(), torch.arange(1., 9).expand(1, 24, 8), 1e-6)
    exempt = {name for name in model.no_weight_decay() if name.startswith('stages.2.blocks.0.')}
    assert exempt == {f'stages.2.blocks.0.mixer.scan.{name}' for name in ('D', 'dt_bias')}
    mixers = [[type(block.mixer).__name__ for block in stage.blocks] for stage in model.stages[2:]]
    assert mixers == [['MambaVisionMixer'] * 2 + ['WindowAttention'], ['MambaVisionMixer', 'WindowAttention']]


def test_heads_must_divide_the_channels():
    with pytest.raises(ValueError, match=r'\[48, 96\], must be multiples of num_heads, got \(5, 4\)'):
        timm.create_model('test_mambavision', num_heads=(5, 4))
