"""The pipeline keeps files whose outputs are right, and no others; the command says why. The formats are replaced."""
import json
import math
from types import SimpleNamespace

import pytest
import torch
from export_cases import subject_of

import subquad_cli
from subquad.tools import export as command
from subquad.tools.common.cli import UserError
from subquad.tools.exporters import formats, pipeline
from subquad.tools.exporters.formats import FORMATS, Conversion, Options
from subquad.tools.exporters.pipeline import export
from subquad.tools.exporters.subject import Sizes


def exporter(error=0., fail=None):
    """A format whose `load` runs the model of the last `convert` and adds an error to its outputs."""
    subjects = []

    def convert(subject, options, path):
        subjects.append(subject)
        path.write_text(json.dumps(subject.metadata))
        (path.parent / (path.name + '.side')).write_text('side file')
        if fail:
            raise fail
        return Conversion({'Conv': 3, 'Add': 2})

    def load(path, threads=1):
        assert path.exists()

        def run(images):
            with torch.no_grad():
                return [y + error * y.abs().max() if y.is_floating_point() else y for y in subjects[-1].eager(images)]
        return run
    return SimpleNamespace(convert=convert, load=load, check=load)


@pytest.fixture
def replace_format(monkeypatch):
    def replace(**options):
        module = exporter(**options)
        monkeypatch.setattr(pipeline, 'exporter', lambda name: module)
        monkeypatch.setattr(formats, '_check_installed', lambda name: None)
    return replace


@pytest.fixture(scope='module')
def subject():
    return subject_of('test_mobilevitv2', size=(64, 64))


def test_right_file_appears_with_its_side_files(subject, replace_format, tmp_path):
    replace_format(error=5e-5)
    (tmp_path / 'a.onnx').write_text('older')
    report = export(subject, 'onnx', tmp_path / 'a.onnx', repeats=2)
    assert report.passed and 4e-5 < report.errors.relative < 6e-5 and report.errors.output == 'logits'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.onnx', 'a.onnx.side']
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    metadata = json.loads((tmp_path / 'a.onnx').read_text())
    assert metadata['format'] == 'onnx' and metadata['precision'] == 'fp32' and metadata['input']['dynamic'] == []
    assert metadata['outputs'] == [dict(name='logits', shape=[1, 1000], dtype='float32')]
    assert all(0 < file and 0 < eager for file, eager in report.latency.values()) and 1 in report.latency


@pytest.mark.parametrize('error', [2e-4, math.nan, math.inf])
def test_wrong_file_does_not_appear(subject, replace_format, tmp_path, error):
    replace_format(error=error)
    (tmp_path / 'a.onnx').write_text('older')
    report = export(subject, 'onnx', tmp_path / 'a.onnx', repeats=0)
    assert not report.passed and report.latency == {}
    assert [path.name for path in tmp_path.iterdir()] == ['a.onnx'] and (tmp_path / 'a.onnx').read_text() == 'older'


@pytest.mark.parametrize('fail', [RuntimeError('first line\nsecond line'), UserError('no such operator'),
                                  OSError(28, 'No space left on device')])
def test_failed_conversion_leaves_nothing(subject, replace_format, tmp_path, fail):
    replace_format(fail=fail)
    with pytest.raises(UserError, match=r'first line second line|no such operator|'
                       r'cannot write .*a\.onnx \(No space left on device\)'):
        export(subject, 'onnx', tmp_path / 'new' / 'a.onnx')
    assert list((tmp_path / 'new').iterdir()) == []


def test_model_with_nan_cannot_be_compared(replace_format, tmp_path):
    replace_format()
    subject = subject_of('test_mobilevitv2', size=(64, 64))
    subject.eager.model.head.fc.bias.data[3] = math.nan
    with pytest.raises(UserError, match='NaN or infinities: nothing can be compared'):
        export(subject, 'onnx', tmp_path / 'a.onnx')
    assert list(tmp_path.iterdir()) == []


def test_folder_with_the_name_of_a_file_is_kept(subject, replace_format, tmp_path):
    replace_format()
    (tmp_path / 'a.onnx').mkdir()
    (tmp_path / 'a.onnx' / 'Manifest.json').write_text('precious')
    with pytest.raises(UserError, match='it is not replaced'):
        export(subject, 'onnx', tmp_path / 'a.onnx', repeats=0)
    assert (tmp_path / 'a.onnx' / 'Manifest.json').read_text() == 'precious'


def test_quantized_files_are_compared_on_calibration_images(subject):
    images = [torch.full((1, 3, 64, 64), float(n)) for n in range(10)]
    static, batch, sizes = (pipeline.inputs_for(subject, Options('int8', frozenset(dynamic), images))
                            for dynamic in ((), ('batch',), ('hw',)))
    assert [float(x.mean()) for x in static] == list(range(8)) and [len(x) for x in batch] == [1, 3, 2]
    assert torch.equal(batch[1], torch.cat(images[:3])) and [x.shape[3] for x in sizes] == [128, 128, 256]


def test_labels_may_differ_in_few_pixels(replace_format):
    labels = torch.arange(10_000).reshape(1, 100, 100)
    subject = SimpleNamespace(eager=lambda x: (labels,), outputs=('labels',), metadata=dict(outputs=[]))
    wrong = labels.clone()
    wrong[0, 0, :20] += 1
    errors = pipeline.compare(lambda x: [wrong], subject, [torch.zeros(1)])
    assert errors.unequal == pytest.approx(2e-3) and errors.relative == 0
    report = pipeline.Report('onnx', None, 0, Conversion({}), errors, 1e-4, {}, [])
    assert not report.passed
    report.errors = errors._replace(unequal=1e-3)
    assert report.passed


@pytest.mark.parametrize('dynamic, shapes', [
    ((), {(1, 64, 64)}), (('batch',), {(1, 64, 64), (3, 64, 64), (2, 64, 64)}),
    (('hw',), {(1, 128, 128), (1, 192, 128), (1, 128, 256)})])
def test_inputs_of_the_comparison(subject, dynamic, shapes):
    inputs = pipeline.inputs_for(subject, Options(dynamic=frozenset(dynamic)))
    assert len(inputs) == 3 and {(len(x), *x.shape[2:]) for x in inputs} == shapes
    assert subject.sizes == Sizes(64, 64, 2048)


@pytest.mark.parametrize('arguments, message', [
    ('test_ppma --format onnx coreml --precision int8', '--precision int8 of onnx needs images'),
    ('test_ppma --format onnx --tolerance nan', 'above 0 and finite'),
    ('test_ppma --format onnx --size 31', 'sides from 32'),
    ('test_ppma --format onnx --repeats -1', 'at least 0'),
    ('test_ppma --format ncnn --dynamic batch', 'all shapes are static'),
    ('test_ppma --format coreml --precision int8 --calibrate x',
     'of onnx, ort, openvino, executorch, litert, not for int8 of coreml'),
    ('test_ppma --format onnx coreml --calibrate x', 'not for fp32 of onnx, fp16 of coreml'),
    ('test_ppma --format ncnn --precision int8 --calibrate x', 'allowed are fp32, fp16'),
    ('test_ppma --format onnx --precision palette4', 'no precision palette4 here; allowed are fp32, fp16, int8'),
    ('test_myo --format onnx --dynamic hw', 'Myo builds its quad tree for one image size'),
    ('test_ppma.digits --format onnx --dynamic hw', 'multiples of 32 from 64 to 2048 for test_ppma, got 32x32'),
    ('test_ppma --format onnx --dynamic hw --size 97x64', 'got 97x64'),
    ('test_ppam --format onnx', "unknown model 'test_ppam'; did you mean test_ppma"),
    ('nosuchmodel --format onnx', "unknown model 'nosuchmodel'"),
    ('test_ppma --format onnx --weights nowhere.safetensors', 'nowhere.safetensors'),
    ('test_ppma --format onnx --out /dev/null/x', 'cannot write to the folder')])
def test_wrong_arguments_end_in_one_sentence(arguments, message, replace_format, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replace_format()
    with pytest.raises(UserError, match=message):
        command.main(arguments.split())
    assert not any(tmp_path.rglob('*.onnx*'))


def test_missing_runtime_names_the_pip_command(monkeypatch):
    monkeypatch.setattr(formats.importlib.util, 'find_spec', lambda name: None)
    for name, form in FORMATS.items():
        if not form.distributions:
            continue
        with pytest.raises(UserError, match='pip install ' + ' '.join(form.distributions)):
            formats.exporter(name)
    with pytest.raises(UserError, match='no installed format'):
        formats.chosen_formats(['all'], Options('fp16'))          # PyTorch's own formats are always installed


def test_command_prints_a_table_and_fails_above_the_tolerance(replace_format, tmp_path, capsys):
    replace_format(error=1e-3)
    arguments = ['test_ppma.digits', '--format', 'onnx', '--repeats', '0', '--out', str(tmp_path)]
    assert command.main(arguments) == 1
    out, err = capsys.readouterr()
    assert 'not written' in out and 'relative error 1.0e-03 of logits is above the tolerance 0.0001' in err
    assert list(tmp_path.iterdir()) == []
    assert command.main([*arguments, '--tolerance', '0.01', '--json']) == 0
    row, = json.loads(capsys.readouterr().out)
    assert row['passed'] and row['operators'] == {'Conv': 3, 'Add': 2} and row['relative_error'] > 9e-4


def test_random_weights_are_reported(replace_format, tmp_path, capsys):
    replace_format()
    assert command.main(['test_ppma', '--format', 'onnx', '--repeats', '0', '--out', str(tmp_path)]) == 0
    assert 'exported with random weights' in capsys.readouterr().err


def test_all_exports_what_is_possible(replace_format, tmp_path, capsys, monkeypatch):
    replace_format()
    def missing(name):
        if name == 'litert':
            raise UserError('litert is missing')
    monkeypatch.setattr(formats, '_check_installed', missing)
    arguments = ['test_ppma.digits', '--format', 'all', '--repeats', '0', '--out', str(tmp_path), '--precision', 'fp16']
    assert command.main(arguments) == 0
    files = {path.name for path in tmp_path.iterdir() if not path.name.endswith('.side')}
    assert files == {f'test_ppma_fp16{form.suffix}' for name, form in FORMATS.items()
                     if name != 'litert' and 'fp16' in form.precisions}
    assert 'left out: litert is missing' in capsys.readouterr().err


def test_formats_have_default_precisions(replace_format, tmp_path):
    replace_format()
    arguments = ['test_ppma.digits', '--format', 'onnx', 'coreml', '--repeats', '0', '--out', str(tmp_path)]
    assert command.main(arguments) == 0
    files = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir() if not path.name.endswith('.side')}
    assert {name: metadata['precision'] for name, metadata in files.items()} == {
        'test_ppma.onnx': 'fp32', 'test_ppma_fp16.mlpackage': 'fp16'}
    assert command.main([*arguments[:2], *arguments[3:], '--precision', 'int8']) == 0        # without images
    assert (tmp_path / 'test_ppma_int8.mlpackage').exists()


def test_every_format_has_an_extra_of_its_distributions():
    import importlib.util

    from helpers import ROOT
    spec = importlib.util.spec_from_file_location('subquad_setup', ROOT / 'setup.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, form in FORMATS.items():
        extra = module.formats['onnx' if name == 'ort' else name] if form.distributions else []
        assert {requirement.partition('>=')[0] for requirement in extra} == set(form.distributions), name
    assert 'export' in subquad_cli.TOOLS


@pytest.mark.parametrize('model, checkpoint', [
    ('test_mobilevitv2.ssdlite_shapes', None), ('subquad://test_mobilevitv2.ssdlite_shapes', None),
    ('ssdlite_test-mobilevitv2_shapes', 'ssdlite_shapes'),
    ('ssdlite_test-mobilevitv2_shapes', 'test_mobilevitv2.ssdlite_shapes')])
def test_weights_of_a_detector_name_its_config(model, checkpoint):
    found = command._named(model, checkpoint)
    assert found == ('ssdlite_test-mobilevitv2_shapes', 'test_mobilevitv2.ssdlite_shapes')
    assert command._named('test_ppma', 'digits') == ('test_ppma', 'digits')
