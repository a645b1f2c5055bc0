"""Parts of training recipes: weight averages, mixup, repeated augmentation, accumulation and gradient checkpointing."""
import json
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from pairwise import slow
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from training_cases import fails, folder_arguments

from subquad.backbones.weights import read_checkpoint
from subquad.tools import train
from subquad.tools.common.cli import UserError
from subquad.tools.data.samplers import RepeatedAugmentationSampler
from subquad.tools.engine.classification.model import TimmClassifier
from subquad.tools.engine.classification.pixels import MixupPreprocessor
from subquad.tools.engine.config import find
from subquad.tools.engine.training.averaging import ModelEMAHook
from subquad.tools.engine.training.learning_rate import scale_learning_rate

PARTS = ("model = dict(drop_path_rate=0.2, data_preprocessor=dict(type='MixupPreprocessor'))\n"
         "train_dataloader = dict(drop_last=True, sampler=dict(_delete_=True, type='RepeatedAugmentationSampler'))\n"
         "custom_hooks = [dict(type='ModelEMAHook', decay=0.9, base_batch_size=2)]\n")


def _config(folder, text):
    path = folder / 'parts.py'
    path.write_text(f'_base_ = {str(find("ppma-tiny_folder"))!r}\n{text}')
    return str(path)


# ---- averages of the weights

def test_the_average_is_that_of_timm(images, tmp_path, monkeypatch, capsys):
    """Three epochs of two batches, whose gradients are accumulated: three steps of the optimizer."""
    oracles, step, before_train = [], OptimWrapper.step, ModelEMAHook.before_train

    def started(hook, runner):
        before_train(hook, runner)
        oracles.append(ModelEmaV3(hook.src_model, decay=0.9 ** 4))

    def stepped(self, **kwargs):
        step(self, **kwargs)
        oracles.append(self)
    monkeypatch.setattr(ModelEMAHook, 'before_train', started)
    monkeypatch.setattr(OptimWrapper, 'step', stepped)
    after = ModelEMAHook.after_train_iter

    def counted(hook, runner, *rest, **options):
        if isinstance(oracles[-1], OptimWrapper):
            oracles.pop()
            oracles[0].update(hook.src_model)
        after(hook, runner, *rest, **options)
    monkeypatch.setattr(ModelEMAHook, 'after_train_iter', counted)
    lerp, averages = torch._foreach_lerp_, []
    monkeypatch.setattr(torch, '_foreach_lerp_',
                        lambda *args, **options: averages.append(options) or lerp(*args, **options))
    arguments = folder_arguments(images, tmp_path / 'run', 'optim_wrapper.accumulative_counts=2', epochs=3,
                                 config=_config(tmp_path, PARTS))
    train.main(arguments)
    assert 'EMA) with decay 0.6561 = 0.9^(8 / 2)' in capsys.readouterr().err
    assert averages.count({}) == 3, 'one call a step of the optimizer; timm names the weight'
    expected = oracles[0].module.state_dict()
    checkpoint = torch.load(tmp_path / 'run' / 'epoch_3.pth', weights_only=False)
    assert checkpoint['state_dict'].keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(checkpoint['state_dict'][key], value, msg=key)
    saved = read_checkpoint(tmp_path / 'run' / 'last.safetensors')[0]
    assert all(torch.equal(saved[key], checkpoint['state_dict'][f'net.{key}']) for key in saved)
    raw = {key.removeprefix('module.'): value for key, value in checkpoint['ema_state_dict'].items()}
    changed = [key for key in expected if not torch.allclose(raw[key].float(), expected[key].float(), atol=1e-6)]
    assert any('running_mean' in key for key in changed) and any('mixer' in key for key in changed)


def test_validation_evaluates_the_average(images, tmp_path, monkeypatch):
    seen = {}

    def evaluated(self, inputs, label=None, mode='tensor'):
        if mode == 'predict':
            seen['weight'] = self.net.head.fc.weight.detach().clone()
        return forward(self, inputs, label, mode)
    forward = TimmClassifier.forward
    monkeypatch.setattr(TimmClassifier, 'forward', evaluated)
    train.main(folder_arguments(images, tmp_path / 'run', config=_config(tmp_path, PARTS)))
    saved = read_checkpoint(tmp_path / 'run' / 'last.safetensors')[0]
    assert torch.equal(seen['weight'], saved['head.fc.weight'])


def test_the_decay_of_the_published_batch():
    assert ModelEMAHook(0.99996, 512).decay_for(1024) == pytest.approx(0.99996 ** 2, abs=1e-12)
    assert ModelEMAHook(0.9995).decay_for(1024) == 0.9995


def test_shared_weights_are_averaged_once():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in 'ab'})
    model['a'].weight = model['b'].weight
    runner = SimpleNamespace(model=model, epoch=0, iter=0, max_iters=1,
                             optim_wrapper=SimpleNamespace(should_update=lambda: True),
                             cfg=Config(dict(train_dataloader=dict(batch_size=1), optim_wrapper=dict())))
    hook = ModelEMAHook(decay=0.9)
    hook.before_run(runner)
    hook.before_train(runner)
    start = model['a'].weight.item()
    torch.nn.init.constant_(model['a'].weight, start + 1)
    hook.after_train_iter(runner, 0)
    assert hook.ema_model.module['b'].weight.item() == pytest.approx(start + 0.1)


# ---- resuming

def test_a_resumed_recipe_equals_an_undisturbed_one(images, tmp_path):
    """With averages, mixup, repeated augmentation, drop path and accumulated gradients."""
    config = _config(tmp_path, PARTS)

    def arguments(name):
        return folder_arguments(images, tmp_path / name, 'default_hooks.checkpoint.max_keep_ckpts=9',
                                'optim_wrapper.accumulative_counts=2', config=config, epochs=3)
    train.main(arguments('whole'))
    train.main(arguments('resumed'))
    for path in (tmp_path / 'resumed').glob('*'):
        if path.name in ('epoch_2.pth', 'epoch_3.pth', 'last_checkpoint', 'last.safetensors', 'best.safetensors'):
            path.unlink()
    train.main([*arguments('resumed'), '--resume'])
    for name in ('epoch_3.pth', 'last.safetensors'):
        expected, found = (read_checkpoint(tmp_path / run / name)[0] for run in ('whole', 'resumed'))
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    states = [torch.load(tmp_path / run / 'epoch_3.pth', weights_only=False)['ema_state_dict']
              for run in ('whole', 'resumed')]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), 'the weights themselves'


# ---- mixup

def _mixed(seed=0, **options):
    np.random.seed(seed)
    preprocessor = MixupPreprocessor(**options)
    preprocessor.mix.num_classes = 4
    inputs = torch.arange(4.).reshape(4, 1, 1, 1).expand(4, 3, 8, 8).contiguous()
    return preprocessor({'inputs': inputs, 'label': torch.arange(4)}, training=True)


@pytest.mark.parametrize('options', [dict(cutmix_alpha=0.), dict(mixup_alpha=0.), dict(mode='elem'), dict(mode='pair'),
                                     dict(mixup_alpha=0., cutmix_alpha=0., cutmix_minmax=(0.3, 0.8))])
def test_mixed_labels_are_the_shares_of_the_images(options):
    """Image n has the value n and the class n, so the mean of a mixed image is the mean of its labels."""
    shares = set()
    for seed in range(8):
        mixed = _mixed(seed, **options)
        assert mixed['label'].shape == (4, 4) and mixed['inputs'].shape == (4, 3, 8, 8)
        torch.testing.assert_close(mixed['label'].sum(1), torch.ones(4))
        torch.testing.assert_close(mixed['inputs'].mean((1, 2, 3)), mixed['label'] @ torch.arange(4.))
        shares.add(round(mixed['label'].max().item(), 4))
    assert len(shares) > 4


def test_only_training_batches_are_mixed():
    batch = {'inputs': torch.rand(3, 3, 4, 4), 'label': torch.tensor([0, 1, 1])}
    same = MixupPreprocessor()(batch)
    assert torch.equal(same['inputs'], batch['inputs']) and torch.equal(same['label'], batch['label'])


def test_label_smoothing_acts_on_mixed_labels():
    """The loss equals timm's, which smooths the labels before it mixes them."""
    model = TimmClassifier('test_vit', num_classes=4, label_smoothing=0.1,
                           data_preprocessor=dict(type='MixupPreprocessor')).eval()
    assert model.data_preprocessor.mix.num_classes == 4
    images, labels = torch.rand(4, 3, 160, 160), torch.tensor([0, 1, 2, 2])
    np.random.seed(1)
    batch = model.data_preprocessor({'inputs': images.clone(), 'label': labels}, training=True)
    np.random.seed(1)
    mixed, targets = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=4)(images.clone(), labels)
    assert torch.equal(batch['inputs'], mixed)
    with torch.no_grad():
        found = model(**batch, mode='loss')['loss']
        expected = SoftTargetCrossEntropy()(model.net(mixed), targets)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('text, message', [
    (PARTS.replace('drop_last=True', 'drop_last=False'), 'needs an even batch_size and drop_last=True, got batch_size='
     '4 and drop_last=False'),
    (PARTS.replace("'MixupPreprocessor'", "'MixupPreprocessor', mode='batches'"), 'mode must be one of batch, pair'),
    (PARTS.replace("'MixupPreprocessor'", "'MixupPreprocessor', mixup_alpha=0, cutmix_alpha=0"), 'must be positive')])
def test_mixup_that_cannot_work_is_refused_before_training(text, message, images, tmp_path):
    fails(folder_arguments(images, tmp_path / 'run', config=_config(tmp_path, text)), message)
    assert not (tmp_path / 'run').exists()


def test_mixup_refuses_tokens():
    with pytest.raises(UserError, match=r'mixes images \(B, C, H, W\) .* got inputs \(2, 7\) and label \(2, 7\)'):
        MixupPreprocessor()({'inputs': torch.zeros(2, 7), 'label': torch.zeros(2, 7)}, training=True)


# ---- repeated augmentation

def _sampler(monkeypatch, rank, processes, size, **options):
    monkeypatch.setattr('subquad.tools.data.samplers.get_dist_info', lambda: (rank, processes))
    return RepeatedAugmentationSampler(range(size), **options)


def test_repeated_augmentation_in_one_process(monkeypatch):
    sampler = _sampler(monkeypatch, 0, 1, 600)
    assert len(sampler) == len(list(sampler)) == 512
    counts = Counter(sampler)
    assert len(counts) == 171 and sorted(counts.values()) == [2] + [3] * 170
    assert len(_sampler(monkeypatch, 0, 1, 8)) == 8, 'few images are not rounded down'


def test_repeated_augmentation_gives_repetitions_to_other_processes(monkeypatch):
    parts = [list(_sampler(monkeypatch, rank, 3, 768)) for rank in range(3)]
    assert parts[0] == parts[1] == parts[2] and len(set(parts[0])) == len(parts[0]) == 256
    parts = [list(_sampler(monkeypatch, rank, 2, 768)) for rank in range(2)]
    counts = Counter(parts[0] + parts[1])
    assert len(counts) == 256 and set(counts.values()) == {3}


def test_the_order_of_repeated_augmentation_depends_on_seed_and_epoch(monkeypatch):
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (3, 0)):
        sampler = _sampler(monkeypatch, 0, 1, 32, seed=seed)
        sampler.set_epoch(epoch)
        orders[seed, epoch] = tuple(sampler)
    assert len(set(orders.values())) == 4, 'seed 1 does not start with the second epoch of seed 0'
    assert list(_sampler(monkeypatch, 0, 1, 6, shuffle=False)) == [0, 0, 0, 1, 1, 1]


# ---- gradient checkpointing and the learning rate

def _close(found, expected, tolerance):
    scale = max(value.abs().max() for value in expected.values())
    return all((found[key] - expected[key]).abs().max() <= tolerance * scale for key in expected)


def test_gradient_checkpointing_keeps_output_and_gradients(monkeypatch):
    batch = dict(inputs=torch.rand(2, 3, 64, 64), label=torch.tensor([0, 1]))
    results, calls, checkpoint = [], [], torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, 'checkpoint',
                        lambda *a, **k: (calls.append(1), checkpoint(*a, **k))[1])
    for enabled in (False, True):
        torch.manual_seed(0)
        model = TimmClassifier('test_ppma', num_classes=4, drop_path_rate=0.5, grad_checkpointing=enabled).train()
        torch.manual_seed(1)
        loss = model(**batch, mode='loss')['loss']
        loss.backward()
        results.append((loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
        assert bool(calls) == enabled
    torch.testing.assert_close(results[0][0], results[1][0])
    assert _close(results[1][1], results[0][1], 1e-6)


def _scaled(scaling, processes=8, accumulated=1):
    config = Config(dict(train_dataloader=dict(batch_size=128), auto_scale_lr=scaling,
                         optim_wrapper=dict(accumulative_counts=accumulated)))
    optimizer = torch.optim.SGD([dict(params=[torch.zeros(1)], lr=5e-4), dict(params=[torch.zeros(1)], lr=1e-4)])
    return scale_learning_rate(optimizer, config, processes), [group['lr'] for group in optimizer.param_groups]


def test_the_learning_rate_is_scaled_with_processes_and_accumulated_batches():
    sentence, rates = _scaled(dict(base_batch_size=512, enable=True))
    assert rates == pytest.approx([1e-3, 2e-4])
    assert sentence == ('the learning rate is 0.001: 0.0005 for 512 images, scaled to 1,024 images (8 processes with '
                        '128 each)')
    sentence, rates = _scaled(dict(base_batch_size=512, enable=True), 1, 2)
    assert rates == pytest.approx([2.5e-4, 5e-5]) and 'gradients of 2 batches accumulated' in sentence
    for off in (None, dict(enable=False), dict(base_batch_size=512)):
        assert _scaled(off) == ('', [5e-4, 1e-4])
    with pytest.raises(UserError, match='base_batch_size must be an integer of at least 1, got None'):
        _scaled(dict(enable=True))


def test_training_scales_the_learning_rate_once_and_says_so(images, tmp_path, capsys):
    options = ['auto_scale_lr.enable=True', 'auto_scale_lr.base_batch_size=2', 'param_scheduler=[]']
    train.main(folder_arguments(images, tmp_path, *options, 'optim_wrapper.accumulative_counts=2'))
    error = capsys.readouterr().err
    assert error.count('the learning rate is 0.002: 0.0005 for 2 images, scaled to 8 images (1 process with 4 each, '
                       'gradients of 2 batches accumulated)') == 1
    assert 'lr 2.0e-03' in error


def _rates(work):
    """Learning rates of the steps of the last run in a folder, whose log is removed; names of logs have seconds."""
    log, = work.glob('*/vis_data/scalars.json')
    rates = [row['lr'] for row in map(json.loads, log.read_text().splitlines()) if 'loss' in row]
    shutil.rmtree(log.parents[1])
    return rates


@pytest.mark.parametrize('schedule', [
    "[dict(type='EpochCosineLR', warmup=1.5, warmup_lr=1e-6, eta_min_ratio=0.1, delay=1, convert_to_iter_based=True)]",
    *slow(
        "[dict(type='LinearLR', start_factor=0.1, by_epoch=True, end=2, convert_to_iter_based=True),"
        "dict(type='CosineAnnealingLR', by_epoch=True, begin=2, convert_to_iter_based=True)]",
        "[dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=3),"
        "dict(type='MultiStepLR', by_epoch=True, milestones=[2, 3], gamma=0.1)]")], ids=['epochs', 'cosine', 'steps'])
def test_a_resumed_training_follows_the_schedule_of_its_config(schedule, images, tmp_path, capsys):
    """As if it had had this schedule from the start, in a line that says so; with the same options nothing is said."""
    options = ['auto_scale_lr.enable=True', 'auto_scale_lr.base_batch_size=2', 'default_hooks.logger.interval=1']
    config = _config(tmp_path, f'param_scheduler = {schedule}\n')
    def arguments(name, *more, epochs=4):
        return folder_arguments(images, tmp_path / name, *options, *more, f'train_cfg.max_epochs={epochs}',
                                config=config, epochs=epochs)
    train.main(arguments('whole'))
    expected = _rates(tmp_path / 'whole')
    assert len(expected) == 8
    train.main(arguments('parts', 'default_hooks.checkpoint.max_keep_ckpts=9', epochs=3))
    assert len(_rates(tmp_path / 'parts')) == 6
    said = 'the schedule or options of the optimizer differ from those of the checkpoint: those of the config apply'
    capsys.readouterr()

    def resumed(epoch, *more):
        train.main([*arguments('parts', *more), '--resume', str(tmp_path / 'parts' / f'epoch_{epoch}.pth')])
        return capsys.readouterr().err
    text = resumed(2)
    assert f'{said} from step 4 on; the learning rate is now ' in text
    assert _rates(tmp_path / 'parts') == pytest.approx(expected[4:])
    text = resumed(3)                                            # which the run before has written again
    assert said not in text and 'scaled to 4 images' in text
    assert _rates(tmp_path / 'parts') == pytest.approx(expected[6:])
    text = resumed(3, 'optim_wrapper.optimizer.lr=0.1')
    assert said in text
    assert _rates(tmp_path / 'parts')[0] > 10 * expected[6]
    assert said in resumed(3, 'optim_wrapper.optimizer.weight_decay=0.3')
    state = torch.load(tmp_path / 'parts' / 'epoch_4.pth', weights_only=False)['optimizer']
    assert {group['weight_decay'] for group in state['param_groups']} == {0., 0.3}


def test_a_resumed_training_with_larger_batches_counts_its_steps_again(images, tmp_path, capsys):
    config = _config(tmp_path, "param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True, T_max=3, "
                     "convert_to_iter_based=True)]\ntrain_cfg = dict(max_epochs=3)\n")

    def arguments(name, epochs, size):
        return folder_arguments(images, tmp_path / name, 'default_hooks.logger.interval=1',
                                f'train_dataloader.batch_size={size}', config=config, epochs=epochs)
    train.main(arguments('whole', 3, 8))
    train.main(arguments('parts', 2, 4))
    assert len(_rates(tmp_path / 'parts')) == 4
    train.main([*arguments('parts', 3, 8), '--resume'])
    assert 'those of the config apply from step 2 on' in capsys.readouterr().err
    assert _rates(tmp_path / 'parts') == pytest.approx(_rates(tmp_path / 'whole')[2:])


def test_a_resumed_training_needs_the_seed_of_its_checkpoint(images, tmp_path):
    arguments = folder_arguments(images, tmp_path)
    train.main([*arguments, '--seed', '3'])

    def contents():
        return {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}, len(list(tmp_path.iterdir()))
    before = contents()
    fails([*arguments, '--resume'],
          'epoch_1.pth was trained with seed 3, and this run has seed 0: resume with --seed 3$')
    assert contents() == before, 'nothing has been written'
    train.main([*arguments, '--seed', '3', '--resume'])
