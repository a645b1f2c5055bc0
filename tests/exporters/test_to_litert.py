"""LiteRT: files run within the tolerances and carry their metadata. Most tests need litert-torch, in its own venv."""
import importlib.util
import json
import zipfile

import pytest
import torch
from digits_exports import calibration_of, check_accuracy, digits_subject
from export_cases import subject_of

from subquad.tools.common.cli import UserError
from subquad.tools.exporters import to_litert
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import export

needs_litert = pytest.mark.skipif(importlib.util.find_spec('litert_torch') is None, reason='litert-torch not installed')


def exported(folder, name, precision='fp32', **options):
    subject = subject_of(name, **options)
    images = [subject.example(seed=seed) for seed in range(16 if precision == 'int8' else 0)]
    return export(subject, 'litert', folder / f'{name}.tflite', Options(precision, calibration=images), repeats=0)


@needs_litert
@pytest.mark.parametrize('name, precision', [('test_ppma', 'fp32'), ('test_mobilevitv2', 'int8')])
def test_digits(name, precision, tmp_path):
    """The last maps of this PPMA are 1 x 1."""
    subject = digits_subject(name)
    options = Options(precision, calibration=calibration_of(subject, precision))
    report = export(subject, 'litert', tmp_path / 'digits.tflite', options, repeats=0)
    assert report.passed
    check_accuracy(to_litert.load(report.path), subject, precision)


@needs_litert
@pytest.mark.parametrize('name, precision, options', [
    ('test_mobilevitv2', 'fp32', dict(size=(64, 96), features=True)),
    ('test_ppma', 'fp16', dict()),
    ('test_mobilevitv2', 'int8', dict()),
    pytest.param('test_mobilevitv2', 'dynamic8', dict(), marks=pytest.mark.slow),
    pytest.param('test_mobilevitv2', 'fp16', dict(), marks=pytest.mark.slow),
    pytest.param('test_myo', 'fp32', dict(size=(84, 59)), marks=pytest.mark.slow),
])
def test_networks_run_as_the_ordinary_model(name, precision, options, tmp_path):
    report = exported(tmp_path, name, precision, **options)
    assert report.passed and [file.name for file in tmp_path.iterdir()] == [f'{name}.tflite']
    low, high = {'fp32': (0, 1e-5), 'fp16': (1e-6, 1e-2)}.get(precision, (1e-3, 0.5))
    assert low <= report.errors.relative < high
    metadata = to_litert.read_metadata(report.path)
    assert metadata['model'] == name and metadata['precision'] == precision and metadata['input']['name'] == 'image'
    parameters = sum(p.numel() for p in subject_of(name, **options).module.parameters())
    assert report.bytes / parameters < (8 if precision == 'fp32' else 4)
    operators = report.conversion.operators
    assert operators['CONV_2D'] > 5 and 'DELEGATE' not in operators
    assert not any('custom' in kind.lower() or 'flex' in kind.lower() for kind in operators)
    interpreter = to_litert._interpreter(report.path)
    names = [output['name'] for output in metadata['outputs']]
    assert interpreter.get_signature_list() == {'serving_default': dict(inputs=['image'], outputs=sorted(names))}
    image, = interpreter.get_input_details()
    assert image['shape'].tolist() == metadata['input']['shape'] and metadata['input']['layout'] == 'NHWC'
    first, *_ = interpreter._get_ops_details()
    assert first['op_name'] != 'TRANSPOSE'
    run = to_litert.load(report.path, threads=2)
    _, height, width, channels = metadata['input']['shape']
    with pytest.raises(UserError, match=f'takes images of shape .1, {channels}, {height}, {width}., got'):
        run(torch.zeros(1, height, width, channels))


def test_metadata_is_a_zip_archive_behind_the_network(tmp_path):
    path = tmp_path / 'a.tflite'
    path.write_bytes(b'network')
    with pytest.raises(UserError, match='holds no metadata'):
        to_litert.read_metadata(path)
    with zipfile.ZipFile(path, 'a') as archive:
        archive.writestr('subquad.json', json.dumps(dict(model='m')))
    assert path.read_bytes().startswith(b'network') and to_litert.read_metadata(path) == dict(model='m')
    with pytest.raises(UserError, match='holds no metadata'):
        to_litert.read_metadata(tmp_path / 'missing.tflite')


@needs_litert
def test_broken_files(tmp_path):
    (tmp_path / 'a.tflite').write_bytes(b'no network')
    for name in ('a', 'missing'):
        with pytest.raises(UserError, match='is not a file for LiteRT'):
            to_litert.load(tmp_path / f'{name}.tflite')


@needs_litert
@pytest.mark.slow
@pytest.mark.parametrize('precision', ['fp32', 'fp16'])
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', ['ppma_tiny', 'myo_tiny', 'subquad_mobilevitv2_050', 'test_ppma', 'test_myo',
                                  'test_mobilevitv2'])
def test_every_family(name, features, precision, tmp_path):
    assert exported(tmp_path, name, precision, features=features).passed
