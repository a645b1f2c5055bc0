"""Pretrained weights in timm: the whole backbone loads or an error is raised, and warnings name what is untrained."""
import re

import pytest
import timm
import torch
from ppma_files import save_training_file
from published_files import check_backbone, create_pretrained, create_with_file
from safetensors.torch import load_file
from timm.models import load_checkpoint

from subquad.backbones.weights import WeightsError, load_weights, read_checkpoint, save_state_dict, save_weights
from subquad.backbones.weights.mobilevitv2_keys import to_cvnets_keys

NAMES = ('test_ppma', 'test_mobilevitv2', 'test_myo')


@pytest.fixture(scope='module', params=NAMES)
def published(request, tmp_path_factory):
    """Name, weight file and state dict of a network with 1000 classes."""
    torch.manual_seed(1)
    model = timm.create_model(request.param)
    path = tmp_path_factory.mktemp('published') / f'{request.param}.safetensors'
    save_weights(model, path)
    return request.param, str(path), model.state_dict()


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
            create_with_file('test_ppma', str(file), **options)
        with pytest.raises(WeightsError, match='the state dict is not a checkpoint of this test_ppma: '):
            timm.create_model('test_ppma', pretrained=True, pretrained_cfg_overlay=dict(state_dict=load_file(file)),
                              **options)


def test_published_classes_load_without_warning(published):
    name, file, state = published
    model, said = create_with_file(name, file)
    assert not said and all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_other_number_of_classes_warns_of_untrained_classifier(published):
    name, file, state = published
    model, said = create_with_file(name, file, num_classes=10)
    check_backbone(model, state)
    assert model.num_classes == 10 and model.get_classifier().weight.shape[0] == 10
    assert len(said) == 1 and re.search(r'classifier of 1000 classes is left out, and the model\'s 10-class classifier '
                                        'starts untrained', said[0])


def test_matching_classifier_loads_although_timm_expects_1000(tmp_path):
    """timm drops a classifier whose size differs from its pretrained_cfg."""
    trained = timm.create_model('test_ppma', num_classes=10)
    save_weights(trained, tmp_path / 'w.safetensors')
    model, said = create_with_file('test_ppma', str(tmp_path / 'w.safetensors'), num_classes=10)
    assert not said and torch.equal(model.head.fc.weight, trained.head.fc.weight)
    assert model.pretrained_cfg['num_classes'] == 10
    with pytest.raises(WeightsError, match=r'head.fc.weight \(10, 128\) instead of \(1000, 128\).*num_classes=10\)$'):
        create_with_file('test_ppma', str(tmp_path / 'w.safetensors'))
    model, said = create_with_file('test_ppma', str(tmp_path / 'w.safetensors'), num_classes=1000)
    assert len(said) == 1 and 'of 10 classes is left out' in said[0]
    check_backbone(model, trained.state_dict())


def test_features_only_needs_no_head(published, tmp_path):
    name, file, state = published
    model, said = create_with_file(name, file, features_only=True)
    wrapped = {key.replace('stages_', 'stages.'): value for key, value in model.state_dict().items()}
    assert not said and all(torch.equal(value, state[key]) for key, value in wrapped.items()) and len(wrapped) > 30
    body = {f'backbone.{key}': value for key, value in state.items() if not key.startswith('head.')}
    save_state_dict(body, tmp_path / 'detector.safetensors')
    other, said = create_with_file(name, str(tmp_path / 'detector.safetensors'), features_only=True)
    assert not said
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model.eval()(x), other.eval()(x)))
    with pytest.raises(WeightsError, match='keys missing .head'):
        create_with_file(name, str(tmp_path / 'detector.safetensors'))
    _, said = create_with_file(name, str(tmp_path / 'detector.safetensors'), num_classes=7)
    assert len(said) == 1 and 'it has no classifier' in said[0]


def test_num_classes_0_ignores_the_files_classifier(published):
    name, file, state = published
    model, said = create_with_file(name, file, num_classes=0)
    check_backbone(model, state)
    assert not said


@pytest.mark.parametrize('in_chans', [1, 4])
@pytest.mark.parametrize('options', [{}, dict(features_only=True)], ids=str)
def test_in_chans_adapts_first_convolution_with_warning(published, in_chans, options):
    name, file, state = published
    model, said = create_with_file(name, file, in_chans=in_chans, **options)
    assert len(said) == 1 and re.search(rf'has 3 input channels and is adapted to {in_chans}$', said[0])
    key = next(key for key in model.state_dict() if key.startswith('stem.') and key.endswith('conv.weight'))
    theirs = state[key]
    expected = theirs.sum(1, keepdim=True) if in_chans == 1 else theirs[:, [0, 1, 2, 0]] * 3 / 4
    torch.testing.assert_close(model.state_dict()[key], expected)


def test_unadaptable_first_layer_is_refused(tmp_path):
    save_weights(timm.create_model('test_ppma', in_chans=5), tmp_path / 'w.safetensors')
    with pytest.raises(WeightsError, match=r'stem.conv1.conv.weight .*5, 3, 3. instead of'):
        create_with_file('test_ppma', str(tmp_path / 'w.safetensors'), in_chans=2, num_classes=10)
    save_weights(timm.create_model('myo_sequence'), tmp_path / 's.safetensors')
    with pytest.raises(WeightsError, match='encoder'):         # a linear layer, which timm would not load
        create_with_file('myo_sequence', str(tmp_path / 's.safetensors'), in_chans=1, num_classes=4)


def test_missing_output_norms_warn(published, tmp_path):
    name, file, state = published
    if name == 'test_mobilevitv2':
        pytest.skip('has no output norms')
    model, said = create_with_file(name, file, features_only=True, output_norms=True)
    assert len(said) == 1 and 'it has no output norms; they start untrained' in said[0]
    check_backbone(model, state, 'model.')
    norms = {key: value for key, value in model.state_dict().items() if 'output_norms' in key}
    assert len(norms) == 8 and all((value == float(key.endswith('weight'))).all() for key, value in norms.items())
    save_weights(timm.create_model(name, output_norms=True), tmp_path / 'dense.safetensors')
    _, said = create_with_file(name, str(tmp_path / 'dense.safetensors'), features_only=True)
    assert len(said) == 1 and 'its output norms are left out' in said[0]


def test_checkpoint_path_and_load_checkpoint_are_strict(published, tmp_path):
    name, file, state = published
    check_backbone(timm.create_model(name, checkpoint_path=file), state)
    for options in (dict(num_classes=10), dict(features_only=True)):
        with pytest.raises(RuntimeError, match='Error.* in loading state_dict'):
            timm.create_model(name, checkpoint_path=file, **options)
    torch.save({'state_dict': {f'net.{key}': value for key, value in state.items()}}, tmp_path / 'epoch_1.pth')
    load_checkpoint(model := timm.create_model(name), str(tmp_path / 'epoch_1.pth'))
    check_backbone(model, state)
    torch.save({'state_dict': {f'backbone.{key}': value for key, value in state.items()}}, tmp_path / 'epoch_2.pth')
    with pytest.raises(RuntimeError, match=r'Missing key[^$]*weights.load_weights.model, FILE. reads more files, and'):
        load_checkpoint(model, str(tmp_path / 'epoch_2.pth'))
    model, said = create_with_file(name, str(tmp_path / 'epoch_1.pth'))             # the filter takes `net.` off
    assert not said
    check_backbone(model, state)


@pytest.mark.parametrize('average', [True, False])
def test_checkpoint_path_and_load_checkpoint_take_the_authors_files(average, tmp_path):
    raw, ema = timm.create_model('test_ppma'), timm.create_model('test_ppma')
    save_training_file(raw, path := str(tmp_path / 'checkpoint.pth'), ema if average else None, key='model')
    expected = (ema if average else raw).state_dict()
    model = timm.create_model('test_ppma', checkpoint_path=path)
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    load_checkpoint(model := timm.create_model('test_ppma'), path, use_ema=False)
    assert torch.equal(model.head.fc.weight, raw.head.fc.weight)
    theirs = timm.create_model('test_mobilevitv2')
    torch.save(to_cvnets_keys(theirs.state_dict()), tmp_path / 'mobilevitv2.pt')
    model = timm.create_model('test_mobilevitv2', checkpoint_path=str(tmp_path / 'mobilevitv2.pt'))
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in model.state_dict().items())


def test_save_for_hf_folder_loads_by_local_dir_and_hub(published, tmp_path, monkeypatch):
    from timm.models import save_for_hf
    name, file, state = published
    trained = timm.create_model(name, num_classes=10)
    with pytest.warns(UserWarning, match='starts untrained'):
        load_weights(trained, file, new_classifier=True)
    save_for_hf(trained, tmp_path, safe_serialization=True)
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    check_backbone(model, state)
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
        create_with_file('test_ppma', str(tmp_path / 'w.pth'), num_classes=10)
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


def test_weights_that_are_not_finite_warn(tmp_path):
    model = timm.create_model('test_ppma')
    with torch.no_grad():
        model.stem.conv1.conv.weight[0] = float('nan')
    save_weights(model, tmp_path / 'nan.safetensors')
    _, said = create_with_file('test_ppma', str(tmp_path / 'nan.safetensors'), features_only=True)
    assert len(said) == 1 and 'contains NaN or infinite values (stem.conv1.conv.weight)' in said[0]
    with pytest.warns(UserWarning, match='contains NaN or infinite values'):
        load_weights(model, tmp_path / 'nan.safetensors')


def test_state_dict_of_the_caller_is_named(tmp_path):
    state = timm.create_model('test_ppma', num_classes=10).state_dict()
    model, said = create_pretrained('test_ppma.digits', num_classes=3, pretrained_cfg_overlay=dict(state_dict=state))
    assert said == ['the state dict: its classifier of 10 classes is left out, and the model\'s 3-class classifier '
                    'starts untrained']
