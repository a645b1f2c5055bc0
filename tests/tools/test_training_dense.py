"""`subquad train` of detectors and segmenters: starting weights, losses that are not finite, options."""

import pytest
import timm
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')

from training_cases import fails

from subquad.backbones.weights import check_finite, read_checkpoint, save_state_dict, save_weights
from subquad.tools import make_dataset, train
from subquad.tools.common.cli import UserError

MASK_RCNN, UPERNET = 'mask-rcnn_test-ppma_shapes', 'upernet_test-ppma_shapes'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """8 images to train on, 4 to validate on."""
    folder = tmp_path_factory.mktemp('dense') / 'shapes'
    make_dataset.main(['shapes', str(folder), '--train', '8', '--val', '4', '--size', '64'])
    return folder


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
    """The work folder of a segmenter after one epoch."""
    folder = tmp_path_factory.mktemp('trained')
    assert train.main([UPERNET, '--data', str(data), '--work-dir', str(folder), '--epochs', '1']) == 0
    return folder


@pytest.mark.parametrize('name', [MASK_RCNN, UPERNET])
def test_training_stops_at_the_first_loss_that_is_not_finite(name, data, tmp_path):
    message = fails([name, '--data', data, '--work-dir', tmp_path, '--epochs', '2', '--cfg-options',
                      'optim_wrapper.optimizer.lr=1e30', 'param_scheduler=[]', 'optim_wrapper.clip_grad=None'],
                    r'the loss is (nan|inf|-inf) at step \d of \d+ \(epoch \d\); the batch holds .*')
    assert str(data / 'images' / 'train') in message
    assert not (tmp_path / 'last.safetensors').exists()
    for path in [*tmp_path.glob('*.safetensors'), *tmp_path.glob('*.pth')]:
        check_finite(read_checkpoint(path)[0], path.name)


def _started(monkeypatch, arguments):
    """(state dict, average or None) with which the training takes its first step."""
    from mmengine.hooks import EMAHook
    from mmengine.runner import EpochBasedTrainLoop
    seen = []

    def stop(loop, *_):
        averages = [hook.ema_model.module.state_dict() for hook in loop.runner.hooks if isinstance(hook, EMAHook)]
        seen.append((loop.runner.model.state_dict(), averages[0] if averages else None))
        raise UserError('enough')
    monkeypatch.setattr(EpochBasedTrainLoop, 'run_iter', stop)
    fails(arguments, 'enough')
    monkeypatch.undo()
    return seen[0]


def test_a_detector_starts_from_a_classifier(data, tmp_path, monkeypatch, capsys):
    """Its backbone, instead of what init_cfg says; an average starts from it, too."""
    model = timm.create_model('test_ppma', num_classes=7)
    path = tmp_path / 'w.safetensors'
    save_weights(model, path, dict(model='test_ppma', options=dict(num_classes=7), classes=list('abcdefg')))
    from subquad.tools.engine.config import find
    config = tmp_path / 'averaged.py'
    config.write_text(f"_base_ = [{str(find(MASK_RCNN))!r}]\ncustom_hooks = [dict(type='EMAHook')]\n"
                      "model = dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='none.pth')))\n")
    state, average = _started(monkeypatch, [config, '--data', data, '--work-dir', tmp_path / 'work', '--weights', path])
    expected = {key: value for key, value in model.state_dict().items() if not key.startswith('head.')}
    assert len(expected) > 50
    for key, value in expected.items():
        assert torch.equal(state[f'backbone.{key}'], value) and torch.equal(average[f'backbone.{key}'], value), key
    text = capsys.readouterr().err
    assert f'{path} is a classifier: the backbone starts from it, neck and heads with random weights; its class' in text
    assert 'the output norms start untrained' in text and "backbone's init_cfg (none.pth) is not used" in text
    assert 'training MaskRCNN on PPMA (' in text and f'from the weights in {path}' in text
    # A file that lacks one of its weights starts nothing.
    weights = model.state_dict()
    weights.pop(next(iter(weights)))
    save_state_dict(weights, path)
    fails([MASK_RCNN, '--data', data, '--work-dir', tmp_path / 'new', '--weights', path],
          'is not a checkpoint of this PPMA backbone: 1 keys missing')
    assert not (tmp_path / 'new').exists()


def test_a_segmenter_starts_from_weights_of_a_segmenter(data, trained, tmp_path, monkeypatch, capsys):
    path = trained / 'last.safetensors'
    weights = read_checkpoint(path)[0]
    arguments = [UPERNET, '--data', data, '--work-dir', tmp_path / 'work', '--weights']
    state, _ = _started(monkeypatch, [*arguments, path])
    assert state.keys() == weights.keys() and all(torch.equal(state[key], weights[key]) for key in state)
    assert 'random' not in capsys.readouterr().err
    # Of other classes: what depends on their number starts at random, and that is said.
    head = 'decode_head.conv_seg'
    fewer = {**weights, f'{head}.weight': weights[f'{head}.weight'][:3], f'{head}.bias': weights[f'{head}.bias'][:3]}
    save_state_dict(fewer, tmp_path / 'fewer.safetensors')
    state, _ = _started(monkeypatch, [*arguments, tmp_path / 'fewer.safetensors'])
    changed = {key for key in state if not torch.equal(state[key], weights[key])}
    assert changed and changed <= {f'{head}.weight', f'{head}.bias'}
    assert 'has other numbers of classes: 2 tensors of the heads start with random weights (decode_head.conv_seg' \
        in capsys.readouterr().err
    key = next(key for key in weights if key.startswith('backbone.') and weights[key].ndim == 2)
    for changes, message in (({key: torch.zeros(2, 2)}, '1 shapes differ'), ({'more': torch.zeros(1)}, 'not in the'),
                             ({key: weights[key] / 0}, 'holds NaN or infinite values in 1 of')):
        save_state_dict({**weights, **changes}, tmp_path / 'bad.safetensors')
        fails([*arguments, tmp_path / 'bad.safetensors'], message)
    assert not (tmp_path / 'work').exists()


def test_a_stock_backbone_starts_from_timms_file(data, tmp_path, monkeypatch, capsys):
    """MMSegmentation's own ResNet has timm's key names."""
    from subquad.tools.engine.config import find
    model = timm.create_model('resnet18', num_classes=5)
    save_weights(model, tmp_path / 'r18.safetensors')
    config = tmp_path / 'resnet.py'
    config.write_text(
        f"_base_ = [{str(find(UPERNET))!r}]\n"
        "model = dict(backbone=dict(_delete_=True, type='ResNet', depth=18, init_cfg=dict(type='Pretrained', "
        "checkpoint='torchvision://resnet18')), decode_head=dict(in_channels=[64, 128, 256, 512]), "
        "auxiliary_head=None)\n")
    state, _ = _started(monkeypatch, [config, '--data', data, '--work-dir', tmp_path / 'work', '--weights',
                                      tmp_path / 'r18.safetensors'])
    expected = {key: value for key, value in model.state_dict().items() if not key.startswith('fc.')}
    assert all(torch.equal(state[f'backbone.{key}'], value) for key, value in expected.items())
    assert 'its classifier (fc.bias, fc.weight) is not used' in capsys.readouterr().err
