"""OpenVINO's representation, run on its CPU runtime."""
import pytest
from digits_exports import calibration_of, check_accuracy, digits_subject
from pairwise import slow

openvino = pytest.importorskip('openvino')
pytest.importorskip('onnx')
pytest.importorskip('onnxscript')

from families import FAMILIES  # noqa: E402
from onnx_exports import check_outputs, record_once, subject  # noqa: E402

from subquad.tools.common.cli import UserError  # noqa: E402
from subquad.tools.exporters import to_openvino  # noqa: E402
from subquad.tools.exporters.formats import Options  # noqa: E402
from subquad.tools.exporters.pipeline import export  # noqa: E402


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch):
    record_once(monkeypatch)


@pytest.mark.parametrize('name', ['test_ppma', *slow('test_mobilevitv2', 'test_myo', 'test_lcsm')])
def test_a_classifier_in_each_precision(name, tmp_path, capfd):
    made, sizes = digits_subject(name), {}
    capfd.readouterr()
    for precision in ('fp32', 'fp16', 'int8'):
        path = tmp_path / f'{precision}.xml'
        conversion = to_openvino.convert(made, Options(precision, calibration=calibration_of(made, precision)), path)
        check_accuracy(to_openvino.load(path), made, precision)
        assert to_openvino.read_metadata(path) == made.metadata
        assert conversion.operators['Convolution'] > 5 and 'Constant' not in conversion.operators
        sizes[precision] = path.with_suffix('.bin').stat().st_size
    printed = capfd.readouterr()
    assert printed.out == printed.err == ''
    assert sorted(file.suffix for file in tmp_path.iterdir()) == 3 * ['.bin'] + 3 * ['.xml']
    parameters = sum(p.numel() for p in made.eager.parameters())
    assert 3.8 < sizes['fp32'] / parameters < 5.2 and sizes['fp16'] < 0.6 * sizes['fp32']
    assert sizes['int8'] < 0.5 * sizes['fp32']

    model = openvino.Core().read_model(tmp_path / 'fp32.xml')
    assert [x.any_name for x in model.inputs] == ['image'] and [x.any_name for x in model.outputs] == ['logits']
    assert made.metadata['model'] in openvino.Core().read_model(tmp_path / 'int8.xml').get_rt_info('subquad').value
    with pytest.raises(RuntimeError, match='incompatible'):
        to_openvino.load(tmp_path / 'fp32.xml')(made.example(2))


def test_threads_and_precision_of_the_runtime(tmp_path, monkeypatch):
    """Without the hint, processors with bfloat16 would not compute in float32."""
    made, path, settings = subject('test_ppma'), tmp_path / 'a.xml', []
    to_openvino.convert(made, Options(), path)
    compile_model = openvino.compile_model

    def compiled(*args):
        settings.append(compile_model(*args))
        return settings[-1]
    monkeypatch.setattr(openvino, 'compile_model', compiled)
    for threads in (1, 2):
        to_openvino.load(path, threads)
        assert settings[-1].get_property('INFERENCE_NUM_THREADS') == threads
        assert settings[-1].get_property('INFERENCE_PRECISION_HINT').to_string() == 'f32'
        nodes = settings[-1].get_runtime_model().get_ordered_ops()
        kinds = {node.get_rt_info()['runtimePrecision'].value for node in nodes}
        assert 'f32' in kinds and not kinds & {'f16', 'bf16'}


@pytest.mark.parametrize('name', ['test_mobilevitv2', *slow('test_ppma')])
def test_dynamic_batch(name, tmp_path):
    made, path, options = subject(name), tmp_path / 'a.xml', Options(dynamic=frozenset({'batch'}))
    to_openvino.convert(made, options, path)
    check_outputs(to_openvino, path, made, options, [(1, None), (3, None)])


@pytest.mark.slow
@pytest.mark.parametrize('features', [False, True])
@pytest.mark.parametrize('name', FAMILIES)
def test_every_family(name, features, tmp_path):
    report = export(subject(name, features), 'openvino', tmp_path / 'a.xml', repeats=0)
    assert report.passed and report.errors.relative < 1e-5
    assert sorted(file.name for file in tmp_path.iterdir()) == ['a.bin', 'a.xml']


def test_files_that_are_no_models(tmp_path):
    path = tmp_path / 'a.xml'
    for text in (None, 'no model'):
        if text:
            path.write_text(text)
        for read in (to_openvino.load, to_openvino.read_metadata):
            with pytest.raises(UserError, match=r'OpenVINO cannot read .*a\.xml'):
                read(path)
    parameter = openvino.opset13.parameter([1, 3], name='x')
    openvino.save_model(openvino.Model([openvino.opset13.relu(parameter)], [parameter], 'm'), path)
    with pytest.raises(UserError, match='has no metadata of `subquad export`'):
        to_openvino.read_metadata(path)
