"""Test RMT against the published network: slips, weight files and the label head."""
import warnings

import pytest
import timm
import torch
from golden_networks import PublishedNetwork, assert_same, load_golden, logits_error, randomize
from helpers import assert_close, relative_error
from ppma_files import authors_state

import subquad
from subquad import kernels
from subquad.backbones import prepare
from subquad.backbones.mixers import polyline
from subquad.backbones.rmt import RMT
from subquad.backbones.weights import WeightsError, load_weights
from subquad.tools.engine.classification.weight_files import read_classifier


def _build(config, **options):
    return RMT(attention=['crisscross' if c else 'full' for c in config['chunkwise_recurrents']],
               rmt_range=config['heads_ranges'], aux_head=config['token_label'],
               dims=config['embed_dims'], depths=config['depths'], num_heads=config['num_heads'],
               mlp_ratios=config['mlp_ratios'], layer_scale=config['layerscales'],
               head_hidden_size=config['projection'], num_classes=config['num_classes'],
               output_norms=True, **options)


class TestPublishedNetwork(PublishedNetwork):
    family, computed, variants = 'rmt', 'Relpos', [dict(layer_scale=(True, False, True, False))]
    build, authors_state = staticmethod(_build), staticmethod(authors_state)
    parameters = dict(rmt_tiny=14_334_216, rmt_small=26_967_240, rmt_base=54_154_896,
                      rmt_large=95_464_864)
    gmacs = dict(rmt_tiny=2.637, rmt_small=4.777, rmt_base=10.373, rmt_large=19.488)
    complete = dict(output_norms=True, aux_head=True)
    # The logs report raw weights of RMT-T, which alone has two blocks in the first stage.
    reported = [(dict(depths=(2, 1, 1, 1)), 'raw'), (dict(depths=(3, 1, 1, 1)), 'averaged')]
    missing = {'layers.1.blocks.0.retention.q_proj.weight': 'stages.1.blocks.0.mixer.q.weight'}


def test_label_head_adds_half_of_the_largest_token_logits():
    golden, model = load_golden('rmt_label_layerscale', _build)
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
    assert logits_error(*load_golden('rmt_stage3_full', _build, mask_mode='multiplicative')) > 0.01


def test_columns_first_is_far_off(monkeypatch):
    golden, model = load_golden('rmt_stage3_full', _build)
    monkeypatch.setitem(polyline.ATTENTIONS, 'crisscross', lambda *args: kernels.crisscross_attention(
        *args[:5], paths='v2h'))
    with torch.no_grad():
        stages = model.forward_intermediates(golden['input'], intermediates_only=True)
    assert relative_error(stages[0], golden['stage1']) > 0.1


# ---- weight files

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
    model = randomize(timm.create_model('test_rmt', num_classes=5, aux_head=True))
    torch.save({'model': authors_state(model)}, tmp_path / 'best.pth')
    read = read_classifier(str(tmp_path / 'best.pth'), 'test_rmt')
    assert read.options == dict(num_classes=5, aux_head=True)
    assert_same(read.model.state_dict(), model.state_dict())
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
