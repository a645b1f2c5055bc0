"""Accuracy on handwritten digits: float32, float16 and int8 files against the ordinary model."""
import pytest
import timm.data
import torch
from helpers import assert_close
from PIL import Image

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')
pytest.importorskip('sklearn')

from onnx_exports import TEST_MODELS, digits_subject, record_once  # noqa: E402

from subquad.tools.data.digits import digits_arrays  # noqa: E402
from subquad.tools.exporters import to_onnx, to_ort  # noqa: E402
from subquad.tools.exporters.formats import Options  # noqa: E402

FORMATS = {'onnx': to_onnx, 'ort': to_ort}
POINTS = {'fp32': 0.5, 'fp16': 0.5, 'int8': 2.0}


@pytest.fixture(autouse=True)
def recorded_once(monkeypatch):
    record_once(monkeypatch)


def images_of(subject, split, count=None):
    """The digits as the model's evaluation prepares them, (n, 3, H, W), and their labels."""
    mean, std = (subject.metadata['preprocessing'][key] for key in ('mean', 'std'))
    transform = timm.data.create_transform((3, *subject.size), crop_pct=1.0, mean=mean, std=std,
                                           interpolation='bilinear')
    arrays, labels = digits_arrays(split)
    images = [transform(Image.fromarray(array).convert('RGB')) for array in arrays[:count]]
    return torch.stack(images), torch.as_tensor(labels[:count])


def logits_of(run, images):
    return torch.cat([run(image[None])[0] for image in images])


def accuracy(logits, labels):
    assert logits.isfinite().all()
    return 100 * (logits.argmax(1) == labels).double().mean().item()


def check_accuracy(name, precision, formats, folder):
    subject = digits_subject(name)
    images, labels = images_of(subject, 'test')
    with torch.inference_mode():
        expected = subject.eager(images)[0]
    before = accuracy(expected, labels)
    assert before > 95
    calibration = images_of(subject, 'train', 64)[0].split(1) if precision == 'int8' else ()
    for name_, module in formats.items():
        path = folder / f'model.{name_}'
        module.convert(subject, Options(precision, calibration=calibration), path)
        logits = logits_of(module.load(path), images)
        after = accuracy(logits, labels)
        assert abs(after - before) <= POINTS[precision], f'{name} {name_} {precision}: {before:.2f} -> {after:.2f}'
        assert_close(logits, expected, {'fp32': 1e-4, 'fp16': 1e-2, 'int8': 0.3}[precision], f'{name} {name_}')
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
    path = check_accuracy('test_ppma', 'int8', {'onnx': to_onnx}, tmp_path)
    printed = capfd.readouterr()
    assert printed.out == printed.err == ''
    assert [file.name for file in tmp_path.iterdir()] == ['model.onnx']
    check_quantized_file(path, sum(p.numel() for p in subject.eager.parameters()))
    assert to_onnx.read_metadata(path) == subject.metadata


@pytest.mark.slow
@pytest.mark.parametrize('precision', POINTS)
@pytest.mark.parametrize('name', TEST_MODELS)
def test_accuracy(name, precision, tmp_path):
    check_accuracy(name, precision, FORMATS, tmp_path)
