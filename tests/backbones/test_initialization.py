"""Test the initialization of MobileViTv2 by the statistics of each kind of layer."""
import math

import pytest
import timm
import torch
from torch import nn


def _layers(model):
    """The convolutions of a model by kind: 'depthwise', 'square' (3 x 3) and 'pointwise'."""
    kinds = {'depthwise': [], 'square': [], 'pointwise': []}
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            kind = 'depthwise' if module.groups > 1 else 'square' if module.kernel_size != (1, 1) else 'pointwise'
            kinds[kind].append(module)
    assert all(kinds.values())
    return kinds


def _check_deviation(values, deviation):
    """Check for mean 0 and the given standard deviation, within five standard errors."""
    count = values.numel()
    assert abs(values.mean()) <= 5 * deviation / math.sqrt(count)
    assert abs(values.std() / deviation - 1) <= 5 / math.sqrt(count)


def _check_norms_are_untrained(model):
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            assert (module.weight == 1).all() and (module.bias == 0).all()


@pytest.mark.parametrize('options', [{}, dict(weight_init='kaiming')], ids=str)
def test_kaiming_draws_weights_as_the_configurations_name(options):
    model = timm.create_model('subquad_mobilevitv2_050', **options)
    for layers in _layers(model).values():
        scaled = [m.weight.detach() * math.sqrt(m.weight.shape[0] * m.weight[0, 0].numel() / 2) for m in layers]
        _check_deviation(torch.cat([w.flatten() for w in scaled]), 1.0)                # He et al., fan of the output
        assert max(w.abs().max() for w in scaled) > 2.5                             # normal, not uniform
        assert all((m.bias == 0).all() for m in layers if m.bias is not None)
    _check_deviation(model.head.fc.weight.detach(), 0.02)
    assert (model.head.fc.bias == 0).all()
    _check_norms_are_untrained(model)


def test_authors_draws_weights_as_the_library_does():
    """It uses PyTorch's defaults (weights and biases uniform within 1 / sqrt(fan_in)) and a Xavier classifier."""
    model = timm.create_model('subquad_mobilevitv2_050', weight_init='authors')
    biases = []
    for layers in _layers(model).values():
        bounds = [m.weight[0].numel() ** -0.5 for m in layers]
        scaled = torch.cat([(m.weight.detach() / bound).flatten() for m, bound in zip(layers, bounds)])
        _check_deviation(scaled, 1 / math.sqrt(3))
        assert 0.99 < scaled.abs().max() <= 1.0001
        biases += [m.bias.detach() / bound for m, bound in zip(layers, bounds) if m.bias is not None]
    _check_deviation(torch.cat(biases), 1 / math.sqrt(3))
    assert 0.99 < torch.cat(biases).abs().max() <= 1.0001
    _check_xavier(model.head.fc)
    _check_norms_are_untrained(model)
    model.reset_classifier(100)
    _check_xavier(model.head.fc)


def _check_xavier(layer):
    bound = math.sqrt(6 / (layer.in_features + layer.out_features))
    _check_deviation(layer.weight.detach(), bound / math.sqrt(3))
    assert 0.99 * bound < layer.weight.abs().max() <= bound * 1.0001
    assert (layer.bias == 0).all()


def test_weight_init_has_no_other_effect():
    models = [timm.create_model('test_mobilevitv2', weight_init=name).eval() for name in ('kaiming', 'authors')]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(models[0](x), models[1](x))
