"""MLLA in ONNX and ExecuTorch, also for an image whose maps are padded to even sides."""
import pytest
import torch
from export_cases import subject_of
from helpers import assert_close

from subquad.tools.exporters.formats import Options

pytestmark = pytest.mark.slow


@pytest.mark.parametrize('module, package, size', [
    ('to_onnx', 'onnxruntime', None), ('to_onnx', 'onnxruntime', (67, 93)), ('to_executorch', 'executorch', None)])
def test_files_give_the_results_of_the_network(module, package, size, tmp_path):
    pytest.importorskip(package)
    exporter = pytest.importorskip(f'subquad.tools.exporters.{module}')
    torch.manual_seed(0)
    subject, path = subject_of('test_mlla', size=size), tmp_path / 'model'
    exporter.convert(subject, Options(), path)
    images = subject.example(seed=1)
    with torch.inference_mode():
        expected = subject.eager(images)[0]
    assert_close(exporter.load(path)(images)[0], expected, 1e-5)
