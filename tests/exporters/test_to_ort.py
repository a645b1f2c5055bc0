"""The format of ONNX Runtime Mobile."""
import json

import pytest
from digits_exports import check_accuracy, digits_subject
from pairwise import slow

onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('onnx')
pytest.importorskip('onnxscript')

from onnx_exports import MODELS, TEST_MODELS, check_outputs, record_once, subject  # noqa: E402

from subquad.tools.common.cli import UserError  # noqa: E402
from subquad.tools.exporters import to_onnx  # noqa: E402
from subquad.tools.exporters.formats import Options  # noqa: E402


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch):
    record_once(monkeypatch)


def convert_and_check(made, options, path, shapes=((1, None), (1, None))):
    conversion = to_onnx.convert(made, options, path)
    check_outputs(to_onnx, path, made, options, shapes)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return conversion


@pytest.mark.parametrize('name', ['test_mobilevitv2', *slow('test_ppma', 'test_myo', 'test_lcsm')])
def test_a_classifier_with_a_fixed_size(name, tmp_path, capfd):
    made, path = digits_subject(name), tmp_path / 'model.ort'
    capfd.readouterr()
    conversion = convert_and_check(made, Options(), path)
    check_accuracy(to_onnx.load(path), made)
    printed = capfd.readouterr()
    assert printed.out == printed.err == ''
    assert path.read_bytes()[4:8] == b'ORTM'
    assert conversion.operators['Conv'] >= 17 and not conversion.operators.keys() & {'ReorderInput', 'ReorderOutput'}
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    assert json.loads(session.get_modelmeta().custom_metadata_map['subquad']) == made.metadata
    assert to_onnx.read_metadata(path) == made.metadata
    assert [(x.name, x.shape) for x in session.get_inputs()] == [('image', [1, 3, *made.size])]
    for batch, size in ((2, made.size), (1, (made.size[0], made.size[1] + 32))):
        with pytest.raises(Exception, match='Got invalid dimensions'):
            to_onnx.load(path)(made.example(batch, size))


@pytest.mark.slow
def test_half_precision_halves_the_file(tmp_path):
    sizes = {}
    for precision in ('fp32', 'fp16'):
        folder = tmp_path / precision
        folder.mkdir()
        convert_and_check(subject('test_mobilevitv2'), Options(precision), folder / 'model.ort')
        sizes[precision] = (folder / 'model.ort').stat().st_size
    weights = sum(p.numel() for p in subject('test_mobilevitv2').eager.parameters())
    assert sizes['fp32'] - sizes['fp16'] > 1.2 * weights        # 2 bytes each, less what the casts take


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / 'model.ort'
    path.write_bytes(b'\0\0\0\0ORTM' + b'\xff' * 100)
    for read in (to_onnx.load, to_onnx.read_metadata):
        with pytest.raises(UserError, match='ONNX Runtime cannot read .*model.ort'):
            read(path)


@pytest.mark.slow
@pytest.mark.parametrize('precision', ['fp32', 'fp16'])
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', (*TEST_MODELS, *MODELS))
def test_classifiers_and_pyramids(name, features, precision, tmp_path):
    convert_and_check(subject(name, features), Options(precision), tmp_path / 'model.ort')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['test_ppma', 'ppma_tiny', 'test_mobilevitv2', 'subquad_mobilevitv2_050'])
def test_dynamic_batch_height_and_width(name, tmp_path):
    step = subject(name).sizes.multiple_of
    sizes = [(4 * step, 3 * step), (3 * step, 4 * step), (5 * step, 5 * step)]
    convert_and_check(subject(name), Options(dynamic=frozenset({'batch', 'hw'})), tmp_path / 'model.ort',
                      [(n + 1, size) for n, size in enumerate(sizes)])
