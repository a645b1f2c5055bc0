"""Prepared models: the same outputs as their eager equation, with gradients, autocast, hooks and adapters too."""
import copy
import platform

import pytest
import timm
import torch
import torch.nn.functional as F
from families import SKELETON
from helpers import relative_error
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import subquad
from subquad.backbones import blocks, joined
from subquad.backbones import prepare as forms
from subquad.backbones.mixers import PolylineMixer, TreeMixer
from subquad.backbones.mobilevitv2 import ConvNormAct
from subquad.backbones.weights import save_weights

NEEDS_ONEDNN = pytest.mark.skipif(platform.machine().lower() not in ('x86_64', 'amd64')
                                  or not hasattr(torch.ops.mkldnn, '_linear_pointwise'),
                                  reason='oneDNN has no joined layers here')
ACTS = [nn.Identity(), nn.GELU(), nn.SiLU()]


def _model(name, **options):
    """A model in evaluation mode whose norms have statistics of their own."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **options).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(std=0.3)
            norm.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize('name, options', [
    ('test_ppma', {}), ('test_ppma', dict(attention='linear')), ('test_ppma', dict(paths='none')),
    *((f'test_{family}', {}) for family in ('rmt', 'mlla', 'vmamba', 'vim', 'mambavision', 'myo', 'lcsm')),
    ('test_lcsm', dict(mixer='mamba')),
    ('test_mobilevitv2', {}), ('test_mobilevitv2', dict(num_latent_tokens=3, sampling='patch')),
    ('test_mobilevitv2', dict(attention='mha')), ('test_mobilevitv2', dict(exact_size=True)),
    ('test_ppma', dict(mixers=('separable', 'depthwise', 'separable', 'depthwise')))], ids=str)
def test_outputs_stay(name, options, monkeypatch):
    exact, rough = (2e-6, 5e-2) if name == 'test_mobilevitv2' or 'mixers' in options else (1e-6, 3e-2)
    model = _model(name, **options)
    prepared, x = subquad.prepare(copy.deepcopy(model)), torch.randn(3, 3, 72, 104)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in prepared.stages.modules())
    with torch.inference_mode():
        expected = model(x)
        assert relative_error(prepared(x), expected) <= exact
        half = copy.deepcopy(prepared).bfloat16()(x.bfloat16())
        with torch.autocast('cpu', torch.bfloat16):
            mixed = prepared(x)
        monkeypatch.setattr(blocks, 'PART_BYTES', 1)                   # image by image
        assert relative_error(prepared(x), expected) <= exact
    for y in (half, mixed):
        assert y.dtype == torch.bfloat16 and relative_error(y.float(), expected) <= rough
    y = prepared(x)                                                   # with gradients
    y.sum().backward()
    assert relative_error(y.detach(), expected) <= exact


def test_float16_autocast_of_a_tree_reads_its_own_numbers():
    mixer, x = TreeMixer(16, 2).eval(), torch.randn(1, 2, 2, 16)
    prepared = subquad.prepare(nn.Sequential(copy.deepcopy(mixer)).eval())
    with torch.no_grad(), torch.autocast('cpu', torch.float16):
        assert relative_error(prepared(x).float(), mixer(x).float()) <= 1e-2


@pytest.mark.parametrize('name', [*SKELETON, 'test_mobilevitv2'])
def test_padding_and_influence_know_the_prepared_forms(name):
    model = _model(name)
    prepared = subquad.prepare(copy.deepcopy(model))
    images = [torch.randn(3, 64, 64), torch.randn(3, 64, 96)]
    with torch.no_grad():
        single = torch.cat([model(image[None]) for image in images])
        assert relative_error(subquad.forward_padded(prepared, images), single) <= 1e-5
    x = torch.randn(1, 3, 64, 64)
    expected, found = (subquad.influence(network, x, (32, 32)) for network in (model, prepared))
    assert expected.keys() == found.keys()
    for key, row in expected.items():
        assert relative_error(found[key].weights, row.weights) <= 1e-4


def test_a_counter_of_operations_sees_every_layer():
    model, x, counts = _model('test_ppma'), torch.randn(1, 3, 64, 64), []
    for prepared in (model, subquad.prepare(copy.deepcopy(model))):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            prepared(x)
        counts.append(counter.get_total_flops())
    # The joined product of a mixer also multiplies the zeros of the decay's rows.
    assert 0 < counts[0] <= counts[1] <= 1.02 * counts[0]


def test_a_prepared_model_compiles_and_exports():
    prepared, x = subquad.prepare(_model('test_ppma')), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        compiled = torch.compile(prepared, backend='aot_eager', fullgraph=True)
        assert relative_error(compiled(x), prepared(x)) <= 1e-6
        program = torch.export.export(prepared, (x,))
        assert relative_error(program.module()(x), prepared(x)) <= 1e-5


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match='call model.eval'):
        subquad.prepare(timm.create_model('test_ppma').train())


def test_a_prepared_model_is_neither_trained_nor_saved_nor_loaded(tmp_path):
    prepared = subquad.prepare(_model('test_ppma'))
    for model in (prepared, copy.deepcopy(prepared), torch.nn.Sequential(prepared)):
        with pytest.raises(ValueError, match='load weights before subquad.prepare'):
            model.load_state_dict(model.state_dict(), strict=False)
    assert copy.deepcopy(prepared).eval().training is False
    for model in (prepared, torch.nn.Sequential(prepared)):
        with pytest.raises(ValueError, match='build the model again'):
            model.train()
    with pytest.raises(ValueError, match='before subquad.prepare'):
        save_weights(prepared, tmp_path / 'weights.safetensors')
    assert not list(tmp_path.iterdir())


def test_preparing_twice_changes_nothing():
    prepared = subquad.prepare(_model('test_ppma'))
    before = str(prepared)
    assert 'JoinedLinear' in before or not joined._ONEDNN
    assert str(subquad.prepare(prepared)) == before


def test_hooks_and_adapters_keep_their_modules(monkeypatch):
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model, x = _model('test_ppma'), torch.randn(3, 3, 32, 32)
    mixer, seen = model.stages[0].blocks[0].mixer, []
    mixer.q.__class__ = Adapter
    model.stages[1].blocks[0].ffn.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    model.stages[2].downsample.conv.register_forward_hook(lambda module, inputs, output: 2 * output)
    with torch.no_grad():
        expected = model(x)
        subquad.prepare(model)
        assert type(mixer.q) is Adapter and isinstance(model.stages[2].downsample.norm, nn.BatchNorm2d)
        # A hook that comes later sees the whole batch, too.
        monkeypatch.setattr(blocks, 'PART_BYTES', 1)
        model.stages[0].blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        assert relative_error(model(x), expected) <= 1e-6
    assert seen == [3, 3, 3]


@NEEDS_ONEDNN
@pytest.mark.parametrize('act', ACTS, ids=repr)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize('autocast', [False, True])
def test_values_of_joined_layers(act, dtype, tolerance, autocast, monkeypatch):
    monkeypatch.setattr(joined, '_ONEDNN', True)           # also where they are not chosen
    if (autocast or dtype == torch.bfloat16) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip('oneDNN has no bfloat16 on this CPU')
    torch.manual_seed(0)
    layer, conv, x = nn.Linear(24, 40), nn.Conv2d(24, 40, 3, 2, 1), torch.randn(2, 9, 7, 24)
    kept = dtype if not autocast else torch.float32
    with torch.inference_mode():
        expected = act(layer(x)), act(conv(x.permute(0, 3, 1, 2)))
        layer, conv, x = layer.to(kept), conv.to(kept), x.to(kept)
        assert joined.join(layer, act) and joined.join(conv, act)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            outputs = layer(x), conv(x.permute(0, 3, 1, 2))
    for actual, wanted in zip(outputs, expected):
        assert actual.dtype == (torch.bfloat16 if autocast else dtype)
        assert relative_error(actual.float(), wanted) <= (2e-2 if autocast else tolerance)


@pytest.mark.parametrize('kind', [
    pytest.param('onednn', marks=NEEDS_ONEDNN),
    pytest.param('native', marks=pytest.mark.skipif(forms.NATIVE is None, reason='the native operators are not built')),
])
def test_joined_layers_run_in_every_mode(kind, monkeypatch):
    monkeypatch.setattr(joined, '_ONEDNN', kind == 'onednn')
    monkeypatch.setattr(joined, '_PACKED', True)
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = F.gelu(layer(x)).detach()
    assert not joined.join(layer, nn.GELU('tanh')) and not joined.join(layer, nn.ReLU())
    assert joined.join(layer, nn.GELU())
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
        torch.testing.assert_close(layer(x), expected)
        assert layer(x[:0]).shape == (0, 4) and layer(x[0]).shape == (4,)
        torch.testing.assert_close(copy.deepcopy(layer).double()(x.double()).float(), expected)


@pytest.mark.parametrize('options', [{}, dict(shared_decay=True), dict(paths='rmt'), dict(paths='none')], ids=str)
def test_one_product_for_queries_keys_values_and_decay(options):
    mixer, x = PolylineMixer(12, 3, attention='crisscross', **options).eval(), torch.randn(2, 3, 5, 12)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.3)
    mixer.decay_scale = 2.0
    with torch.no_grad():
        expected = mixer(x)
        mixer = forms.OneProductMixer.convert(mixer)
        assert mixer.joined.out_features % 16 == 0
        assert relative_error(mixer(x), expected) <= 1e-5


def test_layers_of_mobilevitv2_with_hooks_and_adapters_stay():
    model, seen, x = _model('test_mobilevitv2'), [], torch.randn(1, 3, 64, 64)
    expected = model(x)
    model.stages[1][0].conv1_1x1.conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    unit = model.stages[2][1].transformer[0].attn
    unit.qkv_proj = nn.Sequential(unit.qkv_proj)
    subquad.prepare(model)
    assert type(model.stages[1][0].conv1_1x1) is ConvNormAct and len(seen) == 0
    assert relative_error(model(x), expected) <= 1e-5
    assert len(seen) == 1
    scores = model.context_scores(x)
    assert len(scores) == 9


def test_prepared_attention_computes_keys_for_groups_only():
    flops, x = [], torch.randn(1, 3, 64, 64)
    for model in (_model('test_mobilevitv2'), subquad.prepare(_model('test_mobilevitv2'))):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x)
        flops.append(counter.get_total_flops())
    assert flops[1] < flops[0]
