"""Names of published weights: each is translated to one name here and back, and the loaders stay strict."""
import sys

import pytest
import timm
import torch
from cvnets_files import encoder_entries, transformers_names
from helpers import DATA
from ppma_files import authors_state
from safetensors import safe_open

from subquad.backbones.weights import WeightsError, load_state_dict, load_weights
from subquad.backbones.weights.key_table import KeyTable
from subquad.backbones.weights.mobilevitv2_keys import color_order, to_cvnets_keys, to_timm_keys
from subquad.backbones.weights.ppma_keys import rotary_angles, to_our_keys, to_published_keys

GOLDEN = ('ppma_layerscale_nonsquare.safetensors', 'ppma_mixed_stage3_full.safetensors')
PPMA_NAMES = ('ppma_tiny', 'ppma_small', 'ppma_base', 'test_ppma')
WIDTHS = ('050', '075', '100', '125', '150', '175', '200')


def _random_state(name, **options):
    """Build a network, and return it with random values for all weights, also for statistics and scales."""
    model = timm.create_model(name, **options)
    state = {key: torch.randn_like(value) if value.is_floating_point() else value + 7
             for key, value in model.state_dict().items()}
    return model, state


def _equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def _golden_state(name):
    with safe_open(DATA / name, 'pt') as file:
        return {key.removeprefix('state/'): file.get_tensor(key) for key in file.keys() if key.startswith('state/')}


def test_key_table_translates_numbers_and_uses_the_first_row():
    table = KeyTable((('layers.{s}.down', 'stages.{s+1}.down'), ('layers.{s}.up.{b}', 'stages.{s-1}.up.{b}'),
                      ('head.1', 'fc'), ('head', 'fc')))
    assert table.to_ours('layers.3.down.weight') == 'stages.4.down.weight'
    assert table.to_theirs('stages.4.down.weight') == 'layers.3.down.weight'
    assert table.to_ours('head.bias') == table.to_ours('head.1.bias') == 'fc.bias'
    assert table.to_theirs('fc.bias') == 'head.1.bias'
    assert table.to_ours('layers.2.up.11') == 'stages.1.up.11'
    for key in ('layers.0.up.1', 'layers.x.down.weight', 'layers.1.down.a.b', 'layers.99999.down', 'xhead.bias', ''):
        assert table.to_ours(key) is None, key
    assert table.to_theirs('stages.0.down') is None, 'there is no stage -1'


# ---- PPMA

@pytest.mark.parametrize('name', PPMA_NAMES)
def test_every_ppma_key_has_one_published_name(name):
    with torch.device('meta'):
        state = timm.create_model(name, layer_scale=(False, False, True, True), output_norms=True).state_dict()
    published = to_published_keys(state)
    angles = [key for key in published if key.endswith('Relpos.angle')]
    assert len(published) == len(state) + len(angles) and len(angles) == 4
    assert not published.keys() & state.keys()
    assert list(to_our_keys(published)) == list(state)


@pytest.mark.parametrize('file', GOLDEN)
def test_published_names_are_those_of_the_reference_network(file):
    """The golden files hold complete state dicts of the authors' network, less the counters of BatchNorm."""
    theirs = _golden_state(file)
    back = to_published_keys(to_our_keys(theirs))
    assert _equal(back, theirs)
    assert any(key.endswith('gamma_1') and value.shape[:3] == (1, 1, 1) for key, value in theirs.items()) == (
        'layerscale' in file)


def test_ppma_names_follow_the_authors_code():
    model = timm.create_model('test_ppma', layer_scale=(True,) * 4, output_norms=True)
    assert _equal(to_published_keys(model.state_dict()), authors_state(model))


def test_ppma_round_trip_is_bit_equal(tmp_path):
    model, state = _random_state('test_ppma', num_classes=5, layer_scale=(True, False, True, False))
    published = to_published_keys(state)
    assert published['layers.0.blocks.0.gamma_1'].shape == (1, 1, 1, 32)
    torch.save({'model': published}, tmp_path / 'best.pth')
    load_weights(model, tmp_path / 'best.pth')
    assert _equal(model.state_dict(), state) and _equal(to_our_keys(published), state)
    assert to_our_keys(state) is state, 'own keys stay as they are'


@pytest.mark.parametrize('change, message', [
    (lambda w: w.pop('layers.0.blocks.0.retention.q_proj.weight'), '1 keys missing .stages.0.blocks.0.mixer.q.weight'),
    (lambda w: w.update({'layers.0.blocks.7.ffn.fc1.weight': torch.zeros(1)}),
     'not in the model .stages.0.blocks.7.ffn.fc1.weight'),
    (lambda w: w.update({'layers.0.extra.weight': torch.zeros(1)}), 'not in the model .layers.0.extra.weight'),
    (lambda w: w.update({'norm.weight': torch.zeros(3)}), r'1 shapes differ .head.norm.weight \(3,\) instead of'),
    (lambda w: w.update({'layers.0.blocks.0.gamma_1': torch.ones(2, 1, 1, 16)}), 'gamma .2, 1, 1, 16. instead of'),
    (lambda w: w.update({'head.weight': torch.zeros(5, 128, dtype=torch.int64)}), 'not floating-point .head.fc.weight'),
    (lambda w: w.update({'layers.1.Relpos.angle': rotary_angles(16) * 1.1}), 'Relpos.angle holds other angles'),
    (lambda w: w.update({'layers.1.Relpos.angle': torch.ones(3)}), 'Relpos.angle must hold the angles')])
def test_published_ppma_files_load_strictly(change, message):
    model, state = _random_state('test_ppma', num_classes=5, layer_scale=(True, False, True, False))
    published = to_published_keys(state)
    change(published)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=message):
        load_state_dict(model, published, 'best.pth')
    assert _equal(model.state_dict(), before)


def test_weights_without_a_published_name_are_refused():
    with pytest.raises(WeightsError, match=r"no name for \d+ of the keys .stages.0.blocks.0.mixer"):
        to_published_keys(timm.create_model('test_myo').state_dict())
    with pytest.raises(WeightsError, match=r"the authors' library has no name for \d+ of the keys"):
        to_cvnets_keys(timm.create_model('test_mobilevitv2', attention='linformer', img_size=64).state_dict())


# ---- MobileViTv2

@pytest.mark.parametrize('size', WIDTHS)
def test_cvnets_names_order_and_shapes(size):
    """The entries follow the rules of the authors' library; timm renames such files by order."""
    with torch.device('meta'):
        state = timm.create_model(f'subquad_mobilevitv2_{size}').state_dict()
    ours = [(key, tuple(value.shape)) for key, value in to_cvnets_keys(state).items()]
    encoder = [(key.removeprefix('encoder.'), shape) for key, shape in encoder_entries(int(size) / 100)]
    assert ours[:-2] == encoder
    assert [key for key, _ in ours[-2:]] == ['classifier.1.weight', 'classifier.1.bias']


def test_cvnets_round_trip_is_bit_equal(tmp_path):
    model, state = _random_state('test_mobilevitv2', num_classes=5)
    torch.save(to_cvnets_keys(state), tmp_path / 'w.pt')
    load_weights(model, tmp_path / 'w.pt')
    assert _equal(model.state_dict(), state) and to_timm_keys(state) is state


@pytest.mark.parametrize('convert', [to_cvnets_keys, lambda state: transformers_names(to_cvnets_keys(state))],
                         ids=['cvnets', 'transformers'])
@pytest.mark.parametrize('change, message', [
    (lambda w: w.pop(next(iter(w))), '1 keys missing .stem.conv.weight'),
    (lambda w: w.update({'layer_9.weight': torch.zeros(1)}), 'not in the model .layer_9.weight'),
    (lambda w: w.update({next(iter(w)): torch.zeros(1)}), '1 shapes differ .stem.conv.weight')])
def test_published_mobilevitv2_files_load_strictly(convert, change, message):
    model, state = _random_state('test_mobilevitv2', num_classes=5)
    published = convert(state)
    change(published)
    with pytest.raises(WeightsError, match=message):
        load_state_dict(model, published, 'w.pt')


def test_transformers_names_are_translated():
    model, state = _random_state('test_mobilevitv2', num_classes=5)
    theirs = transformers_names(to_cvnets_keys(state))
    assert not theirs.keys() & {*state, *to_cvnets_keys(state)}
    assert _equal(to_timm_keys(theirs), state)
    bare = {key.removeprefix('mobilevitv2.'): value for key, value in theirs.items() if key.startswith('mobilevitv2.')}
    assert _equal(to_timm_keys(bare), {key: value for key, value in state.items() if 'head' not in key})
    load_state_dict(model, theirs, 'model.safetensors')
    assert _equal(model.state_dict(), state)


def test_color_order_by_the_first_convolution():
    reference = torch.randn(16, 3, 3, 3)
    assert color_order(reference.clone(), reference) == 'RGB'
    assert color_order(reference.flip(1), reference) == 'BGR'
    for other in (reference.roll(1, 1), torch.randn(16, 3, 3, 3), torch.randn(8, 3, 3, 3)):
        with pytest.raises(WeightsError, match='neither for RGB nor for BGR'):
            color_order(other, reference)


@pytest.fixture
def transformers(monkeypatch):
    """The library, if it is installed. In a checkout it takes the folder kernels/ for the package of that name."""
    monkeypatch.setitem(sys.modules, 'kernels', None)
    return pytest.importorskip('transformers', reason='compares with the MobileViTV2 of transformers')


def _randomize(model):
    for module in model.modules():
        if isinstance(getattr(module, 'running_mean', None), torch.Tensor):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1, 0.1)
    return model.eval()


def test_logits_equal_those_of_transformers(transformers):
    """Maps of the images have even sides: transformers leaves out the last row of odd ones, cvnets resizes them."""
    theirs = _randomize(transformers.MobileViTV2ForImageClassification(
        transformers.MobileViTV2Config(width_multiplier=0.5, num_labels=10)))
    ours = timm.create_model('subquad_mobilevitv2_050', num_classes=10).eval()
    load_state_dict(ours, theirs.state_dict(), 'transformers')
    images = torch.rand(2, 3, 64, 128)
    with torch.no_grad():
        expected = theirs(images).logits
        torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.01
    rule = transformers_names(to_cvnets_keys(ours.state_dict()))
    assert list(rule) == list(theirs.state_dict())


def test_segmentation_logits_equal_those_of_transformers(transformers):
    pytest.importorskip('mmseg')
    from dense_cases import load_segmentation
    from mmseg.registry import MODELS
    theirs = _randomize(transformers.MobileViTV2ForSemanticSegmentation(
        transformers.MobileViTV2Config(width_multiplier=0.5, num_labels=21, output_stride=16)))
    model = MODELS.build(load_segmentation('deeplabv3_mobilevitv2-050_4xb32-50e_voc12-coco-512x512').model).eval()
    model.load_state_dict(theirs.state_dict(), strict=False)      # no auxiliary head; the package's check is strict
    convolution = model.backbone.stages[4][1].conv_kxk.conv
    convolution.dilation = convolution.padding = (1, 1)           # transformers leaves out cvnets' dilation here
    images = torch.rand(1, 3, 64, 128)
    with torch.no_grad():
        expected = theirs(images).logits
        torch.testing.assert_close(model.decode_head(model.backbone(images)), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.01
