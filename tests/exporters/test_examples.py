"""The examples prepare pictures as in training, and show what the ordinary model finds in them."""
import functools
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from dense_exports import EXAMPLES, SCRIPTS, channels_last, pictures
from pairwise import slow
from PIL import Image, ImageDraw, ImageFont

from subquad.tools.exporters.formats import FORMATS, missing_packages
from subquad.tools.exporters.pipeline import export
from subquad.tools.exporters.subject import Subject, classifier_from, classifier_subject, describe, preprocessing

WEIGHTS = 'test_mobilevitv2.digits'
TRANSFORMS = {
    'imagenet': dict(input_size=(3, 224, 224), crop_pct=0.875, interpolation='bicubic',
                     mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    'mobilevitv2': dict(input_size=(3, 256, 256), crop_pct=0.888, interpolation='bicubic', mean=(0., 0., 0.),
                        std=(1., 1., 1.)),
    'digits': dict(input_size=(3, 64, 64), crop_pct=1.0, interpolation='bilinear', mean=(0.3, 0.3, 0.3),
                   std=(0.4, 0.4, 0.4)),
    'squash': dict(input_size=(3, 96, 64), crop_pct=0.9, interpolation='bicubic', mean=(0.5, 0.5, 0.5),
                   std=(0.2, 0.3, 0.4), crop_mode='squash'),
    'oblong': dict(input_size=(3, 64, 96), crop_pct=0.9, interpolation='bilinear', mean=(0.5, 0.5, 0.5),
                   std=(0.2, 0.3, 0.4)),
    'gray': dict(input_size=(1, 32, 32), crop_pct=0.95, interpolation='bilinear', mean=(0.13,), std=(0.31,)),
}


def _picture(width, height, seed=0):
    """Smooth colors with noise, of any size."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int64)
    return Image.fromarray((smooth + generator.integers(-40, 40, smooth.shape)).clip(0, 255).astype(np.uint8))


def _metadata(transform):
    return describe('model', 'classification', 'random', (1, *transform['input_size']), preprocessing(transform))


@pytest.mark.parametrize('size', [(640, 427), (375, 500), (224, 224), (61, 40), (33, 501)], ids=str)
@pytest.mark.parametrize('name', TRANSFORMS)
def test_pictures_are_prepared_as_timm_does(name, size):
    transform, picture = TRANSFORMS[name], _picture(*size)
    expected = timm.data.create_transform(**transform)(picture.convert('L') if name == 'gray' else picture)
    actual, _ = pictures.prepare(picture, _metadata(transform))
    assert actual.dtype == np.float32 and actual.shape == (1, *transform['input_size'])
    np.testing.assert_array_equal(actual[0], expected.numpy())


@pytest.mark.parametrize('name', ['oblong', 'gray'])
def test_pictures_have_the_layout_of_the_model(name):
    metadata, picture = _metadata(TRANSFORMS[name]), _picture(61, 40)
    planes, size = pictures.prepare(picture, metadata)
    pixels, same = pictures.prepare(picture, channels_last(metadata))
    assert same == size and pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, planes.transpose(0, 2, 3, 1))


def test_pictures_without_normalization_have_values_up_to_255():
    metadata = _metadata(TRANSFORMS['imagenet'])
    steps = metadata['preprocessing']
    normalized, _ = pictures.prepare(_picture(300, 280), metadata)
    steps['normalize_in_graph'], metadata['input']['range'] = True, [0, 255]
    pixels, _ = pictures.prepare(_picture(300, 280), metadata)
    mean, std = (np.array(steps[key])[:, None, None] for key in ('mean', 'std'))
    assert 200 < pixels.max() <= 255
    np.testing.assert_allclose((pixels[0] / 255 - mean) / std, normalized[0], rtol=0, atol=1e-6)


def test_pictures_are_read_upright_and_opaque(tmp_path):
    picture = _picture(30, 20)
    exif = Image.Exif()
    exif[0x0112] = 6                                     # turned by a quarter
    picture.save(tmp_path / 'turned.png', exif=exif)
    assert pictures.open_picture(tmp_path / 'turned.png').size == (20, 30)
    picture.putalpha(0)
    picture.save(tmp_path / 'clear.png')
    assert np.asarray(pictures.open_picture(tmp_path / 'clear.png')).min() == 255
    Image.fromarray(np.full((4, 4), 65535, dtype=np.uint16)).save(tmp_path / 'deep.png')
    assert np.asarray(pictures.open_picture(tmp_path / 'deep.png')).tolist() == [[[255] * 3] * 4] * 4


@pytest.mark.parametrize('width, height', [(320, 320), (123, 77), (300, 200), (700, 600)])
def test_resizing_without_antialiasing_is_that_of_opencv(width, height):
    cv2 = pytest.importorskip('cv2')
    picture = _picture(500, 333)
    expected = cv2.resize(np.asarray(picture), (width, height), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(np.asarray(pictures.resize_like_opencv(picture, width, height)), expected)


@pytest.mark.parametrize('align_corners', [False, True])
def test_maps_are_resized_as_pytorch_does(align_corners):
    maps = torch.randn(1, 4, 9, 13)
    for height, width in ((36, 52), (5, 30), (1, 1)):
        expected = torch.nn.functional.interpolate(maps, (height, width), mode='bilinear', align_corners=align_corners)
        actual = pictures.resize_bilinear(maps[0].numpy(), height, width, align_corners)
        np.testing.assert_allclose(actual, expected[0].numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize('resize, expected', [
    (dict(size=[64, 96], keep_ratio=False, enlarge=True), (96, 64)),
    (dict(size=[64, 96], keep_ratio=True, enlarge=True), (85, 64)),
    (dict(size=[64, 96], keep_ratio=True, enlarge=False), (40, 30)),
    (dict(size=[20, 20], keep_ratio=True, enlarge=False), (20, 15)),
])
def test_dense_models_take_the_whole_picture(resize, expected):
    assert pictures.resized_size(40, 30, resize) == expected


def test_pictures_are_padded_after_normalization():
    metadata = _metadata(TRANSFORMS['digits'])
    metadata['input']['color'] = 'BGR'
    metadata['preprocessing'].update(
        crop=None, pad=dict(to=[32, 48], value=[7, 8, 9]),
        resize=dict(size=[32, 48], keep_ratio=True, enlarge=False, interpolation='bilinear', antialias=False))
    picture = _picture(20, 10)
    actual, size = pictures.prepare(picture, metadata)
    assert actual.shape == (1, 3, 32, 48) and size == (20, 10)
    expected = (np.asarray(picture, dtype=np.float32)[..., ::-1] / 255 - 0.3) / 0.4
    np.testing.assert_allclose(actual[0, :, :10, :20], expected.transpose(2, 0, 1), rtol=0, atol=1e-6)
    assert actual[0, :, 10:].mean((1, 2)).tolist() == actual[0, :, :, 20:].mean((1, 2)).tolist() == [7, 8, 9]


def _plain_nms(boxes, scores, settings):
    """Non-maximum suppression with one loop for each step."""
    kept = []
    for label in range(scores.shape[1]):
        order = sorted(range(len(boxes)), key=lambda n: -scores[n, label])[:settings['candidates_per_class']]
        chosen = []
        for n in order:
            if scores[n, label] > settings['score_threshold'] and all(
                    _iou(boxes[n], boxes[m]) <= settings['iou_threshold'] for m in chosen):
                chosen.append(n)
        kept += [(float(scores[n, label]), n, label) for n in chosen]
    return sorted(kept, reverse=True)[:settings['max_detections']]


def _iou(a, b):
    width, height = (max(0, min(a[n + 2], b[n + 2]) - max(a[n], b[n])) for n in (0, 1))
    areas = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    return width * height / (sum(areas) - width * height)


@pytest.mark.parametrize('most', [5, 100])
def test_detections_are_those_of_plain_suppression(most):
    generator = np.random.default_rng(0)
    corners = generator.uniform(0, 80, (60, 2))
    boxes = np.concatenate([corners, corners + generator.uniform(5, 40, (60, 2))], 1).astype(np.float32)
    scores = generator.uniform(0, 1, (60, 3)).astype(np.float32) ** 3
    settings = dict(in_graph=False, score_threshold=0.02, iou_threshold=0.4, candidates_per_class=30,
                    max_detections=most)
    found, values, labels = pictures.detections(dict(boxes=boxes[None], scores=scores[None]), settings)
    expected = _plain_nms(boxes, scores, settings)
    assert 5 <= len(expected) < 90                       # some boxes are suppressed
    assert [(float(v), tuple(b), n) for v, b, n in zip(values, found, labels)] == \
        [(value, tuple(boxes[n]), label) for value, n, label in expected]


def test_nothing_above_the_threshold_is_no_detection():
    settings = dict(in_graph=False, score_threshold=0.5, iou_threshold=0.4, candidates_per_class=30, max_detections=9)
    outputs = dict(boxes=np.ones((1, 6, 4), np.float32), scores=np.full((1, 6, 2), 0.1, np.float32))
    assert [len(part) for part in pictures.detections(outputs, settings)] == [0, 0, 0]


def test_boxes_are_drawn_in_the_picture(capsys):
    picture, metadata = Image.new('RGB', (200, 100)), dict(labels=['cat', 'dog'])
    found = np.array([[10, 5, 30, 40.], [0, 0, 70, 70]]), np.array([0.9, 0.1]), np.array([1, 0])
    drawn = np.asarray(pictures.show_objects(picture, metadata, found, (100, 50), 0.3))
    assert capsys.readouterr().out == ' 90.00%  dog  20.0 10.0 60.0 80.0\n'
    rows, columns = drawn.any(2).nonzero()
    assert (rows.min(), rows.max(), columns.min()) == (10, 80, 20)      # the name may be wider than the box
    assert tuple(drawn[40, 20]) == tuple(pictures.palette(2)[1])


def test_low_scores_are_not_shown(capsys):
    picture = Image.new('RGB', (200, 100))
    found = np.array([[0, 0, 70, 70.]]), np.array([0.1]), np.array([0])
    assert not np.asarray(pictures.show_objects(picture, dict(labels=['cat']), found, (200, 100), 0.3)).any()
    assert capsys.readouterr().out == 'no object has a score of 0.3 or more\n'


def test_a_picture_that_cannot_be_written(tmp_path):
    for path in (tmp_path / 'none' / 'found.png', tmp_path / 'found.unknown'):
        with pytest.raises(SystemExit, match=f'^error: {path} cannot be written'):
            pictures.save(Image.new('RGB', (2, 2)), str(path))


@pytest.mark.parametrize('change', [dict, channels_last])
@pytest.mark.parametrize('in_graph', [True, False])
def test_segments_have_the_size_of_the_picture(in_graph, change, capsys):
    picture = Image.new('RGB', (60, 40))
    logits = np.zeros((1, 3, 8, 8), np.float32)
    logits[:, 1, :, :4] = logits[:, 0, :, 4:] = 5        # the left half is class 1, the rest class 0
    labels = np.repeat(np.repeat(logits.argmax(1), 4, 1), 4, 2)
    metadata = change(dict(labels=['sky', 'sea', 'sand'], input=dict(shape=[1, 3, 32, 32], layout='NCHW'),
                           postprocessing=dict(in_graph=in_graph, resize=dict(align_corners=False))))
    found = pictures.segments(dict(logits=logits, labels=labels), metadata, (32, 20))
    assert found.shape == (20, 32)
    drawn = np.asarray(pictures.show_segments(picture, metadata, found))
    assert drawn.shape == (40, 60, 3)
    assert (drawn[:, :30] == pictures.palette(3)[1] // 2).all() and (drawn[:, 30:] == pictures.palette(3)[0] // 2).all()
    assert capsys.readouterr().out == ' 50.00%  sky\n 50.00%  sea\n'


@pytest.fixture(scope='module')
def digit(tmp_path_factory):
    """A picture of a digit, the probabilities of the ordinary model for it, and the model's labels."""
    file = tmp_path_factory.mktemp('digit') / 'digit.png'
    picture = Image.new('RGB', (32, 24))
    ImageDraw.Draw(picture).text((16, 12), '3', anchor='mm', font=ImageFont.load_default(size=32))
    picture.resize((160, 120)).save(file)
    model = timm.create_model(WEIGHTS, pretrained=True).eval()
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.inference_mode():
        probabilities = model(prepare(Image.open(file))[None]).softmax(1)[0]
    return SimpleNamespace(file=file, probabilities=probabilities)


def _run(script, *arguments, without=('subquad', 'timm', 'torch'), cwd=None):
    """Run an example as a program in which some modules cannot be imported."""
    start = ('import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(","))); del sys.argv[:2]; '
             'sys.path.insert(0, sys.argv[0].rpartition("/")[0]); runpy.run_path(sys.argv[0], run_name="__main__")')
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', start, ','.join(without), EXAMPLES / script,
                           *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """A function that exports the classifier of digits, once to each format, and returns the file."""
    @functools.cache
    def convert(name):
        path = tmp_path_factory.mktemp(name) / f'digits{FORMATS[name].suffix}'
        assert export(classifier_subject(*classifier_from(WEIGHTS)), name, path, repeats=0).passed
        return path

    def find(name):
        if missing := missing_packages(name):
            pytest.skip(f"not installed: {', '.join(missing)}")
        return convert(name)
    return find


def _classified(name, path, picture):
    """The first line that an example prints, and label -> probability."""
    runtime = () if name in ('executorch', 'pt2', 'aoti') else ('torch',)
    done = _run(SCRIPTS[name], path, picture, '--topk', 10, without=('subquad', 'timm', *runtime))
    assert done.returncode == 0, done.stderr
    first, *rows = [line for line in done.stdout.splitlines() if line.strip()]
    return first, {row.split()[1]: float(row.split()[0].rstrip('%')) / 100 for row in rows}


# Some conversions take half a minute, and .ort has the example of .onnx.
@pytest.mark.parametrize('name', ['onnx', 'openvino', 'pt2', 'litert', 'ncnn', *slow('ort', 'aoti', 'executorch')])
def test_examples_classify_as_the_ordinary_model(name, digit, exported):
    first, shown = _classified(name, exported(name), digit.file)
    assert first.startswith('test_mobilevitv2 (fp32): ')
    assert list(shown)[0] == str(int(digit.probabilities.argmax())) == '3'
    assert len(shown) == 10
    for label, probability in shown.items():
        assert probability == pytest.approx(float(digit.probabilities[int(label)]), abs=1e-4)


class _Average(torch.nn.Module):
    """Logits (1, 3) from the average color of images."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, images):
        return (self.head(images.mean((2, 3))),)


@pytest.mark.slow
def test_the_example_of_executorch_runs_a_small_network(digit, tmp_path):
    if missing := missing_packages('executorch'):
        pytest.skip(f"not installed: {', '.join(missing)}")
    network, metadata = _Average().eval(), _metadata(TRANSFORMS['digits'])
    metadata['labels'] = ['red', 'green', 'blue']
    subject = Subject('average', 'classification', network, network, (64, 64), 3, ('logits',), metadata, 'one size')
    assert export(subject, 'executorch', tmp_path / 'average.pte', repeats=0).passed
    first, shown = _classified('executorch', tmp_path / 'average.pte', digit.file)
    prepare = timm.data.create_transform(**TRANSFORMS['digits'])
    with torch.inference_mode():
        expected = network(prepare(Image.open(digit.file))[None])[0].softmax(1)[0].tolist()
    assert first.startswith('model (fp32): ')
    assert shown == {label: pytest.approx(value, abs=1e-4) for label, value in zip(metadata['labels'], expected)}


@pytest.fixture
def onnx_file(exported):
    return exported('onnx')


def _with_metadata(file, path, **entries):
    """Copy an ONNX file, with other entries of its metadata; without metadata if there are none."""
    onnx = pytest.importorskip('onnx')
    model = onnx.load(file)
    prop, = (prop for prop in model.metadata_props if prop.key == 'subquad')
    prop.value = json.dumps({**json.loads(prop.value), **entries})
    if not entries:
        model.metadata_props.remove(prop)
    onnx.save(model, path)
    return path


def test_feature_maps_are_listed(onnx_file, digit, tmp_path):
    path = _with_metadata(onnx_file, tmp_path / 'features.onnx', task='features',
                          outputs=[dict(name='stride_4', shape=[1, 10])])
    done = _run('onnx_runtime.py', path, digit.file)
    assert done.stdout.splitlines()[1:] == ['stride_4: 1 x 10'], done.stderr


def test_errors_are_one_sentence(onnx_file, digit, tmp_path):
    bare, text = _with_metadata(onnx_file, tmp_path / 'bare.onnx'), tmp_path / 'text.onnx'
    text.write_text('no model')
    for arguments, sentence in (
            ((tmp_path / 'none.onnx', digit.file), f'there is no file {tmp_path}/none.onnx'),
            ((onnx_file, tmp_path / 'none.png'), f'there is no file {tmp_path}/none.png'),
            ((onnx_file, onnx_file), f'{onnx_file} is not an image that can be read'),
            ((onnx_file, digit.file, '--out', digit.file), f'--out would replace {digit.file}'),
            ((bare, digit.file), f'{bare} has no metadata of `subquad export`'),
            ((text, digit.file), f'{text} cannot be loaded')):
        done = _run('onnx_runtime.py', *arguments)
        assert done.returncode == 1 and done.stderr.startswith(f'error: {sentence}'), done.stderr
        assert done.stdout == '' and len(done.stderr.splitlines()) == 1


def test_numbers_that_are_not_finite_are_an_error(onnx_file, digit, tmp_path):
    steps = dict(preprocessing(TRANSFORMS['digits']), std=[0., 0., 0.])
    done = _run('onnx_runtime.py', _with_metadata(onnx_file, tmp_path / 'zero.onnx', preprocessing=steps), digit.file)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == 'error: the model returns NaN or infinities for this picture'
