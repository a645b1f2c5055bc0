"""Pretrained weights in timm: the whole backbone loads or an error is raised, and warnings name what is untrained."""
import re
import warnings

import pytest
import timm
import torch
from ppma_files import authors_state, save_authors_file
from published_files import publish, serve
from safetensors.torch import load_file
from timm.models import load_checkpoint

from subquad.backbones.weights import WeightsError, load_weights, read_checkpoint, save_state_dict, save_weights
from subquad.backbones.weights.registry import WEIGHTS

NAMES = ('test_ppma', 'test_mobilevitv2', 'test_myo')


@pytest.fixture(scope='module', params=NAMES)
def published(request, tmp_path_factory):
    """Name, weight file and state dict of a network with 1000 classes."""
    torch.manual_seed(1)
    model = timm.create_model(request.param)
    path = tmp_path_factory.mktemp('published') / f'{request.param}.safetensors'
    save_weights(model, path)
    return request.param, str(path), model.state_dict()


def _create(name, file, overlay=None, **kwargs):
    """Return the model and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=dict(file=file, **(overlay or {})),
                                  **kwargs)
    return model, [str(item.message) for item in caught if issubclass(item.category, UserWarning)]


def _backbone_is(model, state, prefix=''):
    own = {key.removeprefix(prefix): value for key, value in model.state_dict().items()}
    same = {key: torch.equal(own[key], state[key]) for key in own if key in state and not key.startswith('head.')}
    assert len(same) > 30 and all(same.values())


@pytest.fixture(scope='module')
def foreign_files(tmp_path_factory):
    """Files that would leave weights random: of a resnet18, and of incomplete, deeper and wider networks."""
    folder = tmp_path_factory.mktemp('foreign')
    model = timm.create_model('test_ppma')
    state = model.state_dict()
    save_weights(timm.create_model('resnet18'), folder / 'resnet18.safetensors')
    save_state_dict({key: value for key, value in state.items() if 'stages.2.blocks.1.ffn' not in key},
                    folder / 'gap.safetensors')
    save_weights(timm.create_model('test_ppma', depths=(1, 1, 3, 1)), folder / 'deeper.safetensors')
    save_weights(timm.create_model('test_ppma', dims=(32, 48, 64, 192)), folder / 'wider.safetensors')
    return sorted(folder.glob('*.safetensors'))


@pytest.mark.parametrize('options', [dict(num_classes=10), dict(features_only=True), dict(num_classes=0), {},
                                     dict(features_only=True, out_indices=(0, 1)), dict(in_chans=1, num_classes=10),
                                     dict(features_only=True, output_norms=True), dict(pretrained_strict=False)],
                         ids=str)
def test_incomplete_backbone_weights_are_refused(foreign_files, options):
    for file in foreign_files:
        with pytest.raises(WeightsError, match='is not a checkpoint of this test_ppma: '):
            _create('test_ppma', str(file), **options)
        with pytest.raises(WeightsError, match='the state dict is not a checkpoint of this test_ppma: '):
            timm.create_model('test_ppma', pretrained=True, pretrained_cfg_overlay=dict(state_dict=load_file(file)),
                              **options)


def test_published_classes_load_without_warning(published):
    name, file, state = published
    model, said = _create(name, file)
    assert not said and all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_other_number_of_classes_warns_of_untrained_classifier(published):
    name, file, state = published
    model, said = _create(name, file, num_classes=10)
    _backbone_is(model, state)
    assert model.num_classes == 10 and model.get_classifier().weight.shape[0] == 10
    assert len(said) == 1 and re.search(r'classifier of 1000 classes is left out, and the model\'s 10-class classifier '
                                        'starts untrained', said[0])


def test_matching_classifier_loads_although_timm_expects_1000(tmp_path):
    """timm drops a classifier whose size differs from its pretrained_cfg."""
    trained = timm.create_model('test_ppma', num_classes=10)
    save_weights(trained, tmp_path / 'w.safetensors')
    model, said = _create('test_ppma', str(tmp_path / 'w.safetensors'), num_classes=10)
    assert not said and torch.equal(model.head.fc.weight, trained.head.fc.weight)
    assert model.pretrained_cfg['num_classes'] == 10
    with pytest.raises(WeightsError, match=r'head.fc.weight \(10, 128\) instead of \(1000, 128\).*num_classes=10\)$'):
        _create('test_ppma', str(tmp_path / 'w.safetensors'))
    model, said = _create('test_ppma', str(tmp_path / 'w.safetensors'), num_classes=1000)
    assert len(said) == 1 and 'of 10 classes is left out' in said[0]
    _backbone_is(model, trained.state_dict())


def test_features_only_needs_no_head(published, tmp_path):
    name, file, state = published
    model, said = _create(name, file, features_only=True)
    wrapped = {key.replace('stages_', 'stages.'): value for key, value in model.state_dict().items()}
    assert not said and all(torch.equal(value, state[key]) for key, value in wrapped.items()) and len(wrapped) > 30
    body = {f'backbone.{key}': value for key, value in state.items() if not key.startswith('head.')}
    save_state_dict(body, tmp_path / 'detector.safetensors')
    other, said = _create(name, str(tmp_path / 'detector.safetensors'), features_only=True)
    assert not said
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model.eval()(x), other.eval()(x)))
    with pytest.raises(WeightsError, match='keys missing .head'):
        _create(name, str(tmp_path / 'detector.safetensors'))
    _, said = _create(name, str(tmp_path / 'detector.safetensors'), num_classes=7)
    assert len(said) == 1 and 'it has no classifier' in said[0]


def test_num_classes_0_ignores_the_files_classifier(published):
    name, file, state = published
    model, said = _create(name, file, num_classes=0)
    _backbone_is(model, state)
    assert not said


@pytest.mark.parametrize('in_chans', [1, 4])
@pytest.mark.parametrize('options', [{}, dict(features_only=True)], ids=str)
def test_in_chans_adapts_first_convolution_with_warning(published, in_chans, options):
    name, file, state = published
    model, said = _create(name, file, in_chans=in_chans, **options)
    assert len(said) == 1 and re.search(rf'has 3 input channels and is adapted to {in_chans}$', said[0])
    key = next(key for key in model.state_dict() if key.startswith('stem.') and key.endswith('conv.weight'))
    theirs = state[key]
    expected = theirs.sum(1, keepdim=True) if in_chans == 1 else theirs[:, [0, 1, 2, 0]] * 3 / 4
    torch.testing.assert_close(model.state_dict()[key], expected)


def test_unadaptable_first_layer_is_refused(tmp_path):
    save_weights(timm.create_model('test_ppma', in_chans=5), tmp_path / 'w.safetensors')
    with pytest.raises(WeightsError, match=r'stem.conv1.conv.weight .*5, 3, 3. instead of'):
        _create('test_ppma', str(tmp_path / 'w.safetensors'), in_chans=2, num_classes=10)
    save_weights(timm.create_model('myo_sequence'), tmp_path / 's.safetensors')
    with pytest.raises(WeightsError, match='encoder'):         # a linear layer, which timm would not load
        _create('myo_sequence', str(tmp_path / 's.safetensors'), in_chans=1, num_classes=4)


def test_missing_output_norms_warn(published, tmp_path):
    name, file, state = published
    if name == 'test_mobilevitv2':
        pytest.skip('has no output norms')
    model, said = _create(name, file, features_only=True, output_norms=True)
    assert len(said) == 1 and 'it has no output norms; they start untrained' in said[0]
    _backbone_is(model, state, 'model.')
    norms = {key: value for key, value in model.state_dict().items() if 'output_norms' in key}
    assert len(norms) == 8 and all((value == float(key.endswith('weight'))).all() for key, value in norms.items())
    save_weights(timm.create_model(name, output_norms=True), tmp_path / 'dense.safetensors')
    _, said = _create(name, str(tmp_path / 'dense.safetensors'), features_only=True)
    assert len(said) == 1 and 'its output norms are left out' in said[0]


def test_checkpoint_path_and_load_checkpoint_are_strict(published, tmp_path):
    name, file, state = published
    _backbone_is(timm.create_model(name, checkpoint_path=file), state)
    for options in (dict(num_classes=10), dict(features_only=True)):
        with pytest.raises(RuntimeError, match='Error.* in loading state_dict'):
            timm.create_model(name, checkpoint_path=file, **options)
    torch.save({'state_dict': {f'net.{key}': value for key, value in state.items()}}, tmp_path / 'epoch_1.pth')
    with pytest.raises(RuntimeError, match='Missing key'):
        load_checkpoint(timm.create_model(name), str(tmp_path / 'epoch_1.pth'))
    model, said = _create(name, str(tmp_path / 'epoch_1.pth'))             # the filter takes `net.` off
    assert not said
    _backbone_is(model, state)


# ---- published weights

@pytest.fixture(scope='module')
def downloads(tmp_path_factory):
    """Files as PPMA's authors and timm publish them, and the state dicts of the networks in them."""
    folder, files, states = tmp_path_factory.mktemp('downloads'), {}, {}
    torch.manual_seed(3)
    for name in ('ppma_tiny.in1k', 'subquad_mobilevitv2_050.cvnets_in1k'):
        model = timm.create_model(name.split('.')[0])
        states[name] = model.state_dict()
        files[name] = folder / f"{name}.{'pth' if 'ppma' in name else 'safetensors'}"
        save_authors_file(model, files[name]) if 'ppma' in name else save_weights(model, files[name])
    return files, states


def _pretrained(name, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        model = timm.create_model(name, pretrained=True, **kwargs)
    return model, [str(item.message) for item in caught if issubclass(item.category, UserWarning)]


@pytest.mark.parametrize('name', ['ppma_tiny.in1k', 'subquad_mobilevitv2_050.cvnets_in1k'])
def test_pretrained_loads_published_weights(name, downloads, monkeypatch):
    files, states = downloads
    asked = serve(monkeypatch, files)
    arch, tag = name.split('.')
    for model, said in (_pretrained(arch), _pretrained(name), _pretrained(arch, pretrained_cfg=tag),
                        _pretrained(arch, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())):
        assert said == [] and all(torch.equal(value, states[name][key]) for key, value in model.state_dict().items())
        assert model.pretrained_cfg == {**timm.get_pretrained_cfg(name).to_dict(), 'num_classes': 1000}
    _pretrained(arch, cache_dir='folder')
    assert asked == [*[name] * 4, f'{name} in folder']
    model, said = _pretrained(arch, num_classes=7, in_chans=1)
    _backbone_is(model, {key: value for key, value in states[name].items() if not key.startswith('stem.')})
    assert len(said) == 1 and said[0].startswith(f'{name}: its classifier of 1000 classes is left out')
    assert '3 input channels and is adapted to 1' in said[0]
    model, said = _pretrained(name, features_only=True)
    own = {key.replace('stages_', 'stages.'): value for key, value in model.state_dict().items()}
    assert said == [] and all(torch.equal(value, states[name][key]) for key, value in own.items()) and len(own) > 200


def test_averaged_weights_of_a_published_classifier_are_named(downloads, tmp_path, monkeypatch):
    files, states = downloads
    raw = timm.create_model('ppma_tiny')
    average = timm.create_model('ppma_tiny')
    average.load_state_dict(states['ppma_tiny.in1k'])
    save_authors_file(raw, tmp_path / 'best.pth', average)
    serve(monkeypatch, {'ppma_tiny.in1k': tmp_path / 'best.pth'})
    model, said = _pretrained('ppma_tiny')
    assert torch.equal(model.head.fc.weight, average.head.fc.weight)
    assert said == ['ppma_tiny.in1k: its averaged weights (model_ema) are read, not the raw ones (model)']
    with pytest.warns(UserWarning, match=r'its raw weights \(model\) are read'):
        assert load_weights(model, 'ppma_tiny.in1k', weights='raw') == 'model'
    assert torch.equal(model.head.fc.weight, raw.head.fc.weight)


def test_published_files_of_another_network_are_refused(downloads, monkeypatch):
    files, _ = downloads
    serve(monkeypatch, {'ppma_tiny.in1k': files['subquad_mobilevitv2_050.cvnets_in1k']})
    for options in ({}, dict(num_classes=10), dict(features_only=True)):
        with pytest.raises(WeightsError, match='^ppma_tiny.in1k is not a checkpoint of this ppma_tiny: '):
            timm.create_model('ppma_tiny', pretrained=True, **options)


def test_a_failed_download_is_raised(monkeypatch):
    serve(monkeypatch, {})
    with pytest.raises(WeightsError, match='^ppma_tiny.in1k cannot be downloaded$'):
        timm.create_model('ppma_tiny', pretrained=True)


@pytest.mark.parametrize('name', ['myo_tiny', 'myo_sequence', 'ppma_base_crisscross'])
def test_networks_without_published_weights_say_which_have_some(name):
    with pytest.raises(WeightsError, match=f'^no weights of {name} are published; pretrained=True works for '
                                           'ppma_tiny.in1k, .*subquad_mobilevitv2_200'):
        timm.create_model(name, pretrained=True)


def test_unknown_and_dense_tags_are_refused(monkeypatch):
    with pytest.raises(WeightsError, match='no weights ppma_tiny.in22k; ppma_tiny has ppma_tiny.in1k'):
        timm.create_model('ppma_tiny.in22k', pretrained=True)
    with pytest.raises(WeightsError, match='ppma_tiny.mask_rcnn_1x_coco are weights for detection, .*features_only'):
        timm.create_model('ppma_tiny.mask_rcnn_1x_coco', pretrained=True)


def test_file_entry_takes_names_and_files_that_timm_cannot_read(tmp_path, monkeypatch):
    """timm reads no pickle with numpy values, and does not know the table of published weights."""
    import numpy as np
    model = timm.create_model('test_ppma', num_classes=0, output_norms=True)
    detector = {f'backbone.{key}': value for key, value in authors_state(model).items()}
    torch.save({'state_dict': {**detector, 'rpn_head.rpn_conv.bias': torch.zeros(1)},
                'meta': dict(score=np.float64(1))}, tmp_path / 'epoch_12.pth')
    publish(monkeypatch, 'test_ppma.mask_rcnn', task='detection')
    serve(monkeypatch, {'test_ppma.mask_rcnn': tmp_path / 'epoch_12.pth'})
    for file in (tmp_path / 'epoch_12.pth', str(tmp_path / 'epoch_12.pth'), 'test_ppma.mask_rcnn',
                 'subquad://test_ppma.mask_rcnn'):
        pyramid, said = _create('test_ppma', file, features_only=True, output_norms=True)
        _backbone_is(pyramid, model.state_dict(), 'model.')
        assert not said and 'state_dict' not in pyramid.pretrained_cfg
    with pytest.raises(WeightsError, match='^no weight file at .*none.pth$'):
        _create('test_ppma', str(tmp_path / 'none.pth'))


@pytest.mark.parametrize('overlay', [dict(hf_hub_id='me/mine'), dict(url='https://example.org/w.pth')], ids=str)
def test_addresses_of_the_caller_replace_published_weights(overlay, downloads, monkeypatch):
    """timm itself would take the published repository, or look for the published file in the caller's repository."""
    files, states = downloads
    asked, seen = serve(monkeypatch, files), []
    builder = 'timm.models._builder.load_state_dict_from_'

    def answer(address, *args, **kwargs):
        seen.append((address, args))
        return dict(states['ppma_tiny.in1k'])
    monkeypatch.setattr(f'{builder}hf', answer)
    monkeypatch.setattr(f'{builder}url', answer)
    model, said = _pretrained('ppma_tiny', pretrained_cfg_overlay=overlay, num_classes=3)
    assert seen == [(*overlay.values(), ())] and asked == [] and len(said) == 1
    _backbone_is(model, states['ppma_tiny.in1k'])
    assert next(iter(overlay.values())) in said[0]


def test_published_classifiers_are_tags_of_timm():
    assert timm.list_pretrained('ppma*') == [f'ppma_{size}.in1k' for size in ('base', 'small', 'tiny')]
    for name, weights in WEIGHTS.items():
        if weights.task != 'classification':
            assert name not in timm.list_pretrained(weights.arch)
            continue
        cfg = timm.get_pretrained_cfg(name)
        assert name in timm.list_pretrained(f'{weights.arch}*')
        assert {key: getattr(cfg, key) for key in ('input_size', 'crop_pct', 'mean', 'std', 'interpolation', 'license',
                                                   'num_classes')} == {
            key: getattr(weights, key) for key in ('input_size', 'crop_pct', 'mean', 'std', 'interpolation', 'license',
                                                   'num_classes')}
        assert tuple(32 * side for side in cfg.pool_size) == cfg.input_size[1:] and cfg.has_weights
    cfg = timm.get_pretrained_cfg('ppma_small')
    assert (cfg.hf_hub_id, cfg.hf_hub_filename, cfg.tag) == (
        'ZhongchenZhao/PPMA', 'checkpoints/classification/PPMA_S_202504021000/best.pth', 'in1k')
    assert timm.get_pretrained_cfg('myo_tiny').tag == 'untrained'


def test_default_config_keeps_its_number_of_classes(monkeypatch):
    """`timm.create_model(arch)` has 1000 classes, also if only a classifier of ten digits is published."""
    from timm.models import generate_default_cfgs

    from subquad.backbones.timm_interface import image_cfg, published_cfgs
    publish(monkeypatch, 'some_net.digits', num_classes=10, url=None, file='some_net.safetensors')
    cfgs = generate_default_cfgs(published_cfgs({'some_net': image_cfg(), 'other_net': image_cfg()}))
    assert [*cfgs['some_net'].tags] == ['untrained', 'digits'] and [*cfgs['other_net'].tags] == ['untrained']
    digits = cfgs['some_net'].cfgs['digits']
    assert digits.num_classes == 10 and digits.file.endswith('some_net.safetensors') and digits.pool_size == (2, 2)
    assert cfgs['some_net'].default.num_classes == 1000


def test_save_for_hf_folder_loads_by_local_dir_and_hub(published, tmp_path, monkeypatch):
    from timm.models import save_for_hf
    name, file, state = published
    trained = timm.create_model(name, num_classes=10)
    with pytest.warns(UserWarning, match='starts untrained'):
        load_weights(trained, file, new_classifier=True)
    save_for_hf(trained, tmp_path, safe_serialization=True)
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    _backbone_is(model, state)
    assert torch.equal(model.get_classifier().weight, trained.get_classifier().weight) and model.num_classes == 10
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, features_only=True)
    assert len(model(torch.rand(1, 3, 64, 64))) >= 4
    monkeypatch.setattr('timm.models._hub.hf_hub_download', lambda *args, filename=None, **_: str(
        tmp_path / (filename or args[1])))
    model = timm.create_model('hf-hub:me/mine', pretrained=True)
    assert torch.equal(model.get_classifier().weight, trained.get_classifier().weight)


@pytest.mark.parametrize('dtype', [torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_not_floating_point_are_refused(dtype, tmp_path):
    model = timm.create_model('test_ppma')
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in model.state_dict().items()}
    torch.save(state, tmp_path / 'w.pth')
    with pytest.raises(WeightsError, match=rf'not floating-point \(stem.conv1.conv.weight {dtype} instead of'):
        load_weights(model, tmp_path / 'w.pth')
    with pytest.raises(WeightsError, match='not floating-point'):
        _create('test_ppma', str(tmp_path / 'w.pth'), num_classes=10)
    half = {key: value.half() for key, value in model.state_dict().items()}
    torch.save(half, tmp_path / 'w.pth')
    load_weights(model, tmp_path / 'w.pth')


def test_load_weights_warns_of_unloaded_weights(tmp_path):
    save_weights(timm.create_model('test_ppma', num_classes=4), tmp_path / 'w.safetensors')
    with pytest.warns(UserWarning, match='w.safetensors: its classifier of 4 classes is left out, and the model'):
        load_weights(timm.create_model('test_ppma', num_classes=9), tmp_path / 'w.safetensors', new_classifier=True)
    with pytest.warns(UserWarning, match='no output norms; they start untrained'):
        load_weights(timm.create_model('test_ppma', num_classes=0, output_norms=True), tmp_path / 'w.safetensors')
    weights, _, _ = read_checkpoint(tmp_path / 'w.safetensors')
    weights['head.proj.weight'] = weights['head.proj.weight'][:-1]
    save_state_dict(weights, tmp_path / 'w.safetensors')
    with pytest.raises(WeightsError, match='1 shapes differ .head.proj.weight'):
        load_weights(timm.create_model('test_ppma', num_classes=9), tmp_path / 'w.safetensors', new_classifier=True)


@pytest.mark.filterwarnings('ignore:The nodes obtained')
@pytest.mark.parametrize('name', NAMES)
def test_torchvision_feature_extractor_error_names_timms(name):
    """torchvision's tracer enters modules that timm's tracer treats as leaves, so an error names timm's."""
    from torchvision.models.feature_extraction import create_feature_extractor
    model = timm.create_model(name).eval()
    with pytest.raises(TypeError, match='features_only=True, or timm.models.create_feature_extractor'):
        create_feature_extractor(model, ['stages.3'])
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        found = timm.models.create_feature_extractor(model, ['stages.3'])(x)['stages.3']
        torch.testing.assert_close(found, model.forward_intermediates(x, intermediates_only=True)[3])


@pytest.mark.parametrize('name', NAMES)
def test_set_input_size_accepts_sizes_from_32(name):
    model = timm.create_model(name).eval()
    for size in (None, 96, (64, 96)):
        model.set_input_size(img_size=size)
    with torch.no_grad():
        assert model(torch.rand(1, 3, 64, 96)).shape == (1, 1000)
    for size in (16, (64,), (64, 64, 3), True, (64., 64)):
        with pytest.raises(ValueError, match='img_size must be an integer of at least 32'):
            model.set_input_size(size)
        with pytest.raises(ValueError, match='img_size must be an integer of at least 32'):
            timm.create_model(name, img_size=size)


def test_set_input_size_refuses_linformer():
    model = timm.create_model('test_mobilevitv2', attention='linformer', img_size=64)
    with pytest.raises(ValueError, match='Linformer attention is made for one image size'):
        model.set_input_size((96, 96))
