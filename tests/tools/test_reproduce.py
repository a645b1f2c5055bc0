"""`subquad reproduce`: the authors' protocol, reported and measured figures, and the exit code."""
import json

import pytest
import torch
from color_net import WORDNET, save_color, use_color_net
from published_files import publish, serve
from user_errors import command_error

from subquad.backbones.weights.registry import WEIGHTS, find
from subquad.tools import reproduce
from subquad.tools.engine.classification import published_protocol
from subquad.tools.engine.classification.published_protocol import compare, describe, protocol

# The images as the network expects them; the crop of 0.8 makes it 10 pixels, then 8.
ENTRY = dict(input_size=(3, 8, 8), crop_pct=0.8, mean=(0., 0., 0.), std=(1., 1., 1.))


@pytest.fixture
def imagenet(tmp_path, monkeypatch):
    """Four images of classes 0 and 7, of which three are predicted right, and published weights of 75 %."""
    use_color_net(monkeypatch)
    for n, (label, predicted) in enumerate([(0, 0), (0, 1), (7, 7), (7, 7)]):
        save_color(tmp_path / 'in1k' / 'val' / WORDNET[label] / f'{n}.png', predicted)
    torch.save({'model': {'shift': torch.zeros(())}, 'model_ema': {'shift': torch.zeros(())}}, tmp_path / 'best.pth')
    publish(monkeypatch, 'test_ppma.color', reported=dict(top1=75.05, top5=100.), **ENTRY)
    serve(monkeypatch, {'test_ppma.color': tmp_path / 'best.pth'})
    return tmp_path / 'in1k'


def _arguments(data, *options):
    return ['test_ppma.color', '--data', str(data), '--partial', '--workers', '0', *options]


def test_reproduced_figures_pass(imagenet, capsys):
    assert reproduce.main(_arguments(imagenet, '--json')) == 0
    out, said = capsys.readouterr()
    found = json.loads(out)
    assert found['metrics']['top1'] == dict(reported=75.05, measured=75., difference=pytest.approx(-0.05), passed=True)
    assert found['passed'] and not found['whole'] and (found['images'], found['classes']) == (4, 2)
    assert 'its averaged weights (model_ema) are read' in said
    assert reproduce.main(_arguments(imagenet / 'val')) == 0
    out = capsys.readouterr().out
    assert '75.05 %' in out and '75.00 %' in out and '-0.05' in out and 'measured on these images only' in out
    assert 'bicubic to 10 pixels, center crop 8 x 8 (crop_pct 0.8), RGB, mean 0 0 0, std 1 1 1' in out


def test_a_difference_beyond_the_tolerance_fails(imagenet, tmp_path, capsys):
    """Another file, whose predictions are one class too high."""
    torch.save({'shift': torch.ones(())}, tmp_path / 'other.pth')
    other = ('--weights', str(tmp_path / 'other.pth'))
    assert reproduce.main(_arguments(imagenet, *other, '--json')) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found['passed'] and found['metrics']['top1']['measured'] == 0 and found['metrics']['top5']['passed']
    assert reproduce.main(_arguments(imagenet, '--tolerance', '0.01')) == 1
    assert ' no ' in capsys.readouterr().out
    assert reproduce.main(_arguments(imagenet, *other, '--tolerance', '80')) == 0


def test_weights_can_be_chosen(imagenet, tmp_path, capsys):
    torch.save({'model': {'shift': torch.ones(())}, 'model_ema': {'shift': torch.zeros(())}}, tmp_path / 'best.pth')
    assert reproduce.main(_arguments(imagenet)) == 0
    assert reproduce.main(_arguments(imagenet, '--raw')) == 1
    assert 'its raw weights (model) are read' in capsys.readouterr().err


def test_a_comparison_includes_its_tolerance_and_never_passes_nan():
    assert compare(82.6, 82.5, 0.1)['passed'] and compare(82.6, 82.7, 0.1)['passed']
    assert not compare(82.6, 82.49, 0.1)['passed']
    assert not compare(82.6, float('nan'), 100.)['passed']


def test_errors(imagenet, tmp_path, monkeypatch):
    for arguments, words in (
            (['test_ppma.color', '--data', imagenet], '4 images of 2 classes, but ImageNet\'s validation set'),
            (['test_ppma.color'], 'needs ImageNet\'s validation images: --data FOLDER'),
            (['test_ppma.color', '--data', tmp_path / 'none'], 'no image folder at'),
            (['ppma_tiny.mask_rcnn_1x_coco'], 'are weights for detection; subquad reproduce takes classifiers only so'),
            (['ppma_tiny.upernet_160k_ade20k'], 'are weights for segmentation; subquad reproduce'),
            (['ppma_tiny.in2k'], 'there are no weights ppma_tiny.in2k'),
            (['test_ppma.digits', '--data', imagenet], '--data is not supported'),
            ([*_arguments(imagenet), '--tolerance', '-1'], '--tolerance must be at least 0'),
            ([*_arguments(imagenet), '--tolerance', 'nan'], '--tolerance must be at least 0'),
            ([*_arguments(imagenet), '--weights', tmp_path / 'none.pth'], 'no weight file at')):
        command_error(reproduce.main, arguments, words)
    (imagenet / 'val' / 'photos').mkdir()
    save_color(imagenet / 'val' / 'photos' / 'a.png', 0)
    command_error(reproduce.main, _arguments(imagenet), 'photos is not one of the 1,000 classes')
    publish(monkeypatch, 'test_ppma.unreported')
    command_error(reproduce.main, ['test_ppma.unreported', '--data', imagenet], 'no figures are reported')


def test_an_unreadable_image_stops(imagenet):
    """Another image in its place would change the figure."""
    (imagenet / 'val' / WORDNET[7] / 'broken.png').write_text('no image')
    command_error(reproduce.main, _arguments(imagenet), 'broken.png is not an image')


def test_the_whole_set_needs_no_partial(imagenet, monkeypatch, capsys):
    monkeypatch.setattr(published_protocol, 'VALIDATION_IMAGES', 4)
    monkeypatch.setattr(published_protocol, 'CLASSES', 2)
    assert reproduce.main([word for word in _arguments(imagenet) if word != '--partial']) == 0
    assert 'these images only' not in capsys.readouterr().out


@pytest.mark.parametrize('name, expected', [
    ('ppma_tiny.in1k', 'bicubic to 256 pixels, center crop 224 x 224 (crop_pct 0.875), RGB, mean 0.485 0.456 0.406, '
                       'std 0.229 0.224 0.225'),
    ('subquad_mobilevitv2_100.cvnets_in1k', 'bicubic to 288 pixels, center crop 256 x 256 (crop_pct 0.888), RGB, '
                                            'mean 0 0 0, std 1 1 1'),
    ('subquad_mobilevitv2_150.cvnets_in22k_ft_in1k_384', 'bicubic to 384 pixels, center crop 384 x 384 (crop_pct 1), '
                                                         'RGB, mean 0 0 0, std 1 1 1')])
def test_protocols_of_the_authors(name, expected):
    assert describe(find(name)) == expected


def test_every_published_classifier_has_a_protocol(tmp_path):
    for name, entry in WEIGHTS.items():
        if entry.task == 'classification':
            data = None if entry.tag == 'digits' else str(tmp_path)
            config = protocol(entry, data, 2, 0)
            assert config.model.name == entry.arch and config.model.num_classes == entry.num_classes
            assert config.test_dataloader.dataset.transform.mean == entry.mean, name


def test_own_classifier_is_reproduced_on_digits(capsys):
    assert reproduce.main(['test_mobilevitv2.digits', '--workers', '0', '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['images'] == 360 and found['whole'] and abs(found['metrics']['top1']['difference']) < 0.01
