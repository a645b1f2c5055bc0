"""LiteRT: files run within the tolerances and carry their metadata. Most tests need litert-torch, in its own venv."""
import importlib.util
import json
import zipfile

import pytest
import torch
from digits_exports import calibration_of, check_accuracy, digits_subject
from export_cases import LABELS, small_classifier, subject_of

from subquad.tools.common.cli import UserError
from subquad.tools.exporters import to_litert
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import export
from subquad.tools.exporters.subject import with_normalization

needs_litert = pytest.mark.skipif(importlib.util.find_spec('litert_torch') is None, reason='litert-torch not installed')


def exported(folder, name, precision='fp32', **options):
    subject = subject_of(name, **options)
    images = [subject.example(seed=seed) for seed in range(16 if precision == 'int8' else 0)]
    return export(subject, 'litert', folder / f'{name}.tflite', Options(precision, calibration=images), repeats=0)


class Table:
    """A table of a flatbuffer, whose fields have the numbers of TFLite's metadata_schema.fbs."""

    def __init__(self, content, place):
        from flatbuffers.table import Table
        self.table = Table(content, place)

    def _place(self, number):
        offset = self.table.Offset(4 + 2 * number)
        return offset and offset + self.table.Pos

    def byte(self, number):
        return self.table.Bytes[self._place(number)] if self._place(number) else 0

    def text(self, number):
        return self.table.String(self._place(number)).decode()

    def inner(self, number):
        return Table(self.table.Bytes, self.table.Indirect(self._place(number)))

    def _items(self, number):
        offset = self._place(number) - self.table.Pos if self._place(number) else 0
        return [self.table.Vector(offset) + 4 * n for n in range(self.table.VectorLen(offset))] if offset else []

    def numbers(self, number):
        from flatbuffers.number_types import Float32Flags
        return [self.table.Get(Float32Flags, place) for place in self._items(number)]

    def tables(self, number):
        return [Table(self.table.Bytes, self.table.Indirect(place)) for place in self._items(number)]


def tflite_metadata(path):
    """The tables of the input and of the outputs in the metadata of TFLite, and the name of the model."""
    from ai_edge_litert.schema_py_generated import Model
    model = Model.GetRootAs(path.read_bytes())
    entries = [model.Metadata(n) for n in range(model.MetadataLength())]
    buffer, = (entry.Buffer() for entry in entries if entry.Name() == b'TFLITE_METADATA')
    content = model.Buffers(buffer).DataAsNumpy().tobytes()
    assert content[4:8] == b'M001'
    top = Table(content, int.from_bytes(content[:4], 'little'))
    assert top.text(7) == '1.0.0'
    graph, = top.tables(3)
    image, = graph.tables(2)
    return image, graph.tables(3), top.text(0)


@needs_litert
@pytest.mark.parametrize('options, normalize, mean, std', [
    (dict(), False, [127.5, 63.75, 31.875], [127.5, 63.75, 51]),
    (dict(color='BGR'), True, [0, 0, 0], [1, 1, 1]),
    (dict(color='gray', mean=[0.2], std=[0.4], labels=[]), False, [51], [102]),
])
def test_tools_of_tflite_find_colors_normalization_and_labels(options, normalize, mean, std, tmp_path):
    subject = small_classifier(**options)
    subject = with_normalization(subject) if normalize else subject
    report = export(subject, 'litert', tmp_path / 'small.tflite', repeats=0)
    image, (scores,), name = tflite_metadata(report.path)
    assert report.passed and name == 'small' and image.text(0) == 'image' and scores.text(0) == 'logits'
    content, (unit,) = image.inner(3), image.tables(4)
    assert content.byte(0) == 2 and unit.byte(0) == 1                   # properties of an image, a normalization
    assert content.inner(1).byte(0) == {'RGB': 1, 'gray': 2, 'BGR': 0}[options.get('color', 'RGB')]
    assert unit.inner(1).numbers(0) == pytest.approx(mean) and unit.inner(1).numbers(1) == pytest.approx(std)
    with zipfile.ZipFile(report.path) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        files = [(file.text(0), file.byte(2)) for file in scores.tables(6)]
        assert files == ([('labels.txt', 2)] if subject.metadata['labels'] else [])         # labels along an axis
        assert sorted(archive.namelist()) == sorted(['subquad.json', *(name for name, _ in files)])
        for name, _ in files:
            assert archive.read(name).decode().splitlines() == LABELS


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
    _, outputs, _ = tflite_metadata(report.path)
    found = [(table.text(0), details['shape'].tolist())
             for table, details in zip(outputs, interpreter.get_output_details(), strict=True)]
    assert sorted(found) == sorted((output['name'], output['shape']) for output in metadata['outputs'])
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
                                  'test_mobilevitv2', 'test_mambavision', 'test_vmamba'])
def test_every_family(name, features, precision, tmp_path):
    assert exported(tmp_path, name, precision, features=features).passed
