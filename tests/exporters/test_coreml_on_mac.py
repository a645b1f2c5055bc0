"""Core ML packages predict as the PyTorch model does. The tests run on a Mac only."""
import sys

import numpy as np
import pytest
import torch
from export_cases import small_classifier, subject_of
from PIL import Image

from subquad.tools.exporters.formats import FORMATS, Options
from subquad.tools.exporters.pipeline import TOLERANCES, compare, export
from subquad.tools.exporters.subject import classifier_from, classifier_subject, with_normalization

pytestmark = pytest.mark.skipif(sys.platform != 'darwin', reason='Core ML runs on a Mac only')
ct = pytest.importorskip('coremltools')
# Largest difference of a probability.
PROBABILITIES = {'fp32': 1e-4, 'fp16': 0.02, 'int8': 0.05, 'palette6': 0.15, 'palette4': 0.4}


def opened(folder, subject, options, units='CPU_ONLY'):
    path = export(subject, 'coreml', folder / 'model.mlpackage', options).path
    return ct.models.MLModel(str(path), compute_units=ct.ComputeUnit[units])


def noise(count, size, channels=3):
    """Pictures (n, channels, height, width) of smooth noise, with whole values from 0 to 255."""
    coarse = torch.rand(count, channels, 4, 4, generator=torch.Generator().manual_seed(0))
    return (255 * torch.nn.functional.interpolate(coarse, size, mode='bilinear')).round()


def picture(pixels, color='RGB'):
    """The picture of pixels (1, channels, height, width), whose channels have the order `color`."""
    array = np.asarray(pixels[0].permute(1, 2, 0), np.uint8)
    return Image.fromarray(array[..., 0] if color == 'gray' else np.ascontiguousarray(
        array[..., ::-1] if color == 'BGR' else array))


def check_probabilities(model, subject, images, precision, color='RGB'):
    """Compare the probabilities, and the label of every image for which the difference cannot change it."""
    subject, labels = with_normalization(subject), subject.metadata['labels']
    for pixels in images.split(1):
        with torch.inference_mode():
            expected = subject.eager(pixels)[0].softmax(1)[0]
        found = model.predict({'image': picture(pixels, color)})
        probabilities = torch.tensor([found['label_probs'][label] for label in labels])
        assert (probabilities - expected).abs().max() <= PROBABILITIES[precision]
        first, second = expected.topk(2).values
        if first - second > 2 * PROBABILITIES[precision]:
            assert found['label'] == labels[expected.argmax()]


@pytest.mark.parametrize('units', ['CPU_ONLY', 'ALL'])
@pytest.mark.parametrize('precision', FORMATS['coreml'].precisions)
def test_digits(precision, units, tmp_path):
    pytest.importorskip('sklearn')
    from subquad.tools.data.digits import digits_arrays
    subject = classifier_subject(*classifier_from('test_mobilevitv2.digits'))
    pictures = [Image.fromarray(array).convert('RGB').resize(subject.size[::-1], Image.Resampling.BILINEAR)
                for array in digits_arrays('test')[0][:32]]
    images = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2).float()
    check_probabilities(opened(tmp_path, subject, Options(precision), units), subject, images, precision)


@pytest.mark.parametrize('color, mean, std', [
    ('RGB', (0.5, 0.25, 0.125), (0.5, 0.25, 0.2)), ('BGR', (0.5, 0.25, 0.125), (0.5, 0.25, 0.2)),
    ('gray', (0.5,), (0.25,))])
def test_colors(color, mean, std, tmp_path):
    subject = small_classifier(color, mean, std)
    subject.module.head.weight.data *= 20              # so that colors change the probabilities
    model = opened(tmp_path, subject, Options('fp32'))
    check_probabilities(model, subject, noise(4, subject.size, len(mean)), 'fp32', color)


@pytest.mark.parametrize('precision', ['fp32', 'fp16'])
@pytest.mark.parametrize('name', ['test_ppma', 'test_mobilevitv2', 'test_myo'])
def test_feature_maps_of_images(name, precision, tmp_path):
    subject = subject_of(name, size=(64, 64), features=True)
    model, pixels = opened(tmp_path, subject, Options(precision)), with_normalization(subject)

    def run(images):
        found = model.predict({'image': picture(images)})
        return [torch.from_numpy(found[name]) for name in subject.outputs]
    assert compare(run, pixels, noise(3, subject.size).split(1)).relative <= TOLERANCES[precision]


@pytest.mark.parametrize('precision', ['fp32', 'fp16'])
def test_batches_of_tensors(precision, tmp_path):
    subject = subject_of('test_mobilevitv2', size=(64, 64))
    model = opened(tmp_path, subject, Options(precision, frozenset(['batch'])))
    images = [subject.example(batch, seed=batch) for batch in (1, 3, 2)]
    errors = compare(lambda x: [torch.from_numpy(model.predict({'image': x.numpy()})['logits'])], subject, images)
    assert errors.relative <= TOLERANCES[precision]
