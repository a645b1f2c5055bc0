"""`subquad test` of classifiers: weights, test-time augmentation, calibration, tables, ImageNet's test sets."""
import csv
import json

import numpy as np
import pytest
import timm
import torch
from color_net import PLAIN, WORDNET, save_color, use_color_net
from mmengine.config import Config
from PIL import Image
from training_cases import fails
from user_errors import command_error

from subquad.backbones.weights import save_weights
from subquad.tools import test
from subquad.tools.engine.classification import throughput
from subquad.tools.engine.classification.class_report import ClassReport
from subquad.tools.engine.classification.prediction_metrics import (
    AccuracyMetric,
    CalibrationMetric,
    Predictions,
    expected_calibration_error,
    ranks,
)
from subquad.tools.engine.classification.views import EvaluatedNet, view_transform
from subquad.tools.engine.classification.weight_files import transform_differences

DIGITS = 'test-ppma_digits'
FOLDER = 'ppma-tiny_folder'


@pytest.fixture
def color(tmp_path, monkeypatch):
    """A file of weights of ColorNet, which every classifier is then."""
    use_color_net(monkeypatch)
    torch.save({'shift': torch.zeros(())}, tmp_path / 'color.pth')
    return tmp_path / 'color.pth'


def _tested(capsys, *arguments):
    """The metrics, and what stderr says."""
    assert test.main([*map(str, arguments), '--json']) == 0
    out, said = capsys.readouterr()
    return json.loads(out), said


def _labels(capsys, color, data, labels, *options):
    return _tested(capsys, FOLDER, color, '--data', data, '--labels', labels, *options, '--cfg-options', *PLAIN)


# ---- calibration

def _predictions(confidence, correct):
    n = len(confidence)
    return Predictions(np.zeros(n, int), np.zeros(n, int), np.array(confidence), np.array(correct))


def test_expected_calibration_error_by_hand():
    # Bins of width 1 / 15: {0.95, 0.98}, {0.6, 0.6}, {0.07}.
    found = expected_calibration_error(_predictions([0.95, 0.98, 0.6, 0.6, 0.07], [True, True, True, False, False]))
    assert found == pytest.approx((2 * (1 - 0.965) + 2 * (0.6 - 0.5) + 0.07) / 5)
    assert expected_calibration_error(_predictions([1., 1.], [True, True])) == 0
    assert expected_calibration_error(_predictions([0., 1.], [False, False])) == pytest.approx(0.5)


@pytest.mark.parametrize('scores, label, expected', [
    ([0.7, 0.2, 0.1], 0, (0, 0.7, True)), ([0.7, 0.2, 0.1], 1, (0, 0.7, False)),
    ([0.5, 0.5, 0.], 0, (1, 0.5, False)), ([1 / 3] * 3, 2, (0, 1 / 3, False)),
    ([float('nan'), 1., 0.], 1, (-1, 1., False)), ([float('inf'), 0., 0.], 0, (-1, 1., False))])
def test_predictions_with_ties_and_scores_that_are_not_finite(scores, label, expected):
    """They are correct exactly if AccuracyMetric counts them."""
    metric, accuracy = CalibrationMetric(), AccuracyMetric(topk=(1,))
    sample = dict(scores=torch.tensor(scores), label=torch.tensor(label))
    metric.process(None, [sample])
    accuracy.process(None, [sample])
    _, predicted, confidence, correct = metric.results[0]
    assert (predicted, pytest.approx(confidence), correct) == expected
    assert accuracy.compute_metrics(accuracy.results)['top1'] == 100 * correct


def test_ranks_with_several_correct_classes():
    nan, other = float('nan'), [True, False, False, False]
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2], [0.4, 0.4, 0.1, 0.1], [0.4, nan, 0.1, 0.1]])
    correct = torch.tensor([[True, False, True, False], [True, True, False, False], other, other])
    found = ranks(scores, correct).tolist()
    assert found[:3] == [1, 0, 1] and found[3] > 1000


# ---- weights

def test_plain_and_averaged_weights(tmp_path, capsys):
    raw, average = (timm.create_model('test_ppma', num_classes=10) for _ in range(2))
    torch.save({'model': raw.state_dict(), 'model_ema': average.state_dict()}, tmp_path / 'both.pth')
    results = {}
    for name, model in (('raw', raw), ('averaged', average)):
        torch.save(model.state_dict(), tmp_path / 'one.pth')
        results[name], said = _tested(capsys, DIGITS, tmp_path / 'one.pth')
        assert 'weights' not in said
        flag = '--raw' if name == 'raw' else '--ema'
        found, said = _tested(capsys, DIGITS, tmp_path / 'both.pth', flag, '--record', tmp_path / 'r')
        assert found == results[name] and f'its {name} weights (model' in said
    assert results['raw'] != results['averaged']
    assert _tested(capsys, DIGITS, tmp_path / 'both.pth')[0] == results['averaged']
    records = [json.loads(line) for line in (tmp_path / 'r').read_text().splitlines()]
    assert [record['options'] for record in records] == ['--raw', '--ema']
    fails([DIGITS, tmp_path / 'one.pth', '--raw'], 'holds one set of weights', test.main)
    torch.save({'model': raw.state_dict()}, tmp_path / 'raw.pth')
    fails([DIGITS, tmp_path / 'raw.pth', '--ema'], 'it has no averaged weights', test.main)


# ---- what the file says of its images

@pytest.mark.parametrize('form', ['safetensors', 'pth'])
def test_images_are_prepared_as_the_file_records(form, tmp_path, capsys):
    """Not as the config says, unless an option of the command does; classes are compared in both forms of a file."""
    torch.manual_seed(0)
    model = timm.create_model('test_ppma', num_classes=10)
    path, classes = tmp_path / f'w.{form}', [*map(str, range(10))]
    recorded = dict(input_size=(3, 48, 48), mean=(0.1, 0.1, 0.1), std=(0.3, 0.3, 0.3), crop_pct=1.0)
    network = dict(num_classes=10, drop_path_rate=0.05)

    def save(classes):
        if form == 'safetensors':
            return save_weights(model, path, dict(model='test_ppma', options=network, classes=classes,
                                                  transform=recorded))
        config = Config(dict(model=dict(type='TimmClassifier', name='test_ppma', **network),
                             test_dataloader=dict(dataset=dict(transform=recorded))))
        torch.save({'state_dict': {f'net.{key}': value for key, value in model.state_dict().items()},
                    'meta': dict(cfg=config.pretty_text, dataset_meta=dict(classes=classes))}, path)
    save(classes)
    key = 'test_dataloader.dataset.transform'
    options = [f'{key}.{name}={str(value).replace(" ", "")}' for name, value in recorded.items()]
    expected, said = _tested(capsys, DIGITS, path, '--cfg-options', *options)
    assert 'prepared' not in said
    found, said = _tested(capsys, DIGITS, path)
    assert found == expected and said.startswith(
        'images are prepared with input_size=(3, 48, 48), mean=(0.1, 0.1, 0.1), std=(0.3, 0.3, 0.3), as '
        f'{path} records; the config has input_size=(3, 32, 32), mean=(0.3, 0.3, 0.3), std=(0.4, 0.4, 0.4) (--cfg')
    other, said = _tested(capsys, DIGITS, path, '--cfg-options', f'{key}.mean=(0.9,0.9,0.9)')
    assert other != expected
    assert f'images are prepared with mean=(0.9, 0.9, 0.9); {path} has mean=(0.1, 0.1, 0.1)\n' in said
    assert 'images are prepared with input_size=(3, 48, 48), std=(0.3, 0.3, 0.3), as' in said
    fails([DIGITS, path, '--record', tmp_path / 'r'], '--record: .* has input_size=.*, the config has', test.main)
    save(classes[::-1])
    fails([DIGITS, path], 'was trained on the classes 9, 8, .*, but the data has 0, 1, ', test.main)


def test_crops_that_resize_alike_are_equal():
    """cvnets resizes to 288 for a crop of 256, which timm gives as 0.888."""
    both = [dict(input_size=(3, 256, 256), crop_pct=share) for share in (0.888, 256 / 288)]
    assert transform_differences(*both) == {} == transform_differences(dict(input_size=224), {})
    assert transform_differences({**both[0], 'crop_pct': 0.8}, both[1]) == dict(crop_pct=(0.8, 256 / 288))


# ---- test-time augmentation

def _image(height, width):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def test_views_are_the_crops_of_the_resized_image():
    transform = timm.data.create_transform((3, 32, 32), crop_pct=0.8, interpolation='bilinear')
    image = _image(50, 60)
    resized = timm.data.create_transform((3, 40, 48), crop_pct=1., interpolation='bilinear')(image)    # no crop
    assert torch.equal(view_transform(transform, 'flip', 0.8)(image)[1], transform(image).flip(-1))
    five = view_transform(transform, 'five-crop', 0.8)(image)
    assert five.shape == (5, 3, 32, 32) and torch.equal(five[4], transform(image))
    assert torch.equal(five[0], resized[:, :32, :32]) and torch.equal(five[3], resized[:, -32:, -32:])
    ten = view_transform(transform, 'ten-crop', 0.8)(image)
    assert torch.equal(ten[:5], five) and torch.equal(ten[9], five[4].flip(-1))


def test_probabilities_of_views_are_averaged():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    images = torch.randn(3, 2, 3, 2, 2)
    mean = net(images.flatten(0, 1)).softmax(-1).unflatten(0, (3, 2)).mean(1)
    assert torch.allclose(EvaluatedNet(net, True, None)(images).softmax(-1), mean, atol=1e-6)
    restricted = EvaluatedNet(net, False, [1, 3])(images[:, 0]).softmax(-1)
    expected = net(images[:, 0])[:, [1, 3]].softmax(-1)
    assert torch.allclose(restricted[:, [1, 3]], expected, atol=1e-6) and not restricted[:, [0, 2]].any()
    with torch.no_grad():
        net[1].bias[0] = float('nan')                   # of a class that is not chosen from
    assert EvaluatedNet(net, False, [1, 3])(images[:, 0]).isnan().all()


def test_tta_changes_the_predictions(tmp_path, capsys):
    """With the flip, a network and the same one on mirrored images predict the same."""
    torch.manual_seed(0)
    save_weights(timm.create_model('test_ppma', num_classes=10), tmp_path / 'w.safetensors')
    options = ('--cfg-options', 'test_dataloader.dataset.transform.crop_pct=0.8')
    found = [_tested(capsys, DIGITS, tmp_path / 'w.safetensors', *words, *options)[0]['calibration/ece']
             for words in ((), ('--tta', 'flip'), ('--tta', 'five-crop'), ('--tta', 'ten-crop'))]
    assert len(set(found)) == 4
    fails([DIGITS, tmp_path / 'w.safetensors', '--tta', 'five-crop'], 'crop_pct=1; set --cfg-options', test.main)
    fails([DIGITS, tmp_path / 'w.safetensors', '--tta'], '--tta without a word are for detectors', test.main)


# ---- throughput

class _Loader:
    """Batches of 4 images; each takes two seconds of a clock, the first ten."""

    def __init__(self, batches, clock):
        self.batches, self.clock = batches, clock

    def __len__(self):
        return self.batches

    def __iter__(self):
        for n in range(self.batches):
            self.clock[0] += 2 if n else 10
            yield dict(inputs=torch.zeros(4, 3, 2, 2))


@pytest.mark.parametrize('batches, rate, taken', [(1, 0.4, 10), (5, 2., 18), (100, 2., 32)])
def test_rate_of_the_loader(batches, rate, taken, monkeypatch):
    """The first batch starts the workers and does not count; a long test is not repeated in full."""
    clock = [0.]
    monkeypatch.setattr(throughput.time, 'perf_counter', lambda: clock[0])
    assert throughput.loader_rate(_Loader(batches, clock)) == rate and clock[0] == taken


def test_rate_of_the_network(monkeypatch):
    clock = [0.]
    monkeypatch.setattr(throughput.time, 'perf_counter', lambda: clock[0])

    class Net(torch.nn.Module):
        def forward(self, images):
            clock[0] += 1
            return images
    net = Net()
    stopwatch = throughput.Stopwatch(net)
    for size in (100, 6, 2):
        net(torch.zeros(size, 3))
        clock[0] += 50                                  # loading, which does not count
    assert stopwatch.rate() == 4 and not net._forward_hooks and not net._forward_pre_hooks


# ---- tables and pictures

def test_report_shows_and_writes_the_classes(color, tmp_path, capsys):
    """Class 0: 2 of 4 right, 1 as class 1, 1 not finite. Class 1: all right. Class 5 is never predicted."""
    for n, (label, predicted) in enumerate([(0, 0), (0, 0), (0, 1), (0, None), (1, 1), (1, 1), (5, 0)]):
        save_color(tmp_path / 'data' / WORDNET[label] / f'{n}.png', predicted or 0, predicted is not None)
    found, said = _labels(capsys, color, tmp_path / 'data', 'imagenet', '--report', '--throughput',
                          '--out', tmp_path / 'out')
    assert found['accuracy/top1'] == pytest.approx(400 / 7) and '1 of 7 images have scores that are NaN' in said
    assert found['throughput/model'] > 0 and found['throughput/loader'] > 0
    report = found['report']
    assert report['classes'] == [
        dict(name=f'{WORDNET[5]} electric ray', precision=None, recall=0., count=1),
        dict(name='n01440764 tench', precision=pytest.approx(200 / 3), recall=50., count=4),
        dict(name='n01443537 goldfish', precision=pytest.approx(200 / 3), recall=100., count=2)]
    assert report['nonfinite'] == 1
    pairs = {(row['label'][:9], (row['predicted'] or 'none')[:9]): (row['count'], row['share'])
             for row in report['confusions']}
    assert pairs == {(WORDNET[0], WORDNET[1]): (1, 25.), (WORDNET[0], 'none'): (1, 25.),
                     (WORDNET[5], WORDNET[0]): (1, 100.)}
    assert sum(row['count'] for row in report['reliability']) == 7
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {
        'report.json', 'classes.csv', 'confusion.png', 'reliability.png'}
    written = json.loads((tmp_path / 'out' / 'report.json').read_text())
    assert written['classes'] == report['classes'] and written['metrics']['accuracy/top1'] == found['accuracy/top1']
    rows = list(csv.DictReader((tmp_path / 'out' / 'classes.csv').open()))
    assert [row['recall'] for row in rows] == ['0.00', '50.00', '100.00'] and rows[0]['precision'] == ''
    test.main([FOLDER, str(color), '--data', str(tmp_path / 'data'), '--labels', 'imagenet', '--report',
               '--cfg-options', *PLAIN])
    shown = capsys.readouterr().out
    assert 'never predicted' in shown and 'nothing (scores not finite)' in shown
    assert shown.index(WORDNET[5]) < shown.index(WORDNET[0]) < shown.index(WORDNET[1])


@pytest.mark.parametrize('classes', [3, 40, 1000])
def test_pictures_stay_readable_with_many_classes(classes, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(3 * classes) % classes
    predicted = np.where(rng.random(len(labels)) < 0.8, labels, rng.integers(0, classes, len(labels)))
    report = ClassReport()
    report.take(Predictions(labels, predicted, rng.random(len(labels)), labels == predicted),
                [f'class ${n}' for n in range(classes)])
    report.write(tmp_path, {})
    size = Image.open(tmp_path / 'confusion.png').size
    assert max(size) < 2000 and min(size) > 250
    assert len(list(csv.DictReader((tmp_path / 'classes.csv').open()))) == classes


def test_options_of_the_other_kind_are_refused(tmp_path):
    weights = tmp_path / 'w.safetensors'
    save_weights(timm.create_model('test_ppma', num_classes=10), weights)
    (tmp_path / 'file').write_text('')
    for options, words in ((('--show-dir', tmp_path), '--out FOLDER'),
                           (('--labels', 'real'), 'config of image folders'),
                           (('--out', tmp_path / 'file'), 'cannot write to the folder')):
        command_error(test.main, [DIGITS, weights, *options], words)


@pytest.mark.parametrize('options, words', [
    (['--report'], '--report is for classifiers'), (['--raw'], '--ema and --raw are for classifiers'),
    (['--tta', 'flip'], '--tta flip is for classifiers; --tta alone')])
def test_detectors_refuse_options_of_classifiers(options, words):
    pytest.importorskip('mmdet')
    command_error(test.main, ['mask-rcnn_test-ppma_shapes', 'w.pth', *options], words)


# ---- ImageNet's test sets

def test_imagenet_a_and_r_choose_from_their_200_classes(color, tmp_path, capsys):
    """Classes 6 and 15 are in ImageNet-A, 1 and 2 in ImageNet-R; 7 is not in A, 15 and 0 are not in R."""
    for n, (label, predicted) in enumerate([(6, 6), (6, 7), (15, 15), (15, 6)]):
        save_color(tmp_path / 'a' / WORDNET[label] / f'{n}.png', predicted)
    # The network says 7, which is no class of ImageNet-A; the nearest one is 6.
    assert _labels(capsys, color, tmp_path / 'a', 'imagenet-a')[0]['accuracy/top1'] == 75
    assert _labels(capsys, color, tmp_path / 'a', 'imagenet')[0]['accuracy/top1'] == 50
    fails([FOLDER, color, '--data', tmp_path / 'a', '--labels', 'imagenet-r'],
          f'{WORDNET[15]} is not one of the 200 classes of imagenet-r', test.main)
    for n, (label, predicted) in enumerate([(1, 0), (2, 2)]):
        save_color(tmp_path / 'r' / WORDNET[label] / f'{n}.png', predicted)
    assert _labels(capsys, color, tmp_path / 'r', 'imagenet-r')[0]['accuracy/top1'] == 100
    assert _labels(capsys, color, tmp_path / 'r', 'imagenet-sketch')[0]['accuracy/top1'] == 50


def test_imagenet_v2_has_folders_of_numbers(color, tmp_path, capsys):
    """Sorted as text, 10 comes before 2, and absent folders do not move the others."""
    for label in (2, 10, 999):
        save_color(tmp_path / 'v2' / str(label) / 'a.jpeg.png', label)
    assert _labels(capsys, color, tmp_path / 'v2', 'imagenet-v2')[0]['accuracy/top1'] == 100
    fails([FOLDER, color, '--data', tmp_path / 'v2', '--labels', 'imagenet'], 'the folder 2 is not one of the 1,000',
          test.main)


def test_real_accepts_every_class_that_it_lists(color, tmp_path, capsys):
    """Labels: image 1 none, image 2 {5, 7}, image 3 {0}."""
    for number, (folder, predicted) in enumerate([(0, 0), (0, 7), (1, 1)], 1):
        save_color(tmp_path / 'in1k' / 'val' / WORDNET[folder] / f'ILSVRC2012_val_{number:08d}.png', predicted)
    (tmp_path / 'real.json').write_text(json.dumps([[], [5, 7], [0]]))
    found, said = _labels(capsys, color, tmp_path / 'in1k', f'real={tmp_path}/real.json', '--out', tmp_path / 'out')
    assert (found['accuracy/top1'], found['accuracy/top5']) == (50, 100)
    assert '1 of 3 images have no label in ReaL and are left out' in said
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {'report.json', 'reliability.png'}
    # timm's copy: the first image has none, too, the second 795 or 970, the third 230 or 231.
    assert _labels(capsys, color, tmp_path / 'in1k', 'real')[0]['accuracy/top5'] == 0
    save_color(tmp_path / 'in1k' / 'val' / WORDNET[1] / 'ILSVRC2012_val_00000003.png', 230)
    assert _labels(capsys, color, tmp_path / 'in1k', 'real')[0]['accuracy/top1'] == 50


@pytest.mark.parametrize('content, labels, words', [
    ('[[1000]]', 'real={}', 'must hold a list of lists'), ('{', 'real={}', 'cannot be read'),
    ('[[], [], []]', 'real={}', 'ReaL labels none'), ('[[1]]', 'real={}', 'is not named like an image'),
    ('', 'imagenet-b', "got 'imagenet-b'; did you mean imagenet"), ('', 'imagenet=x', "got 'imagenet=x'")])
def test_wrong_labels(content, labels, words, color, tmp_path):
    for number in (1, 2):
        save_color(tmp_path / 'in1k' / WORDNET[number] / f'ILSVRC2012_val_{number:08d}.png', number)
    (tmp_path / 'real.json').write_text(content)
    fails([FOLDER, color, '--data', tmp_path / 'in1k', '--labels', labels.format(tmp_path / 'real.json')], words,
          test.main)
    fails([FOLDER, color, '--labels', 'real'], 'needs its images: --data FOLDER', test.main)


def test_classes_without_names_are_not_compared():
    from subquad.backbones.weights.metadata import class_difference, numbered
    assert class_difference(['cat', 'dog'], numbered(2)) == class_difference(numbered(2), ['cat', 'dog']) == ''
    assert class_difference(['cat', 'dog'], numbered(3)) and class_difference(['cat', 'dog'], ['0', '1'])
