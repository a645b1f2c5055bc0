"""int8 and half-precision ExecuTorch files: accuracy on handwritten digits, and refusals."""
import pytest
import torch
from PIL import Image
from torch import nn

from subquad.tools.common.cli import UserError
from subquad.tools.data.digits import digits_arrays
from subquad.tools.exporters.comparing import compare
from subquad.tools.exporters.file_metadata import describe
from subquad.tools.exporters.formats import Options
from subquad.tools.exporters.subject import Subject, classifier_from, classifier_subject

pytest.importorskip('executorch')
pytest.importorskip('torchao')
executorch = pytest.importorskip('subquad.tools.exporters.to_executorch')


class Small(nn.Module):
    """Convolutions, one with a weight that is computed, cumulative sums, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, 2, 1), nn.Linear(16, 5)
        self.weight = nn.Parameter(torch.randn(16, 1, 3, 3) / 3)

    def forward(self, images):
        y = self.stem(images).relu()
        weight = self.weight + nn.functional.pad(torch.ones(16, 1, 1, 1), [1] * 4)
        y = nn.functional.conv2d(y, weight, padding=1, groups=16)
        y = y + 0.1 * y.cumsum(2).flatten(2).relu().unflatten(2, (8, 8))        # a view of the sums, as in PPMA
        return (self.head(y.mean((2, 3))),)


@pytest.fixture
def subject():
    torch.manual_seed(0)
    model = Small().eval()
    transform = dict(resize=None, crop=[16, 16], scale=1 / 255, mean=[0.] * 3, std=[1.] * 3, normalize_in_graph=False)
    return Subject('small', 'classification', model, model, (16, 16), 3, ('logits',),
                   describe('small', 'classification', 'random', (1, 3, 16, 16), transform), 'sizes are fixed')


def test_quantized_convolutions_and_linear_layers(subject, tmp_path):
    images = [subject.example(seed=n) for n in range(8)]
    errors, sizes = {}, {}
    for precision in ('fp32', 'int8'):
        path = tmp_path / f'{precision}.pte'
        conversion = executorch.convert(subject, Options(precision, calibration=images), path)
        assert conversion.delegated_macs == 1.0
        errors[precision] = compare(executorch.load(path), subject, images).relative
        sizes[precision] = path.stat().st_size
    assert errors['fp32'] < 1e-5 < errors['int8'] < 0.05     # the file computes with 8 bits, and well


def test_a_quantized_file_with_a_dynamic_batch(subject, tmp_path):
    subject.metadata['input']['dynamic'] = ['batch']
    images, options = [subject.example(seed=n) for n in range(8)], Options('int8', frozenset(['batch']))
    executorch.convert(subject, options._replace(calibration=images), tmp_path / 'a.pte')
    run = executorch.load(tmp_path / 'a.pte')
    assert compare(run, subject, [torch.cat(images), *images]).relative < 0.05


def test_calibration_images_are_needed_and_checked(subject, tmp_path):
    for images, sentence in (((), 'int8 needs calibration images'),
                             ([torch.zeros(1, 3, 16, 32)], r'calibration images must be \(1, 3, 16, 16\)')):
        with pytest.raises(UserError, match=sentence):
            executorch.convert(subject, Options('int8', calibration=images), tmp_path / 'a.pte')
    assert not list(tmp_path.iterdir())


def _digits(subject, split, folder, count=None):
    """Preprocessed images and labels, read from files as a user's are."""
    images, labels = (part[:count] for part in digits_arrays(split))
    tensors = []
    for image in images:
        Image.fromarray(image).save(folder / 'digit.png')
        tensors.append(subject.prepare(folder / 'digit.png'))
    return tensors, torch.as_tensor(labels)


@pytest.mark.slow
@pytest.mark.parametrize('precision, points', [('fp32', 0.5), ('fp16', 0.5), ('int8', 2.0)])
@pytest.mark.parametrize('name', ['test_ppma.digits', 'test_mobilevitv2.digits'])
def test_accuracy_on_digits(name, precision, points, tmp_path):
    read, weights = classifier_from(name)
    subject = classifier_subject(read, weights)
    calibration = _digits(subject, 'train', tmp_path, 64)[0] if precision == 'int8' else ()
    executorch.convert(subject, Options(precision, calibration=calibration), tmp_path / 'digits.pte')
    run = executorch.load(tmp_path / 'digits.pte')
    images, labels = _digits(subject, 'test', tmp_path)
    with torch.inference_mode():
        eager = torch.cat([subject.eager(image)[0] for image in images]).argmax(1)
    exported = torch.cat([run(image)[0] for image in images]).argmax(1)
    before, after = (100 * float((answer == labels).double().mean()) for answer in (eager, exported))
    assert before > 90
    assert abs(after - before) <= points, f'{before:.2f} % before, {after:.2f} % after'
