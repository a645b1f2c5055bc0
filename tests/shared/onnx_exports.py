"""Subjects and their ONNX graphs for the tests of the formats ONNX and ORT, made once in a process."""
import copy
import functools

import torch
from export_cases import subject_of
from helpers import assert_close

from subquad.tools.exporters import to_onnx
from subquad.tools.exporters.formats import Options

TEST_MODELS = ('test_ppma', 'test_mobilevitv2', 'test_myo', 'test_lcsm')
MODELS = ('subquad_mobilevitv2_050', 'ppma_tiny', 'test_mambavision', 'myo_tiny')
TOLERANCES = {'fp32': 1e-4, 'fp16': 1e-2}


@functools.lru_cache(maxsize=None)
def subject(name, features=False):
    """A classifier with random weights and randomized norms, or its feature pyramid."""
    torch.manual_seed(0)
    return subject_of(name, features=features)


_RECORD, _RECORDED = to_onnx.record, {}


def record_once(monkeypatch):
    """Record the float32 graph of each subject once in a process; the rest of a conversion runs as always."""
    def record(subject, dynamic=frozenset()):
        key = subject.name, subject.task, subject.metadata['weights'], frozenset(dynamic)
        if key not in _RECORDED:
            _RECORDED[key] = _RECORD(subject, dynamic)
        return copy.deepcopy(_RECORDED[key])
    monkeypatch.setattr(to_onnx, 'record', record)


def check_outputs(module, path, subject, options=Options(), shapes=((1, None), (1, None))):   # noqa: B008  (a tuple)
    """Compare the file with the ordinary model, on images of these (batch, size)."""
    run = module.load(path)
    for n, (batch, size) in enumerate(shapes):
        images = subject.example(batch, size, seed=n)
        with torch.inference_mode():
            expected = subject.eager(images)
        outputs = run(images)
        assert len(outputs) == len(subject.outputs)
        for name, output, wanted in zip(subject.outputs, outputs, expected):
            assert output.dtype == torch.float32
            assert_close(output, wanted, TOLERANCES[options.precision], f'{subject.name} {name}')
