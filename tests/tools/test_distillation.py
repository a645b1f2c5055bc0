"""Distillation: values of the losses, the teacher's preprocessing, and what is refused."""
from copy import deepcopy

import pytest
import timm
import torch
import torch.nn.functional as F
from training_cases import fails

from subquad.backbones.weights import read_checkpoint, save_state_dict
from subquad.tools import test as evaluation
from subquad.tools import train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.classification import distillation
from subquad.tools.engine.classification.distillation import Distillation
from subquad.tools.engine.classification.model import TimmClassifier

CONFIG = 'test-ppma_digits-distilled'
DIGITS = [str(n) for n in range(10)]
NORM = dict(mean=(0.3, 0.3, 0.3), std=(0.4, 0.4, 0.4))


def _teacher(folder, name='test_mobilevitv2', classes=DIGITS, **norm):
    """Write the weights of a network as `subquad train` does."""
    torch.manual_seed(1)
    net = timm.create_model(name, num_classes=len(classes))
    path = folder / f'{name}-{len(classes)}.safetensors'
    transform = dict(input_size=(3, 32, 32), crop_pct=1.0, interpolation='bilinear', **(norm or NORM))
    save_state_dict(net.state_dict(), path, dict(model=name, options=dict(num_classes=len(classes)), classes=classes,
                                                 transform=transform))
    return str(path), net.eval()


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    return _teacher(tmp_path_factory.mktemp('teacher'))


def _student(**options):
    torch.manual_seed(2)
    return TimmClassifier('test_ppma', num_classes=10, label_smoothing=0.1, distillation=dict(
        type='Distillation', **options)).train()


def _batch():
    torch.manual_seed(3)
    return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def _arguments(weights, work, *options):
    return [CONFIG, '--work-dir', str(work), '--epochs', '1', '--cfg-options', 'train_dataloader.batch_size=8',
            'train_dataloader.num_batch_per_epoch=2', f'model.distillation.teacher.weights={weights}', *options]


@pytest.mark.parametrize('temperature', [1., 3.])
@pytest.mark.parametrize('alpha', [0.3, 1.])
def test_the_soft_loss_is_the_divergence_times_the_squared_temperature(alpha, temperature, teacher):
    model, (images, labels) = _student(teacher=dict(weights=teacher[0]), alpha=alpha, temperature=temperature), _batch()
    with torch.no_grad():
        p = (teacher[1](images).double() / temperature).softmax(-1)
        logits = model.net(images).double()
        q = (logits / temperature).softmax(-1)
        found = model(images, labels, mode='loss')
    expected = temperature ** 2 * (p * (p.log() - q.log())).sum() / 8
    assert expected > 1e-3
    torch.testing.assert_close(found['loss_distillation'].double(), alpha * expected, rtol=1e-4, atol=1e-6)
    label = F.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(found['loss_label'].double(), (1 - alpha) * label, rtol=1e-5, atol=1e-7)


def test_the_hard_loss_is_the_cross_entropy_with_the_teachers_class(teacher):
    model, (images, labels) = _student(teacher=dict(weights=teacher[0]), kind='hard'), _batch()
    with torch.no_grad():
        chosen = teacher[1](images).argmax(-1)
        logs = model.net(images).double().log_softmax(-1)
        found = model(images, labels, mode='loss')
    assert (chosen != labels).any()
    expected = -logs[range(8), chosen].mean() / 2
    torch.testing.assert_close(found['loss_distillation'].double(), expected, rtol=1e-5, atol=1e-7)


def test_the_teacher_gets_images_of_its_own_mean_and_deviation(tmp_path):
    norm = dict(mean=(0.1, 0.2, 0.6), std=(0.5, 0.2, 1.))
    path, net = _teacher(tmp_path, **norm)
    pixels = torch.rand(4, 3, 32, 32)

    def normalized(mean, std):
        return (pixels - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    with torch.no_grad():
        expected = net(normalized(**norm))
    batch = normalized(**NORM)
    for options, other in ((dict(weights=path), False), (dict(weights=path, **NORM), True)):
        found = Distillation(options)
        found.prepare(10, DIGITS, dict(input_size=(3, 32, 32), **NORM))
        assert torch.allclose(found(batch), expected, rtol=1e-4, atol=1e-5) != other
        assert (found.renormalization is None) == other


def test_the_teacher_is_frozen_and_no_part_of_the_model(teacher):
    model = _student(teacher=dict(weights=teacher[0]))
    plain = TimmClassifier('test_ppma', num_classes=10)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    assert not any(module.training for module in model.distillation.net.modules())
    assert not any(parameter.requires_grad for parameter in model.distillation.net.parameters())
    before = {key: value.clone() for key, value in model.distillation.net.state_dict().items()}
    sum(model(*_batch(), mode='loss').values()).backward()
    assert all(torch.equal(before[key], value) for key, value in model.distillation.net.state_dict().items())
    assert deepcopy(model).distillation.net is model.distillation.net, 'an average of the weights shares the teacher'


def test_pretrained_weights_of_timm(monkeypatch):
    """timm is asked for its weights; its download is replaced here."""
    asked = []

    def create(name, pretrained):
        asked.append((name, pretrained))
        if len(asked) > 1:
            raise OSError('the hub cannot be reached')
        return timm.models.create_model(name, num_classes=10)
    monkeypatch.setattr(distillation.timm, 'create_model', create)
    found = Distillation(dict(name='resnet10t', pretrained=True))
    assert asked == [('resnet10t', True)] and found(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert found.mean == timm.data.IMAGENET_DEFAULT_MEAN
    with pytest.raises(UserError, match='teacher resnet10t: its pretrained weights cannot be loaded: .*the hub cannot'):
        Distillation(dict(name='resnet10t', pretrained=True))
    with pytest.raises(UserError, match="unknown model 'resnet10x'"):
        Distillation(dict(name='resnet10x', pretrained=True))


@pytest.mark.parametrize('options, message', [
    (dict(kind='medium'), "kind must be 'soft' or 'hard', got 'medium'"),
    (dict(alpha=0), 'alpha must be above 0 and at most 1, got 0'),
    (dict(alpha=1.5), 'alpha must be above 0 and at most 1, got 1.5'),
    (dict(temperature=0.), 'temperature must be positive, got 0.0'),
    (dict(teacher=dict(name='test_ppma')), 'teacher needs trained weights'),
    (dict(teacher=dict(pretrained=True)), 'pretrained=True needs the name'),
    (dict(teacher=dict(weights='x.pth', pretrained=True)), 'either weights=FILE_OR_NAME or')])
def test_impossible_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Distillation(**{'teacher': dict(weights='x.pth'), **options})


def test_a_teacher_that_does_not_fit_is_refused_before_training(tmp_path):
    work = tmp_path / 'run'
    path, _ = _teacher(tmp_path, classes=DIGITS[:7])
    fails(_arguments(path, work), 'the teacher test_mobilevitv2 was trained on the classes 0, 1, 2, .*, but the data')
    path, _ = _teacher(tmp_path, classes=DIGITS[::-1])
    fails(_arguments(path, work), 'was trained on the classes 9, 8, 7, .*, but the data has 0, 1, 2')
    fails(_arguments(tmp_path / 'absent.safetensors', work), 'absent.safetensors')
    torch.save(timm.create_model('test_ppma', num_classes=7).state_dict(), tmp_path / 'ppma.pth')
    fails(_arguments(tmp_path / 'ppma.pth', work, 'model.distillation.teacher.name=test_ppma'),
          r'returns logits \(1, 7\), but \(B, 10\) are needed for the 10 classes')
    assert not work.exists()


def test_a_teacher_for_other_images_and_tokens_are_refused(teacher):
    found = Distillation(dict(weights=teacher[0]))
    found.net = torch.nn.Linear(5, 10)
    with pytest.raises(UserError, match=r'the teacher test_mobilevitv2 does not accept a batch \(1, 3, 32, 32\): '):
        found.prepare(10, DIGITS, dict(input_size=(3, 32, 32)))
    with pytest.raises(UserError, match='distillation is for images'):
        Distillation(dict(weights=teacher[0])).prepare(10, DIGITS, None)


def test_a_distilled_run_writes_files_without_the_teacher(teacher, tmp_path, capsys):
    assert train.main(_arguments(teacher[0], tmp_path / 'run')) == 0
    weights, metadata, _ = read_checkpoint(tmp_path / 'run' / 'last.safetensors')
    assert weights.keys() == timm.create_model('test_ppma', num_classes=10).state_dict().keys()
    assert 'distillation' not in metadata['options']
    state = read_checkpoint(tmp_path / 'run' / 'epoch_1.pth')[0]
    assert len(state) == len(weights)
    # The teacher's file is not needed to test.
    options = ['--cfg-options', 'model.distillation.teacher.weights=absent.safetensors',
               'test_dataloader.num_batch_per_epoch=1', 'test_dataloader.batch_size=8']
    assert evaluation.main([CONFIG, str(tmp_path / 'run' / 'last.safetensors'), *options]) == 0
    assert 'accuracy/top1' in capsys.readouterr().out
