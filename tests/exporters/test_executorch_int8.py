"""int8 and half-precision ExecuTorch files: accuracy on handwritten digits, and refusals."""
from dataclasses import replace

import pytest
import torch
from digits_exports import POINTS, calibration_of, check_accuracy, digits_subject
from torch import nn

from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.pipeline import compare
from subquad.tools.exporters.subject import Subject, describe

pytest.importorskip('executorch')
pytest.importorskip('torchao')
executorch = pytest.importorskip('subquad.tools.exporters.to_executorch')


class Small(nn.Module):
    """Convolutions, one with a weight that is computed, cumulative sums, a pad, a concatenation, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.side, self.head = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(24, 5)
        self.weight = nn.Parameter(torch.randn(16, 1, 3, 3) / 3)

    def forward(self, images):
        x, side = self.stem(images), self.side(images)
        y = x.relu()
        weight = self.weight + nn.functional.pad(torch.ones(16, 1, 1, 1), [1] * 4)
        y = nn.functional.conv2d(y, weight, padding=1, groups=16)
        y = y + 0.1 * y.cumsum(2).flatten(2).relu().unflatten(2, (8, 8))        # a view of the sums, as in PPMA
        x = nn.functional.avg_pool2d(nn.functional.pad(x, [1] * 4), 2).mean((2, 3), keepdim=True)        # as in Myo
        return (self.head(torch.cat([x + y, side], 1).mean((2, 3))),)


@pytest.fixture
def subject():
    torch.manual_seed(0)
    model = Small().eval()
    transform = dict(resize=None, crop=[16, 16], scale=1 / 255, mean=[0.] * 3, std=[1.] * 3, normalize_in_graph=False)
    return Subject('small', 'classification', model, model, (16, 16), 3, ('logits',),
                   describe('small', 'classification', 'random', (1, 3, 16, 16), transform), 'sizes are fixed')


def test_quantized_convolutions_and_linear_layers(subject, tmp_path):
    images, path = [subject.example(seed=n) for n in range(8)], tmp_path / 'int8.pte'
    assert executorch.convert(subject, Options('int8', calibration=images), path).delegated_macs == 1.0
    assert 1e-5 < compare(executorch.load(path), subject, images).relative < 0.05    # computed with 8 bits


class Labels(nn.Sequential):
    """Logits, and the labels of their resized map, as segmenters have them."""

    def forward(self, images):
        logits = super().forward(images)
        resized = nn.functional.interpolate(logits, (32, 32), mode='bilinear', align_corners=False)
        return logits, resized.argmax(1)


def test_quantized_logits_that_are_resized_and_an_output(subject, tmp_path):
    model = Labels(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 5, 1)).eval()
    subject = replace(subject, module=model, eager=model, outputs=('logits', 'labels'))
    images, path = [subject.example(seed=n) for n in range(8)], tmp_path / 'int8.pte'
    executorch.convert(subject, Options('int8', calibration=images), path)
    logits, labels = executorch.load(path)(images[0])
    expected = model(images[0])
    assert (logits - expected[0]).abs().max() < 0.05 * expected[0].abs().max()
    assert (labels == expected[1]).float().mean() > 0.9


@pytest.mark.slow
def test_a_quantized_file_with_a_dynamic_batch(subject, tmp_path):
    subject.metadata['input']['dynamic'] = ['batch']
    images, options = [subject.example(seed=n) for n in range(8)], Options('int8', frozenset(['batch']))
    executorch.convert(subject, options._replace(calibration=images), tmp_path / 'a.pte')
    run = executorch.load(tmp_path / 'a.pte')
    assert compare(run, subject, [torch.cat(images), *images]).relative < 0.05


@pytest.mark.slow
@pytest.mark.parametrize('precision', POINTS)
@pytest.mark.parametrize('name', ['test_ppma', 'test_mobilevitv2'])
def test_accuracy_on_digits(name, precision, tmp_path):
    subject = digits_subject(name)
    options = Options(precision, calibration=calibration_of(subject, precision))
    executorch.convert(subject, options, tmp_path / 'digits.pte')
    check_accuracy(executorch.load(tmp_path / 'digits.pte'), subject, precision)
