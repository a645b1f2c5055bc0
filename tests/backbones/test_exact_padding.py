"""A padded batch of images of several sizes equals the single images: logits, features and gradients."""
import pytest
import timm
import torch
from helpers import assert_close
from torch import nn

import subquad
from subquad.backbones.mixers.eos_codes import PRESETS
from subquad.backbones.padding import sizes_of_mask

SIZES = [(64, 96), (90, 65), (33, 128), (64, 96)]
MODELS = {
    'ppma': ('test_ppma', {}),
    'ppma_linear': ('test_ppma', dict(attention='linear')),
    'ppma_decomposed_cross': ('test_ppma', dict(attention='decomposed', paths='cross_scan')),
    'ppma_paper': ('test_ppma', dict(mask_mode='multiplicative', attention=('crisscross', 'full', 'full', 'full'))),
    'myo': ('test_myo', {}),
    'myo_symmetric': ('test_myo', dict(parametrization='symmetric', depths=(2, 2, 2, 2))),
    'myo_forest': ('test_myo', dict(parametrization='skew', max_levels=3, depths=(2, 2, 2, 2))),
    'mobilevitv2': ('test_mobilevitv2', {}),
    'mobilevitv2_exact': ('test_mobilevitv2', dict(exact_size=True, output_stride=16)),
    'mobilevitv2_mha_max': ('test_mobilevitv2', dict(attention='mha', global_pool='catavgmax')),
    'mobilevitv2_patch': ('test_mobilevitv2', dict(sampling='patch')),
    'lcsm': ('test_lcsm', {}),
    'lcsm_raster': ('test_lcsm', dict(mode='raster')),
    'lcsm_forward': ('test_lcsm', dict(mode='forward', mixer='mamba')),
    'lcsm_code_12': ('test_lcsm', dict(mixer='1-12-1-1')),
}


def build(case='ppma', **options):
    """A model whose BatchNorm layers, decays and edges are not those of an untrained network."""
    name, given = MODELS[case]
    model = timm.create_model(name, num_classes=7, **given, **options).eval()
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1 and 'A_log' not in key:
            nn.init.normal_(parameter, float(key.endswith('weight')), 0.2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.2)
    return model


def images_of(sizes=SIZES):
    return [torch.randn(3, *size) for size in sizes]


def spoiled(images):
    """A batch whose padding holds numbers that no result may depend on."""
    batch, sizes = subquad.pad_images(images)
    batch = nn.functional.pad(batch, (0, 7, 0, 5), value=torch.nan)
    for image, (height, width) in zip(batch, sizes):
        image[:, height:], image[:, :, width:] = 1e4, torch.nan
    return batch, sizes


@torch.no_grad()
@pytest.mark.parametrize('case', MODELS)
def test_padded_batch_equals_single_images(case):
    model, images = build(case), images_of()
    batch, sizes = spoiled(images)
    with subquad.exact_padding(model, sizes) as stage_sizes:
        logits, (features, maps) = model(batch), model.forward_intermediates(batch)
    for n, image in enumerate(images):
        single, single_maps = model.forward_intermediates(image[None])
        assert_close(logits[n], model(image[None])[0], 1e-5, 'logits')
        assert len(maps) == len(single_maps) == len(stage_sizes)
        for y, expected, regions in zip([*maps, features], [*single_maps, single], [*stage_sizes, stage_sizes[-1]]):
            height, width = regions[n]
            assert expected.shape[2:] == (height, width)
            assert_close(y[n, :, :height, :width], expected[0], 1e-5, 'map')
            assert not y[n, :, height:].any() and not y[n, :, :, width:].any()


@torch.no_grad()
@pytest.mark.parametrize('mixer', PRESETS)
def test_every_recurrence(mixer):
    model = build('lcsm', mixer=mixer, depths=(1, 1, 1, 1), dims=(16, 32, 32, 32), num_heads=(1, 1, 2, 2))
    images = images_of([(64, 40), (47, 96)])
    batch, sizes = spoiled(images)
    with subquad.exact_padding(model, sizes):
        features = model.forward_features(batch)
    for n, image in enumerate(images):
        single = model.forward_features(image[None])[0]
        assert_close(features[n, :, :single.shape[1], :single.shape[2]], single, 1e-5)


@pytest.mark.parametrize('case', ['ppma', 'myo', 'mobilevitv2', 'lcsm'])
def test_gradients_equal_those_of_single_images(case):
    """In float64, because gradients of small parameters are sums of large numbers."""
    model, images = build(case).double(), [image.double() for image in images_of([(40, 64), (64, 33)])]
    batch, sizes = spoiled(images)
    batch.requires_grad_()
    with subquad.exact_padding(model, sizes):
        model(batch).square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for n, image in enumerate(images):
        image.requires_grad_()
        model(image[None]).square().sum().backward()
        height, width = sizes[n]
        assert_close(batch.grad[n, :, :height, :width], image.grad, 1e-9)
        assert not batch.grad[n, :, height:].any() and not batch.grad[n, :, :, width:].any()
    for name, parameter in model.named_parameters():
        assert_close(grads[name], parameter.grad, 1e-9, name)


@torch.no_grad()
def test_backbone_of_a_detector():
    """Output norms keep the padding at zero, and the context finds the backbone inside of a larger module."""
    pytest.importorskip('mmengine')
    from subquad.backbones.mm import Myo
    detector = nn.ModuleDict(dict(backbone=Myo(arch='test', out_indices=(1, 3), output_norms=True))).eval()
    for norm in detector.backbone.output_norms:
        nn.init.normal_(getattr(norm, 'bias', torch.empty(1)))
    images = images_of([(64, 96), (81, 64)])
    batch, sizes = spoiled(images)
    with subquad.exact_padding(detector, sizes) as stage_sizes:
        maps = detector.backbone(batch)
    for n, image in enumerate(images):
        for stage, y, expected in zip((1, 3), maps, detector.backbone(image[None]), strict=True):
            height, width = stage_sizes[stage][n]
            assert_close(y[n, :, :height, :width], expected[0], 1e-5)
            assert not y[n, :, height:].any() and not y[n, :, :, width:].any()


class Shuffle(nn.Module):
    """A mixer of a user, which depends on the size of the map and knows nothing of padding."""

    def forward(self, x):
        return x.flip(1, 2) * x.shape[2]


@torch.no_grad()
def test_mixers_of_users_run_by_size():
    model = build('ppma')
    model.stages[1].blocks[0].mixer = Shuffle()
    images = images_of()
    logits = subquad.forward_padded(model, images)
    for n, image in enumerate(images):
        assert_close(logits[n], model(image[None])[0], 1e-5)


@torch.no_grad()
def test_mask_is_the_same_as_sizes():
    model, images = build('lcsm'), images_of()
    batch, sizes = subquad.pad_images(images)
    mask = torch.zeros(len(batch), *batch.shape[2:], dtype=torch.bool)
    for own, (height, width) in zip(mask, sizes):
        own[:height, :width] = True
    assert sizes_of_mask(mask) == sizes
    with subquad.exact_padding(model, mask=mask):
        masked = model(batch)
    with subquad.exact_padding(model, torch.tensor(sizes)):
        assert model(batch).equal(masked)


@torch.no_grad()
@pytest.mark.parametrize('case', ['ppma', 'mobilevitv2'])
def test_nothing_is_left_behind(case):
    """After the context, or an error in it, the model is as before, with its own results."""
    model, x = build(case), torch.randn(2, 3, 64, 64)
    before, keys = model(x), list(model.state_dict())
    with pytest.raises(ZeroDivisionError), subquad.exact_padding(model, [(64, 64), (32, 40)]):
        assert list(model.state_dict()) == keys
        assert not model(x).equal(before)
        raise ZeroDivisionError
    assert model(x).equal(before)
    assert not any(m._forward_hooks or m._forward_pre_hooks or 'forward' in m.__dict__ for m in model.modules())


def _mask(*rows):
    return torch.tensor([rows], dtype=torch.bool).repeat_interleave(32, 1).repeat_interleave(32, 2)


@pytest.mark.parametrize('given, error, message', [
    (dict(), ValueError, 'either sizes or mask, got neither'),
    (dict(sizes=[(64, 64)], mask=_mask((1, 1), (1, 1))), ValueError, 'got both'),
    (dict(sizes=[(64, 64)] * 2), ValueError, 'one entry for each of the 1 images of the batch, got 2'),
    (dict(sizes=[(64, 65)]), ValueError, 'must not exceed those of the batch, 64 x 64, got 64 x 65 for image 0'),
    (dict(sizes=[(0, 64)]), ValueError, 'at least 32 x 32, got 0 x 64 for image 0'),
    (dict(sizes=[]), ValueError, 'at least one image, got none'),
    (dict(sizes=[(31, 64)]), ValueError, 'at least 32 x 32, got 31 x 64'),
    (dict(sizes=[(64., 64.)]), TypeError, r'pair \(height, width\) of integers for each image, got \(64.0, 64.0\)'),
    (dict(sizes=[64]), TypeError, 'got 64 for image 0'),
    (dict(sizes=5), TypeError, r'sizes must be a list of pairs \(height, width\) or an integer tensor \(B, 2\), got 5'),
    (dict(sizes=torch.tensor(5)), TypeError, r'a list of pairs .*, got tensor\(5\)'),
    (dict(mask=torch.ones(1, 64, 64)), TypeError, r'boolean tensor \(B, H, W\), true for the image, got torch.float32'),
    (dict(mask=torch.ones(64, 64, dtype=torch.bool)), ValueError, r'must be \(B, H, W\), got \(64, 64\)'),
    (dict(mask=_mask((0, 1), (0, 1))), ValueError, 'rectangle at the top left .* image 0 differs'),
    (dict(mask=_mask((1, 1), (1, 0))), ValueError, 'rectangle at the top left'),
    (dict(mask=_mask((1, 0, 1))), ValueError, 'rectangle at the top left'),
    (dict(mask=_mask((0, 0))), ValueError, 'at least 32 x 32, got 0 x 0'),
    (dict(mask=_mask((1, 1, 0), (1, 1, 0))), ValueError, r'height and width of the batch, \(64, 64\), got \(64, 96\)'),
])
def test_wrong_sizes_and_masks(given, error, message):
    model = build('ppma')
    with pytest.raises(error, match=message), subquad.exact_padding(model, **given):
        model(torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize('case', ['ppma', 'mobilevitv2'])
@pytest.mark.parametrize('x, error', [(torch.zeros(3, 64, 64), ValueError), (torch.zeros(1, 4, 64, 64), ValueError),
                                      (torch.zeros(1, 3, 64, 64).int(), TypeError), (None, TypeError)])
def test_wrong_inputs_have_the_message_of_the_stem(case, x, error):
    model = build(case)
    with subquad.exact_padding(model, [(64, 64)]), pytest.raises(error, match='the input must be'):
        model(x)


def test_models_that_cannot_take_padding():
    sizes, x = [(64, 64)], torch.randn(1, 3, 64, 64)
    with pytest.raises(ValueError, match='one PPMA, .* of subquad, got Linear with 0'):
        subquad.exact_padding(nn.Linear(1, 1), sizes).__enter__()
    with pytest.raises(ValueError, match='got ModuleList with 2'):
        subquad.exact_padding(nn.ModuleList([build('ppma'), build('myo')]), sizes).__enter__()
    with pytest.raises(TypeError, match='compiled model'):
        subquad.exact_padding(torch.compile(build('ppma')), sizes).__enter__()
    model = build('ppma')
    with subquad.exact_padding(model, sizes), pytest.raises(ValueError, match='cannot be nested'):
        subquad.exact_padding(model, sizes).__enter__()
    with subquad.exact_padding(model.train(), sizes), pytest.raises(ValueError, match='stem.conv1.norm is in training'):
        model(x)
    model.eval().set_grad_checkpointing()
    with subquad.exact_padding(model, sizes), pytest.raises(ValueError, match='gradient checkpointing'):
        model(x)
    with subquad.exact_padding(model, sizes), torch.no_grad():
        assert model(x).isfinite().all()


@pytest.mark.parametrize('images, error, message', [
    ([], ValueError, 'one or more tensors .* got none'),
    ([torch.zeros(3, 64, 64), torch.zeros(1, 64, 64)], ValueError, 'equal channels'),
    ([torch.zeros(3, 64, 64), torch.zeros(3, 64, 64).double()], ValueError, 'equal channels, dtypes'),
    ([torch.zeros(1, 3, 64, 64)], ValueError, r'tensors \(C, H, W\)'),
    ([[1]], TypeError, 'got list'),
    (None, TypeError, r'images must be a list of tensors \(C, H, W\), got NoneType'),
])
def test_wrong_images(images, error, message):
    with pytest.raises(error, match=message):
        subquad.pad_images(images)


def test_images_of_a_generator():
    batch, sizes = subquad.pad_images(torch.ones(3, side, 40) for side in (32, 48))
    assert batch.shape == (2, 3, 48, 40) and sizes == [(32, 40), (48, 40)]


def test_a_mask_for_a_recurrence_that_cannot_take_one():
    mixer = build('lcsm_raster').stages[0].blocks[0].mixer
    with pytest.raises(ValueError, match="mode='raster' does not take a mask; use subquad.exact_padding"):
        mixer(torch.randn(1, 4, 4, mixer.dim), torch.ones(1, 4, 4, dtype=torch.bool))
