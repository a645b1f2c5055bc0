"""Test the prepared form of MobileViTv2 and of the mixers that hybrids take from it."""
import copy

import pytest
import timm
import torch
from helpers import assert_close
from torch import nn

import subquad
from subquad.backbones import prepare as forms
from subquad.backbones.mobilevitv2 import ConvNormAct


def _model(name, **options):
    """A model in evaluation mode whose norms have statistics of their own."""
    model = timm.create_model(name, num_classes=7, **options).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(std=0.3)
            norm.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize('name, options', [
    ('test_mobilevitv2', {}), ('test_mobilevitv2', dict(num_latent_tokens=3, sampling='patch')),
    ('test_mobilevitv2', dict(attention='mha')), ('test_mobilevitv2', dict(exact_size=True)),
    ('test_ppma', dict(mixers=('separable', 'depthwise', 'separable', 'depthwise')))], ids=str)
def test_outputs_stay(name, options, monkeypatch):
    model = _model(name, **options)
    prepared, x = subquad.prepare(copy.deepcopy(model)), torch.randn(3, 3, 72, 104)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in prepared.stages.modules())
    with torch.inference_mode():
        expected = model(x)
        assert_close(prepared(x), expected, 2e-6)
        with torch.autocast('cpu', torch.bfloat16):
            assert_close(prepared(x).float(), expected, 5e-2)
        assert_close(copy.deepcopy(prepared).bfloat16()(x.bfloat16()).float(), expected, 5e-2)
        monkeypatch.setattr(forms, 'PART_BYTES', 1)                   # image by image
        assert_close(prepared(x), expected, 2e-6)
    y = prepared(x)                                                   # with gradients
    y.sum().backward()
    assert_close(y, expected, 2e-6)


def test_layers_with_hooks_and_adapters_stay():
    model, seen, x = _model('test_mobilevitv2'), [], torch.randn(1, 3, 64, 64)
    expected = model(x)
    model.stages[1][0].conv1_1x1.conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    unit = model.stages[2][1].transformer[0].attn
    unit.qkv_proj = nn.Sequential(unit.qkv_proj)
    subquad.prepare(model)
    assert type(model.stages[1][0].conv1_1x1) is ConvNormAct and len(seen) == 0
    assert_close(model(x), expected)
    assert len(seen) == 1
    scores = model.context_scores(x)
    assert len(scores) == 9


def test_prepared_attention_computes_keys_for_groups_only():
    from torch.utils.flop_counter import FlopCounterMode
    flops, x = [], torch.randn(1, 3, 64, 64)
    for model in (_model('test_mobilevitv2'), subquad.prepare(_model('test_mobilevitv2'))):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x)
        flops.append(counter.get_total_flops())
    assert flops[1] < flops[0]
