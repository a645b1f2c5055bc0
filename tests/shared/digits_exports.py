"""Exported classifiers of handwritten digits, with bundled or trained weights, against the ordinary model."""
import functools
import tempfile

import timm.data
import torch
from helpers import ROOT, assert_close
from PIL import Image

from subquad.tools.data.digits import digits_arrays
from subquad.tools.exporters.subject import classifier_from, classifier_subject

# Largest difference of the accuracies in points, and of the logits relative to the largest.
POINTS = {'fp32': 0., 'fp16': 0.5, 'int8': 1.}
ERRORS = {'fp32': 1e-4, 'fp16': 1e-2, 'int8': 0.3}
TRAINED = tempfile.TemporaryDirectory()


@functools.lru_cache(maxsize=None)
def digits_weights(name):
    """The name of a classifier's bundled weights for handwritten digits, or a file of weights that are trained now."""
    if (ROOT / 'backbones' / 'weights' / 'shipped' / f'{name}.digits.safetensors').is_file():
        return f'{name}.digits'
    from subquad.tools import train  # needs MMEngine, which LiteRT's environment lacks

    folder = f'{TRAINED.name}/{name}'
    assert not train.main(['test-mobilevitv2_digits', '--cfg-options', f'model.name={name}', '--work-dir', folder])
    return f'{folder}/last.safetensors'


@functools.lru_cache(maxsize=None)
def digits_subject(name):
    """The classifier `name` with weights for handwritten digits."""
    return classifier_subject(*classifier_from(digits_weights(name)))


def images_of(subject, split, count=None):
    """The digits as the model's evaluation prepares them, (n, 3, H, W), and their labels."""
    mean, std = (subject.metadata['preprocessing'][key] for key in ('mean', 'std'))
    transform = timm.data.create_transform((3, *subject.size), crop_pct=1.0, mean=mean, std=std,
                                           interpolation='bilinear')
    arrays, labels = digits_arrays(split)
    images = [transform(Image.fromarray(array).convert('RGB')) for array in arrays[:count]]
    return torch.stack(images), torch.as_tensor(labels[:count])


def calibration_of(subject, precision):
    """Images for a quantized file, (1, 3, H, W) each; none for other precisions."""
    return images_of(subject, 'train', 64)[0].split(1) if precision == 'int8' else ()


def check_accuracy(run, subject, precision='fp32'):
    """Assert that a file finds the digits of the 360 test images as the ordinary model does."""
    images, labels = images_of(subject, 'test')
    with torch.inference_mode():
        expected = subject.eager(images)[0]
    logits = torch.cat([run(image[None])[0] for image in images])
    assert logits.isfinite().all()
    before, after = (100 * (y.argmax(1) == labels).double().mean().item() for y in (expected, logits))
    assert before > 99
    assert abs(after - before) <= POINTS[precision], f'{subject.name} {precision}: {before:.2f} % -> {after:.2f} %'
    assert_close(logits, expected, ERRORS[precision], f'{subject.name} {precision}')
