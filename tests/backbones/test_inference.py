"""Layers of eager inference on a CPU that run on oneDNN with their activation: same values, and nobody is bypassed."""
import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import relative_error
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import subquad
from subquad.backbones import inference

ACTS = [nn.Identity(), nn.GELU(), nn.GELU('tanh'), nn.SiLU(), nn.ReLU()]
assert subquad


@pytest.fixture
def calls(monkeypatch):
    """Count the layers that oneDNN computed."""
    count = []
    cast = inference._in_one_dtype
    monkeypatch.setattr(inference, '_in_one_dtype', lambda *tensors: count.append(1) or cast(*tensors))
    return count


@pytest.mark.skipif(not inference._ONEDNN, reason='PyTorch has no oneDNN here, or this is no x86 CPU')
@pytest.mark.parametrize('act', ACTS, ids=repr)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize('autocast', [False, True])
def test_values_equal_those_of_separate_layers(act, dtype, tolerance, autocast, calls):
    if (autocast or dtype == torch.bfloat16) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip('oneDNN has no bfloat16 on this CPU')
    torch.manual_seed(0)
    layer, conv = nn.Linear(24, 40), nn.Conv2d(24, 40, 3, 2, 1)
    x = torch.randn(2, 9, 7, 24)
    kept = dtype if not autocast else torch.float32
    with torch.inference_mode():
        expected = act(layer(x)), act(conv(x.permute(0, 3, 1, 2)))
        layer, conv, x = layer.to(kept), conv.to(kept), x.to(kept)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            y = inference.linear(layer, x, act), inference.convolution(conv, x.permute(0, 3, 1, 2), act)
            folded = inference.convolution(conv, x.permute(0, 3, 1, 2), act, (conv.weight * 2, conv.bias))
    for actual, wanted in zip(y, expected):
        assert actual.dtype == (torch.bfloat16 if autocast else dtype)
        assert relative_error(actual.float(), wanted) <= (2e-2 if autocast else tolerance)
    doubled = act(F.conv2d(x.float().permute(0, 3, 1, 2), 2 * conv.weight.float(), conv.bias.float(), 2, 1))
    assert relative_error(folded.float(), doubled) <= (2e-2 if autocast else tolerance)
    known = type(act) in inference._ACTIVATIONS and getattr(act, 'approximate', 'none') == 'none'
    known = known and not (isinstance(act, nn.SiLU) and dtype == torch.float32 and not autocast)
    assert len(calls) == (3 if known else 0)


def test_adapters_hooks_and_gradients_keep_the_layer(calls):
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    x = torch.randn(3, 8)
    seen = []
    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: seen.append(1))
    adapted = Adapter(8, 8)
    with torch.no_grad():
        torch.testing.assert_close(inference.linear(adapted, x), F.linear(x, adapted.weight, adapted.bias) + 1)
        inference.linear(hooked, x)
    assert seen == [1]
    inference.linear(nn.Linear(8, 8), x).sum().backward()
    with torch.no_grad():
        inference.linear(nn.Linear(8, 8).double(), x.double())
        assert torch.func.vmap(lambda row: inference.linear(adapted, row))(x).shape == x.shape
        assert inference.linear(nn.Linear(8, 4), x[:0]).shape == (0, 4)
    assert not calls


@pytest.mark.parametrize('name', ['test_ppma', 'test_myo', 'test_mobilevitv2'])
def test_counters_of_operations_see_every_layer(name):
    model, x = timm.create_model(name).eval(), torch.randn(1, 3, 64, 64)
    counts = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
            model(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize('name', ['test_ppma', 'test_myo', 'test_mobilevitv2'])
def test_inference_equals_the_pass_with_gradients(name):
    torch.manual_seed(0)
    model, x = timm.create_model(name).eval(), torch.randn(2, 3, 96, 64)
    expected = model(x).detach()
    with torch.inference_mode():
        assert relative_error(model(x), expected) <= 1e-5
        half = copy.deepcopy(model).bfloat16()(x.bfloat16())
        with torch.autocast('cpu', torch.bfloat16):
            mixed = model(x)
    for y in (half, mixed):
        assert y.dtype == torch.bfloat16
        assert (y.float() - expected).abs().max() < 0.1 * expected.abs().max() + 1e-2
