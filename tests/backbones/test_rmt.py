"""Test RMT against the published network: parameters, MACs, outputs, gradients, weight files and the label head."""
import argparse
import json
import warnings

import pytest
import timm
import torch
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from ppma_files import authors_state
from safetensors import safe_open

import subquad
from subquad import kernels
from subquad.backbones import prepare
from subquad.backbones.mixers import polyline
from subquad.backbones.rmt import RMT
from subquad.backbones.weights import WeightsError, checkpoint_filter_fn, load_weights
from subquad.tools.engine.classification.weight_files import read_classifier
from subquad.tools.engine.counting.counts import count

GOLDEN = sorted(path.name for path in DATA.glob('rmt_*.safetensors'))
PARAMETERS = {'rmt_tiny': 14_334_216, 'rmt_small': 26_967_240, 'rmt_base': 54_154_896, 'rmt_large': 95_464_864}
GMACS = {'rmt_tiny': 2.637, 'rmt_small': 4.777, 'rmt_base': 10.373, 'rmt_large': 19.488}


@pytest.mark.parametrize('name', ['rmt_tiny', 'rmt_small', *slow('rmt_base', 'rmt_large')])
def test_parameters_and_macs_equal_the_published_ones(name):
    row = count(name, 224, 224)
    assert row['parameters'] == PARAMETERS[name]
    assert row['macs'] / 1e9 == pytest.approx(GMACS[name], rel=0.01)


def _golden(name):
    with safe_open(DATA / name, 'pt') as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()['config'])


def _part(golden, prefix):
    return {key.removeprefix(prefix): value for key, value in golden.items() if key.startswith(prefix)}


def _network(golden, config, **kwargs):
    model = RMT(attention=['crisscross' if c else 'full' for c in config['chunkwise_recurrents']],
                rmt_range=config['heads_ranges'], aux_head=config['token_label'], dims=config['embed_dims'],
                depths=config['depths'], num_heads=config['num_heads'], mlp_ratios=config['mlp_ratios'],
                layer_scale=config['layerscales'], head_hidden_size=config['projection'],
                num_classes=config['num_classes'], output_norms=True, **kwargs).eval()
    model.load_state_dict(_part(golden, 'state/'))
    return model


@pytest.mark.parametrize('backend', ['reference', 'portable', 'export'])
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


def test_label_head_adds_half_of_the_largest_token_logits():
    golden, config = _golden('rmt_label_layerscale.safetensors')
    model = _network(golden, config)
    with torch.no_grad():
        features = model.forward_features(golden['input'])
        assert_close(model.head(features), golden['logits_cls'], 2e-5)
        tokens = model.head.aux_fc(features.permute(0, 2, 3, 1))
        assert_close(tokens.flatten(1, 2).reshape(golden['logits_aux'].shape), golden['logits_aux'], 2e-5)
        assert_close(model(golden['input']), golden['logits_cls'] + golden['logits_aux'].amax(1) / 2, 2e-5)
    model.reset_classifier(0)
    model.reset_classifier(3)
    assert model.head.aux_fc.weight.shape == (3, 64) and 0 < model.head.aux_fc.weight.std() < 0.03
    assert model(golden['input']).shape == (2, 3)


# ---- slips between the paper and the code

def test_the_code_adds_the_log_of_the_decay_where_the_paper_multiplies():
    golden, config = _golden('rmt_stage3_full.safetensors')
    with torch.no_grad():
        assert relative_error(_network(golden, config, mask_mode='multiplicative')(golden['input']),
                              golden['logits']) > 0.01


def test_columns_first_is_far_off(monkeypatch):
    golden, config = _golden('rmt_stage3_full.safetensors')
    monkeypatch.setitem(polyline.ATTENTIONS, 'crisscross', lambda *args: kernels.crisscross_attention(
        *args[:5], paths='v2h'))
    with torch.no_grad():
        stages = _network(golden, config).forward_intermediates(golden['input'], intermediates_only=True)
    assert relative_error(stages[0], golden['stage1']) > 0.1


# ---- weight files

def _random(name, **options):
    """Build a network with random values for all weights."""
    model = timm.create_model(name, **options)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.normal_()
    return model


def _same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize('name', ['rmt_tiny', 'rmt_small', 'rmt_base', 'rmt_large', 'test_rmt'])
def test_every_key_has_one_published_name(name):
    with torch.device('meta'):
        model = timm.create_model(name, output_norms=True, aux_head=True)
    theirs = authors_state(model)
    shapes = {key: value.shape for key, value in model.published_state(model.state_dict()).items()}
    assert shapes == {key: value.shape for key, value in theirs.items()}
    back = model.translate_checkpoint(theirs)
    assert {key: value.shape for key, value in back.items()} == {
        key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize('name', GOLDEN)
def test_golden_names_and_buffers_come_back(name):
    golden, config = _golden(name)
    theirs = _part(golden, 'state/')
    model = _network(golden, config)
    back = model.published_state(model.translate_checkpoint(theirs))
    assert back.keys() == theirs.keys()
    for key, value in theirs.items():
        assert_close(back[key], value, 1e-6 if 'Relpos' in key else 0, key)


@pytest.mark.parametrize('wrap', [
    lambda state: state, lambda state: {'model': state, 'args': argparse.Namespace(lr=1e-3), 'max_accuracy': 82.4},
    lambda state: {'state_dict': {f'backbone.{key}': value for key, value in state.items()}}],
    ids=['bare', 'model', 'state_dict'])
def test_published_files_load_strictly(wrap, tmp_path):
    model = _random('test_rmt', num_classes=5, layer_scale=(True, False, True, False))
    state = authors_state(model)
    torch.save(wrap(state), tmp_path / 'best.pth')
    loaded = timm.create_model('test_rmt', num_classes=5, layer_scale=(True, False, True, False))
    load_weights(loaded, tmp_path / 'best.pth')
    assert _same(loaded.state_dict(), model.state_dict())
    state.pop('layers.1.blocks.0.retention.q_proj.weight')
    torch.save(wrap(state), tmp_path / 'less.pth')
    with pytest.raises(WeightsError, match='1 keys missing .stages.1.blocks.0.mixer.q.weight'):
        load_weights(loaded, tmp_path / 'less.pth')


@pytest.mark.parametrize('blocks, read', [(2, 'raw'), (3, 'averaged')])
def test_the_copy_that_the_authors_report_is_read(blocks, read, tmp_path):
    """The logs report raw weights of RMT-T, which alone has two blocks in the first stage."""
    models = {kind: _random('test_rmt', depths=(blocks, 1, 1, 1)) for kind in ('raw', 'averaged')}
    torch.save({'model': authors_state(models['raw']), 'model_ema': authors_state(models['averaged'])},
               tmp_path / 'best.pth')
    loaded = timm.create_model('test_rmt', depths=(blocks, 1, 1, 1))
    with pytest.warns(UserWarning, match=f'its {read} weights .* are read'):
        load_weights(loaded, tmp_path / 'best.pth')
    assert _same(loaded.state_dict(), models[read].state_dict())
    other = 'averaged' if read == 'raw' else 'raw'
    with pytest.warns(UserWarning, match=f'its {other} weights .* are read'):
        load_weights(loaded, tmp_path / 'best.pth', weights=other)


def test_files_of_other_networks_are_refused_in_a_sentence():
    rmt, ppma = timm.create_model('test_rmt'), timm.create_model('test_ppma')
    with pytest.raises(WeightsError, match=r'weights of PPMA \(they have path_embed\), not of RMT: build ppma_tiny'):
        rmt.load_state_dict(authors_state(ppma))
    for model in (ppma, timm.create_model('test_ppma', paths='rmt')):
        with pytest.raises(WeightsError, match=r'weights of RMT \(they have Relpos.decay\), not of PPMA: build rmt_'):
            model.load_state_dict(authors_state(rmt))
    for options in (dict(num_heads=(4, 3, 4, 6)), dict(rmt_range=(5, 5, 6, 6))):
        other = authors_state(timm.create_model('test_rmt', **options))
        with pytest.raises(WeightsError, match='layers.0.Relpos.decay holds other decays than .* 2 heads.* variant'):
            rmt.load_state_dict(other)
    state = authors_state(rmt)
    state['layers.2.Relpos.angle'] *= 1.1
    with pytest.raises(WeightsError, match='layers.2.Relpos.angle holds other angles'):
        rmt.load_state_dict(state)


def test_files_with_token_labels(tmp_path):
    """A file of B* or L* builds `aux_head` by itself where its options are found; S*'s cannot be placed."""
    model = _random('test_rmt', num_classes=5, aux_head=True)
    torch.save({'model': authors_state(model)}, tmp_path / 'best.pth')
    read = read_classifier(str(tmp_path / 'best.pth'), 'test_rmt')
    assert read.options == dict(num_classes=5, aux_head=True) and _same(read.model.state_dict(), model.state_dict())
    with pytest.raises(WeightsError, match='2 keys not in the model .head.aux_fc.weight, head.aux_fc.bias'):
        load_weights(timm.create_model('test_rmt', num_classes=5), tmp_path / 'best.pth')
    overlay = dict(file=str(tmp_path / 'best.pth'))
    with pytest.warns(UserWarning, match='classifier of 5 classes is left out'):
        tuned = timm.create_model('test_rmt', pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3,
                                  aux_head=True)
    assert tuned.head.aux_fc.weight.shape == (3, 96) and torch.equal(tuned.head.proj.weight, model.head.proj.weight)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        pyramid = timm.create_model('test_rmt', pretrained=True, pretrained_cfg_overlay=overlay, features_only=True)
    assert torch.equal(pyramid.stages_0.blocks[0].pos.weight, model.stages[0].blocks[0].pos.weight)
    star = {**authors_state(model), 'aux_head.weight': torch.zeros(5, 128)}
    with pytest.raises(WeightsError, match='aux_head takes 128 channels, as in the log of RMT-S.*place .* is unknown'):
        model.load_state_dict(star)


def test_weights_are_downloaded_by_hand():
    for load in (lambda: timm.create_model('rmt_tiny', pretrained=True),
                 lambda: load_weights(timm.create_model('rmt_tiny', device='meta'), 'rmt_tiny.in1k')):
        with pytest.raises(WeightsError, match='rmt_tiny.in1k has no direct address: download its file from https://pan'
                                               r'.*vsyv.* give its path \(license of the weights: none stated\)'):
            load()
    assert timm.list_models('rmt*', pretrained=True) == []


@pytest.mark.skipif(prepare.NATIVE is None, reason='the native operators are not built')
def test_prepared_mixers_are_native():
    model = subquad.prepare(timm.create_model('test_rmt').eval())
    assert all(type(mixer) is prepare.NativeMixer for mixer in model.mixers().values())
