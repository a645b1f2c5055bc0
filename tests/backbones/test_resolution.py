"""The decay of a fraction of the image stays the same at another resolution, and the scale 1 changes nothing."""
import math

import pytest
import timm
import torch
from helpers import assert_close
from torch import nn

import subquad
from subquad.backbones.mixers import EosMixer, PolylineMixer, TreeMixer
from subquad.backbones.mixers.eos_decay import memory_lengths

FADING = ['s4', 's4d', 's5', 'dss', 'tnn', 'mamba', 'retnet', 'tnl', 'gla', 'gateloop', 'dur', 'gfw', 'rwkv4', 'hgrn',
          'lrn', 'm3', '1-6-1-0', '1-7-1-0', '0-8-1-0', '1-9-1-0', '1-0-1-0', '1-5-1-0', '0-1-0-1-4']
LASTING = ['linear_attention', 'cosformer', 'lrpe', 'deltanet', 'fwp', 'm1', 'm2', '1-10-1-0', '1-11-1-0', '1-12-1-0']


def upsampled(x, scale):
    """Nearest neighbors of tokens (B, H, W, C)."""
    return x.repeat_interleave(scale, 1).repeat_interleave(scale, 2)


def between(steps, scale, dim):
    """The total decay between the last tokens of neighboring cells of `scale` tokens."""
    total = steps.cumsum(dim)
    corners = total.index_select(dim, torch.arange(scale - 1, total.shape[dim], scale))
    return corners.diff(dim=dim)


@torch.no_grad()
@pytest.mark.parametrize('scale', [2, 3])
@pytest.mark.parametrize('options', [dict(), dict(shared_decay=True), dict(paths='rmt', attention='crisscross'),
                                     dict(paths='cross_scan', attention='crisscross'), dict(attention='linear')])
def test_decay_of_polylines_between_corresponding_points(options, scale):
    mixer, x = PolylineMixer(8, 2, **options), torch.randn(1, 4, 5, 8)
    logs = mixer.decay_logs(x)
    subquad.set_decay_scale(mixer, scale)
    fine = mixer.decay_logs(upsampled(x, scale))
    for steps, fine_steps, dim in zip(logs, fine, (3, 2)):
        kept = fine_steps[..., ::scale] if dim == 2 else fine_steps[:, :, ::scale]
        assert_close(between(kept, scale, dim), between(steps, 1, dim), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize('name', FADING)
def test_decay_of_recurrences_between_corresponding_points(name):
    """Two steps at twice the resolution decay as one, and memories last twice as many tokens."""
    mixer = EosMixer(16, 2, name)
    x = torch.randn(1, 1, 5, 16)
    coarse = mixer.state_decay(x)
    subquad.set_decay_scale(mixer, 2)
    fine = mixer.state_decay(x.repeat_interleave(2, 2))
    assert_close(2 * fine.elements, coarse.elements, 1e-5)
    if coarse.logs.shape[3] > 1:
        assert_close(between(fine.logs, 2, 3), between(coarse.logs, 1, 3), 1e-5)
    else:
        length = memory_lengths(coarse.logs.expand(1, -1, 1, 5), 3)
        assert_close(memory_lengths(fine.logs.expand(1, -1, 1, 10), 3)[..., ::2], 2 * length.float(), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize('name', FADING)
def test_scans_use_the_scaled_decay(name):
    """Not only what the mixer reports: the scale changes its result, and the scale 1 restores it."""
    mixer, x = EosMixer(16, 2, name, gated=False), torch.randn(1, 3, 40, 16)
    before = mixer(x)
    subquad.set_decay_scale(mixer, 4)
    after = mixer(x)
    assert (after - before).abs().max() > 1e-4 * before.abs().max()
    subquad.set_decay_scale(mixer, 1)
    assert mixer(x).equal(before)


@torch.no_grad()
def test_recurrence_of_a_constant_image_converges():
    """A running mean of a value that jumps once: at every resolution, the scaled decay gives the same step response."""
    mixer = EosMixer(8, 1, 'lrn', gated=False, tau=1.0)
    nn.init.zeros_(mixer.recurrence.forget.weight)                  # the decay 1/2 for each token
    nn.init.zeros_(mixer.recurrence.forget.bias)
    line = torch.cat([torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)], 2)

    def response(x):
        return mixer.recurrence.scan(x, mixer.recurrence.tokens(torch.zeros_like(x)))[0, 0, :, 0]

    coarse = response(line)
    subquad.set_decay_scale(mixer, 4)
    assert_close(response(line.repeat_interleave(4, 2))[3::4], coarse, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize('parametrization, factor', [('laplacian', 4.0), ('symmetric', 1.0), ('skew', 1.0)])
def test_levels_of_trees_are_shifted(parametrization, factor):
    """Edges of level n + 1 are those of level n before, times the number of tokens of a cell for 'laplacian'."""
    mixer = TreeMixer(8, 2, parametrization, static_edges=True)
    nn.init.normal_(mixer.edge_bias)
    x = torch.randn(1, 6, 8, 8)
    levels = mixer.levels(6, 8)
    coarse = mixer.edges(x, levels)
    subquad.set_decay_scale(mixer, 2)
    fine = mixer.edges(upsampled(x, 2), mixer.levels(12, 16))
    assert len(fine) == len(coarse) + 1
    for edge, expected in zip(fine[1:], coarse):
        assert_close(edge, factor * expected, 1e-6)
    assert_close(fine[0][:, :, :6, :8], coarse[0], 1e-6)             # below the finest level there are no other biases


@torch.no_grad()
def test_biases_between_levels_are_interpolated():
    mixer = TreeMixer(8, 2, static_edges=True)
    nn.init.normal_(mixer.edge_bias)
    bias = mixer.edge_bias
    subquad.set_decay_scale(mixer, 2 ** 0.25)
    shifted = mixer._biases()
    assert_close(shifted[3], 0.25 * bias[2] + 0.75 * bias[3])
    assert_close(shifted[-1], bias[-1])
    subquad.set_decay_scale(mixer, 0.5)
    assert mixer._biases()[3].equal(bias[4])


@torch.no_grad()
def test_tree_of_an_upsampled_image_gives_nearly_the_upsampled_result():
    """With biases that differ from level to level, the shift brings the solution nearer to that of the small image."""
    mixer = TreeMixer(4, 1, static_edges=True).eval()
    nn.init.uniform_(mixer.edge_bias, -6, 3)
    nn.init.eye_(mixer.value.weight)
    nn.init.zeros_(mixer.value.bias)
    x = torch.randn(1, 16, 16, 4)

    def solution(x):
        return torch.stack([mixer.influence(x, 2, k, mixer.edges(x, mixer.levels(*x.shape[1:3]))) for k in range(4)])

    def distance(fine):
        cells = nn.functional.avg_pool2d(fine.flatten(0, 1), 2, divisor_override=1)       # of the token and of its cell
        return float((cells - coarse.flatten(0, 1)).abs().sum())

    coarse = solution(x)
    big = upsampled(x, 2)

    def fine():
        return torch.stack([mixer.influence(big, 4, 2 * k, mixer.edges(big, mixer.levels(32, 32))) for k in range(4)])

    unscaled = distance(fine())
    subquad.set_decay_scale(mixer, 2)
    assert distance(fine()) < 0.7 * unscaled


@torch.no_grad()
@pytest.mark.parametrize('name', ['test_ppma', 'test_myo', 'test_lcsm'])
def test_scale_of_a_network(name):
    model, x = timm.create_model(name).eval(), torch.randn(1, 3, 64, 64)
    for module in model.modules():
        if isinstance(module, TreeMixer):
            nn.init.normal_(module.edge_bias)
    before, keys = model(x), list(model.state_dict())
    subquad.set_decay_scale(model, 2)
    assert not model(x).equal(before) and list(model.state_dict()) == keys
    subquad.set_decay_scale(model, 1.0)
    assert model(x).equal(before)


@torch.no_grad()
def test_hybrids_with_attention():
    """Attention has no decay and stays; padding is exact for all mixers that have names."""
    model = timm.create_model('test_myo', mixers=('depthwise', 'separable', 'tree', 'attention')).eval()
    subquad.set_decay_scale(model, 2)
    assert [mixer.decay_scale for mixer in model.mixers().values() if hasattr(mixer, 'decay_scale')] == [2, 2, 1]
    images = [torch.randn(3, 64, 96), torch.randn(3, 80, 40)]
    logits = subquad.forward_padded(model, images)
    for n, image in enumerate(images):
        assert_close(logits[n], model(image[None])[0], 1e-5)


@torch.no_grad()
def test_windows_of_a_forest_keep_their_share_of_the_image():
    model = timm.create_model('test_myo', max_levels=3)
    subquad.set_decay_scale(model, 2)
    mixer = model.stages[0].blocks[0].mixer
    assert len(mixer.levels(64, 64)) == 4
    assert mixer(torch.randn(1, 64, 64, 32)).isfinite().all()


@torch.no_grad()
def test_a_scale_and_padding_at_once():
    model = timm.create_model('test_myo', depths=(2, 2, 2, 2)).eval()
    for module in model.modules():
        if isinstance(module, TreeMixer):
            nn.init.normal_(module.edge_bias)
    subquad.set_decay_scale(model, 1.5)
    images = [torch.randn(3, 64, 96), torch.randn(3, 80, 40)]
    logits = subquad.forward_padded(model, images)
    for n, image in enumerate(images):
        assert_close(logits[n], model(image[None])[0], 1e-5)


@pytest.mark.parametrize('name, options, message', [
    ('test_mobilevitv2', {}, 'MobileViTv2 has no decay to scale: separable self-attention weights tokens by'),
    ('resnet18', {}, 'ResNet has no decay to scale$'),
    ('test_ppma', dict(paths='none'), r"stages.0.blocks.0.mixer cannot be scaled by 2: paths='none' has no decay"),
    ('test_ppma', dict(paths='cross_scan'), "with paths='cross_scan', a step of one row passes all tokens"),
    ('test_lcsm', dict(mode='raster'), "with mode='raster', a step of one row"),
    *(('test_lcsm', dict(mixer=mixer), f"mixer='{mixer}' has no decay for each token") for mixer in LASTING),
])
def test_models_without_a_decay_to_scale(name, options, message):
    with pytest.raises(ValueError, match=message):
        subquad.set_decay_scale(timm.create_model(name, **options), 2)


def test_a_model_that_refuses_keeps_its_scale():
    model = timm.create_model('test_myo')
    model.stages[3].blocks[0].mixer.max_levels = 2
    with pytest.raises(ValueError, match='shifts by whole levels only, so the scale must be a power of 2'):
        subquad.set_decay_scale(model, 1.5)
    with pytest.raises(ValueError, match='max_levels=2 would become 1, and must be at least 2'):
        subquad.set_decay_scale(model, 0.5)
    assert {mixer.decay_scale for mixer in model.mixers().values()} == {1.0}


@pytest.mark.parametrize('scale', [0, -1, math.inf, math.nan, '2', None, True, (2, 2)])
def test_wrong_scales(scale):
    with pytest.raises(ValueError, match='scale must be a positive finite number, got'):
        subquad.set_decay_scale(timm.create_model('test_ppma'), scale)
