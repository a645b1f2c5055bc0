"""Training from the weights of a file: `load_from`, `subquad train --weights`, `--resume`, and what is said of it."""
import pytest
import timm
import torch
from mmengine.config import Config
from training_cases import fails, folder_arguments, make_images

from subquad.backbones.weights import (
    checkpoint_filter_fn,
    read_checkpoint,
    read_metadata,
    save_state_dict,
    save_weights,
)
from subquad.tools import train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import load

FINETUNE = 'ppma-tiny_finetune-folder'


@pytest.fixture(scope='module')
def ready(tmp_path_factory):
    """A file of subquad train for ten digits: (path, weights)."""
    torch.manual_seed(7)
    model = timm.create_model('test_ppma', num_classes=10)
    path = tmp_path_factory.mktemp('ready') / 'last.safetensors'
    save_weights(model, path, dict(model='test_ppma', options=dict(num_classes=10, drop_path_rate=0.05),
                                   classes=[*map(str, range(10))]))
    return path, model.state_dict()


def _started(monkeypatch, arguments):
    """The weights with which the training of these arguments takes its first step."""
    from mmengine.runner import EpochBasedTrainLoop
    seen = []

    def stop(loop, *_):
        seen.append({key: value.clone() for key, value in loop.runner.model.net.state_dict().items()})
        raise UserError('enough')
    monkeypatch.setattr(EpochBasedTrainLoop, 'run_iter', stop)
    fails(arguments, 'enough')
    return seen[0]


@pytest.mark.parametrize('name, form, way', [
    ('test_ppma', 'safetensors', 'load_from'), ('test_ppma', 'safetensors', '--weights'),
    ('test_ppma', 'pth of a Runner', '--weights'),
    ('resnet18', 'safetensors', '--weights'), ('subquad_mobilevitv2_050', 'authors', '--weights'),
    ('subquad_mobilevitv2_050', 'pth', 'load_from')])
def test_a_classifier_starts_from_every_weight_of_a_file(name, form, way, images, tmp_path, monkeypatch, capsys):
    model = timm.create_model(name, num_classes=2)
    weights = {key: value + 0.25 if value.is_floating_point() else value + 3
               for key, value in model.state_dict().items()}
    path = tmp_path / ('w.safetensors' if form == 'safetensors' else 'w.pth')
    if form == 'safetensors':
        save_state_dict(weights, path)
    elif form == 'pth of a Runner':
        torch.save({'state_dict': {f'net.{key}': value for key, value in weights.items()}, 'meta': {}}, path)
    elif form == 'authors':                        # the same network with its authors' names, from timm's
        other = timm.create_model('mobilevitv2_050', num_classes=2)
        weights = {key: value + 0.25 if value.is_floating_point() else value
                   for key, value in other.state_dict().items()}
        torch.save(weights, path)
        weights = checkpoint_filter_fn(weights, model)
    else:
        torch.save(weights, path)
    arguments = folder_arguments(images, tmp_path / 'work')
    arguments[arguments.index('test_ppma')] = name
    if name != 'test_ppma':
        arguments = [word.replace('(3,32,32)', '(3,64,64)') for word in arguments]
    arguments += [f'load_from={path}'] if way == 'load_from' else ['--weights', str(path)]
    started = _started(monkeypatch, arguments)
    assert started.keys() == weights.keys()
    assert all(torch.equal(started[key], weights[key]) for key in started)
    error = capsys.readouterr().err
    assert 'random' not in error and f'from the weights in {path}' in error


def test_classifier_for_other_classes_starts_at_random(ready, images, tmp_path, monkeypatch, capsys):
    path, weights = ready
    for way in (['--weights', path], ['--cfg-options', f'load_from={path}']):
        arguments = folder_arguments(images, tmp_path / 'work')
        if way[0] == '--weights':
            arguments += way
        else:
            arguments += way[1:]
        started = _started(monkeypatch, [*arguments])
        changed = [key for key in started if started[key].shape != weights[key].shape
                   or not torch.equal(started[key], weights[key])]
        assert sorted(changed) == ['head.fc.bias', 'head.fc.weight']
        assert f'{path} has 10 classes, the data 2: the classifier (head.fc.weight, head.fc.bias) starts with random' \
            in capsys.readouterr().err
    # As many classes, and others.
    named = tmp_path / 'named.safetensors'
    save_weights(timm.create_model('test_ppma', num_classes=2), named,
                 dict(model='test_ppma', options=dict(num_classes=2), classes=['cat', 'dog']))
    started = _started(monkeypatch, [*folder_arguments(images, tmp_path / 'work'), '--weights', named])
    assert not torch.equal(started['head.fc.weight'], read_checkpoint(named)[0]['head.fc.weight'])
    told = 'was trained on the classes cat, dog, but the data has dark, light: the classifier'
    assert told in capsys.readouterr().err
    headless = tmp_path / 'headless.safetensors'
    save_state_dict({key: value for key, value in weights.items() if not key.startswith('head.fc')}, headless)
    _started(monkeypatch, [*folder_arguments(images, tmp_path / 'work'), '--weights', headless])
    assert 'has no classifier: the classifier' in capsys.readouterr().err


def test_mismatched_weights_are_refused(ready, images, tmp_path):
    path, weights = ready
    work = tmp_path / 'work'
    arguments = [*folder_arguments(images, work)]
    bad = tmp_path / 'bad.safetensors'

    def write(changes, metadata=None):
        save_state_dict({**weights, **changes}, bad, metadata)
        return bad
    key = next(name for name in weights if name.startswith('stages.') and weights[name].ndim == 2)
    for changes, metadata, message in (
            ({'extra': torch.zeros(1)}, None, r'1 keys not in the model \(extra\)'),
            ({key: torch.zeros(3, 3)}, None, '1 shapes differ'),
            ({key: torch.full_like(weights[key], torch.nan)}, None, 'holds NaN or infinite values'),
            ({}, dict(model='ppma_tiny', options={}), 'was trained as ppma_tiny, but the config builds test_ppma'),
            ({}, dict(model='test_ppma', options=dict(checkpoint_path='/x')),
             "unexpected keyword argument 'checkpoint_path'"),
            ({}, dict(model='test_ppma', options=3), 'options in the metadata must be an object, got 3')):
        fails([*arguments, '--weights', write(changes, metadata)], message)
        assert not work.exists()
    fails([*arguments, '--weights', tmp_path / 'none.pth'], 'no weight file')
    short = {k: v for k, v in weights.items() if k != key}
    save_state_dict(short, bad)
    fails([*arguments, f'load_from={bad}'], r'is not a checkpoint of this test_ppma: 1 keys missing')
    fails([*arguments, '--weights', path, '--resume', path], '--weights and --resume CHECKPOINT exclude each other')
    assert not work.exists()


def _runners_file(path, classes, transform, **options):
    """A .pth file of `subquad train` with these entries of its config, and the weights in it."""
    model = timm.create_model('test_ppma', num_classes=2, **options)
    model.head.fc.weight.data += 1
    config = Config(dict(model=dict(type='TimmClassifier', name='test_ppma', num_classes=2, **options),
                         test_dataloader=dict(dataset=dict(transform=transform))))
    torch.save({'state_dict': {f'net.{key}': value for key, value in model.state_dict().items()},
                'meta': dict(cfg=config.pretty_text, dataset_meta=dict(classes=classes))}, path)
    return model.state_dict()


def test_a_checkpoint_of_other_classes_and_another_transform(images, tmp_path, monkeypatch, capsys):
    """A .pth file is compared with the data and the config as a .safetensors file is."""
    path = tmp_path / 'w.pth'
    weights = _runners_file(path, ['cat', 'dog'], dict(input_size=(3, 48, 48), mean=(0., 0., 0.)),
                            mask_mode='multiplicative')
    from subquad.tools.engine.classification import task as module
    seen, load_weights = [], module.load_starting_weights

    def load(net, *arguments):
        seen.append(net.stages[0].blocks[0].mixer.mask_mode)
        load_weights(net, *arguments)
    monkeypatch.setattr(module, 'load_starting_weights', load)
    started = _started(monkeypatch, [*folder_arguments(images, tmp_path / 'work'), '--weights', path])
    assert seen == ['multiplicative']
    assert [key for key in started if not torch.equal(started[key], weights[key])] == ['head.fc.weight']
    text = capsys.readouterr().err
    assert f'{path} was trained on the classes cat, dog, but the data has dark, light: the classifier (head.fc' in text
    assert (f'{path} is for images with input_size=(3, 48, 48), mean=(0.0, 0.0, 0.0); this training has '
            'input_size=(3, 32, 32), mean=(0.485, 0.456, 0.406)\n') in text
    assert not list((tmp_path / 'work').glob('*/*.log'))


def test_one_command_starts_from_weights_and_resumes(ready, images, tmp_path, capsys):
    for epochs, said in ((1, f'nothing to resume in {tmp_path}: the training starts from the weights in {ready[0]}'),
                         (2, f'{tmp_path}/epoch_1.pth is resumed: the weights in {ready[0]} are not read')):
        train.main([*folder_arguments(images, tmp_path, epochs=epochs), '--weights', str(ready[0]), '--resume'])
        text = capsys.readouterr().err
        assert said in text and (' has 10 classes' in text) == (epochs == 1)
        assert not [path for path in tmp_path.glob('*/*.log') if not path.stat().st_size]
    assert 'resuming after epoch 1' in text


def test_resuming_takes_the_options_that_came_with_the_weights(images, tmp_path, capsys):
    _runners_file(tmp_path / 'w.pth', ['dark', 'light'], dict(input_size=(3, 32, 32)), mask_mode='multiplicative')
    arguments = folder_arguments(images, tmp_path / 'run', epochs=2)
    train.main([*folder_arguments(images, tmp_path / 'run'), '--weights', str(tmp_path / 'w.pth')])
    train.main([*arguments, '--resume'])
    assert read_metadata(tmp_path / 'run' / 'last.safetensors')['options']['mask_mode'] == 'multiplicative'
    assert 'mask_mode' not in capsys.readouterr().err


def test_options_of_the_network_come_with_the_weights(images, tmp_path, monkeypatch, capsys):
    path = tmp_path / 'w.safetensors'
    save_weights(timm.create_model('test_ppma', num_classes=10, mask_mode='multiplicative'), path,
                 dict(model='test_ppma', options=dict(num_classes=10, mask_mode='multiplicative', drop_path_rate=0.3),
                      classes=[*map(str, range(10))]))
    from subquad.tools.engine.classification import task as module
    seen = []
    monkeypatch.setattr(module, 'load_starting_weights',
                        lambda net, *_: seen.append(net.stages[0].blocks[0].mixer.mask_mode))
    _started(monkeypatch, [*folder_arguments(images, tmp_path / 'work'), '--weights', path])
    _started(monkeypatch, [*folder_arguments(images, tmp_path / 'work', 'model.mask_mode=additive'), '--weights', path])
    assert seen == ['multiplicative', 'additive']
    assert "was trained with mask_mode='multiplicative'; the config has mask_mode='additive'" in capsys.readouterr().err


def test_resuming_refuses_another_network(images, tmp_path):
    train.main(folder_arguments(images, tmp_path))
    fails([*folder_arguments(images, tmp_path, 'model.paths=none', epochs=2), '--resume'],
           'is not a checkpoint of this PPMA: ')


def test_resuming_refuses_other_classes(images, tmp_path):
    train.main(folder_arguments(images, tmp_path / 'run'))
    other = make_images(tmp_path / 'other')
    for part in ('train', 'val'):
        (other / part / 'light').rename(other / part / 'bright')
    fails([*folder_arguments(other, tmp_path / 'run', epochs=2), '--resume'],
          'epoch_1.pth was trained on the classes dark, light, but the data has bright, dark: resume with the data of')


def test_finetuning_on_a_folder(ready, images, tmp_path, capsys):
    config = load(FINETUNE)
    assert config.train_cfg.max_epochs <= 30 and config.optim_wrapper.optimizer.layer_decay < 1
    assert config.optim_wrapper.optimizer.lr < load('ppma-tiny_folder').optim_wrapper.optimizer.lr
    assert train.main([*folder_arguments(images, tmp_path, config=FINETUNE, epochs=2), '--weights', str(ready[0])]) == 0
    lines = capsys.readouterr().err.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith('training '))
    assert lines[first].startswith('training test_ppma (0.') and f'from the weights in {ready[0]}' in lines[first]
    assert lines[first + 1].startswith('on 8 images of 2 classes, 8 to validate on; on cpu; 2 epochs of 2 steps; '
                                       f'everything is written to {tmp_path}')
    validations = [n for n, line in enumerate(lines) if line.startswith('validation  ')]
    assert len(validations) == 3 and validations[0] == first + 2, 'the first is of the weights as they come'
    # Resumed, it has been evaluated already.
    train.main([*folder_arguments(images, tmp_path, config=FINETUNE, epochs=3), '--resume'])
    text = capsys.readouterr().err
    assert text.count('validation  ') == 1 and 'resuming after epoch 2' in text and 'epoch_2.pth' in text
