"""Weights that are part of the package: small, whole, loaded without a network, and as accurate as recorded."""
import json

import pytest
import timm
import torch
from helpers import ROOT
from pairwise import slow
from safetensors import safe_open

from subquad.backbones.weights import read_metadata
from subquad.backbones.weights.download import SHIPPED, fetch
from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools import make_dataset, test
from subquad.tools.data.digits import digits_arrays, mnist5k_arrays
from subquad.tools.engine.classification.weight_files import classifier_from_file
from subquad.tools.engine.config import load

SHIPPED_WEIGHTS = [weights for weights in WEIGHTS.values() if weights.file]
CLASSIFIERS = [weights for weights in SHIPPED_WEIGHTS if weights.task == 'classification']
MASK_RCNN = 'test_ppma.mask_rcnn_shapes'
DETECTORS = ['test_mobilevitv2.ssdlite_shapes', MASK_RCNN]
SEGMENTERS = ['test_mobilevitv2.deeplabv3_shapes', 'test_ppma.upernet_shapes']
HALF = [MASK_RCNN, *SEGMENTERS]
# Metric in the registry -> in the records of `subquad test`.
AVERAGE_PRECISIONS = {'box_AP': 'coco/bbox_mAP', 'mask_AP': 'coco/segm_mAP'}


def _names(weights):
    return weights.name


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError('a connection was opened')
    monkeypatch.setattr('socket.socket.connect', refuse)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')


def test_every_file_is_in_the_table():
    assert set(map(_names, SHIPPED_WEIGHTS)) == {*DETECTORS, *SEGMENTERS, *(
        f'test_{family}.{data}' for family in ('ppma', 'mobilevitv2', 'myo', 'lcsm') for data in ('digits', 'mnist5k'))}
    assert sorted(weights.file for weights in SHIPPED_WEIGHTS) == sorted(path.name for path in SHIPPED.iterdir())


@pytest.mark.parametrize('weights', SHIPPED_WEIGHTS, ids=_names)
def test_files_are_small_and_float32_or_half(weights):
    path = fetch(weights)                                  # compares size and sha256 with the table
    assert weights.sha256 and weights.size == path.stat().st_size <= 2_000_000
    with safe_open(path, 'pt') as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}
    assert kinds <= {'F32', 'I64', *(['F16'] if weights.name in HALF else ())}


@pytest.mark.parametrize('weights', CLASSIFIERS, ids=_names)
def test_table_says_what_file_and_config_say(weights):
    metadata = read_metadata(fetch(weights))
    assert metadata['model'] == weights.arch and len(metadata['classes']) == weights.num_classes
    known = {key: getattr(weights, key) for key in metadata['transform']}
    assert metadata['transform'] == {key: list(v) if isinstance(v, tuple) else v for key, v in known.items()}
    config = load(_config(weights))
    assert metadata['epoch'] == config.train_cfg.max_epochs and config.model.name == weights.arch


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('weights', [pytest.param(weights, marks=[pytest.mark.slow] * (weights.tag == 'mnist5k'))
                                     for weights in CLASSIFIERS], ids=_names)
def test_pretrained_model_is_as_accurate_as_recorded(weights, no_network):
    model = timm.create_model(weights.name, pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images, labels = {'digits': digits_arrays, 'mnist5k': mnist5k_arrays}[weights.tag]('test')
    with torch.no_grad():
        logits = torch.cat([model(torch.stack([transform(_image(pixels)) for pixels in images[start:start + 200]]))
                            for start in range(0, len(images), 200)])
    accuracy = (logits.argmax(1) == torch.as_tensor(labels)).float().mean().item() * 100
    recorded = _recorded(_config(weights))['accuracy/top1']
    assert accuracy == pytest.approx(recorded, abs=0.3) and accuracy > 97                # an image of 360 is 0.28 %
    assert weights.reported == {'top1': pytest.approx(recorded, abs=0.05)}
    other, _, classes = classifier_from_file(weights.name)
    assert classes == [str(digit) for digit in range(10)]
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_default_of_the_test_models_stays_untrained(no_network):
    assert timm.create_model('test_ppma').num_classes == 1000
    backbone = timm.create_model('test_ppma.digits', pretrained=True, features_only=True).eval()
    assert len(backbone(torch.rand(1, 3, 32, 32))) == 4


def _config(weights):
    return f"{weights.arch.replace('_', '-')}_{weights.tag}"


def _image(pixels):
    from PIL import Image
    return Image.fromarray(pixels).convert('RGB')


def _recorded(config):
    """Return the newest record of `subquad test --record` for a config as it is."""
    lines = (ROOT / 'model_cards' / 'benchmarks' / 'trained.jsonl').read_text().splitlines()
    return [line for line in map(json.loads, lines) if (line['config'], line['options']) == (config, '')][-1]


# tests/exporters run the other detector and segmenter on images.
@pytest.mark.parametrize('name', [MASK_RCNN, *slow(DETECTORS[0])])
def test_detectors_find_shapes(name, tmp_path, no_network, capsys):
    """On 40 images of the same kind as those of the record."""
    pytest.importorskip('mmdet')
    weights = WEIGHTS[name]
    recorded = _recorded(weights.config)
    kinds = {kind: key for kind, key in AVERAGE_PRECISIONS.items() if key in recorded}
    assert weights.reported == {kind: pytest.approx(recorded[key] * 100, abs=0.05) for kind, key in kinds.items()}
    make_dataset.main(['shapes', str(tmp_path / 'shapes'), '--train', '1', '--val', '40'])
    capsys.readouterr()
    test.main([weights.config, name, '--data', str(tmp_path / 'shapes'), '--json'])
    found = json.loads(capsys.readouterr().out)
    for key in kinds.values():
        assert found[f'{key}_50'] == pytest.approx(recorded[f'{key}_50'], abs=0.15)


@pytest.mark.parametrize('name', [SEGMENTERS[1], *slow(SEGMENTERS[0])])
def test_segmenters_find_shapes(name, tmp_path, no_network, capsys):
    """On 40 images of the same kind as those of the record."""
    pytest.importorskip('mmseg')
    weights = WEIGHTS[name]
    recorded = _recorded(weights.config)
    assert weights.reported == {'mIoU': pytest.approx(recorded['mIoU'], abs=0.05)}
    make_dataset.main(['shapes', str(tmp_path / 'shapes'), '--train', '1', '--val', '40'])
    capsys.readouterr()
    test.main([weights.config, name, '--data', str(tmp_path / 'shapes'), '--json'])
    assert json.loads(capsys.readouterr().out)['mIoU'] == pytest.approx(recorded['mIoU'], abs=10)


@pytest.mark.long
@pytest.mark.parametrize('name', [*DETECTORS, *SEGMENTERS])
def test_all_validation_images_give_the_recorded_figures(name, tmp_path, no_network, capsys):
    weights = WEIGHTS[name]
    pytest.importorskip('mmdet' if name in DETECTORS else 'mmseg')
    make_dataset.main(['shapes', str(tmp_path / 'shapes'), '--train', '1', '--val', '200'])
    capsys.readouterr()
    test.main([weights.config, name, '--data', str(tmp_path / 'shapes'), '--json'])
    found = json.loads(capsys.readouterr().out)
    for metric, figure in weights.reported.items():
        value = found['mIoU'] if metric == 'mIoU' else 100 * found[AVERAGE_PRECISIONS[metric]]
        assert value == pytest.approx(figure, abs=0.3), metric
