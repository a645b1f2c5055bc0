"""The forms of prepared models on a GPU: outputs, launches, and the cases in which modules run their own equation.

Without a GPU they run in Triton's interpreter."""
import copy
import importlib

import pytest
import timm
import torch
from dispatches import Dispatches
from helpers import relative_error
from operator_cases import DEVICE, skip_without_triton
from torch import nn

import subquad
from subquad import kernels
from subquad.backbones import prepare as forms
from subquad.backbones import prepare_gpu
from subquad.backbones.export import prepare_for_export
from subquad.backbones.joined import ACTIVATIONS
from subquad.kernels.prepared import bias_act, group_norm, layer_norm, path_sums

skip_without_triton()

# Operators of a forward pass of prepared networks for 224 x 224 images.
MOST_OPERATORS = {'ppma_tiny': 200, 'myo_tiny': 180, 'lcsm_tiny': 382, 'subquad_mobilevitv2_100': 130}


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    for module in (forms, prepare_gpu):
        monkeypatch.setattr(module, 'is_on_gpu', lambda layer: True)


def _models(name, **options):
    """A network whose norms are no identities, and a prepared copy."""
    torch.manual_seed(0)
    if name != 'test_mobilevitv2':
        options = dict(options, depths=(1, 1, 1, 1))
    model = timm.create_model(name, num_classes=7, **options).eval()
    for norm in model.modules():
        if isinstance(norm, (nn.GroupNorm, nn.LayerNorm)) and norm.weight is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    model = model.to(DEVICE)
    return model, subquad.prepare(copy.deepcopy(model))


@pytest.mark.parametrize('name, options', [
    ('test_ppma', {}), ('test_ppma', dict(paths='v2h', shared_decay=True)),
    ('test_ppma', dict(paths='rmt', layer_scale=(True,) * 4)), ('test_myo', {}), ('test_myo', dict(static_edges=True)),
    ('test_lcsm', {}), ('test_mobilevitv2', {})], ids=str)
def test_outputs_stay(name, options):
    model, prepared = _models(name, **options)
    x = torch.randn(1, 3, 32, 64, device=DEVICE)
    with torch.inference_mode():
        expected = model(x)
        for backend in ('triton', 'portable'):
            with kernels.use_backend(backend):
                assert relative_error(prepared(x), expected) <= 3e-6


def test_other_scales_of_the_decay():
    model, prepared = _models('test_ppma')
    x = torch.randn(1, 3, 32, 32, device=DEVICE)
    for network in (model, prepared):
        subquad.set_decay_scale(network, 2)
    with torch.inference_mode():
        expected = model(x)
        with kernels.use_backend('triton'):
            assert relative_error(prepared(x), expected) <= 3e-6


@pytest.mark.parametrize('name', ['test_mobilevitv2', 'test_myo'])
def test_padding_knows_the_forms(name):
    model, prepared = _models(name)
    images = [torch.randn(3, 32, width, device=DEVICE) for width in (32, 64)]
    with torch.no_grad():
        single = torch.cat([model(image[None]) for image in images])
        with kernels.use_backend('triton'):
            assert relative_error(subquad.forward_padded(prepared, images), single) <= 1e-5


def test_what_needs_a_gradient_autocast_or_a_graph_takes_the_equation():
    x = torch.ones(1, device=DEVICE)
    with kernels.use_backend('triton'):
        assert not prepare_gpu.on_triton(x)
        with torch.no_grad():
            assert prepare_gpu.on_triton(x)
            torch.set_autocast_enabled('cuda', True)
            try:
                assert not prepare_gpu.on_triton(x)
            finally:
                torch.set_autocast_enabled('cuda', False)
            with pytest.raises(ValueError, match='float64'):
                prepare_gpu.on_triton(x.double())
    model, prepared = _models('test_ppma')
    images = [torch.randn(1, 3, 32, 32, device=DEVICE, requires_grad=True) for _ in range(2)]
    images[1].data.copy_(images[0].data)
    for network, x in zip((model, prepared), images):
        network(x).square().sum().backward()
    assert relative_error(images[1].grad, images[0].grad) <= 1e-4


def test_an_empty_batch_and_bfloat16():
    for name in ('test_ppma', 'test_mobilevitv2'):
        model, prepared = _models(name)
        x = torch.randn(1, 3, 32, 32, device=DEVICE)
        with torch.inference_mode():
            expected = model(x)
            with kernels.use_backend('triton'):
                assert prepared(x[:0]).shape == (0, 7)
                half = prepared.bfloat16()(x.bfloat16())
        assert half.dtype == torch.bfloat16 and relative_error(half.float(), expected) <= 3e-2


def test_modules_of_other_models_take_other_shapes_and_layouts():
    norms = nn.ModuleList([nn.GroupNorm(1, 8), nn.LayerNorm(8), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)])
    prepared = subquad.prepare(copy.deepcopy(norms).eval()).to(DEVICE)
    norms.to(DEVICE)
    shapes = [(2, 8), (2, 8, 5), (2, 3, 8)], [(2, 8, 5, 5), (8, 5, 5)]
    with torch.no_grad(), kernels.use_backend('triton'):
        for module, form, inputs in zip(norms, prepared, (shapes[0][:2], shapes[0][::2], shapes[1], shapes[1])):
            assert type(form) is not type(module)
            for shape in inputs:
                x = torch.randn(shape, device=DEVICE)
                y, expected = form(x), module(x)
                assert y.stride() == expected.stride() and relative_error(y, expected) <= 1e-6
        with pytest.raises(RuntimeError):
            prepared[1](torch.randn(2, 16, device=DEVICE))


def test_a_tree_has_its_export_form():
    _, prepared = _models('test_myo')
    assert any(type(module) is prepare_gpu.OneProductTreeMixer for module in prepared.modules())
    prepare_for_export(prepared)
    assert not any(type(module) is prepare_gpu.OneProductTreeMixer for module in prepared.modules())


@pytest.mark.parametrize('name', MOST_OPERATORS)
def test_operators_of_a_forward_pass(name):
    with torch.device('meta'):
        prepared = subquad.prepare(timm.create_model(name).eval().bfloat16())
    x = torch.empty(128, 3, 224, 224, device='meta', dtype=torch.bfloat16)
    with torch.no_grad(), kernels.use_backend('triton'):
        prepared(x)                                                     # some tables are kept
        with Dispatches() as found:
            prepared(x)
    assert 100 < found.count <= MOST_OPERATORS[name], found.names


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('shape', [(3, 5, 64), (7, 20), (1, 2, 2, 320), (2, 0, 8)], ids=str)
def test_layer_norm(shape, dtype):
    x, add = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    weight, bias, ahead = (torch.randn(shape[-1], device=DEVICE).to(dtype) for _ in range(3))
    total = x.double() + add.double()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    for given, s, later in (((None, None), x.double(), ()), ((add, None), total, total),
                            ((add, ahead), total, total + ahead.double())):
        for w, b in ((weight, bias), (None, None)):
            y, found = layer_norm(x, w, b, 1e-5, *given)
            affine = (None, None) if w is None else (w.double(), b.double())
            expected = nn.functional.layer_norm(s, shape[-1:], *affine, 1e-5)
            assert y.dtype == dtype and (y - expected).abs().le(tolerance * expected.abs().clamp(min=1)).all()
            if given[0] is None:
                assert found.numel() == 0
            else:
                assert (found - later).abs().le(tolerance * later.abs().clamp(min=1)).all()


@pytest.mark.parametrize('act', [nn.Identity(), nn.GELU(), nn.SiLU()], ids=str)
def test_bias_act(act):
    x, bias = 5 * torch.randn(3, 7, 11, 20, device=DEVICE), torch.randn(20, device=DEVICE)
    expected = act(x.double() + bias.double())
    assert (bias_act(x, bias, ACTIVATIONS[type(act)]) - expected).abs().max() <= 2e-6
    assert bias_act(x[:0], bias, ACTIVATIONS[type(act)]).shape == (0, 7, 11, 20)


@pytest.mark.parametrize('shape', [(3, 5, 7, 20), (1, 40, 43, 96), (2, 1, 1, 8), (0, 4, 4, 8)], ids=str)
def test_group_norm(shape, monkeypatch):
    monkeypatch.setattr(importlib.import_module('subquad.kernels.prepared.triton_group_norm'), 'PARTS', 16)
    x, add = 3 + torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
    weight, bias, ahead = (torch.randn(shape[-1], device=DEVICE) for _ in range(3))
    total = x.double() + add.double()
    for given, s, later in (((), x.double(), None), ((add, None), total, total),
                            ((add, ahead), total, total + ahead.double())):
        y, found = group_norm(x, weight, bias, 1e-5, *given)
        expected = nn.functional.group_norm(s.permute(0, 3, 1, 2), 1, weight.double(), bias.double(), 1e-5)
        assert (y - expected.permute(0, 2, 3, 1)).abs().le(5e-6).all()
        assert found.numel() == 0 if later is None else (found - later).abs().le(1e-6 * later.abs().clamp(min=1)).all()


@pytest.mark.parametrize('directions', [1, 2])
@pytest.mark.parametrize('batch, height, width, heads', [(2, 3, 5, 2), (1, 20, 70, 3), (2, 1, 1, 1), (1, 130, 17, 2),
                                                         (0, 4, 4, 2)])
def test_path_sums(batch, height, width, heads, directions):
    z = 5 * torch.randn(batch, height, width, heads * directions + 3, device=DEVICE)[..., :heads * directions]
    a_log = torch.randn(heads, device=DEVICE)
    if z.numel():
        z[0, 0, 0, 0] = 1e4                                              # a step log below the least one
    steps = -a_log.double().exp() * nn.functional.softplus(z.double().unflatten(3, (directions, heads))) / 2
    steps = steps.clamp(-80, 0).permute(3, 0, 4, 1, 2)
    alpha, beta = steps[0], steps[-1]
    for sums, expected in ((False, (alpha, beta)), (True, (alpha.cumsum(-1), beta.cumsum(-2)))):
        for found, wanted in zip(path_sums(z, a_log, 2.0, sums), expected):
            assert found.shape == wanted.shape and found.dtype == torch.float32
            assert (found - wanted).abs().le(1e-6 * wanted.abs().clamp(min=1)).all()
