"""Other forms of training a classifier: a linear probe, channels_last, torch.compile, another size, other losses."""
import json

import numpy as np
import pytest
import timm
import torch
from families import FAMILIES
from pairwise import slow
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy
from training_cases import fails, folder_arguments, make_images

from subquad.backbones.weights import read_checkpoint, save_state_dict
from subquad.tools import train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.classification.model import TimmClassifier
from subquad.tools.engine.classification.prediction_metrics import AccuracyMetric, MultiLabelMetric
from subquad.tools.engine.classification.task import build_data
from subquad.tools.engine.config import load
from subquad.tools.engine.training.finite import FiniteHook

TWO_STEPS = ['train_dataloader.batch_size=8', 'train_dataloader.num_batch_per_epoch=2']


def _arguments(config, work, *options, weights=None):
    return [config, '--work-dir', str(work), '--epochs', '1', *(['--weights', str(weights)] if weights else []),
            '--cfg-options', *TWO_STEPS, *options]


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp('weights') / 'weights.safetensors'
    save_state_dict(timm.create_model('test_ppma', num_classes=10).state_dict(), path)
    return path


# ---- linear probe

def test_a_linear_probe_changes_only_the_classifier(weights, tmp_path):
    assert train.main(_arguments('test-ppma_digits-probe', tmp_path, 'model.drop_path_rate=0.5', weights=weights)) == 0
    before, after = (read_checkpoint(path)[0] for path in (weights, tmp_path / 'last.safetensors'))
    assert before.keys() == after.keys() and any('running_mean' in key for key in before)
    assert {key for key in before if not torch.equal(before[key], after[key])} == {'head.fc.weight', 'head.fc.bias'}


@pytest.mark.parametrize('decay', [0., 0.05])
def test_the_dry_run_of_a_probe_shows_what_is_frozen(decay, weights, capsys):
    arguments = ['test-ppma_digits-probe', '--dry-run', '--weights', str(weights), '--cfg-options',
                 f'optim_wrapper.optimizer.weight_decay={decay}']
    assert train.main([arguments[0], '--json', *arguments[1:]]) == 0
    rates = {each['name']: each['lr'] for each in json.loads(capsys.readouterr().out)['parameters']}
    assert {name for name, rate in rates.items() if rate is not None} == {'head.fc.weight', 'head.fc.bias'}
    if not decay:
        assert train.main(arguments) == 0
        assert 'frozen' in capsys.readouterr().out


@pytest.mark.parametrize('name', [*FAMILIES, 'test_vit', 'test_byobnet'])
def test_the_frozen_part_stays_in_eval_mode(name):
    model = TimmClassifier(name, num_classes=4, trainable='head')
    for _ in range(2):
        training = {module for module in model.net.modules() if module.training}
        assert training == set(model.net.get_classifier().modules())
        assert not any(module.training for module in model.eval().modules())
        model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert [id(parameter) for parameter in trained] == [id(p) for p in model.net.get_classifier().parameters()]


def test_a_probe_that_cannot_work_is_refused(tmp_path):
    fails(_arguments('test-ppma_digits-probe', tmp_path / 'run'), 'give the weights of the rest with --weights')
    assert not (tmp_path / 'run').exists()
    with pytest.raises(UserError, match="trainable must be 'all' or 'head', got 'fc'"):
        TimmClassifier('test_ppma', num_classes=4, trainable='fc')
    with pytest.raises(UserError, match='test_ppma has no classifier with parameters'):
        TimmClassifier('test_ppma', num_classes=0, trainable='head')


# ---- channels_last

@pytest.mark.parametrize('name', FAMILIES)
def test_channels_last_converts_weights_and_images(name):
    seen, results = [], []
    batch = dict(inputs=torch.rand(2, 3, 32, 32, generator=torch.manual_seed(1)), label=torch.tensor([0, 1]))
    for enabled in (False, True):
        torch.manual_seed(0)
        model = TimmClassifier(name, num_classes=4, channels_last=enabled).train()
        model.net.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].stride()))
        loss = model(**batch, mode='loss')['loss']
        loss.backward()
        results.append((loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
        kernels = [p for p in model.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
        assert kernels and all(p.is_contiguous(memory_format=torch.channels_last) == enabled for p in kernels)
    assert seen == [(3072, 1024, 32, 1), (3072, 1, 96, 3)]
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    for key, expected in results[0][1].items():
        torch.testing.assert_close(results[1][1][key], expected, rtol=1e-3, atol=1e-4, msg=key)


def test_channels_last_trains_and_refuses_tokens(tmp_path):
    assert train.main(_arguments('test-ppma_digits', tmp_path, 'model.channels_last=True')) == 0
    assert 'channels_last' not in read_checkpoint(tmp_path / 'last.safetensors')[1]['options']
    model = TimmClassifier('test_ppma', num_classes=4, channels_last=True)
    with pytest.raises(RuntimeError, match='rank 4 tensor to use channels_last'):
        model(torch.zeros(2, 7, dtype=torch.long))


# ---- torch.compile

def _losses(monkeypatch, work, *options):
    """The losses of three steps."""
    losses, after = [], FiniteHook.after_train_iter

    def noted(hook, runner, batch_idx, data_batch=None, outputs=None):
        losses.append(outputs['loss'].item())
        after(hook, runner, batch_idx, data_batch, outputs)
    with monkeypatch.context() as patch:
        patch.setattr(FiniteHook, 'after_train_iter', noted)
        assert train.main(_arguments('test-ppma_digits', work, *options, 'train_dataloader.num_batch_per_epoch=3',
                                     'model.drop_path_rate=0.')) == 0
    return losses


def test_a_compiled_network_has_the_same_losses_and_names(monkeypatch, tmp_path):
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward
    if 'counting' not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(counting, name='counting')
    plain = _losses(monkeypatch, tmp_path / 'plain')
    assert not graphs
    compiled = _losses(monkeypatch, tmp_path / 'compiled', 'compile.backend=counting')
    assert len(set(plain)) == 3 and compiled == pytest.approx(plain, rel=1e-5)
    assert len(graphs) == 1, 'later steps use what the first has compiled'
    for name in ('last.safetensors', 'epoch_1.pth'):
        expected, found = (read_checkpoint(tmp_path / run / name)[0] for run in ('plain', 'compiled'))
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            # The gradient of a bias before a batch norm is rounding, of which AdamW makes whole steps.
            if not key.endswith(('bias', 'running_mean')):
                torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4, msg=key)


# ---- fine-tuning at another image size

@pytest.mark.parametrize('name', ['test_ppma', *slow(*FAMILIES)[1:]])
def test_weights_are_fine_tuned_at_another_size(name, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    net, seen, forward = timm.create_model(name, num_classes=2), [], TimmClassifier.forward
    save_state_dict(net.state_dict(), tmp_path / 'weights.safetensors')

    def noted(model, inputs, *rest, **options):
        if not seen:
            assert all(torch.equal(value, net.state_dict()[key]) for key, value in model.net.state_dict().items())
        seen.append(tuple(inputs.shape[1:]))
        return forward(model, inputs, *rest, **options)
    monkeypatch.setattr(TimmClassifier, 'forward', noted)
    images, sizes = make_images(tmp_path / 'data'), {'train': 64, 'val': 96}
    options = [f'{part}_dataloader.dataset.transform.input_size=(3,{size},{size})' for part, size in sizes.items()]
    assert train.main(['ppma-tiny_finetune-folder', '--model', name, '--data', str(images), '--epochs', '1',
                       '--weights', str(tmp_path / 'weights.safetensors'), '--work-dir', str(tmp_path / 'run'),
                       '--cfg-options', 'train_dataloader.num_workers=0', 'val_dataloader.num_workers=0',
                       'train_dataloader.batch_size=4', 'test_dataloader.dataset.transform.input_size=(3,96,96)',
                       *options]) == 0
    assert seen[0] == (3, 96, 96) and (3, 64, 64) in seen, 'the first validation, and training'
    assert 'random weights' not in capsys.readouterr().err
    assert read_checkpoint(tmp_path / 'run' / 'best.safetensors')[1]['transform']['input_size'] == [3, 96, 96]


def test_a_network_of_a_fixed_size_refuses_weights_of_another(tmp_path):
    save_state_dict(timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=10).state_dict(),
                    tmp_path / 'weights.safetensors')
    fails([*_arguments('test-ppma_digits', tmp_path / 'run', 'model.img_size=32', 'model.depth=1',
                       'model.name=vit_tiny_patch16_224', weights=tmp_path / 'weights.safetensors')],
          'is not a checkpoint of this .*pos_embed')


# ---- binary cross-entropy and several labels

BCE = [dict(), dict(sum_classes=True), dict(target_threshold=0.2)]


def _loss(labels, mixed=False, smoothing=0.1, **bce):
    """The loss of TimmClassifier for fixed logits (4, 3)."""
    mixup = dict(data_preprocessor=dict(type='MixupPreprocessor')) if mixed else {}
    model = TimmClassifier('test_ppma', num_classes=3, label_smoothing=smoothing, bce=bce, **mixup)
    model.net = torch.nn.Identity()
    assert not model.state_dict()
    np.random.seed(3)
    batch = model.data_preprocessor(dict(inputs=torch.zeros(4, 3, 8, 8), label=labels), training=True)
    return model(LOGITS, batch['label'], mode='loss')['loss']


LOGITS = torch.linspace(-2, 3, 12).reshape(4, 3)


@pytest.mark.parametrize('options', BCE)
@pytest.mark.parametrize('labels', [torch.tensor([0, 2, 1, 1]),
                                    torch.tensor([[1., 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 1]])])
def test_the_binary_cross_entropy_is_that_of_timm(labels, options):
    """Alone, and of mixed labels, which timm smooths before it mixes them."""
    several = labels.ndim == 2
    expected = BinaryCrossEntropy(0.1, smooth_dense=True, **options)(LOGITS, labels)
    torch.testing.assert_close(_loss(labels, **options), expected)
    mixup = Mixup(0.8, 1., label_smoothing=0.1, num_classes=3, multi_label=several)
    np.random.seed(3)
    _, mixed = mixup(torch.zeros(4, 3, 8, 8), labels)
    expected = BinaryCrossEntropy(0.1, **options)(LOGITS, mixed)
    torch.testing.assert_close(_loss(labels, mixed=True, **options), expected)


def test_average_precision_is_that_of_scikit_learn():
    from sklearn.metrics import average_precision_score
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, (40, 5)) / 9, rng.random((40, 5)) < 0.3           # many equal scores
    labels[:, 4] = False                                                                   # no image has class 4
    metric = MultiLabelMetric()
    metric.process(None, [dict(scores=torch.tensor(s), label=torch.tensor(n).float()) for s, n in zip(scores, labels)])
    metric.process(None, [dict(scores=torch.ones(5, dtype=torch.double), label=torch.full((5,), -100.))])
    expected = np.mean([average_precision_score(labels[:, n], scores[:, n]) for n in range(4)])
    assert metric.evaluate(41)['multi_label/mAP'] == pytest.approx(100 * expected, abs=1e-9)


def test_losses_and_metrics_that_do_not_fit_the_labels_are_errors():
    model = TimmClassifier('test_ppma', num_classes=3)
    model.net = torch.nn.Identity()
    with pytest.raises(UserError, match=r'which needs model.bce=dict\(\)'):
        model(LOGITS, torch.eye(3)[[0, 1, 2, 2]], mode='loss')
    with pytest.raises(UserError, match='need the metric .*MultiLabelMetric'):
        AccuracyMetric().process(None, model(LOGITS, torch.ones(4, 3), mode='predict'))
    fails(['test-ppma_digits', '--cfg-options', 'model.bce.sum_class=True'], "model: .*'sum_class'")


# ---- the config in the folder of a run

def test_the_config_in_the_folder_of_a_run_trains_the_same(tmp_path):
    """It has no variables whose values differ from those that were used; a change of one of its entries acts."""
    images = make_images(tmp_path / 'data')
    arguments = folder_arguments(images, tmp_path / 'run', 'optim_wrapper.optimizer.lr=3e-4', epochs=2)
    assert train.main([*arguments, '--seed', '3']) == 0
    written = tmp_path / 'run' / 'ppma-tiny_folder.py'
    config = load(str(written))
    assert not {'epochs', 'size', 'data_root', 'warmup'} & set(config)
    assert all(type(each.get('begin', 0)) is int for each in config.param_scheduler)
    assert train.main([str(written), '--work-dir', str(tmp_path / 'again')]) == 0
    expected, found = (read_checkpoint(tmp_path / run / 'last.safetensors')[0] for run in ('run', 'again'))
    assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in found)
    written.write_text(written.read_text().replace('max_epochs=2', 'max_epochs=1'))
    assert train.main([str(written), '--work-dir', str(tmp_path / 'shorter')]) == 0
    assert (tmp_path / 'shorter' / 'epoch_1.pth').exists() and not (tmp_path / 'shorter' / 'epoch_2.pth').exists()


def test_workers_of_validation_persist(tmp_path):
    """Those of training do not: no checkpoint holds their random states. They have other seeds in each epoch."""
    config = load('ppma-tiny_folder')
    del config.train_dataloader['worker_init_fn']
    for part in ('train', 'val'):
        config[f'{part}_dataloader'].dataset.root = str(make_images(tmp_path / part) / part)
    loaders = build_data(config, ('train', 'val'))[0]
    assert loaders['train_dataloader']['worker_init_fn'] == dict(type='keep_torch_worker_seeds')
    assert loaders['val_dataloader']['persistent_workers'] and 'persistent_workers' not in loaders['train_dataloader']
    config.val_dataloader.num_workers = 0
    assert 'persistent_workers' not in build_data(config, ('val',))[0]['val_dataloader']
