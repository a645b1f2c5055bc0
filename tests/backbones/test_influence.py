"""Influence of all tokens on one token: rows equal those of the Jacobian of the mixer with fixed coefficients."""
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import assert_close
from torch import nn

import subquad
from subquad.backbones.influence import attention_without_decay, mixer_influence, pixel_of, polyline_mask
from subquad.backbones.mixers import (
    EosMixer,
    LinformerSelfAttention,
    MultiHeadSelfAttention,
    PolylineMixer,
    SeparableSelfAttention,
    TreeMixer,
)
from subquad.backbones.mixers import eos as eos_module
from subquad.backbones.saliency import class_activation, effective_receptive_field
from subquad.backbones.timm_interface import init_linear
from subquad.kernels.polyline_attention.reference import polyline_log_masks

GRID, TOKEN = (4, 5), (1, 3)
# SiLU of this number is 1.
_NEUTRAL_GATE = 1.2784645427610738


class Given(nn.Module):
    """A layer that returns a given tensor, whatever its input."""

    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def random(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def jacobian(function, values):
    """The full Jacobian of a function by autograd, output dimensions first."""
    return torch.autograd.functional.jacobian(function, values)


def shared_by_channels(matrix, heads):
    """Return the rows (heads, H, W) that all channels of a head have, from (C, H, W, C), and check that they do."""
    channels = matrix.shape[0] // heads
    matrix = matrix.reshape(heads, channels, *GRID, heads, channels)
    rows = torch.einsum('hdyxhd->hyx', matrix) / channels
    eye = torch.eye(heads * channels, dtype=matrix.dtype).reshape(heads, channels, heads, channels)
    assert_close(matrix, torch.einsum('hyx,hdge->hdyxge', rows, eye), 1e-9)
    return rows


ALL_PATHS = [('full', mode, paths) for mode in ('additive', 'multiplicative')
             for paths in ('both', 'v2h', 'cross_scan', 'rmt', 'none')]


@pytest.mark.parametrize('attention, mask_mode, paths', [
    *ALL_PATHS, ('crisscross', 'additive', 'both'), ('crisscross', 'multiplicative', 'v2h'),
    ('linear', 'additive', 'both'), ('decomposed', 'additive', 'both'), ('decomposed', 'additive', 'cross_scan')])
def test_rows_of_polyline_attention(attention, mask_mode, paths):
    mixer = random(PolylineMixer(12, 2, attention=attention, mask_mode=mask_mode, paths=paths))
    x = torch.randn(1, *GRID, 12, dtype=torch.float64)
    found = mixer_influence(mixer, x, TOKEN)
    mixer.v, mixer.out, values = Given(), nn.Identity(), torch.randn(1, *GRID, 12, dtype=torch.float64)
    nn.init.zeros_(mixer.lepe.weight)
    nn.init.zeros_(mixer.lepe.bias)

    def run(values):
        mixer.v.value = values
        return mixer(x)[0, TOKEN[0], TOKEN[1]]

    expected = shared_by_channels(jacobian(run, values)[:, 0], 2)
    assert_close(found[0], expected, 1e-9)
    assert found.shape == (1, 2, *GRID) and mixer_influence(mixer.float(), x.float(), TOKEN).dtype == torch.float32


@pytest.mark.parametrize('options', [{}, dict(parametrization='symmetric', shift_grid=True), dict(max_levels=2),
                                     dict(parametrization='skew'), dict(static_edges=True)])
def test_rows_of_tree_solves(options):
    mixer, x = random(TreeMixer(8, 2, **options)), torch.randn(1, *GRID, 8, dtype=torch.float64)
    found = mixer_influence(mixer, x, TOKEN)
    mixer.value, mixer.out = Given(), nn.Identity()
    mixer.gate = Given(torch.full_like(x, _NEUTRAL_GATE))

    def run(values):
        mixer.value.value = values
        return mixer(x)[0, TOKEN[0], TOKEN[1]]

    assert_close(found[0], shared_by_channels(jacobian(run, torch.randn_like(x))[:, 0], 2), 1e-9)
    signed = options.get('parametrization') in ('skew', 'symmetric')
    assert bool((found < 0).any()) == signed


@pytest.mark.parametrize('name, mode', [
    *((name, 'axis') for name in ('gla', 'mamba', 'retnet', 'deltanet', 's4d', 'rwkv4', 'cosformer', '1-1-1-6')),
    ('gla', 'raster'), ('gla', 'forward'), ('hgrn', 'raster'), ('s5', 'raster')])
def test_rows_of_recurrences(name, mode, monkeypatch):
    """The row of a head is the mean over its output channels, and the sum over its input channels."""
    torch.manual_seed(0)
    mixer = EosMixer(8, 2, name, mode=mode).apply(init_linear).double().eval()
    x = torch.randn(1, *GRID, 8, dtype=torch.float64)
    values = mixer.value(x).detach()
    found, norm = mixer_influence(mixer, x, TOKEN), F.layer_norm

    def fixed(y, *arguments, **options):
        mean, scale = y.detach().mean(-1, keepdim=True), (y.detach().var(-1, correction=0, keepdim=True) + 1e-6).rsqrt()
        assert_close((y - mean) * scale, norm(y, *arguments, **options), 1e-9)
        return (y - mean) * scale

    monkeypatch.setattr(eos_module.F, 'layer_norm', fixed)
    matrix = jacobian(lambda values: mixer.mix(values, x)[0, TOKEN[0], TOKEN[1]], values)[:, 0]      # (C, H, W, C)
    matrix = matrix.reshape(2, 4, *GRID, 2, 4)
    assert_close(found[0], torch.einsum('gdyxhe->hyx', matrix) / 4, 1e-9)
    if name != 's5':
        assert matrix[0, :, :, :, 1].abs().max() == 0
    if mode == 'forward':
        assert found.flatten(2)[..., TOKEN[0] * GRID[1] + TOKEN[1] + 1:].abs().max() == 0


@pytest.mark.parametrize('latent, sampling', [(1, 'pixel'), (3, 'pixel'), (2, 'patch')])
def test_rows_of_separable_attention(latent, sampling):
    mixer = random(SeparableSelfAttention(6, latent, sampling=sampling))
    x = torch.randn(1, 6, *GRID, dtype=torch.float64)
    found, query = mixer_influence(mixer, x, TOKEN), mixer.query(x).permute(0, 3, 1, 2).detach()
    mixer.qkv_proj, mixer.out_proj = Given(), nn.Identity()

    def run(keys):
        mixer.qkv_proj.value = torch.cat([query, keys, torch.ones_like(keys)], 1)
        return mixer(x)[0, :, TOKEN[0], TOKEN[1]]

    rows = shared_by_channels(jacobian(run, torch.randn_like(x))[:, 0].permute(0, 2, 3, 1), 1)
    assert_close(found[0], rows, 1e-9)
    assert torch.isclose(found.sum(), torch.ones((), dtype=torch.float64)) and (found == 0).sum() > 9


@pytest.mark.parametrize('mixer', [MultiHeadSelfAttention(8, 2), LinformerSelfAttention(8, 5, 2, projected=3)],
                         ids=['dense', 'linformer'])
def test_rows_of_attention_in_groups(mixer):
    mixer, x = random(mixer), torch.randn(1, 8, *GRID, dtype=torch.float64)                # 4 groups of 5 tokens
    found, (q, k, _) = mixer_influence(mixer, x, TOKEN), mixer.qkv_proj(x).detach().split(8, 1)
    mixer.qkv_proj, mixer.out_proj = Given(), nn.Identity()

    def run(values):
        mixer.qkv_proj.value = torch.cat([q, k, values], 1)
        return mixer(x)[0, :, TOKEN[0], TOKEN[1]]

    assert_close(found[0], shared_by_channels(jacobian(run, torch.randn_like(x))[:, 0].permute(0, 2, 3, 1), 2), 1e-9)


@pytest.mark.parametrize('paths', ['both', 'v2h', 'rmt'])
def test_polyline_masks(paths):
    """The attention without decay and the mask, from dense matrices; they are the factors of the multiplicative row."""
    mixer = random(PolylineMixer(8, 2, mask_mode='multiplicative', paths=paths))
    x = torch.randn(1, *GRID, 8, dtype=torch.float64)
    attention, mask = attention_without_decay(mixer, x, TOKEN), polyline_mask(mixer, x, TOKEN)
    dense = [log.exp() for log in polyline_log_masks(*mixer.decay_logs(x))]
    expected = sum(dense[:2 if paths == 'both' else 1])[0, :, TOKEN[0] * GRID[1] + TOKEN[1]]
    assert_close(mask[0].flatten(1), expected, 1e-9)
    assert torch.allclose(attention.sum((2, 3)), torch.ones(1, 2, dtype=torch.float64))
    assert_close(attention * mask, mixer_influence(mixer, x, TOKEN), 1e-9)
    with pytest.raises(ValueError, match="paths='none' has no polyline mask"):
        polyline_mask(PolylineMixer(8, 2, paths='none'), x.float(), TOKEN)


@pytest.mark.parametrize('name, options', [
    ('test_ppma', {}), ('test_myo', {}), ('test_lcsm', {}), ('test_mobilevitv2', {}),
    ('test_mobilevitv2', dict(attention='mha')),
    ('test_mobilevitv2', dict(attention='linformer', img_size=(64, 96)))])
def test_influence_in_models(name, options):
    """Each layer's row equals that of its mixer for the mixer's own input, at the token that contains the pixel."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **options)
    x, seen = torch.randn(2, 3, 64, 96), {}
    with torch.inference_mode():
        found = subquad.influence(model, x, (40, 20))
    assert model.training and len(found) == (9 if 'mobile' in name else 5)
    for token, weights in found.values():
        size = weights.shape[2:]
        assert token == (40 * size[0] // 64, 20 * size[1] // 96)
        if name != 'test_lcsm' and options.get('attention') != 'linformer':
            assert torch.allclose(weights.sum((2, 3)), torch.ones(2, 1), atol=1e-5)
    layer = list(found)[1]
    if not options:
        module = model.get_submodule(f'{layer}.attn' if 'mobile' in name else f'{layer}.mixer')
        module.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))
        model.eval()(x)
        assert_close(found[layer].weights, mixer_influence(module, seen['x'], found[layer].token), 1e-5)
        assert list(subquad.influence(model, x, (0, 0), layers=[layer])) == [layer]
    if name == 'test_myo':
        others = model.influences(x, (40 / 64, 20 / 96))
        assert all(torch.equal(other.weights, found[key].weights) for key, other in others.items())


def test_influence_in_hybrids_and_grafts():
    """Layers without a mixer that adds up tokens are left out; rows of attention and of Laplacian trees sum to 1."""
    hybrid = timm.create_model('test_ppma', mixers=('separable', 'identity', 'tree', 'attention'))
    graft = subquad.graft(timm.create_model('test_vit', img_size=64, depth=3), 'tree', layers=[0, 2])
    own = ['stages.0.blocks.0', 'stages.2.blocks.0', 'stages.2.blocks.1', 'stages.3.blocks.0']
    for model, layers in ((hybrid, own), (graft, ['blocks.0', 'blocks.2'])):
        found = subquad.influence(model, torch.randn(1, 3, 64, 64), (50, 10))
        assert list(found) == layers
        for token, weights in found.values():
            assert token == (50 * weights.shape[2] // 64, 10 * weights.shape[3] // 64)
            assert torch.allclose(weights.sum((2, 3)), torch.ones(()), atol=1e-5)


def test_influence_in_other_modules():
    """The whole model runs where there is no forward_features, and the rows are those of the model itself."""
    torch.manual_seed(0)
    model, x = timm.create_model('test_ppma', num_classes=3).eval(), torch.randn(1, 3, 64, 96)
    expected = subquad.influence(model, x, (40, 20))
    features = timm.create_model('test_ppma', features_only=True).eval()
    features.load_state_dict({name.replace('stages.', 'stages_', 1): value for name, value in model.state_dict().items()
                              if not name.startswith('head')})
    for other, rename in ((features, lambda name: name.replace('.', '_', 1)), (nn.Sequential(model), '0.{}'.format)):
        found = subquad.influence(other, x, (40, 20))
        assert list(found) == [rename(name) for name in expected]
        for ours, theirs in zip(found.values(), expected.values()):
            assert ours.token == theirs.token and torch.equal(ours.weights, theirs.weights)


def test_numbers_of_numpy_and_the_name_of_one_layer():
    model, x = timm.create_model('test_ppma', num_classes=3).eval(), torch.randn(1, 3, 64, 96)
    layer = 'stages.2.blocks.0'
    expected = subquad.influence(model, x, (40, 20), [layer])
    found = subquad.influence(model, x, np.array([40, 20]), layer)
    assert list(found) == [layer] and torch.equal(found[layer].weights, expected[layer].weights)
    assert found[layer].token == expected[layer].token and all(type(n) is int for n in found[layer].token)
    assert pixel_of((np.float32(0.5), 0), (8, 8)) == (4, 0)


def test_a_layer_that_does_not_run():
    model = nn.Sequential(timm.create_model('test_ppma', num_classes=3))
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="Sequential does not run its layer '0.stages.0.blocks.0' for these images"):
        subquad.influence(model, torch.randn(1, 3, 64, 64), (0, 0))


def test_no_square_matrix_is_computed():
    """A map of 96 x 96 tokens: a matrix of all pairs would have 85 million numbers."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            out = function(*arguments, **(options or {}))
            for y in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(y, torch.Tensor):
                    self.count = max(self.count, y.numel())
            return out

    x = torch.randn(1, 96, 96, 8)
    for mixer in (PolylineMixer(8, 1, attention='crisscross'), TreeMixer(8, 1), EosMixer(8, 1),
                  PolylineMixer(8, 1, paths='none')):
        with Largest() as largest:
            mixer_influence(mixer, x, (40, 50))
        assert 0 < largest.count < 96 ** 4 / 8


@pytest.mark.parametrize('arguments, message', [
    (dict(pixel=(64, 0)), r'pixel \(64, 0\) is outside of the image of 64 x 96: rows go from 0 to 63'),
    (dict(pixel=(0, -1)), r'pixel \(0, -1\) is outside'),
    (dict(pixel=(0.5, 0.5)), r'pixel must be two integers \(row, column\), got \(0.5, 0.5\)'),
    (dict(pixel=(1, 2), layers=['stages.9']), "there is no layer 'stages.9'; the layers are stages.0.blocks.0"),
    (dict(pixel=None), r'pixel must be two integers \(row, column\), got None'),
    (dict(pixel=5), r'pixel must be two integers \(row, column\), got 5'),
    (dict(pixel=(True, 0)), r'pixel must be two integers \(row, column\), got \(True, 0\)'),
    (dict(pixel=(1, 2), layers=[]), r'layers must be None, or one or more of stages.0.blocks.0, .*, got \[\]'),
    (dict(pixel=(1, 2), layers=5), 'layers must be None, or one or more of .*, got 5'),
    (dict(pixel=(1, 2), layers=[0]), 'there is no layer 0; the layers are stages.0.blocks.0'),
    (dict(pixel=(1, 2), x=torch.zeros(0, 3, 64, 96)), r'at least one, got torch.float32 of shape \(0, 3, 64, 96\)'),
    (dict(pixel=(1, 2), model=None), 'model must be a torch.nn.Module, got NoneType'),
    (dict(pixel=(1, 2), x=torch.zeros(3, 64, 96)),
     r'x must be images \(B, C, H, W\) of real numbers, at least one, got torch.float32 of shape \(3, 64, 96\)'),
    (dict(pixel=(1, 2), model='resnet18'), 'ResNet has no mixer of this package: PolylineMixer')])
def test_wrong_arguments(arguments, message):
    arguments = dict(dict(x=torch.zeros(1, 3, 64, 96)), **arguments)
    name = arguments.pop('model', 'test_ppma')
    model = None if name is None else timm.create_model(name)
    with pytest.raises((ValueError, TypeError), match=message):
        subquad.influence(model, **arguments)


def test_dtypes_that_the_model_cannot_run_are_named():
    x = torch.zeros(1, 3, 64, 64)
    for function in (subquad.influence, effective_receptive_field):
        model = timm.create_model('test_ppma').eval()
        with pytest.raises(TypeError, match='PPMA cannot run images of torch.float64 with parameters of torch.float32'):
            function(model, x.double(), (1, 2))
        model.stages[1].half()
        with pytest.raises(TypeError, match='images of torch.float32 with parameters of torch.float16 and'):
            function(model, x, (1, 2))
    assert subquad.influence(timm.create_model('test_ppma').double(), x.double(), (1, 2))
    with pytest.raises(TypeError, match='images of torch.float64'):
        class_activation(timm.create_model('test_ppma'), x.double())


def test_wrong_mixers_and_tokens():
    with pytest.raises(ValueError, match='Linear is no mixer of this package'):
        mixer_influence(nn.Linear(2, 2), torch.zeros(1, 2, 2, 2), (0, 0))
    for kind in (PolylineMixer, TreeMixer):
        with pytest.raises(ValueError, match=r'token \(0, 3\) is outside of the map of 4 x 3'):
            mixer_influence(kind(4, 1), torch.zeros(1, 4, 3, 4), (0, 3))
    with pytest.raises(ValueError, match='at must be two fractions'):
        pixel_of((0.5, 1.0), (3, 3))
    assert pixel_of((0.5, 0.99), (3, 200)) == (1, 198)


@pytest.mark.parametrize('options', [{}, dict(parametrization='symmetric', shift_grid=True), dict(max_levels=2)])
def test_standard_deviations_of_a_tree(options):
    """They are the roots of the diagonal of the inverse of the dense matrix."""
    from subquad.kernels.quadtree_solve.reference import quadtree_matrix
    from subquad.kernels.trees import sibling_normalized
    mixer, x = random(TreeMixer(8, 2, **options)), torch.randn(2, *GRID, 8, dtype=torch.float64)
    found, levels = mixer.standard_deviation(x), mixer.levels(*GRID)
    edges, parametrization = mixer.edges(x, levels), mixer.parametrization
    if parametrization == 'symmetric':
        edges = [sibling_normalized(edge, level, mixer.rho) for edge, level in zip(edges, levels)]
    matrix = quadtree_matrix(edges, *GRID, parametrization, levels[0][2:])
    expected = torch.linalg.inv(matrix).diagonal(dim1=2, dim2=3)[..., :20].sqrt().reshape(2, 2, *GRID)
    assert_close(found, expected, 1e-9)
    with pytest.raises(ValueError, match='skew.* has no standard deviation'):
        TreeMixer(8, 2, parametrization='skew').standard_deviation(x.float())
