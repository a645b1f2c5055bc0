"""PyTorch 2.13's backward pass of BatchNorm in evaluation mode is wrong for some gradients. No model meets them."""
import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import assert_close
from torch import nn

import subquad

BATCH_NORM = F.batch_norm


def _exact(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """`F.batch_norm` in evaluation mode by operations whose gradients are right."""
    assert not training
    mean, scale, bias = (y[:, None, None] for y in (mean, (var + eps).rsqrt() * weight, bias))
    return (x - mean) * scale + bias


def _gradients(monkeypatch, function, x):
    """Return the gradients of x by PyTorch's BatchNorm and by `_exact`, for a gradient of random numbers."""
    found = []
    for batch_norm in (BATCH_NORM, _exact):
        monkeypatch.setattr(F, 'batch_norm', batch_norm)
        inputs = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = function(inputs)
        torch.manual_seed(1)
        found += torch.autograd.grad(y, inputs, torch.randn(y.shape, dtype=y.dtype))
    return found


def _norm(channels):
    norm = nn.BatchNorm2d(channels).double().eval()
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm


@pytest.mark.skipif(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 13), reason='seen in PyTorch 2.13')
def test_pytorch_still_has_the_fault(monkeypatch):
    norm, errors = _norm(8), []
    for batch in (1, 2):
        x = torch.randn(batch, 8, 5, 6, dtype=torch.float64)
        actual, expected = _gradients(monkeypatch, lambda x: norm(x).flatten(2).transpose(1, 2), x)
        errors.append((actual - expected).abs().max() / expected.abs().max())
        assert_close(*_gradients(monkeypatch, lambda x: norm(x).permute(0, 2, 3, 1).flatten(1, 2), x), 1e-12)
    assert errors[1] < 1e-12
    assert errors[0] > 0.1, ('PyTorch computes this gradient right: remove this file, and "Wrong gradients of frozen '
                             'BatchNorm layers" from docs/troubleshooting.md')


@pytest.mark.parametrize('between', [nn.Conv2d(8, 8, 1), nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8))],
                         ids=['mask features', 'ChannelMapper'])
def test_what_detectors_have_before_they_flatten_maps(between, monkeypatch):
    """DINO and Mask2Former flatten maps behind a convolution, and most behind a GroupNorm, too."""
    norm, between = _norm(8), between.double()
    x = torch.randn(1, 8, 5, 6, dtype=torch.float64)
    assert_close(*_gradients(monkeypatch, lambda x: between(norm(x)).flatten(2).permute(0, 2, 1), x), 1e-12)


def _random_statistics(name):
    model = timm.create_model(name, num_classes=3).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize('name', ['test_lcsm', 'test_mobilevitv2', 'test_myo', 'test_ppma'])
def test_models_and_explanations_of_one_image(name, layout, monkeypatch):
    model = _random_statistics(name)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64).contiguous(memory_format=layout)
    assert_close(*_gradients(monkeypatch, model, x), 1e-9)
    maps = []
    for batch_norm in (BATCH_NORM, _exact):
        monkeypatch.setattr(F, 'batch_norm', batch_norm)
        maps.append((subquad.class_activation(model, x, 0).maps, subquad.effective_receptive_field(model, x)))
    for actual, expected in zip(*maps):
        assert_close(actual, expected, 1e-9)
