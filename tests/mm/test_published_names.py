"""Names of published weights in detectors and segmenters: init_cfg, load_from, and the commands."""
import json
import re
from contextlib import nullcontext

import pytest
import timm
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import MASK_RCNN, build_small_detector, make_shapes
from mmdet.apis import init_detector
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import CheckpointLoader
from mmengine.runner.checkpoint import load_checkpoint as load_as_mmengine
from ppma_files import authors_state, save_authors_file, save_training_file
from published_files import publish, serve
from training_cases import fails

from subquad.backbones.weights import WeightsError, load_weights, read_file
from subquad.backbones.weights.ppma_keys import to_our_keys
from subquad.tools import predict, test
from subquad.tools import weights as weights_command
from subquad.tools.engine.config import find


@pytest.fixture(scope='module')
def networks(tmp_path_factory):
    """A classifier with an average, a detector, and their files as PPMA's authors write them."""
    folder = tmp_path_factory.mktemp('published')
    torch.manual_seed(5)
    raw, average, detector = timm.create_model('test_ppma'), timm.create_model('test_ppma'), build_small_detector()
    save_authors_file(raw, folder / 'best.pth', average)
    heads = {key: value for key, value in detector.state_dict().items() if not key.startswith('backbone.')}
    backbone = {f'backbone.{key}': value for key, value in authors_state(detector.backbone).items()}
    torch.save(dict(state_dict={**backbone, **heads}, meta=dict(CLASSES=('a', 'b', 'c', 'd', 'e'))),
               folder / 'epoch_12.pth')
    return folder, raw.state_dict(), average.state_dict(), detector.state_dict()


@pytest.fixture
def asked(networks, monkeypatch):
    """Publish the classifier as test_ppma.small and the detector as test_ppma.shapes; the names of downloads."""
    publish(monkeypatch, 'test_ppma.small')
    publish(monkeypatch, 'test_ppma.shapes', task='detection', num_classes=5, config=MASK_RCNN)
    folder = networks[0]
    return serve(monkeypatch, {'test_ppma.small': folder / 'best.pth', 'test_ppma.shapes': folder / 'epoch_12.pth'})


def _same(state, expected, prefix=''):
    keys = [key for key in expected if not key.startswith('head.')]
    return len(keys) > 50 and all(torch.equal(state[prefix + key], expected[key]) for key in keys)


@pytest.mark.parametrize('name', ['subquad://test_ppma.small', 'test_ppma.small', 'FILE'])
@pytest.mark.parametrize('weights', [None, 'raw', 'averaged'])
def test_init_cfg_takes_names_and_a_choice_of_weights(name, weights, networks, asked):
    """The raw weights are the default, because the authors' detectors start from them."""
    folder, raw, average, _ = networks
    name = str(folder / 'best.pth') if name == 'FILE' else name
    choice = {} if weights is None else dict(weights=weights)
    backbone = MODELS.build(dict(type='PPMA', arch='test', init_cfg=dict(type='Pretrained', checkpoint=name, **choice)))
    backbone.init_weights()
    assert _same(backbone.state_dict(), average if weights == 'averaged' else raw)
    said = ('averaged weights (model_ema) are read, not the raw ones (model)' if weights == 'averaged' else
            'raw weights (model) are read, not the averaged ones (model_ema)')
    assert f'weights are loaded from {name}; ' in backbone.load_summary and said in backbone.load_summary
    assert asked == ([] if 'best' in name else ['test_ppma.small'])


def test_init_cfg_takes_averaged_weights_from_a_file_without_raw_ones(networks, tmp_path):
    content = torch.load(networks[0] / 'best.pth', weights_only=False)
    torch.save({'model_ema': content['model_ema']}, tmp_path / 'average.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'average.pth'))
    backbone = MODELS.build(dict(type='PPMA', arch='test', init_cfg=init_cfg))
    backbone.init_weights()
    assert _same(backbone.state_dict(), networks[2])
    with pytest.raises(WeightsError, match="it has no raw weights, only averaged ones .*set weights='averaged'"):
        MODELS.build(dict(type='PPMA', arch='test', init_cfg=dict(init_cfg, weights='raw'))).init_weights()


@pytest.mark.parametrize('key', ['models', 'model'])
@pytest.mark.parametrize('averaged', [True, False])
def test_files_of_the_authors_training_are_read(key, averaged, tmp_path, monkeypatch, capsys):
    """backup0.pth and best.pth hold the raw weights under `models`, also beside `model_ema`."""
    raw, average = timm.create_model('test_ppma'), timm.create_model('test_ppma')
    save_training_file(raw, path := tmp_path / 'best.pth', average if averaged else None, key)
    raw, average = raw.state_dict(), (average if averaged else raw).state_dict()
    model = timm.create_model('test_ppma')
    for choice, expected in ((None, average), ('raw', raw)):
        with pytest.warns(UserWarning, match='weights .* are read, not the') if averaged else nullcontext():
            assert load_weights(model, path, weights=choice) == ('model_ema' if averaged and not choice else key)
        assert _same(model.state_dict(), expected)
    backbone = MODELS.build(dict(type='PPMA', arch='test', init_cfg=dict(type='Pretrained', checkpoint=str(path))))
    backbone.init_weights()
    assert _same(backbone.state_dict(), raw)
    assert not averaged or f'its raw weights ({key}) are read, not the averaged ones' in backbone.load_summary
    assert _same(to_our_keys(CheckpointLoader.load_checkpoint(str(path))['state_dict']), raw)
    monkeypatch.chdir(tmp_path)
    for choice, expected in (([], average), (['--raw'], raw)):
        assert weights_command.main(['convert', 'best.pth', '--out', 'w.safetensors', *choice, '--model', 'test_ppma',
                                     '--json']) in (0, None)
        provenance = json.loads(capsys.readouterr().out)['provenance']
        assert provenance['weights'] == ('averaged' if averaged and not choice else 'raw')
        assert _same(read_file('w.safetensors').weights, expected)
        (tmp_path / 'w.safetensors').unlink()


def test_init_cfg_takes_the_backbone_of_a_published_detector(networks, asked):
    for options in ({}, dict(prefix='backbone')):
        backbone = MODELS.build(dict(type='PPMA', arch='test', init_cfg=dict(
            type='Pretrained', checkpoint='subquad://test_ppma.shapes', **options)))
        backbone.init_weights()
        expected = {key.removeprefix('backbone.'): value for key, value in networks[3].items() if 'backbone.' in key}
        assert _same(backbone.state_dict(), expected)


@pytest.mark.parametrize('init_cfg, message', [
    (dict(checkpoint='test_ppma.small', weights='best'), "weights must be 'averaged' or 'raw', got 'best'"),
    (dict(checkpoint='test_ppma.smal'), 'there are no weights test_ppma.smal; test_ppma has .*test_ppma.small'),
    (dict(checkpoint='subquad://ppma_tinny.in1k'), 'no weights of ppma_tinny.in1k are published; did you mean'),
    (dict(checkpoint='https://example.org/w.pth'), 'is an address: download the file first'),
    (dict(checkpoint='test_ppma.shapes', weights='averaged'), 'it has no averaged weights, only raw ones .state_dict')])
def test_wrong_names_and_choices_in_init_cfg_are_refused(init_cfg, message, asked):
    with pytest.raises(ValueError, match=message):
        MODELS.build(dict(type='PPMA', arch='test', init_cfg=dict(type='Pretrained', **init_cfg))).init_weights()


def test_mmengines_loader_knows_the_scheme(networks, asked):
    """`load_from` of the stock train.py and test.py, `init_detector`, and the init_cfg of a whole model."""
    detector = build_small_detector()
    checkpoint = load_as_mmengine(detector, 'subquad://test_ppma.shapes')
    assert all(torch.equal(value, networks[3][key]) for key, value in detector.state_dict().items())
    assert checkpoint['meta'] == dict(CLASSES=('a', 'b', 'c', 'd', 'e'))
    whole = build_small_detector()
    whole.init_cfg = dict(type='Pretrained', checkpoint='subquad://test_ppma.shapes')
    whole.init_weights()
    stock = init_detector(Config.fromfile(find(MASK_RCNN)), 'subquad://test_ppma.shapes', device='cpu')
    for model in (whole, stock):
        assert all(torch.equal(value, networks[3][key]) for key, value in model.state_dict().items())
    assert stock.dataset_meta['classes'] == ('a', 'b', 'c', 'd', 'e')
    with pytest.raises(WeightsError, match='to load a file of the backbone only, set model.backbone.init_cfg'):
        load_as_mmengine(build_small_detector(), 'subquad://test_ppma.small')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp('named') / 'shapes', train=4, val=2, size=64)


@pytest.fixture
def first_state(monkeypatch):
    """The state dict with which the training takes its first step, instead of training, and the config."""
    from mmengine.runner import EpochBasedTrainLoop

    from subquad.tools.common.cli import UserError
    seen = [{}, None]

    def stop(loop, *_):
        seen[0].update({key: value.clone() for key, value in loop.runner.model.state_dict().items()})
        seen[1] = loop.runner.cfg
        raise UserError('enough')
    monkeypatch.setattr(EpochBasedTrainLoop, 'run_iter', stop)
    return seen


@pytest.mark.parametrize('words', [['--cfg-options', 'load_from=test_ppma.shapes'],
                                   ['--weights', 'test_ppma.shapes']],
                         ids=' '.join)
def test_training_starts_from_a_published_detector(words, networks, asked, data, first_state, tmp_path, capsys):
    fails([MASK_RCNN, '--data', data, '--work-dir', tmp_path / 'work', *words], 'enough')
    state, config = first_state
    assert state and all(torch.equal(value, networks[3][key]) for key, value in state.items())
    said = capsys.readouterr().err
    assert 'from the weights in test_ppma.shapes' in said
    if words[0] == '--cfg-options':
        assert re.search(r'load_from: MaskRCNN: all \d+ weights are loaded from test_ppma.shapes', said)
        assert config.load_from == 'subquad://test_ppma.shapes', 'mmengine\'s own tools know the scheme only'


def test_training_starts_from_a_published_classifier(networks, asked, data, first_state, tmp_path, capsys):
    arguments = [MASK_RCNN, '--data', data, '--work-dir', tmp_path / 'work']
    fails([*arguments, '--weights', 'test_ppma.small'], 'enough')
    assert _same(first_state[0], networks[1], 'backbone.')
    said = capsys.readouterr().err
    assert 'test_ppma.small is a classifier: the backbone starts from it' in said
    assert 'test_ppma.small: its raw weights (model) are read, not the averaged ones (model_ema)' in said
    fails([*arguments, '--cfg-options', 'model.backbone.init_cfg.type=Pretrained',
           'model.backbone.init_cfg.checkpoint=subquad://test_ppma.small',
           'model.backbone.init_cfg.weights=averaged'], 'enough')
    assert _same(first_state[0], networks[2], 'backbone.')
    assert 'its averaged weights (model_ema) are read' in capsys.readouterr().err


def test_failed_downloads_end_training_before_anything_is_written(asked, data, tmp_path, monkeypatch):
    serve(monkeypatch, {})
    arguments = [MASK_RCNN, '--data', data, '--work-dir', tmp_path / 'work']
    for words in (['--weights', 'test_ppma.small'], ['--cfg-options', 'model.backbone.init_cfg.type=Pretrained',
                                                        'model.backbone.init_cfg.checkpoint=test_ppma.small']):
        fails([*arguments, *words], r'test_ppma.\w+ cannot be downloaded')
    fails([*arguments, '--weights', 'test_ppma.smal'], 'there are no weights test_ppma.smal')
    assert not (tmp_path / 'work').exists()


@pytest.mark.filterwarnings('ignore:.*its raw weights .model. are read:UserWarning')
def test_test_and_predict_take_published_detectors(asked, data, tmp_path, capsys):
    assert test.main([MASK_RCNN, 'test_ppma.shapes', '--data', str(data), '--json']) == 0
    assert 'coco/bbox_mAP' in json.loads(capsys.readouterr().out)
    image = str(next((data / 'images' / 'val').iterdir()))
    results = []
    for words in (['test_ppma.shapes'], [MASK_RCNN, 'subquad://test_ppma.shapes']):
        assert predict.main([*words, image, '--out', str(tmp_path / 'out'), '--json', '--score', '0']) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]
    fails(['test_ppma.shapes', image, '--topk', '2'], '--topk is for classifiers', predict.main)
    fails(['test_ppma.smal', image], 'there are no weights test_ppma.smal', predict.main)
    fails([MASK_RCNN, 'test_ppma.small', '--data', data], 'test_ppma.small is not a checkpoint of this MaskRCNN',
          test.main)
