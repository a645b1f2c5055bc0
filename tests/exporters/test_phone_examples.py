"""The programs for Android and iOS compile, and prepare pictures and read outputs as the Python examples do."""
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from browser import missing_programs
from dense_exports import LABELS, RESIZES, channels_last, dense_metadata, noisy_picture, pictures
from helpers import ROOT

from subquad.tools.exporters.subject import describe, preprocessing

ANDROID, STUBS = ROOT / 'examples' / 'android', ROOT / 'tests' / 'exporters' / 'android_stubs'
IOS, IOS_STUBS = ROOT / 'examples' / 'ios' / 'CoreML.swift', ROOT / 'tests' / 'exporters' / 'ios_stubs'
CLASSIFIERS = {
    'bicubic': dict(input_size=(3, 64, 64), crop_pct=0.875, interpolation='bicubic'),
    'bilinear': dict(input_size=(3, 64, 64), crop_pct=1.0, interpolation='bilinear'),
    'squash': dict(input_size=(3, 48, 32), crop_pct=0.9, interpolation='bicubic', crop_mode='squash'),
    'oblong': dict(input_size=(3, 48, 64), crop_pct=0.9, interpolation='bilinear'),
    'gray': dict(input_size=(1, 32, 32), crop_pct=0.95, interpolation='bilinear'),
}
SIZES = [(160, 107), (125, 94), (31, 20)]


@pytest.fixture(scope='module')
def program(tmp_path_factory):
    """The programs for Android with stubs of Android's and the runtimes' classes, compiled; a path of classes."""
    if reason := missing_programs('kotlinc', 'java'):
        pytest.skip(f'{reason}; the npm package kotlin-compiler has kotlinc in its folder bin')
    path = tmp_path_factory.mktemp('android') / 'examples.jar'
    sources = [*sorted(ANDROID.glob('*.kt')), *sorted(STUBS.glob('*.kt'))]
    done = subprocess.run(['kotlinc', *sources, '-include-runtime', '-d', path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'warning: ' not in done.stderr.replace('VM warning: ', '')           # those of the virtual machine
    return path


@pytest.fixture(scope='module')
def ios_program(tmp_path_factory):
    """The program for iOS with stubs of Core ML and Core Graphics, which draw nothing."""
    if not shutil.which('swiftc') or sys.platform == 'darwin':
        pytest.skip('not installed: swiftc for Linux')
    folder = tmp_path_factory.mktemp('ios')
    for words in (
            *(['-parse-as-library', '-emit-module', '-c', '-module-name', name, IOS_STUBS / f'{name}.swift']
              for name in ('CoreGraphics', 'CoreML')),
            [IOS_STUBS / 'main.swift', IOS, 'CoreGraphics.o', 'CoreML.o', '-o', 'example']):
        done = subprocess.run(['swiftc', '-I', folder, *words], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr + done.stdout
    return folder / 'example'


def _run(command, folder, picture, metadata, outputs):
    """Run a program with a model that returns `outputs`, and return what it prints."""
    folder.mkdir()
    colors = np.asarray(picture.convert('RGBA'))[..., [3, 0, 1, 2]]
    (folder / 'picture.argb').write_bytes(colors.tobytes())
    (folder / 'size.json').write_text(json.dumps(picture.size))
    (folder / 'metadata.json').write_text(json.dumps(metadata))
    for name, output in outputs.items():
        (folder / f'{name}.f32').write_bytes(output.astype('>f4').tobytes())
    done = subprocess.run([*command, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _run_android(program, folder, picture, metadata, outputs):
    """Run the program for Android, and compare its input of the model with that of the Python examples."""
    found = _run(['java', '-cp', program, 'MainKt'], folder, picture, metadata, outputs)
    actual = np.fromfile(folder / 'input.f32', '>f4').reshape(metadata['input']['shape'])
    # One step of 8 bits is 0.017 or more.
    np.testing.assert_allclose(actual, pictures.prepare(picture, metadata)[0], rtol=0, atol=2e-6)
    return found


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('name', CLASSIFIERS)
def test_android_prepares_and_classifies_as_python(program, name, size, tmp_path):
    channels = CLASSIFIERS[name]['input_size'][0]
    transform = dict(CLASSIFIERS[name], mean=(0.485, 0.456, 0.406)[:channels], std=(0.229, 0.224, 0.225)[:channels])
    metadata = describe('model', 'classification', 'random', (1, *transform['input_size']), preprocessing(transform),
                        LABELS)
    logits = dict(logits=np.array([[-1, 2, 7, 3]]))
    assert _run_android(program, tmp_path / 'case', noisy_picture(*size), metadata, logits) == 'square'


def _detector(resize, in_graph):
    """Metadata and outputs of a detector."""
    generator = np.random.default_rng(1)
    count, classes = 40, len(LABELS)
    start, sides = generator.uniform(-10, 60, (count, 2)), generator.uniform(10, 40, (count, 2))
    boxes = np.concatenate([start, start + sides], 1).astype(np.float32)
    scores = generator.uniform(0, 1, (count, classes)).astype(np.float32)
    outputs = dict(boxes=boxes[None], scores=scores[None])
    if in_graph:
        outputs = dict(boxes=boxes, scores=np.sort(scores[:, 0])[::-1], labels=np.arange(count) % classes)
    return dense_metadata('detection', resize, in_graph=in_graph, score_threshold=0.2, iou_threshold=0.3,
                          candidates_per_class=25, max_detections=30), outputs


def _check_detections(found, size, metadata, outputs):
    _, inner = pictures.prepare(noisy_picture(*size), metadata)
    expected = [row for row in zip(*pictures.detections(outputs, metadata['postprocessing'])) if row[1] >= 0.3]
    assert len(found) == len(expected) > 10
    for (label, score, *box), (corners, value, index) in zip(found, expected):
        assert label == LABELS[index] and score == pytest.approx(value, abs=1e-6)
        corners = corners.clip(0, inner * 2) * np.array(size * 2) / np.array(inner * 2)
        np.testing.assert_allclose(box, corners, rtol=0, atol=1e-4)


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('resize', RESIZES)
@pytest.mark.parametrize('in_graph', [False, True], ids=['raw', 'selected'])
def test_android_detects_as_python(program, in_graph, resize, size, tmp_path):
    metadata, outputs = _detector(resize, in_graph)
    found = _run_android(program, tmp_path / 'case', noisy_picture(*size), metadata, outputs)
    _check_detections(found, size, metadata, outputs)


def _segmenter(resize, in_graph):
    """Metadata and outputs of a segmenter."""
    generator = np.random.default_rng(2)
    outputs = dict(logits=generator.normal(size=(1, len(LABELS), 10, 12)).astype(np.float32))
    if in_graph:
        outputs['labels'] = generator.integers(0, len(LABELS), (1, 80, 96))
    metadata = dense_metadata('segmentation', resize, in_graph=in_graph, resize=dict(align_corners=resize == 'kept'))
    metadata['outputs'] = [dict(name=name, shape=list(output.shape)) for name, output in outputs.items()]
    return metadata, outputs


def _check_segments(found, size, metadata, outputs):
    _, inner = pictures.prepare(noisy_picture(*size), metadata)
    # Pillow takes the pixel before a boundary in the middle, and the programs the one after it.
    columns, lines = ((np.arange(to) + 0.5) * part // to for part, to in zip(inner, size))
    expected = pictures.segments(outputs, metadata, inner)[lines.astype(int)[:, None], columns.astype(int)]
    np.testing.assert_array_equal(np.array(found).reshape(expected.shape), expected)


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('resize', RESIZES)
@pytest.mark.parametrize('in_graph', [False, True], ids=['logits', 'labels'])
def test_android_segments_as_python(program, in_graph, resize, size, tmp_path):
    metadata, outputs = _segmenter(resize, in_graph)
    found = _run_android(program, tmp_path / 'case', noisy_picture(*size), metadata, outputs)
    _check_segments(found, size, metadata, outputs)


@pytest.mark.parametrize('in_graph', [False, True], ids=['logits', 'labels'])
def test_android_gives_a_model_its_layout(program, in_graph, tmp_path):
    metadata, outputs = _segmenter('enlarged', in_graph)
    metadata, size = channels_last(metadata), (125, 94)
    found = _run_android(program, tmp_path / 'case', noisy_picture(*size), metadata, outputs)
    _check_segments(found, size, metadata, outputs)


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('resize', RESIZES)
def test_ios_detects_and_segments_as_python(ios_program, resize, size, tmp_path):
    """Core ML files leave the selection of detections to the program, and return the labels of pixels."""
    for case, check in ((_detector(resize, False), _check_detections), (_segmenter(resize, True), _check_segments)):
        found = _run([ios_program], tmp_path / check.__name__, noisy_picture(*size), *case)
        check(found, size, *case)


def test_ios_classifies_with_logits(ios_program, tmp_path):
    transform = dict(CLASSIFIERS['bicubic'], mean=(0.5,) * 3, std=(0.5,) * 3)
    metadata = describe('model', 'classification', 'random', (1, 3, 64, 64), preprocessing(transform), LABELS)
    logits = dict(logits=np.array([[-1, 2, 7, 3]]))
    assert _run([ios_program], tmp_path / 'case', noisy_picture(160, 107), metadata, logits) == 'square'


@pytest.mark.skipif(sys.platform != 'darwin', reason='Core ML is part of macOS')
def test_the_program_for_ios_compiles():
    done = subprocess.run(['swiftc', '-typecheck', IOS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
