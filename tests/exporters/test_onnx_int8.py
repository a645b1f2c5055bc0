"""Accuracy on handwritten digits: float32, float16 and int8 files against the ordinary model."""
import pytest
import torch
from digits_exports import POINTS, calibration_of, check_accuracy, digits_subject

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')
pytest.importorskip('sklearn')

from onnx_exports import TEST_MODELS, record_once  # noqa: E402

from subquad.tools.exporters import to_onnx  # noqa: E402
from subquad.tools.exporters.formats import Options  # noqa: E402

FORMATS = {'onnx': to_onnx, 'ort': to_onnx}


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch):
    record_once(monkeypatch)


def convert_and_check(name, precision, formats, folder):
    subject = digits_subject(name)
    for name_, module in formats.items():
        path = folder / f'model.{name_}'
        module.convert(subject, Options(precision, calibration=calibration_of(subject, precision)), path)
        check_accuracy(module.load(path), subject, precision)
    return path


def check_quantized_file(path, parameters):
    """Weights are in int8 with a scale for each output channel; few stay in float32, and outputs are not rounded."""
    model = onnx.load(path)
    elements = {}
    for tensor in model.graph.initializer:
        elements[tensor.data_type] = elements.get(tensor.data_type, 0) + torch.Size(tensor.dims).numel()
    assert elements[onnx.TensorProto.INT8] > 0.85 * parameters
    assert elements[onnx.TensorProto.FLOAT] < 0.15 * parameters
    assert {entry.domain for entry in model.opset_import} == {''}
    producers = {name: node for node in model.graph.node for name in node.output}
    assert all(producers[value.name].op_type != 'DequantizeLinear' for value in model.graph.output)
    scales = {tensor.name: tensor for tensor in model.graph.initializer}
    per_channel = [node for node in model.graph.node if node.op_type == 'DequantizeLinear'
                   and len(scales[node.input[1]].dims) == 1 and scales[node.input[1]].dims[0] > 1]
    convolutions = [node for node in model.graph.node if node.op_type in ('Conv', 'Gemm', 'MatMul')]
    assert len(per_channel) > 0.8 * len(convolutions) > 10


def test_int8_keeps_the_accuracy_of_ppma(tmp_path, capfd):
    subject = digits_subject('test_ppma')
    capfd.readouterr()
    path = convert_and_check('test_ppma', 'int8', {'onnx': to_onnx}, tmp_path)
    printed = capfd.readouterr()
    assert printed.out == printed.err == ''
    assert [file.name for file in tmp_path.iterdir()] == ['model.onnx']
    check_quantized_file(path, sum(p.numel() for p in subject.eager.parameters()))
    assert to_onnx.read_metadata(path) == subject.metadata


@pytest.mark.slow
@pytest.mark.parametrize('precision', POINTS)
@pytest.mark.parametrize('name', TEST_MODELS)
def test_accuracy(name, precision, tmp_path):
    convert_and_check(name, precision, FORMATS, tmp_path)
