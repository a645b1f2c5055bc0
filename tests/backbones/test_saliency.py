"""Effective receptive field and class activation maps, against autograd and against the definition."""
from functools import partial

import numpy as np
import pytest
import timm
import torch
from timm.models.volo import VOLO
from torch import nn

import subquad
from subquad.backbones.saliency import NoFeatureMap, feature_map


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
        assert target is None or torch.equal(subquad.class_activation(model, x, np.int64(target)).maps, maps)
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


@pytest.mark.parametrize('layer', ['stages.1', 'stages.1.downsample', 'stages.1.blocks.0', 'stages.1.blocks.0.norm1',
                                   'stages.1.blocks.0.mixer', 'stages.1.blocks.0.ffn.fc1'])
@pytest.mark.parametrize('name', ['test_ppma', 'test_myo', 'test_lcsm'])
def test_class_activation_of_another_layer(name, layer):
    """Stages are channels-first, and what is inside of blocks is channels-last; the map has the grid of the layer."""
    model, x = timm.create_model(name, num_classes=5), torch.randn(2, 3, 64, 96)
    seen = []
    with torch.enable_grad():
        module = model.eval().get_submodule(layer)
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))
        logits = model(x)
        gradient, = torch.autograd.grad(logits[:, 3].sum(), seen[0])
    axis = 1 if layer in ('stages.1', 'stages.1.downsample') else 3
    positions = [n for n in (1, 2, 3) if n != axis]
    expected = (seen[0] * gradient.mean(positions, keepdim=True)).sum(axis).relu()
    found = subquad.class_activation(model, x, 3, layer).maps
    assert found.shape == (2, 8, 12) and torch.allclose(found, expected, atol=1e-6)


class Mixed(nn.Module):
    """A network whose layers have both layouts, which their types do not tell."""

    num_classes = 2

    def __init__(self):
        super().__init__()
        self.patches, self.turn, self.last = nn.Conv2d(3, 12, 8, 8), nn.Identity(), nn.GELU()
        self.fc, self.never = nn.Linear(12, 2), nn.Identity()

    def forward(self, x):
        tokens = self.turn(self.patches(x).permute(0, 2, 3, 1))
        return self.fc(self.last(tokens.permute(0, 3, 1, 2)).mean((2, 3)))


def test_layouts_of_a_network_with_both():
    model = Mixed()
    for size, grid in (((64, 96), (8, 12)), ((96, 64), (12, 8)), ((60, 200), (7, 25))):
        for layer in ('patches', 'turn', 'last'):
            assert subquad.class_activation(model, torch.randn(1, 3, *size), layer=layer).maps.shape == (1, *grid)
    square = torch.randn(1, 3, 96, 96)                   # 12 x 12 positions of 12 channels
    with pytest.raises(ValueError, match=r"'turn', \(1, 12, 12, 12\), can be \(B, C, H, W\) or \(B, H, W, C\)"):
        subquad.class_activation(model, square, layer='turn')
    assert subquad.class_activation(model, square, layer='patches').maps.shape == (1, 12, 12)
    with pytest.raises(ValueError, match="Mixed does not call its layer 'never'"):
        subquad.class_activation(model, square, layer='never')


@pytest.mark.parametrize('name, options, size, layer, grid', [
    ('VOLO', dict(layers=(1, 1, 1, 1), embed_dims=(24, 48, 48, 48), num_heads=(2, 4, 4, 4)), 224, None, 14),
    ('cait_xxs24_224', dict(depth=1, embed_dim=24, num_heads=2), 224, None, 14),
    ('xcit_nano_12_p8_224', dict(depth=1, embed_dim=24, num_heads=2), 224, None, 28),
    ('mvitv2_tiny', {}, 224, None, 7),
    ('swin_tiny_patch4_window7_224', dict(depths=(1, 1), embed_dim=24, num_heads=(1, 2)), 224, 'patch_embed.proj', 56),
    ('swin_tiny_patch4_window7_224', dict(depths=(1, 1), embed_dim=24, num_heads=(1, 2)), 224, 'layers.0.blocks.0', 56),
    ('test_mobilevitv2', {}, 64, 'stages.3.1.transformer.0', 4)])
def test_layouts_of_timm_models(name, options, size, layer, grid):
    """Maps and tokens whose layout or number of class tokens the model does not tell."""
    model = (VOLO if name == 'VOLO' else partial(timm.create_model, name))(num_classes=5, **options)
    assert subquad.class_activation(model, torch.randn(1, 3, size, size), 1, layer).maps.shape == (1, grid, grid)


@pytest.mark.parametrize('name, options, layer, message', [
    ('test_mobilevitv2', dict(attention='mha'), 'stages.3.1.transformer.0', 'is no map of features of images'),
    ('swin_tiny_patch4_window7_224', dict(depths=(1, 1), embed_dim=24, num_heads=(1, 2)), 'layers.0.blocks.0.attn',
     r'the output of .*, \(64, 49, 24\), is no map'),
    ('pit_ti_224', dict(base_dims=(8, 8, 8), depth=(1, 1, 1)), None, 'a tuple, is not one map'),
    ('coat_lite_tiny', {}, None, "CoaT does not call its layer 'serial_blocks4'")])
def test_layers_without_a_map(name, options, layer, message):
    model = timm.create_model(name, num_classes=5, **options)
    size = 64 if name.startswith('test') else 224
    with pytest.raises(NoFeatureMap, match=message):
        subquad.class_activation(model, torch.randn(1, 3, size, size), layer=layer)


@pytest.mark.parametrize('function, arguments, message', [
    ('effective_receptive_field', dict(pixel=(0, 24)), r'pixel \(0, 24\) is outside of the image of 16 x 24'),
    ('effective_receptive_field', dict(x=torch.zeros(3, 16, 24)), r'x must be images \(B, C, H, W\) of real numbers'),
    ('effective_receptive_field', dict(x=torch.zeros(1, 3, 16, 24).int()), 'got torch.int32 of shape'),
    ('effective_receptive_field', dict(x=torch.zeros(0, 3, 16, 24)), r'at least one, got .* \(0, 3'),
    ('effective_receptive_field', dict(pixel=5), r'pixel must be two integers \(row, column\), got 5'),
    ('effective_receptive_field', dict(model=None), 'model must be a torch.nn.Module, got NoneType'),
    ('class_activation', dict(model=None), 'model must be a torch.nn.Module, got NoneType'),
    ('class_activation', dict(target=2), 'target must be a class from 0 to 1, got 2'),
    ('class_activation', dict(target=1.0), 'target must be None or the number of a class, an integer, got 1.0'),
    ('class_activation', dict(target=True), 'target must be None or the number of a class, an integer, got True'),
    ('class_activation', dict(target='1'), "target must be None or the number of a class, an integer, got '1'"),
    ('class_activation', dict(target=torch.ones(1)), r'target must be None .* got tensor\(\[1.\]\)'),
    ('class_activation', dict(layer=['conv']), r"layer must be None or the name of a module, got \['conv'\]"),
    ('class_activation', dict(layer='head'), "the model has no layer 'head'"),
    ('class_activation', dict(layer='fc'), r"the output of 'fc', \(1, 2\), is no map of features"),
    ('class_activation', dict(model=nn.Conv2d(3, 4, 4)), 'Conv2d does not name its last feature map'),
    ('effective_receptive_field', dict(model=nn.Conv2d(3, 4, 4)), 'Conv2d has no feature map'),
    ('class_activation', dict(model=timm.create_model('test_ppma', num_classes=0), x=torch.zeros(1, 3, 32, 32)),
     'PPMA has no classifier')])
def test_wrong_arguments(function, arguments, message):
    arguments = dict(dict(model=OneByOne(), x=torch.zeros(1, 3, 16, 24)), **arguments)
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(subquad, function)(**arguments)
