"""The examples find in pictures what `subquad predict` finds, with exported detectors and segmenters."""
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from dense_cases import make_shapes
from dense_exports import EXAMPLES, SCRIPTS, pictures, unmatched
from pairwise import slow
from PIL import Image

from subquad.tools.engine.config import load
from subquad.tools.engine.dense.prediction import Predictor
from subquad.tools.exporters.dense_preprocessing import read_image
from subquad.tools.exporters.dense_subject import dense_subject
from subquad.tools.exporters.formats import FORMATS, missing_packages
from subquad.tools.exporters.pipeline import export

pytestmark = pytest.mark.usefixtures('metafiles_read_once')
SSDLITE, WEIGHTS = 'ssdlite_test-mobilevitv2_shapes', 'test_mobilevitv2.ssdlite_shapes'
SEGMENTER = 'deeplabv3_test-mobilevitv2_shapes'
RESIZES = {
    'none': None,
    'opencv': dict(type='Resize', scale=(192, 128), keep_ratio=False),
    'pillow': dict(type='Resize', scale=(192, 128), keep_ratio=False, interpolation='bicubic', backend='pillow'),
    'padded': dict(type='Resize', scale=(256, 192), keep_ratio=True),
}


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """Nine generated images of 128 x 128, and a photograph of 427 x 640."""
    samples = pytest.importorskip('sklearn.datasets')
    folder = tmp_path_factory.mktemp('images')
    make_shapes(folder / 'shapes', train=1, val=9, size=128)
    Image.fromarray(samples.load_sample_image('china.jpg')).save(folder / 'photograph.png')
    return [*sorted((folder / 'shapes/images/val').iterdir()), folder / 'photograph.png']


def _unmatched(found, sample):
    """Count the detections that only one side has: rows (label, score, x1, y1, x2, y2), and what predict returns."""
    rows = np.array(found).reshape(-1, 6)
    return unmatched((rows[:, 2:], rows[:, 1], rows[:, 0]), sample)


def _config(resize):
    config = load(SSDLITE)
    if resize:
        config.test_dataloader.dataset.pipeline[1] = resize
    return config


@pytest.mark.parametrize('resize', RESIZES)
def test_pictures_are_prepared_as_for_predict(files, resize):
    sizes = {'none': [(128, 128), (448, 640)], 'padded': [(192, 256)] * 2}
    for file, size in zip(files[-2:], sizes.get(resize, [None] * 2)):
        metadata = dense_subject(_config(RESIZES[resize]), WEIGHTS, size).metadata
        expected = read_image(file, metadata)
        actual, (width, height) = pictures.prepare(pictures.open_picture(file), metadata)
        assert (height, width) == expected.content
        # One step of 8 bits is 0.004.
        np.testing.assert_allclose(actual, expected.images.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize('resize', ['opencv', *slow('none', 'pillow')])
def test_raw_outputs_become_the_detections_of_predict(files, resize):
    config = _config(RESIZES[resize])
    predictor, sizes = Predictor(config, WEIGHTS), [(128, 128), (448, 640)] if resize == 'none' else [None] * 2
    subjects = [dense_subject(config, WEIGHTS, size) for size in sizes]
    for file in files:
        subject, picture, sample = subjects[file is files[-1]], pictures.open_picture(file), predictor(file)
        pixels, size = pictures.prepare(picture, subject.metadata)
        with torch.inference_mode():
            outputs = [y.numpy() for y in subject.module(torch.from_numpy(pixels))]
        boxes, scores, labels = pictures.detections(dict(zip(subject.outputs, outputs)),
                                                    subject.metadata['postprocessing'])
        boxes = boxes.clip(0, size * 2) * (np.array(picture.size * 2) / np.array(size * 2))
        assert len(sample.pred_instances) > 10
        assert _unmatched(np.column_stack([labels, scores, boxes]), sample) == 0


def _run(script, path, *arguments, cwd):
    done = subprocess.run([sys.executable, '-W', 'ignore', EXAMPLES / script, path, *map(str, arguments)],
                          capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.strip()]


def _detected(lines, labels):
    """Rows (label, score, x1, y1, x2, y2) from the lines that an example prints."""
    rows = [re.fullmatch(r' *([\d.]+)%  (\S+)  ([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+)', line) for line in lines[1:-1]]
    return [(labels.index(row[2]), float(row[1]) / 100, *map(float, row.groups()[2:])) for row in rows]


def _exported(subject, name, folder):
    if missing := missing_packages(name):
        pytest.skip(f"not installed: {', '.join(missing)}")
    path = folder / f'model{FORMATS[name].suffix}'
    assert export(subject, name, path, repeats=0).passed
    return path


@pytest.mark.parametrize('name', ['onnx', *slow('openvino', 'pt2', 'aoti')])
def test_the_example_detects_what_predict_detects(files, name, tmp_path):
    subject = dense_subject(load(SSDLITE), WEIGHTS, (448, 640), nms=True)
    lines = _run(SCRIPTS[name], _exported(subject, name, tmp_path), files[-1], '--score', 0, cwd=tmp_path)
    assert lines[-1] == 'see found.png'
    found, sample = _detected(lines, subject.metadata['labels']), Predictor(load(SSDLITE), WEIGHTS)(files[-1])
    assert len(found) == len(sample.pred_instances) > 10
    assert _unmatched(found, sample) == 0
    drawn, picture = (np.asarray(Image.open(file).convert('RGB')) for file in (tmp_path / 'found.png', files[-1]))
    assert drawn.shape == picture.shape and 0 < (drawn != picture).any(2).mean() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize('name', ['ncnn', 'executorch', 'litert'])
def test_examples_select_detections_of_raw_outputs(files, name, tmp_path):
    subject = dense_subject(load(SSDLITE), WEIGHTS, (128, 128))
    lines = _run(SCRIPTS[name], _exported(subject, name, tmp_path), files[0], '--score', 0, cwd=tmp_path)
    found, sample = _detected(lines, subject.metadata['labels']), Predictor(load(SSDLITE), WEIGHTS)(files[0])
    assert len(found) == len(sample.pred_instances) > 10
    assert _unmatched(found, sample) == 0


@pytest.mark.slow
@pytest.mark.parametrize('name', SCRIPTS)
def test_examples_segment_as_the_ordinary_model(files, name, tmp_path):
    subject, plain = (dense_subject(load(SEGMENTER), 'test_mobilevitv2.deeplabv3_shapes', (192, 256), labels=labels)
                      for labels in (True, False))
    path = _exported(plain if name == 'ncnn' else subject, name, tmp_path)
    lines = _run(SCRIPTS[name], path, files[0], '--out', 'colors.png', cwd=tmp_path)
    with torch.inference_mode():
        labels = subject.eager(subject.prepare(files[0]))[1][0, :128, :128].numpy()
    shares = {subject.metadata['labels'][n]: float((labels == n).mean()) for n in np.unique(labels)}
    shown = {line.split()[1]: float(line.split()[0].rstrip('%')) / 100 for line in lines[1:-1]}
    assert len(shares) >= 2 and set(shown) <= set(shares)
    assert all(shown.get(name, 0) == pytest.approx(share, abs=2e-3) for name, share in shares.items())
    drawn = np.asarray(Image.open(tmp_path / 'colors.png'))
    blend = Image.blend(Image.open(files[0]).convert('RGB'),
                        Image.fromarray(pictures.palette(len(subject.metadata['labels']))[labels]), 0.5)
    assert (drawn == np.asarray(blend)).all(2).mean() > 0.999
