"""Test RMT against the published network: parameters, MACs, outputs, gradients, weight files and the label head."""
import argparse
import json
import warnings

import pytest
import timm
import torch
from helpers import DATA, assert_close, relative_error
from pairwise import slow
from safetensors import safe_open

from subquad import kernels
from subquad.backbones.mixers import polyline
from subquad.backbones.rmt import RMT
from subquad.backbones.weights import WeightsError, checkpoint_filter_fn, load_weights
from subquad.backbones.weights.rmt_keys import to_our_keys, to_published_keys
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
