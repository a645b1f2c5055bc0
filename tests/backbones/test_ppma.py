"""Test PPMA against the published network: parameters, MACs, outputs, gradients, weight files and options."""
import copy
import json

import pytest
import timm
import torch
from helpers import DATA, assert_close, relative_error
from operator_cases import DEVICE, skip_without_triton
from pairwise import slow
from safetensors import safe_open

from subquad import kernels
from subquad.backbones.mixers import PolylineMixer
from subquad.backbones.ppma import PPMA
from subquad.backbones.weights import WeightsError, checkpoint_filter_fn
from subquad.tools.engine.counting.counts import count

GOLDEN = sorted(path.name for path in DATA.glob('ppma_*.safetensors'))
PARAMETERS = {'ppma_tiny': 14_335_272, 'ppma_small': 26_969_472, 'ppma_base': 54_158_524}
GMACS = {'ppma_tiny': 2.70, 'ppma_small': 4.90, 'ppma_base': 10.59}


@pytest.mark.parametrize('name', ['ppma_tiny', 'ppma_small', *slow('ppma_base')])
def test_parameters_and_macs_equal_the_published_ones(name):
    row = count(name, 224, 224)
    assert row['parameters'] == PARAMETERS[name]
    assert row['macs'] / 1e9 == pytest.approx(GMACS[name], rel=0.01)
    assert row['macs_without_attention'] < row['macs']


@pytest.mark.parametrize('options, parameters', [(dict(paths='none'), 14_334_216), (dict(paths='rmt'), 14_334_216),
                                                 (dict(shared_decay=True), 14_334_856), (dict(paths='v2h'), 14_335_272),
                                                 (dict(paths='cross_scan'), 14_335_272), (dict(), 14_335_272)])
def test_parameters_of_the_ablation_equal_the_published_ones(options, parameters):
    assert sum(p.numel() for p in timm.create_model('ppma_tiny', device='meta', **options).parameters()) == parameters


def test_macs_without_mask_equal_the_published_ones():
    assert count('ppma_tiny', 224, 224, paths='none')['macs'] / 1e9 == pytest.approx(2.65, rel=0.01)


def _golden(file):
    with safe_open(file, 'pt') as f:
        return {key: f.get_tensor(key) for key in f.keys()}, json.loads(f.metadata()['config'])


def _network(config, state, **kwargs):
    model = PPMA(attention=['crisscross' if c else 'full' for c in config['chunkwise_recurrents']],
                 dims=config['embed_dims'], depths=config['depths'], num_heads=config['num_heads'],
                 mlp_ratios=config['mlp_ratios'], layer_scale=config['layerscales'], output_norms=True,
                 head_hidden_size=config['projection'], num_classes=config['num_classes'], **kwargs).eval()
    model.load_state_dict(checkpoint_filter_fn(state, model))
    return model


def _device(backend):
    """The device of a backend: kernels run on a GPU if there is one, and in Triton's interpreter otherwise."""
    if backend == 'triton':
        skip_without_triton()
    return DEVICE if backend == 'triton' else 'cpu'


# The interpreter of the kernels takes a minute for a network.
@pytest.mark.parametrize('backend', ['reference', 'portable', 'export', *slow('triton')])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', GOLDEN)
def test_outputs_and_gradients_equal_those_of_the_published_network(name, dtype, backend):
    device = _device(backend)
    if backend == 'triton' and dtype == torch.float64:
        pytest.skip('the kernels do not support float64')
    golden, config = _golden(DATA / name)
    model = _network(config, {k.removeprefix('state/'): v for k, v in golden.items() if k.startswith('state/')})
    model = model.to(device, dtype)
    image = golden['input'].to(device, dtype).requires_grad_()
    with kernels.use_backend(backend):
        _, stages = model.forward_intermediates(image)
        _, normed = model.forward_intermediates(image, norm=True)
        logits = model(image)
        (logits * golden['cotangent'].to(logits)).sum().backward()
    for n in range(4):
        assert_close(stages[n], golden[f'stage{n + 1}'], 2e-5, f'stage{n + 1}')
        assert_close(normed[n], golden[f'outnorm{n}'], 2e-5, f'outnorm{n}')
    assert_close(logits, golden['logits'], 2e-5, 'logits')
    gradients = {k.removeprefix('grad/'): v for k, v in golden.items() if k.startswith('grad/') and k != 'grad/input'}
    parameters = dict(model.named_parameters())
    assert len(gradients) > 10
    for key, value in checkpoint_filter_fn({'patch_embed.': torch.zeros(0), **gradients}, model).items():
        if key != 'patch_embed.':
            assert_close(parameters[key].grad, value, 2e-5, key)
    assert_close(image.grad, golden['grad/input'], 2e-5, 'input')


@pytest.mark.parametrize('name, ranges', [('ppma_tiny', (4, 4, 6, 6)), ('ppma_small', (4, 4, 6, 6)),
                                          ('ppma_base', (5, 5, 6, 6)), ('ppma_base_crisscross', (5, 5, 6, 6))])
def test_the_rmt_ablation_has_the_decay_ranges_of_rmt(name, ranges):
    model = timm.create_model(name, paths='rmt', device='meta')
    assert tuple(stage.blocks[0].mixer.rmt_range for stage in model.stages) == ranges


OPTIONS = [
    dict(mask_mode='multiplicative'),
    dict(paths='none'),
    dict(paths='rmt'),
    dict(paths='cross_scan'),
    dict(paths='v2h'),
    dict(paths='cross_scan', mask_mode='multiplicative'),
    dict(shared_decay=True),
    dict(attention='linear'),
    dict(attention='decomposed'),
    dict(attention='full'),
    dict(attention='crisscross', paths='none'),
    dict(attention='linear', paths='cross_scan'),
    dict(attention='decomposed', paths='none'),
    dict(attention=('linear', 'decomposed', 'crisscross', 'full')),
]


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_options_agree_between_backends(options):
    torch.manual_seed(0)
    model = timm.create_model('test_ppma', num_classes=5, **options)
    with torch.no_grad():                              # strong decay, so that the mask has an effect
        for name, parameter in model.named_parameters():
            if name.endswith('dt_bias'):
                parameter.add_(3)
    model = model.double().eval()
    x = torch.randn(2, 3, 40, 72, dtype=torch.float64)
    with kernels.use_backend('reference'):
        expected = model(x)
    for backend in ('portable', 'export'):
        with kernels.use_backend(backend):
            assert_close(model(x), expected, 1e-7)
    expected.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('options', [
    dict(paths='cross_scan'), *slow(dict(mask_mode='multiplicative'), dict(paths='v2h'))], ids=str)
def test_options_agree_on_triton(options):
    """Compare outputs and gradients of networks on the Triton kernels with the reference."""
    device = _device('triton')
    torch.manual_seed(0)
    model = timm.create_model('test_ppma', num_classes=3, depths=(1, 1, 1, 1), **options).to(device).eval()
    x, results = torch.randn(1, 3, 32, 36, device=device), {}
    for backend in ('reference', 'triton'):
        model.zero_grad()
        with kernels.use_backend(backend):
            y = model(x)
            y.sum().backward()
        results[backend] = [y.detach(), *(p.grad.clone() for p in model.parameters())]
    for actual, expected in zip(results['triton'], results['reference']):
        assert relative_error(actual, expected, least=1e-2) <= 2e-4


def test_options_change_the_output():
    outputs = []
    for options in (dict(), *OPTIONS):
        torch.manual_seed(0)
        model = timm.create_model('test_ppma', **options).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if 'decay' in name or name.endswith(('q.weight', 'k.weight')):
                    parameter.mul_(3)
            outputs.append(model(torch.ones(1, 3, 64, 64).cumsum(-1) / 32))
    for n, first in enumerate(outputs):
        assert all(not torch.allclose(first, other, rtol=1e-6, atol=1e-9) for other in outputs[n + 1:]), n


@pytest.mark.parametrize('size', [(32, 32), (33, 47), (64, 32), (95, 131), (32, 200)])
def test_feature_maps_of_any_image_size(size):
    model = timm.create_model('test_ppma', features_only=True).eval()
    with torch.no_grad():
        maps = model(torch.randn(2, 3, *size))
    assert [m.shape[-2:] for m in maps] == [torch.Size((-(-size[0] // s), -(-size[1] // s))) for s in (4, 8, 16, 32)]
    assert all(m.isfinite().all() for m in maps)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_stay_close_to_float32(dtype):
    torch.manual_seed(0)
    model = timm.create_model('test_ppma').eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        actual = copy.deepcopy(model).to(dtype)(x.to(dtype))
        with torch.autocast('cpu', dtype):
            mixed = model(x)
    assert actual.dtype == dtype
    for y in (actual, mixed):
        assert (y.float() - expected).abs().max() < 0.1 * expected.abs().max() + 1e-2


@pytest.mark.parametrize('name', ['test_ppma', 'test_mobilevitv2'])
def test_wrong_images_are_refused(name):
    model = timm.create_model(name).eval()
    for x, error, message in ((torch.zeros(1, 3, 31, 64), ValueError, r'H and W >= 32, got \(1, 3, 31, 64\)'),
                              (torch.zeros(3, 64, 64), ValueError, r'got \(3, 64, 64\)'),
                              (torch.zeros(1, 1, 64, 64), ValueError, r'\(B, 3, H, W\)'),
                              (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), TypeError, 'torch.uint8')):
        with pytest.raises(error, match=message):
            model(x)


@pytest.mark.parametrize('size', ['tiny', 'small', 'base'])
def test_crisscross_variants_differ_in_attention_only(size):
    """They have the published sizes with criss-cross attention in every stage, and no published weights."""
    model = timm.create_model(f'ppma_{size}_crisscross', device='meta')
    published = timm.create_model(f'ppma_{size}', device='meta')
    assert {m.attention for m in model.modules() if isinstance(m, PolylineMixer)} == {'crisscross'}
    shapes = [{key: value.shape for key, value in m.state_dict().items()} for m in (model, published)]
    assert shapes[0] == shapes[1]
    with pytest.raises(WeightsError, match=f'no weights of ppma_{size}_crisscross are published'):
        timm.create_model(f'ppma_{size}_crisscross', pretrained=True)


def test_crisscross_attention_is_sub_quadratic():
    """From 448 to 896 the number N of tokens grows by 4, hence N^1.5 by 8 and N^2 by 16."""
    growth = {}
    for name in ('ppma_tiny', 'ppma_tiny_crisscross'):
        rows = [count(name, side, side) for side in (448, 896)]
        attention = [row['macs'] - row['macs_without_attention'] for row in rows]
        growth[name] = attention[1] / attention[0]
    assert growth['ppma_tiny_crisscross'] == pytest.approx(8, rel=0.02)
    assert growth['ppma_tiny'] > 13
