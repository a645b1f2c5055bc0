"""Which files in a work folder are of its last run, and what a checkpoint of another training is refused for."""
import json
import shutil

import pytest
import torch
from mmengine.runner import EpochBasedTrainLoop
from pairwise import slow_cases
from training_cases import fails, folder_arguments

from subquad.backbones.weights import read_metadata
from subquad.tools import train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.checkpoints.runner_checkpoints import checkpoint_to_resume, find_checkpoints, set_aside
from subquad.tools.engine.classification.prediction_metrics import AccuracyMetric
from subquad.tools.engine.config import find

LINEAR = "dict(type='LinearLR', start_factor=0.1, by_epoch=True, end=3)"
COSINE = "dict(type='CosineAnnealingLR', by_epoch=True, T_max=4)"


def _names(folder):
    return [path.name for path in find_checkpoints(folder)]


def _write(folder, *names):
    for name in names:
        (folder / name).write_text(f'{name} {len(list(folder.iterdir()))}')


def test_a_run_has_only_its_own_checkpoints(tmp_path, capsys):
    _write(tmp_path, 'epoch_1.pth', 'epoch_2.pth', 'best.safetensors', 'own.pth', 'last_checkpoint', 'last_validation')
    set_aside(tmp_path, tmp_path / 'epoch_2.pth', 'a')                   # resumed: all are of this run
    assert _names(tmp_path) == ['epoch_2.pth', 'epoch_1.pth'] and not (tmp_path / 'a').exists()
    assert capsys.readouterr().err == ''
    set_aside(tmp_path, None, 'a')
    assert f'an earlier run (epoch_1.pth, epoch_2.pth) are now in {tmp_path}/a' in capsys.readouterr().err
    assert _names(tmp_path) == [] and [path.name for path in tmp_path.iterdir() if path.is_file()] == ['own.pth']
    assert {path.name for path in (tmp_path / 'a').iterdir()} == {
        'epoch_1.pth', 'epoch_2.pth', 'best.safetensors', 'last_checkpoint', 'last_validation'}
    _write(tmp_path, 'epoch_1.pth')
    set_aside(tmp_path, tmp_path / 'a' / 'epoch_2.pth', 'b')             # which continues the first run
    assert _names(tmp_path) == [] and _names(tmp_path / 'b') == ['epoch_1.pth']


def test_going_back_in_a_run_leaves_the_later_checkpoints_out(tmp_path, capsys):
    _write(tmp_path, 'epoch_1.pth', 'epoch_2.pth', 'interrupted_epoch_2_step_1.pth', 'epoch_3.pth', 'best.safetensors')
    set_aside(tmp_path, tmp_path / 'epoch_2.pth', 'a')
    assert _names(tmp_path) == ['epoch_2.pth', 'epoch_1.pth'] and (tmp_path / 'best.safetensors').exists()
    assert 'an earlier run (epoch_3.pth, interrupted_epoch_2_step_1.pth)' in capsys.readouterr().err


def test_the_best_weights_of_an_earlier_run_are_not_those_of_a_resumed_one(images, tmp_path, monkeypatch):
    accuracy = [91.]
    monkeypatch.setattr(AccuracyMetric, 'compute_metrics', lambda self, results: dict(top1=accuracy[0]))
    train.main(folder_arguments(images, tmp_path))
    assert read_metadata(tmp_path / 'best.safetensors')['accuracy/top1'] == 91
    accuracy[0] = 55.
    arguments = folder_arguments(images, tmp_path, epochs=2)
    train.main([*folder_arguments(images, tmp_path, 'train_cfg.val_interval=9', epochs=1)])
    assert read_metadata(tmp_path / 'best.safetensors')['accuracy/top1'] == 55, 'the last epoch is validated'
    accuracy[0] = 40.
    train.main([*arguments, '--resume'])
    assert read_metadata(tmp_path / 'best.safetensors')['accuracy/top1'] == 55, 'its own'
    (tmp_path / 'epoch_1.pth').rename(tmp_path.parent / 'epoch_1.pth')
    train.main([*arguments, '--resume', str(tmp_path.parent / 'epoch_1.pth')])
    assert read_metadata(tmp_path / 'best.safetensors')['accuracy/top1'] == 40, 'the folder had those of another run'


@pytest.mark.parametrize('options', [['optim_wrapper.optimizer.weight_decay=0'], ['optim_wrapper.optimizer.opt=sgd'],
                                     ['optim_wrapper.optimizer.layer_decay=0.5']])
def test_another_optimizer_is_one_error(options, images, tmp_path):
    train.main(folder_arguments(images, tmp_path))
    fails([*folder_arguments(images, tmp_path, *options, epochs=2), '--resume'],
          'epoch_1.pth has the state of another optimizer or of other groups of parameters: keep its optimizer')


def test_adam_after_adamw_is_adam(images, tmp_path, capsys):
    train.main(folder_arguments(images, tmp_path))
    train.main([*folder_arguments(images, tmp_path, 'optim_wrapper.optimizer.opt=adam', epochs=2), '--resume'])
    assert 'the schedule or options of the optimizer differ' in capsys.readouterr().err
    groups = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['optimizer']['param_groups']
    assert {group['decoupled_weight_decay'] for group in groups} == {False}


@pytest.mark.parametrize('before, after', [
    ([LINEAR, COSINE], [LINEAR]), *slow_cases(([COSINE], [COSINE, LINEAR])),
    (["dict(type='CosineRestartLR', periods=[2, 2], restart_weights=[1, 1], eta_min=0., by_epoch=True)"],
     ["dict(type='CosineRestartLR', periods=[3, 1], restart_weights=[1, 0.5], eta_min=0., by_epoch=True)"])])
def test_other_schedulers_apply_from_the_start(before, after, images, tmp_path, capsys):
    """Removed, added or with other options: the rates are those of a run that had them from the start."""
    def arguments(name, schedulers, epochs):
        path = tmp_path / f'{name}_{len(schedulers)}.py'
        path.write_text(f"_base_ = {str(find('ppma-tiny_folder'))!r}\nparam_scheduler = [{', '.join(schedulers)}]\n"
                        f'train_cfg = dict(max_epochs={epochs})\n')
        return folder_arguments(images, tmp_path / name, 'default_hooks.logger.interval=1', config=str(path),
                                epochs=epochs)
    train.main(arguments('whole', after, 4))
    train.main(arguments('parts', before, 2))
    shutil.rmtree(next((tmp_path / 'parts').glob('2*')))
    capsys.readouterr()
    train.main([*arguments('parts', after, 4), '--resume'])
    assert 'the schedule or options of the optimizer differ' in capsys.readouterr().err
    rates = []
    for name in ('whole', 'parts'):
        log, = (tmp_path / name).glob('*/vis_data/scalars.json')
        rates.append([row['lr'] for row in map(json.loads, log.read_text().splitlines()) if 'loss' in row])
    assert len(rates[0]) == 8 and rates[1] == pytest.approx(rates[0][4:])


def test_every_changed_setting_of_training_is_named(images, tmp_path, monkeypatch, capsys):
    config = tmp_path / 'config.py'
    config.write_text(f"_base_ = {str(find('ppma-tiny_folder'))!r}\n"
                      "custom_hooks = [dict(type='ModelEMAHook', decay=0.9)]\nparam_scheduler = []\n")

    def arguments(*options, epochs=2):
        return folder_arguments(images, tmp_path / 'run', *options, config=str(config), epochs=epochs)
    train.main(arguments(epochs=1))
    capsys.readouterr()

    def stop(*_):
        raise UserError('enough')
    monkeypatch.setattr(EpochBasedTrainLoop, 'run_iter', stop)
    fails([*arguments('custom_hooks.0.decay=0.8', 'model.drop_path_rate=0.2', 'model.label_smoothing=0.3',
                      'train_dataloader.dataset.transform.input_size=48', 'train_dataloader.num_workers=1',
                      'optim_wrapper.accumulative_counts=2', 'val_dataloader.batch_size=3'), '--resume', '--amp'],
          'enough')
    line, = [line for line in capsys.readouterr().err.splitlines() if 'of the checkpoint' in line]
    assert 'apply from step 2 on: ' in line
    assert set(line.partition(' on: ')[2].split('), ')) == {
        'model.label_smoothing is 0.3 (was 0.1', 'model.drop_path_rate is 0.2 (was not set',
        'train_dataloader.dataset.transform.input_size is 48 (was [3, 32, 32]', 'train_cfg.max_epochs is 2 (was 1',
        'optim_wrapper.accumulative_counts is 2 (was not set',
        "optim_wrapper.type is 'CPUAmpOptimWrapper' (was not set", 'custom_hooks.ModelEMAHook.decay is 0.8 (was 0.9)'}


def test_averages_need_their_hook(images, tmp_path):
    config = tmp_path / 'config.py'
    config.write_text(f"_base_ = {str(find('ppma-tiny_folder'))!r}\ncustom_hooks = [dict(type='ModelEMAHook')]\n")
    train.main(folder_arguments(images, tmp_path / 'run', config=str(config)))
    fails([*folder_arguments(images, tmp_path / 'run', config=str(config), epochs=2), 'custom_hooks=[]', '--resume'],
          'epoch_1.pth holds averages of the weights, which the custom_hooks of this run do not continue')


def test_a_finished_training_says_that_nothing_is_left(images, tmp_path, capsys):
    train.main(folder_arguments(images, tmp_path, epochs=2))
    for epochs in (2, 1):
        capsys.readouterr()
        train.main([*folder_arguments(images, tmp_path, epochs=epochs), '--resume'])
        text = capsys.readouterr().err
        assert f'epoch_2.pth has 2 epochs, and this training has {epochs}; a larger --epochs continues it' in text
        assert 'the schedule or options' not in text
    assert checkpoint_to_resume(str(tmp_path), '').endswith('epoch_2.pth')


def test_a_validation_after_every_zero_epochs_is_one_error(images, tmp_path):
    fails(folder_arguments(images, tmp_path / 'run', 'train_cfg.val_interval=0'),
          'train_cfg.val_interval must be an integer of at least 1, got 0')
    assert not (tmp_path / 'run').exists()
