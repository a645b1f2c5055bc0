"""Classifiers from weight files in `predict`: what a file says of its model is read and checked, the rest assumed."""
import json
import math
import re
import time

import numpy as np
import pytest
import timm
import torch
from mmengine.config import Config
from PIL import Image
from user_errors import command_error

from subquad.backbones.weights import save_weights
from subquad.tools import predict
from subquad.tools.engine.classification.weight_files import classifier_from_file, config_metadata, read_classifier
from subquad.tools.exporters.subject import preprocessing

OPTIONS = dict(num_classes=3, mask_mode='multiplicative')
TRANSFORM = dict(input_size=(3, 48, 48), crop_pct=1.0, mean=(0.3, 0.3, 0.3), std=(0.4, 0.4, 0.4),
                 interpolation='bilinear')
CLASSES = ['a', 'b', 'c']


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'image.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path)
    return str(path)


@pytest.fixture
def model():
    return timm.create_model('test_ppma', **OPTIONS)


def _config():
    return Config(dict(model=dict(type='TimmClassifier', name='test_ppma', label_smoothing=0.1, **OPTIONS),
                       test_dataloader=dict(batch_size=2, dataset=dict(type='Digits', transform=TRANSFORM)),
                       other=[1, -2.5, None, {'a-b': (1,)}]))


def _runners(model, path, **meta):
    torch.save({'state_dict': {f'net.{key}': value for key, value in model.state_dict().items()}, 'meta': meta}, path)
    return str(path)


def _metadata(**changes):
    return {**dict(model='test_ppma', options=OPTIONS, classes=CLASSES, transform=TRANSFORM), **changes}


def _predicted(capsys, *args):
    predict.main([*args, '--json', '--topk', '3'])
    out, err = capsys.readouterr()
    return json.loads(out)[0]['classes'], err


def _error(capsys, *args):
    return command_error(predict.main, args)


@pytest.mark.parametrize('where', ['inside', 'beside', 'safetensors'])
def test_pth_and_safetensors_of_a_run_predict_alike(where, model, image, tmp_path, capsys):
    run = tmp_path / 'run'
    run.mkdir()
    save_weights(model, run / 'last.safetensors', _metadata())
    meta = dict(cfg=_config().pretty_text, dataset_meta=dict(classes=CLASSES)) if where == 'inside' else {}
    path = _runners(model, run / 'epoch_1.pth', **meta)
    if where == 'beside':
        _config().dump(run / 'config.py')
    expected, _ = _predicted(capsys, str(run / 'last.safetensors'), image)
    if where == 'inside':
        (run / 'last.safetensors').unlink()
    for name in ([], ['--model', 'test_ppma']):
        found, said = _predicted(capsys, path, image, *name)
        assert found == expected and 'assumed' not in said
    assert (f'read from {run}' in said) == (where != 'inside')


def test_assumed_transform_is_reported(model, image, tmp_path, capsys):
    torch.save(model.state_dict(), tmp_path / 'w.pth')
    _, said = _predicted(capsys, str(tmp_path / 'w.pth'), image, '--model', 'test_ppma')
    assert said.count('\n') == 1 and 'assuming the settings of test_ppma (size 64 x 64, mean 0.485' in said
    save_weights(model, tmp_path / 'w.safetensors', _metadata(model='ppma_tiny'))
    _, said = _predicted(capsys, str(tmp_path / 'w.safetensors'), image, '--model', 'test_ppma')
    assert 'assuming the settings of test_ppma' in said
    assert 'does not name its model' in _error(capsys, tmp_path / 'w.pth', image)


def test_config_beside_a_checkpoint_is_not_executed(tmp_path):
    text = _config().pretty_text
    assert config_metadata(text) == dict(model='test_ppma', options=OPTIONS, transform=TRANSFORM)
    marker = tmp_path / 'was_run'
    code = f'os.mkdir({str(marker)!r})'
    assert config_metadata(f'import os\n{code}\nx = {code}\n{text}') == config_metadata(text)
    assert not marker.exists()
    for other in ('', 'model = dict(type="MaskRCNN")', 'model = dict(**x)', 'model = {[]: 1}', '(' * 10_000, 'a b',
                  '\0', 'model = 3', 'x = ' + '-' * 100_000 + '1'):
        assert config_metadata(other) == {}


@pytest.mark.parametrize('name', ['test_ppma', 'test_mobilevitv2', 'resnet18'])
@pytest.mark.parametrize('classes', [37, 2])
def test_classifier_files_with_any_number_of_classes(name, classes, tmp_path):
    model = timm.create_model(name, num_classes=classes)
    torch.save({'model': model.state_dict()}, tmp_path / 'w.pth')
    loaded, _, names = classifier_from_file(str(tmp_path / 'w.pth'), name)
    assert len(names) == classes == loaded.num_classes


@pytest.mark.parametrize('value', [float('nan'), float('-inf')])
def test_nonfinite_weights_need_allow_nonfinite(value, model, image, tmp_path, capsys):
    with torch.no_grad():
        model.head.fc.weight[0, 0] = value
    save_weights(model, tmp_path / 'w.safetensors', _metadata())
    message = _error(capsys, tmp_path / 'w.safetensors', image)
    assert all(part in message for part in ('NaN or infinite values in 1 of', 'head.fc.weight', '--allow-nonfinite'))
    model, _, _ = classifier_from_file(str(tmp_path / 'w.safetensors'), allow_nonfinite=True)
    assert not model.head.fc.weight.isfinite().all()


@pytest.mark.parametrize('options, expected', [
    (dict(checkpoint_path='x.pth'), "unexpected keyword argument 'checkpoint_path'; its options are "),
    (dict(pretrained=True), "keyword argument 'pretrained'"), (dict(pretrained_cfg_overlay={}), 'unexpected'),
    (dict(features_only=True), 'unexpected'), (dict(device='meta'), 'unexpected'),
    (dict(mixer=1), 'unexpected'),
    (dict(depths=[20_000, 1, 1, 1]), r'depths must be one value for each of 4 stages, each an integer .*, got \[20000'),
    (dict(depths='1111'), "got '1111'"), (dict(depths=3), 'got 3'),
    (dict(dims=[1e9] * 4), 'dims must be one value for each'),
    (dict(dims=[8190, 48, 64, 96], num_heads=[1] * 4), 'not a checkpoint'),
    (dict(num_classes=10 ** 9), 'num_classes must be an integer'), (dict(num_classes=True), 'got True'),
    (dict(num_classes='3'), "got '3'"), (dict(in_chans=-1), 'in_chans'), (dict(img_size=[2]), 'img_size'),
    (dict(mask_mode='../x'), 'mask_mode must be one of'), (dict(mask_mode=['additive']), 'mask_mode'),
    (dict(mask_mode='other'), 'mask_mode must be one of'),
    (dict(shared_decay='yes'), 'shared_decay must be True or False'),
    (dict(drop_rate=float('nan')), 'drop_rate'), (dict(head_hidden_size=9_999), 'not a checkpoint of')], ids=str)
def test_options_of_a_file_are_checked(options, expected, model, image, tmp_path, capsys):
    started = time.monotonic()
    save_weights(model, tmp_path / 'w.safetensors', _metadata(options={**OPTIONS, **options}))
    assert re.search(expected, _error(capsys, tmp_path / 'w.safetensors', image))
    assert time.monotonic() - started < 15


@pytest.mark.parametrize('model_name, options', [
    ('resnet18', dict(checkpoint_path='other.pth')), ('resnet18', dict(layers=[10_000, 2, 2, 2])),
    ('vit_tiny_patch16_224', dict(depth=20_000)), ('vit_tiny_patch16_224', dict(norm_layer={'a': 1})),
    ('resnet18', dict(num_classes=[])), ('vit_gigantic_patch14_clip_224', {})], ids=str)
def test_options_of_other_networks_are_checked(model_name, options, model, image, tmp_path, capsys):
    save_weights(model, tmp_path / 'w.safetensors', _metadata(model=model_name, options=options))
    assert model_name.split('_patch')[0] in _error(capsys, tmp_path / 'w.safetensors', image)


@pytest.mark.parametrize('changes', [
    dict(model=3), dict(model=''), dict(model='x' * 10_000), dict(model='local-dir:/etc'), dict(options=[1]),
    dict(options=None), dict(options={'': 1}), dict(classes='abc'), dict(classes=[1, 2, 3]), dict(classes={'a': 1}),
    dict(classes=['a']), dict(classes=None), dict(transform=[3]), dict(transform={'input_size': 10 ** 6}),
    dict(transform={'input_size': []}), dict(transform={'input_size': ['3', '4']}), dict(transform={'mean': 'x'}),
    dict(transform={'std': [0, 0, 0]}), dict(transform={'mean': [1, 2]}), dict(transform={'interpolation': 'x'}),
    dict(transform={'auto': 3}), dict(transform={'crop_pct': -1}), dict(transform={'input_size': [3, 4, 4]}),
    dict(transform={'is_training': True}), dict(transform={'input_size': True})], ids=lambda v: str(v)[:40])
def test_metadata_of_wrong_types_is_a_one_line_error(changes, model, image, tmp_path, capsys):
    save_weights(model, tmp_path / 'w.safetensors', _metadata(**changes))
    message = _error(capsys, tmp_path / 'w.safetensors', image)
    assert len(message) < 700


@pytest.mark.parametrize('metadata', [3, [], 'x', None, True, [[]] * 3], ids=str)
def test_metadata_that_are_not_a_json_object(metadata, model, image, tmp_path, capsys):
    from safetensors.torch import save_file
    save_file(model.state_dict(), tmp_path / 'w.safetensors', {'subquad': json.dumps(metadata)})
    assert 'the metadata must be a JSON object' in _error(capsys, tmp_path / 'w.safetensors', image)
    for text in ('[' * 100_000, '{', '1' * 10_000):
        save_file(model.state_dict(), tmp_path / 'w.safetensors', {'subquad': text})
        assert 'metadata' in _error(capsys, tmp_path / 'w.safetensors', image)


def test_options_of_the_file_build_the_network(tmp_path, image, capsys):
    """What a training may set for a network of timm's, too, and options of training in the transform."""
    for name, options in (('test_ppma', dict(depths=[1, 2, 1, 1], attention=['linear'] * 4, layer_scale=[True] * 4,
                                             img_size=[64, 64], head_hidden_size=None)),
                          ('test_mobilevitv2', dict(width=0.25, num_latent_tokens=4, exact_size=True)),
                          ('test_myo', dict(parametrization='skew', max_levels=2)),
                          ('test_vit', dict(class_token=False, global_pool='avg', drop_path_rate=0.1)),
                          ('test_resnet', dict(output_stride=16))):
        model = timm.create_model(name, num_classes=3, **options)
        save_weights(model, tmp_path / 'w.safetensors', _metadata(
            model=name, options=dict(num_classes=3, **options), transform={} if name == 'test_vit' else
            {**TRANSFORM, 'input_size': 64, 'hflip': 0., 'auto_augment': None}))
        found, _ = _predicted(capsys, str(tmp_path / 'w.safetensors'), image)
        assert sorted(item['name'] for item in found) == CLASSES, name


@pytest.mark.parametrize('transform', [
    dict(input_size=(3, 48, 48)),
    dict(input_size=40, mean=(0.3,) * 3, crop_pct=None),
    dict(input_size=(32, 48), std=(0.4,) * 3, interpolation='bicubic')], ids=str)
def test_defaults_of_a_transform_are_written_out(transform, model, image, tmp_path):
    """What the file leaves out is what timm takes for it, also for exported files, which describe the transform."""
    save_weights(model, tmp_path / 'last.safetensors', _metadata(transform=transform))
    read = read_classifier(str(tmp_path / 'last.safetensors'))
    expected = timm.data.create_transform(**transform)(Image.open(image))
    assert torch.equal(timm.data.create_transform(**read.transform)(Image.open(image)), expected)
    described = preprocessing(read.transform)
    assert described['crop'] == list(expected.shape[1:])
    assert described['resize']['interpolation'] == transform.get('interpolation', 'bilinear')
    assert described['resize']['size'] in ([math.floor(side / 0.875) for side in described['crop']],
                                           math.floor(described['crop'][0] / 0.875))
