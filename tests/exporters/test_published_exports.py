"""ONNX and ExecuTorch files of published families that the exporters' own tests leave out."""
import pytest
import torch
from export_cases import subject_of
from helpers import assert_close

from subquad.tools.exporters.formats import Options

pytestmark = pytest.mark.slow


# MLLA pads maps to even sides, and scans leave blocks unfilled.
@pytest.mark.parametrize('size', [None, (67, 93)])
@pytest.mark.parametrize('module, package', [('to_onnx', 'onnxruntime'), ('to_executorch', 'executorch')])
@pytest.mark.parametrize('name', ['test_mlla', 'test_vmamba', 'test_vim'])
def test_files_give_the_results_of_the_network(name, module, package, size, tmp_path):
    pytest.importorskip(package)
    exporter = pytest.importorskip(f'subquad.tools.exporters.{module}')
    torch.manual_seed(0)
    subject, path = subject_of(name, size=size), tmp_path / 'model'
    exporter.convert(subject, Options(), path)
    images = subject.example(seed=1)
    with torch.inference_mode():
        expected = subject.eager(images)[0]
    assert_close(exporter.load(path)(images)[0], expected, 1e-5)
