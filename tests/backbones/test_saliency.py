"""Effective receptive field and class activation maps, against autograd and against the definition."""
import pytest
import timm
import torch
from torch import nn

import subquad
from subquad.backbones.saliency import feature_map


class OneByOne(nn.Module):
    """A network of one strided convolution, whose receptive field and class activations are known."""

    num_classes = 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 4, 4, stride=4), nn.Linear(4, 2)
        self.feature_info = [dict(num_chs=4, reduction=4, module='conv')]

    def forward_features(self, x):
        return self.conv(x)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))


def test_receptive_field_of_a_convolution():
    model, x = OneByOne(), torch.randn(2, 3, 16, 24)
    found = subquad.effective_receptive_field(model, x, (9, 2))
    expected = torch.zeros(2, 16, 24)
    expected[:, 8:12, 0:4] = model.conv.weight.sum(0).abs().sum(0)
    assert torch.allclose(found, expected, atol=1e-6) and model.training
    center = subquad.effective_receptive_field(model, x)
    assert center[0].nonzero().amin(0).tolist() == [8, 12] and center[0].nonzero().amax(0).tolist() == [11, 15]


def test_class_activation_of_a_linear_classifier():
    """Behind a mean over positions, Grad-CAM is the class activation map: the classifier's row times the features."""
    model, x = OneByOne(), torch.randn(3, 3, 16, 24)
    features, count = model.conv(x), 4 * 6
    for target in (None, 1):
        maps, classes, layer = subquad.class_activation(model, x, target)
        assert classes.tolist() == (model(x).argmax(1).tolist() if target is None else [1] * 3) and layer == 'conv'
        rows = model.fc.weight[classes] / count
        assert torch.allclose(maps, torch.einsum('bchw,bc->bhw', features, rows).relu(), atol=1e-6)


@pytest.mark.parametrize('name, size, grid', [
    ('test_ppma', 64, 2), ('test_myo', 64, 2), ('test_lcsm', 64, 2), ('test_mobilevitv2', 64, 2),
    ('test_resnet', 64, 2), ('test_vit', 160, 10), ('test_efficientnet', 64, 2), ('test_convnext', 64, 2),
    ('swin_tiny_patch4_window7_224', 224, 7)])
def test_any_timm_model(name, size, grid):
    torch.manual_seed(0)
    options = dict(depths=(1, 1, 1, 1), embed_dim=24, num_heads=(1, 2, 3, 4)) if 'swin' in name else {}
    model, x = timm.create_model(name, num_classes=5, **options), torch.randn(1, 3, size, size)
    with torch.inference_mode():
        field = subquad.effective_receptive_field(model, x)
        maps, classes, _ = subquad.class_activation(model, x)
    assert field.shape == (1, size, size) and field.max() > 0 and field.min() >= 0
    assert maps.shape == (1, grid, grid) and maps.isfinite().all() and maps.min() >= 0
    assert classes.tolist() == model.eval()(x).argmax(1).tolist()
    assert feature_map(model, x).shape[2:] == (grid, grid)


def test_class_activation_of_another_layer():
    model, x = timm.create_model('test_ppma', num_classes=5), torch.randn(1, 3, 64, 96)
    assert subquad.class_activation(model, x, 3, 'stages.1').maps.shape == (1, 8, 12)


@pytest.mark.parametrize('function, arguments, message', [
    ('effective_receptive_field', dict(pixel=(0, 24)), r'pixel \(0, 24\) is outside of the image of 16 x 24'),
    ('effective_receptive_field', dict(x=torch.zeros(3, 16, 24)), r'x must be images \(B, C, H, W\) of real numbers'),
    ('effective_receptive_field', dict(x=torch.zeros(1, 3, 16, 24).int()), 'got torch.int32 of shape'),
    ('class_activation', dict(target=2), 'target must be a class from 0 to 1, got 2'),
    ('class_activation', dict(layer='head'), "the model has no layer 'head'"),
    ('class_activation', dict(layer='fc'), r"the output of 'fc', \(1, 2\), is no map of features"),
    ('class_activation', dict(model=nn.Conv2d(3, 4, 4)), 'Conv2d does not name its last feature map'),
    ('effective_receptive_field', dict(model=nn.Conv2d(3, 4, 4)), 'Conv2d has no feature map'),
    ('class_activation', dict(model=timm.create_model('test_ppma', num_classes=0), x=torch.zeros(1, 3, 32, 32)),
     'PPMA has no classifier')])
def test_wrong_arguments(function, arguments, message):
    arguments = dict(dict(model=OneByOne(), x=torch.zeros(1, 3, 16, 24)), **arguments)
    with pytest.raises(ValueError, match=message):
        getattr(subquad, function)(**arguments)
