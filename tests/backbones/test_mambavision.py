"""Test MambaVision against the published network: slips, windows and weight files."""
import json

import pytest
import timm
import torch
import torch.nn.functional as F
from golden_networks import PublishedNetwork, assert_same, load_golden, logits_error
from helpers import assert_close
from safetensors import safe_open
from torch import nn

import subquad
from subquad.backbones.mambavision import ARCHS, MambaVision
from subquad.backbones.mixers.window import MambaVisionMixer
from subquad.backbones.weights import WeightsError, download, load_weights
from subquad.backbones.weights.registry import find, of_arch
from subquad.tools import weights
from subquad.tools.engine.classification.published_protocol import describe
from subquad.tools.engine.classification.weight_files import published_transform


def _build(config, **options):
    options = {'window_size': config['window_size'][2:], **options}
    return MambaVision(dim=config['dim'], in_dim=config['in_dim'], depths=config['depths'],
                       num_heads=config['num_heads'][2:], mlp_ratio=config['mlp_ratio'],
                       layer_scale=config.get('layer_scale'), num_classes=config['num_classes'],
                       output_norms=True, **options)


def _batch_norm(name, dim):
    return {**{f'{name}.{part}': (dim,) for part in ('weight', 'bias', 'running_mean', 'running_var')},
            f'{name}.num_batches_tracked': ()}


def _linear(name, rows, columns, bias=True):
    return {f'{name}.weight': (rows, columns), **({f'{name}.bias': (rows,)} if bias else {})}


def _scan(name, dim):
    """The mixer of one block: 8 states, and steps of rank dim / 16."""
    half, rank = dim // 2, -(-dim // 16)
    return {f'{name}.A_log': (half, 8), f'{name}.D': (half,), **_linear(f'{name}.in_proj', dim, dim, False),
            **_linear(f'{name}.x_proj', rank + 16, half, False), **_linear(f'{name}.dt_proj', half, rank),
            f'{name}.conv1d_x.weight': (half, 1, 3), f'{name}.conv1d_z.weight': (half, 1, 3),
            **_linear(f'{name}.out_proj', dim, dim, False)}


def _authors_shapes(dim, in_dim=64, depths=(), layer_scale=None, **_):
    """Keys and shapes of the authors' file, written down from their network and not from this package's key table."""
    found = {'patch_embed.conv_down.0.weight': (in_dim, 3, 3, 3), **_batch_norm('patch_embed.conv_down.1', in_dim),
             'patch_embed.conv_down.3.weight': (dim, in_dim, 3, 3), **_batch_norm('patch_embed.conv_down.4', dim)}
    for stage, depth in enumerate(depths):
        chs = dim << stage
        for number in range(depth):
            block = f'levels.{stage}.blocks.{number}'
            for part in (1, 2):
                if stage < 2:
                    found.update({f'{block}.conv{part}.weight': (chs, chs, 3, 3), f'{block}.conv{part}.bias': (chs,),
                                  **_batch_norm(f'{block}.norm{part}', chs)})
                else:
                    found.update({f'{block}.norm{part}.{name}': (chs,) for name in ('weight', 'bias')})
                    found.update({f'{block}.gamma_{part}': (chs,)} if layer_scale else {})
            if stage >= 2:
                found.update({**_linear(f'{block}.mlp.fc1', 4 * chs, chs), **_linear(f'{block}.mlp.fc2', chs, 4 * chs)})
                found.update(_scan(f'{block}.mixer', chs) if number < (depth + 1) // 2 else {
                    **_linear(f'{block}.mixer.qkv', 3 * chs, chs), **_linear(f'{block}.mixer.proj', chs, chs)})
        if stage < 3:
            found[f'levels.{stage}.downsample.reduction.0.weight'] = (2 * chs, chs, 3, 3)
    return {**found, **_batch_norm('norm', 8 * dim), **_linear('head', 1000, 8 * dim)}


def _authors_state(arch='test', device='cpu'):
    """A file of the authors with random values."""
    return {key: torch.randn(shape, device=device) if shape else torch.tensor(3, device=device)
            for key, shape in _authors_shapes(**ARCHS[arch]).items()}


class TestPublishedNetwork(PublishedNetwork):
    family, complete, reported = 'mambavision', {}, [({}, 'averaged')]
    build = staticmethod(_build)
    parameters = dict(
        mambavision_tiny=31_794_248, mambavision_tiny2=35_104_008, mambavision_small=50_140_584,
        mambavision_base=97_685_288, mambavision_large=227_961_048, mambavision_large2=241_554_824,
        mambavision_large2_512=241_554_824, mambavision_large3_256=739_570_472,
        mambavision_large3_512=739_570_472)
    gmacs = dict(mambavision_tiny=4.460, mambavision_tiny2=5.106, mambavision_small=7.482,
                 mambavision_base=14.956, mambavision_large=34.843, mambavision_large2=37.503)
    missing = {'levels.2.blocks.2.mixer.qkv.bias': 'stages.2.blocks.2.mixer.qkv.bias',
               'levels.2.blocks.0.mixer.conv1d_z.weight': 'stages.2.blocks.0.mixer.conv.weight'}
    containers = {'transformers': lambda state, _: {f'model.{key}': x for key, x in state.items()}}

    def authors_state(self, model):
        """Other than those of `published`, with which its names and shapes are compared."""
        return model.published_state(model.state_dict())

    def published(self, name, model):
        return _authors_state(name.replace('_mambavision', '').replace('mambavision_', ''), 'meta')

    def macs(self, name, row):
        return row['macs_without_attention']


@pytest.mark.parametrize('size', [(33, 45), (64, 64), (70, 50)])
def test_inference_equals_training_at_odd_sizes(size):
    model, x = timm.create_model('test_mambavision', num_classes=3).eval(), torch.randn(2, 3, *size)
    with torch.no_grad():
        fast = model.forward_features(x)
    assert_close(fast, model.forward_features(x), 1e-5)
    assert fast.shape[2:] == tuple(-(-n // 32) for n in size)


def test_prepare_folds_the_norms_of_convolutions():
    model, x = timm.create_model('test_mambavision', num_classes=3).eval(), torch.randn(2, 3, 70, 50)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(value, 0.5, 1.5)
    with torch.no_grad():
        expected = model(x)
        fast = subquad.prepare(model)
        assert [name for name, module in fast.named_modules() if isinstance(module, nn.BatchNorm2d)] == ['head.norm']
        assert_close(fast(x), expected, 1e-5)


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

def _error(change=lambda model: None, **options):
    golden, model = load_golden('mambavision_odd', _build, **options)
    change(model)
    return logits_error(golden, model)


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


# ---- weight files

def test_a_file_of_another_variant_is_refused_in_a_sentence(tmp_path):
    torch.save(_authors_state(), tmp_path / 'test.pth')
    for options, words in ((dict(depths=(1, 1, 5, 2)), '32 keys missing .*stages.2.blocks.2.mixer.in_proj'),
                           (dict(dim=20), 'shapes differ'),
                           (dict(layer_scale=1e-5), '10 keys missing .stages.2.blocks.0.ls1.gamma')):
        with pytest.raises(WeightsError, match=f'test.pth is not a checkpoint of this test_mambavision: .*{words}'):
            load_weights(timm.create_model('test_mambavision', **options), tmp_path / 'test.pth')
    with pytest.raises(WeightsError, match='is not a checkpoint of this test_ppma: '):
        load_weights(timm.create_model('test_ppma'), tmp_path / 'test.pth')


def test_convert_finds_the_network_and_writes_the_authors_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = _authors_state()
    torch.save({'state_dict': state}, 'authors.pth.tar')
    assert weights.main(['convert', 'authors.pth.tar', '--out', 'ours.safetensors']) == 0
    with safe_open('ours.safetensors', 'pt') as file:
        assert json.loads(file.metadata()['subquad'])['model'] == 'test_mambavision'
    assert weights.main(['convert', 'ours.safetensors', '--to', 'mambavision', '--out', 'back.pth']) == 0
    back = torch.load('back.pth', weights_only=True)['model']
    assert_same(back, state)


def test_weights_say_that_they_are_non_commercial_before_the_download(capsys, monkeypatch, tmp_path):
    row = find('mambavision_tiny')
    assert row.terms == 'cc-by-nc-sa-4.0, non-commercial' and find('ppma_tiny').terms == 'apache-2.0'
    for arguments in (['list', row.name], ['info', row.name]):
        assert not weights.main(arguments) and row.terms in capsys.readouterr().out
    monkeypatch.setattr(download, 'cached_file', lambda *_: None)
    monkeypatch.setattr(download, '_from_hub', lambda *_: tmp_path)
    with pytest.warns(UserWarning, match=f'mambavision_tiny.in1k: the license of the weights is {row.terms}'):
        assert download.fetch(row) == tmp_path
    assert timm.get_pretrained_cfg('mambavision_tiny').license == 'cc-by-nc-sa-4.0'


def test_registry_rows():
    assert find('mambavision_base').source == 'hf-hub:nvidia/MambaVision-B-1K@main/mambavision_base_1k.pth.tar'
    assert [row.tag for row in of_arch('mambavision_base')] == [
        'in1k', 'in21k_ft_in1k', 'cascade_mask_rcnn_3x_coco', 'upernet_160k_ade20k']
    row = find('mambavision_large3_512')
    assert row.source == 'hf-hub:nvidia/MambaVision-L3-512-21K@main/mambavision_L3_21k_740m_512.pth.tar'
    cfg = timm.get_pretrained_cfg('mambavision_large3_512')
    assert (cfg.input_size, cfg.crop_pct, cfg.crop_mode) == ((3, 512, 512), 0.93, 'squash')
    assert published_transform(row)['crop_mode'] == 'squash' and 'to 550 pixels on both sides' in describe(row)
    assert timm.get_pretrained_cfg('mambavision_tiny2').crop_mode == 'center'
    assert 'crop_mode' not in published_transform(find('mambavision_tiny2'))
