"""`subquad predict FILE` and `subquad test FILE` find with an exported file what they find with the weights."""
import json

import numpy as np
import pytest
from dense_cases import make_shapes
from digits_exports import calibration_of, digits_subject, digits_weights
from helpers import ROOT
from pairwise import slow

from subquad.tools import predict, test
from subquad.tools.common.cli import UserError
from subquad.tools.data.image_sets import Digits
from subquad.tools.engine.config import load
from subquad.tools.exporters.dense_subject import dense_subject
from subquad.tools.exporters.formats import FORMATS, WITH_NMS, Options, missing_packages
from subquad.tools.exporters.pipeline import export, with_file_metadata
from subquad.tools.exporters.subject import with_normalization

SSDLITE, UPERNET = 'ssdlite_test-mobilevitv2_shapes', 'upernet_test-ppma_shapes'
WEIGHTS = {SSDLITE: 'test_mobilevitv2.ssdlite_shapes', UPERNET: 'test_ppma.upernet_shapes'}


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """Every fifth test image of the digits, in a folder for each class."""
    folder, digits = tmp_path_factory.mktemp('photos'), Digits('test')
    for n in range(0, len(digits), 5):
        image, label = digits[n].values()
        (folder / 'val' / str(label)).mkdir(parents=True, exist_ok=True)
        image.save(folder / 'val' / str(label) / f'{n}.png')
    return folder


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp('data') / 'shapes', train=1, val=4, size=128)


def _needs(name):
    if missing := missing_packages(name):
        pytest.skip(f'{", ".join(missing)} missing')


def _file(name, subject, folder, **options):
    _needs(name)
    report = export(subject, name, folder / f'model{FORMATS[name].suffix}', Options(**options), repeats=0)
    assert report.passed, report.errors
    return str(report.path)


def _run(tool, capsys, *words):
    capsys.readouterr()
    assert not tool.main([*map(str, words), '--json'])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize('normalize', [False, *slow(True)])
@pytest.mark.parametrize('name', ['onnx', 'ncnn', *slow('ort', 'openvino', 'pt2', 'aoti', 'executorch', 'litert')])
def test_classifiers(name, normalize, photos, tmp_path, capsys):
    subject = digits_subject('test_mobilevitv2')
    file = _file(name, with_normalization(subject) if normalize else subject, tmp_path)
    expected = _run(predict, capsys, 'test_mobilevitv2.digits', photos / 'val' / '3', '--topk', 10)
    found = _run(predict, capsys, file, photos / 'val' / '3', '--topk', 10)
    for row, other in zip(found, expected):
        assert [c['name'] for c in row['classes'][:2]] == [c['name'] for c in other['classes'][:2]]
        np.testing.assert_allclose(*([c['probability'] for c in r['classes']] for r in (row, other)), atol=1e-4)
    metrics = _run(test, capsys, file, '--data', photos)
    assert metrics['accuracy/top1'] == metrics['model/top1'] > 95 and metrics['agreement/top1'] == 100
    assert metrics['latency/median'] > 0


@pytest.mark.parametrize('model', ['test_mobilevitv2', *slow(
    'test_ppma', 'test_myo', 'test_lcsm', 'test_rmt', 'test_mlla', 'test_vmamba', 'test_vim', 'test_mambavision')])
@pytest.mark.parametrize('name', ['onnx', *slow('ort', 'openvino', 'executorch', 'litert')])
def test_int8_is_within_a_point_of_float32(model, name, tmp_path, capsys):
    _needs(name)                                      # before a training
    subject = digits_subject(model)
    file = _file(name, subject, tmp_path, precision='int8', calibration=calibration_of(subject, 'int8'))
    digits = Digits('test')
    for n in range(len(digits)):
        image, label = digits[n].values()
        (tmp_path / 'val' / str(label)).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / 'val' / str(label) / f'{n}.png')
    metrics = _run(test, capsys, file, '--data', tmp_path, '--weights', digits_weights(model))
    assert metrics['model/top1'] > 95 and abs(metrics['accuracy/top1'] - metrics['model/top1']) <= 1


@pytest.mark.parametrize('config', [SSDLITE, *slow(UPERNET)])
@pytest.mark.parametrize('name', ['ncnn', *slow('onnx', 'openvino', 'pt2', 'executorch')])
def test_detectors_and_segmenters(config, name, shapes, tmp_path, capsys):
    subject = dense_subject(load(config), WEIGHTS[config], (128, 128), nms=name == 'onnx', labels=name != 'ncnn')
    file, images = _file(name, subject, tmp_path), shapes / 'images' / 'val'
    least = [] if config == UPERNET else ['--score', 0.05]
    expected = _run(predict, capsys, WEIGHTS[config], images, '--out', tmp_path / 'model', *least)
    found = _run(predict, capsys, file, images, '--out', tmp_path / 'file', *least)
    for row, other in zip(found, expected):
        if config == UPERNET:
            assert [c['name'] for c in row['classes']] == [c['name'] for c in other['classes']]
            np.testing.assert_allclose(*([c['share'] for c in r['classes']] for r in (row, other)), atol=1e-3)
        else:
            assert row['objects'] and [o['class'] for o in row['objects']] == [o['class'] for o in other['objects']]
            np.testing.assert_allclose(*([o['box'] for o in r['objects']] for r in (row, other)), atol=0.5)
    assert (tmp_path / 'file' / f'{next(images.iterdir()).stem}.png').is_file()
    metrics = _run(test, capsys, file, '--data', shapes)
    metric = 'mIoU' if config == UPERNET else 'coco/bbox_mAP'
    assert abs(metrics[metric] - metrics[f'model/{metric}']) < (0.2 if config == UPERNET else 0.005)
    assert metrics[metric] > 0


@pytest.mark.parametrize('name', FORMATS)
def test_metadata_follow_the_schema(name):
    jsonschema = pytest.importorskip('jsonschema')
    schema = json.loads((ROOT / 'docs' / 'export-metadata.schema.json').read_text())
    dense = (dense_subject(load(config), size=(128, 128), nms=name in WITH_NMS) for config in WEIGHTS)
    for subject in (digits_subject('test_mobilevitv2'), *dense):
        metadata = with_file_metadata(subject, name).metadata
        jsonschema.validate(metadata, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**metadata, 'more': 1}, schema)


@pytest.mark.parametrize('words, sentence', [
    (['none.onnx', '--data', '.'], 'there is no file none.onnx'),
    (['model.mlpackage', '--data', '.'], 'Core ML has no runtime for Python'),
    (['model.onnx', '--data', '.', '--threads', '0'], '--threads must be at least 1, got 0'),
    (['model.onnx', '--data', 'other'], 'the folder four in other is no class of the file, whose classes are 0, 1, 2'),
])
def test_wrong_requests_give_one_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'model.mlpackage').mkdir()
    for name in ('four', '0'):
        (tmp_path / 'other' / name).mkdir(parents=True)
        Digits('test')[0]['inputs'].save(tmp_path / 'other' / name / '1.png')
    if words[0] == 'model.onnx':
        _file('onnx', digits_subject('test_mobilevitv2'), tmp_path)
    with pytest.raises(UserError, match=sentence):
        test.main(words)
