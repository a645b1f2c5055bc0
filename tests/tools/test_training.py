"""`subquad train` when something goes wrong: losses that are not finite, folders, disks and interruptions."""
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import timm
import torch
from training_cases import fails, folder_arguments

from subquad.backbones.weights import check_finite, read_checkpoint, save_weights
from subquad.tools import test, train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.classification.prediction_metrics import AccuracyMetric

DIGITS = 'test-ppma_digits'


# ---- metrics and losses

@pytest.mark.parametrize('scores, top1, top2', [
    ([[0.1, 0.7, 0.2]], 100, 100), ([[0.6, 0.3, 0.1]], 0, 100), ([[0.2, 0.2, 0.2]], 0, 0), ([[0.4, 0.4, 0.2]], 0, 100),
    ([[float('nan')] * 3], 0, 0), ([[0.1, float('inf'), 0.2]], 0, 0), ([[float('nan'), 0.9, 0.1]], 0, 0)])
def test_accuracy_of_ties_and_of_scores_that_are_not_finite(scores, top1, top2):
    metric = AccuracyMetric(topk=(1, 2, 5))
    metric.process(None, [dict(scores=torch.tensor(row), label=1) for row in scores])
    found = metric.evaluate(1)
    assert (found['accuracy/top1'], found['accuracy/top2']) == (top1, top2)
    if not np.isfinite(scores).all():
        assert found['accuracy/top5'] == 0, 'also where there are fewer classes than k'


def test_training_stops_at_the_first_loss_that_is_not_finite(images, tmp_path, capsys):
    message = fails(folder_arguments(images, tmp_path, 'optim_wrapper.optimizer.lr=1e30', 'param_scheduler=[]',
                                      'optim_wrapper.clip_grad=None', epochs=3),
                     r'the loss is (nan|inf) at step \d of 6 \(epoch \d\); the batch holds .*\.png')
    files = [word.strip(' ,;') for word in message.split() if '.png' in word]
    assert len(files) == 4 and all(os.path.isfile(file) for file in files)
    assert not list(tmp_path.glob('last.safetensors'))
    for path in [*tmp_path.glob('*.safetensors'), *tmp_path.glob('*.pth')]:
        check_finite(read_checkpoint(path)[0], path.name)
    assert message.count('no checkpoint had been written') == (not list(tmp_path.glob('*.pth')))
    assert 'loss nan' not in capsys.readouterr().err


def test_weights_that_are_not_finite_are_not_written(images, tmp_path, monkeypatch):
    """A finite loss can still give non-finite weights."""
    from mmengine.optim import OptimWrapper
    step, count = OptimWrapper.step, []

    def broken(self, **kwargs):
        step(self, **kwargs)
        count.append(1)
        if len(count) == 4:
            next(iter(self.optimizer.param_groups[0]['params'])).data.fill_(float('inf'))
    monkeypatch.setattr(OptimWrapper, 'step', broken)
    fails(folder_arguments(images, tmp_path, epochs=2), 'the weights hold NaN or infinities after step 4 of 4 .*: '
           'nothing is written; the last good checkpoint is .*epoch_1.pth')
    assert sorted(p.name for p in tmp_path.glob('*.*t*') if p.is_file()) == ['best.safetensors', 'epoch_1.pth']


def test_a_metric_that_is_nan_is_never_best(tmp_path):
    from subquad.tools.engine.training.hooks import WeightsHook
    hook, saved = WeightsHook(), []
    hook._save = lambda runner, name, metadata: saved.append(metadata['accuracy/top1'])
    hook._when = lambda runner: {}
    for value in (float('nan'), float('inf'), 3., float('nan'), 2., 4.):
        hook.after_val_epoch(None, {'accuracy/top1': value})
    assert saved == [3., 4.]
    save_weights(torch.nn.Linear(1, 1), tmp_path / 'best.safetensors', {'accuracy/top1': float('nan')})
    hook = WeightsHook()
    hook.before_train(type('Runner', (), dict(work_dir=str(tmp_path), timestamp='now', _resume=True,
                                              _load_from=tmp_path / 'epoch_1.pth')))
    assert hook.best == -float('inf')


def test_testing_refuses_weights_that_are_not_finite(tmp_path, capsys):
    model = timm.create_model('test_ppma', num_classes=10)
    model.head.fc.weight.data[3, 3] = float('nan')
    path = tmp_path / 'w.safetensors'
    save_weights(model, path, dict(model='test_ppma', options=dict(num_classes=10), classes=[*map(str, range(10))]))
    fails([DIGITS, path], 'w.safetensors holds NaN or infinite values in 1 of .*--allow-nonfinite', test.main)
    assert test.main([DIGITS, str(path), '--allow-nonfinite', '--json']) == 0
    assert json.loads(capsys.readouterr().out)['accuracy/top1'] == 0


def test_drop_last_counts_the_samples_of_each_process(monkeypatch):
    from subquad.tools.engine.training.building import check_batch_size
    check_batch_size(dict(drop_last=True, batch_size=6), range(11), 'train')
    monkeypatch.setenv('WORLD_SIZE', '2')
    check_batch_size(dict(drop_last=True, batch_size=6), range(11), 'train')
    with pytest.raises(UserError, match='has 11 samples for 3 processes, fewer than batch_size=6 each, and drop_last'):
        monkeypatch.setenv('WORLD_SIZE', '3')
        check_batch_size(dict(drop_last=True, batch_size=6), range(11), 'train')


# ---- folders, disks, interruptions

def test_a_moved_folder_resumes_in_its_new_place(images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ['default_hooks.checkpoint.max_keep_ckpts=9', 'default_hooks.checkpoint.save_best=auto']
    train.main(folder_arguments(images, tmp_path / 'old', *options, epochs=3))
    expected = read_checkpoint(tmp_path / 'old' / 'last.safetensors')[0]

    def is_expected(folder):
        found = read_checkpoint(folder / 'last.safetensors')[0]
        return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    # As it was after two epochs; the note of the last checkpoint and the state in it name the old folder.
    for name in ('epoch_3.pth', 'last.safetensors'):
        (tmp_path / 'old' / name).unlink()
    (tmp_path / 'old' / 'last_checkpoint').write_text(str(tmp_path / 'old' / 'epoch_2.pth'))
    shutil.copytree(tmp_path / 'old', tmp_path / 'copy')
    before = {path.name: path.read_bytes() for path in (tmp_path / 'old').iterdir() if path.is_file()}
    train.main([*folder_arguments(images, tmp_path / 'copy', *options, epochs=3), '--resume'])
    assert f"the state in {tmp_path / 'copy' / 'epoch_2.pth'}" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'old').iterdir() if path.is_file()}, \
        'the original stays as it is'
    assert is_expected(tmp_path / 'copy')
    # Without --work-dir, with the config in the folder, which names the old place.
    (tmp_path / 'old').rename(tmp_path / 'moved')
    config = tmp_path / 'moved' / 'ppma-tiny_folder.py'
    config.write_text(config.read_text() + f"\nresume = True\nload_from = '{tmp_path}/old/epoch_2.pth'\n")
    train.main([str(config), '--resume'])
    assert is_expected(tmp_path / 'moved')
    (tmp_path / 'moved' / 'last.safetensors').unlink()
    train.main([str(config), '--work-dir', str(tmp_path / 'moved')])                  # as the config says: resume
    assert is_expected(tmp_path / 'moved')
    assert not (tmp_path / 'runs').exists() and not (tmp_path / 'old').exists()


_HOLD = """
import multiprocessing, sys, time
from pathlib import Path
from subquad.tools.engine.training.run import _locked
with _locked(Path(sys.argv[1])):
    multiprocessing.get_context('fork').Process(target=time.sleep, args=(30,)).start()     # as a data loader's worker
    print('locked', flush=True)
    time.sleep(60)
"""


def _holder(folder):
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    process = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', _HOLD, str(folder)], stdout=subprocess.PIPE,
                               env=environment, text=True)
    assert process.stdout.readline() == 'locked\n'
    return process


def test_a_second_training_in_a_folder_is_refused(images, tmp_path):
    process = _holder(tmp_path)
    try:
        before = sorted(tmp_path.iterdir())
        fails(folder_arguments(images, tmp_path), f'another run is writing to {tmp_path} '
               rf'\(process {process.pid} on .*\); .* another --work-dir')
        assert sorted(tmp_path.iterdir()) == before
    finally:
        process.kill()
        process.wait()
    # Killed, it leaves its file, and its worker lives on for a while.
    assert (tmp_path / 'training.lock').exists()
    assert train.main(folder_arguments(images, tmp_path)) == 0
    assert not (tmp_path / 'training.lock').exists()


def test_folders_without_locks(tmp_path, capsys, monkeypatch):
    import fcntl

    from subquad.tools.engine.training.run import _locked

    def lockf(*_):
        raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(fcntl, 'lockf', lockf)
    with _locked(tmp_path / 'a' / 'b'):
        assert (tmp_path / 'a' / 'b').is_dir()
    assert 'cannot be locked (No locks available): nothing stops a second' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], 'empty folders that were made go again'


@pytest.mark.parametrize('where', ['checkpoint', 'note of the last checkpoint', 'weights'])
def test_full_disk_leaves_whole_files_and_one_error(where, images, tmp_path, monkeypatch):
    """The second epoch's files do not fit any more."""
    import builtins

    from subquad.tools.engine.checkpoints import runner_checkpoints
    full = OSError(errno.ENOSPC, 'No space left on device')
    count = []

    def breaks(*_, **__):
        raise full
    if where == 'checkpoint':
        fsync = os.fsync
        monkeypatch.setattr(runner_checkpoints.os, 'fsync', lambda fd: (count.append(fd), breaks() if len(count) > 1
                                                                 else fsync(fd)))
    elif where == 'weights':
        from safetensors import SafetensorError

        from subquad.backbones import weights as module

        def breaks(*_, **__):
            raise SafetensorError('Error while serializing: I/O error: No space left on device (os error 28)')
        for target in (module, getattr(module, 'files', None)):
            if hasattr(target, 'save_file'):
                monkeypatch.setattr(target, 'save_file', breaks)
    else:
        real = builtins.open

        def noted(file, *rest, **options):
            if str(file).endswith('last_checkpoint') and rest[:1] == ('w',):
                count.append(file)
                opened = real(file, *rest, **options)            # emptied by now
                if len(count) > 1:
                    opened.close()
                    breaks()
                return opened
            return real(file, *rest, **options)
        monkeypatch.setattr(builtins, 'open', noted)
    arguments = folder_arguments(images, tmp_path, 'default_hooks.checkpoint.max_keep_ckpts=1', epochs=3)
    message = fails(arguments, f'the disk is full while writing to {tmp_path}; free some space; ')
    monkeypatch.undo()
    assert not list(tmp_path.glob('*.part')) and not list(tmp_path.glob('last.safetensors'))
    kept = sorted(tmp_path.glob('*.pth'))
    if where != 'weights':                                       # which are written at the first validation
        assert f'training state saved in {kept[-1]}; resume with: subquad train ppma-tiny_folder --data ' in message
    assert kept
    for path in kept:
        read_checkpoint(path)
    assert train.main([*arguments, '--resume']) == 0
    assert read_checkpoint(tmp_path / 'last.safetensors')[1]['epoch'] == 3


def test_checkpoints_of_earlier_runs_are_not_reported(images, tmp_path, capsys, monkeypatch):
    from subquad.tools.engine.training.progress import ProgressHook
    train.main(folder_arguments(images, tmp_path))
    message = fails(folder_arguments(images, tmp_path, 'optim_wrapper.optimizer.lr=1e30', 'param_scheduler=[]',
                                     'train_dataloader.batch_size=2', 'optim_wrapper.clip_grad=None'), 'the loss is')
    assert 'no checkpoint had been written' in message

    def interrupted(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(ProgressHook, 'after_train_iter', interrupted)
    earlier, = map(str, tmp_path.glob('earlier_*/epoch_1.pth'))
    resumed = [*folder_arguments(images, tmp_path, epochs=2), '--resume', earlier]
    for arguments, expected in ((folder_arguments(images, tmp_path), 'no checkpoint has been written to '),
                                (resumed, f'training state saved in {earlier}; resume with: subquad train ')):
        with pytest.raises(KeyboardInterrupt):
            train.main(arguments)
        text = capsys.readouterr().err
        assert expected in text
    assert text.count('--resume') == 1 and text.strip().endswith(f'--resume {earlier}'), 'not of the last run'
    monkeypatch.undo()
    train.main(resumed)
    train.main([*folder_arguments(images, tmp_path, epochs=3), '--resume'])      # now it is the run of this folder
    assert 'resuming after epoch 2' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures('sigint')
def test_ctrl_c_in_a_process(images, tmp_path):
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    process = subprocess.Popen([sys.executable, '-W', 'ignore', '-m', 'subquad', 'train',
                                *folder_arguments(images, tmp_path, epochs=5000)], env=environment,
                               stderr=subprocess.PIPE, text=True)
    end = time.time() + 120
    while not list(tmp_path.glob('epoch_*.pth')) and time.time() < end:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and 'Traceback' not in error
    assert 'training state saved in' in error and '; resume with: subquad train' in error
    assert not (tmp_path / 'training.lock').exists() and not list(tmp_path.glob('*.part'))
