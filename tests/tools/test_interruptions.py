"""Training that is interrupted by signals, or killed, and resumed; and damaged checkpoints."""
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch
from mmengine.runner import EpochBasedTrainLoop
from pairwise import slow_cases
from training_cases import (
    fails,
    folder_arguments,
    preloaded_processes,
    run_in_group,
    run_train,
    write_random_config,
)

from subquad.tools import train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.checkpoints.interruptions import Interrupted, InterruptionHook
from subquad.tools.engine.checkpoints.runner_checkpoints import checkpoint_to_resume, find_checkpoints
from subquad.tools.engine.training.run import resume_command

pytestmark = pytest.mark.usefixtures('sigint')


def _arguments(config, work, resume=False):
    return [str(config), '--work-dir', str(work), *(['--resume'] if resume else [])]


def _final(work):
    return (work / 'last.safetensors').read_bytes(), (work / 'best.safetensors').read_bytes()


@pytest.fixture(scope='module')
def whole(images, tmp_path_factory):
    """The configs by (accumulation, workers), and the final weights of undisturbed runs; made when they are needed."""
    folder, made = tmp_path_factory.mktemp('whole'), {}

    def get(accumulation=1, workers=0):
        if (accumulation, workers) not in made:
            work = folder / f'{accumulation}_{workers}'
            config = write_random_config(folder / f'{work.name}.py', images, 3, accumulation, workers)
            assert train.main(_arguments(config, work)) == 0
            made[accumulation, workers] = config, _final(work)
        return made[accumulation, workers]
    return get


def _signal_at(monkeypatch, number, stage, count):
    """Send this process a signal in the call `count` of a method of MMEngine's hooks."""
    from mmengine.hooks import RuntimeInfoHook
    method, calls = getattr(RuntimeInfoHook, stage), []

    def signaling(self, runner, *args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), number)
        return method(self, runner, *args, **kwargs)
    monkeypatch.setattr(RuntimeInfoHook, stage, signaling)


@pytest.mark.parametrize('number, stage, count, options, expected', [
    (signal.SIGTERM, 'after_train_iter', 6, {}, 'interrupted_epoch_1_step_2.pth'),
    (signal.SIGINT, 'before_train_iter', 7, dict(accumulation=3), 'interrupted_epoch_1_step_3.pth'),
    (signal.SIGTERM, 'after_train_iter', 3, dict(workers=2), 'interrupted_epoch_0_step_3.pth'),
    (signal.SIGTERM, 'after_train_iter', 8, dict(accumulation=3), 'epoch_2.pth'),
    (signal.SIGINT, 'after_val_iter', 2, {}, 'epoch_2.pth'),
], ids=['step', 'accumulation', 'workers', 'end of epoch', 'validation'])
def test_a_signal_leaves_a_checkpoint_from_which_training_continues_exactly(
        number, stage, count, options, expected, whole, tmp_path, monkeypatch, capfd):
    config, final = whole(**options)
    _signal_at(monkeypatch, number, stage, count)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        train.main(_arguments(config, tmp_path))
    assert caught.value.code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    text = capfd.readouterr().err
    assert f'{number.name}: training stops after this step and writes a checkpoint; a second signal' in text
    assert f'training state saved in {tmp_path}/{expected}; resume with: subquad train ' in text
    assert not (tmp_path / 'last.safetensors').exists()
    monkeypatch.undo()
    assert train.main(_arguments(config, tmp_path, resume=True)) == 0
    assert _final(tmp_path) == final
    assert not list(tmp_path.glob('interrupted_*')) and len(list(tmp_path.glob('*.pth'))) == 2
    text = capfd.readouterr().err
    assert text.count('validation  ') == (3 if 'epoch_0' in expected else 2), 'once after each epoch in both parts'
    if '_step_' in expected:
        epoch, step = expected.split('.')[0].split('_')[2::2]
        assert f'resuming after epoch {epoch} and {step} steps' in text


def test_a_second_signal_and_one_before_the_first_step_stop_at_once(monkeypatch, capfd):
    monkeypatch.delenv('RANK', raising=False)
    hook = InterruptionHook()
    with hook.listening():
        with pytest.raises(Interrupted, match='SIGTERM'):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert hook.number is None
        hook.before_train_iter(None, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert hook.number == signal.SIGTERM
        with pytest.raises(Interrupted, match='SIGINT') as caught:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        assert caught.value.code == 130
        # A launcher passes on the signal that a terminal has sent to all processes.
        hook.number = None
        monkeypatch.setenv('RANK', '0')
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err.count('a second signal stops it at once') == 2


def test_a_full_disk_at_a_signal(whole, tmp_path, monkeypatch):
    """The error is reported, and the last checkpoint stays."""
    from subquad.tools.engine.checkpoints import interruptions
    config, final = whole()
    _signal_at(monkeypatch, signal.SIGTERM, 'after_train_iter', 6)
    save, limits = interruptions.save_interrupted, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            save(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(interruptions, 'save_interrupted', limited)
    fails(_arguments(config, tmp_path), f'a file grew beyond the largest size allowed while writing to {tmp_path}; '
          rf'free some space; training state saved in {tmp_path}/epoch_1.pth; resume with: subquad train .* --resume$')
    assert not list(tmp_path.glob('*.part')) and not list(tmp_path.glob('interrupted_*'))
    monkeypatch.undo()
    assert train.main(_arguments(config, tmp_path, resume=True)) == 0
    assert _final(tmp_path) == final


def test_an_epoch_of_another_length_refuses_a_checkpoint_inside_an_epoch(whole, tmp_path, monkeypatch):
    config, _ = whole()
    _signal_at(monkeypatch, signal.SIGTERM, 'after_train_iter', 2)
    with pytest.raises(Interrupted):
        train.main(_arguments(config, tmp_path))
    monkeypatch.undo()
    fails([*_arguments(config, tmp_path, resume=True), '--cfg-options', 'train_dataloader.batch_size=4'],
          'interrupted_epoch_0_step_2.pth was written after 2 of 4 steps of an epoch, but an epoch now has 2 steps')


# ---- damaged checkpoints

@pytest.fixture(scope='module')
def run_folder(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'run'
    train.main(folder_arguments(images, folder, epochs=3))
    return folder


def _cut(content):
    return content[:len(content) // 2]


def _flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]


@pytest.mark.parametrize('damage, words', [
    (_cut, 'damaged'), (_flip, 'differs from its checksum'), *slow_cases((lambda content: b'', 'damaged'))])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, words, run_folder, images, tmp_path, capsys):
    work = tmp_path / 'run'
    shutil.copytree(run_folder, work)
    newest = work / 'epoch_3.pth'
    newest.write_bytes(damage(newest.read_bytes()))
    assert train.main([*folder_arguments(images, work, epochs=3), '--resume']) == 0
    text = capsys.readouterr().err
    assert f'warning: --resume: {newest} is ' in text and words in text
    assert 'trying epoch_2.pth, the checkpoint before it' in text and 'resuming after epoch 2' in text
    assert _final(work) == _final(run_folder)
    for path in (newest, work / 'epoch_2.pth'):
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Exception, match='epoch_2.pth is damaged'):
        checkpoint_to_resume(str(work), '')
    with pytest.raises(Exception, match='epoch_3.pth is damaged'):
        checkpoint_to_resume(str(work), str(newest))


def test_the_order_of_checkpoints(tmp_path):
    for name in ('epoch_9.pth', 'epoch_10.pth', 'interrupted_epoch_9_step_7.pth', 'best_epoch_12.pth', 'iter.pth'):
        (tmp_path / name).write_text('')
    (tmp_path / 'last_checkpoint').write_text('/elsewhere/iter.pth')
    found = [path.name for path in find_checkpoints(tmp_path)]
    assert found == ['epoch_10.pth', 'interrupted_epoch_9_step_7.pth', 'epoch_9.pth']
    for name in found:
        (tmp_path / name).unlink()
    assert find_checkpoints(tmp_path) == [tmp_path / 'iter.pth'], 'a name of the config'
    (tmp_path / 'last_checkpoint').write_text('')
    assert find_checkpoints(tmp_path) == []


# ---- kills

def _start(context, config, work, slowly=False):
    log = work.parent / f'{work.name}.log'
    log.write_text('')
    process = context.Process(target=run_train,
                              args=(_arguments(config, work, bool(find_checkpoints(work))), str(log), slowly))
    process.start()
    return process, log


def _wait(process, condition, seconds=300):
    """Wait until condition() is true; return whether the process then runs."""
    end = time.monotonic() + seconds
    while process.is_alive() and not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
    return process.is_alive()


def _finish(context, config, work):
    process, log = _start(context, config, work)
    process.join(300)
    assert process.exitcode == 0, log.read_text()


def _check_kills(kills, images, tmp_path):
    """Kill training runs at random moments, resume them, and compare the weights with those of an undisturbed run."""
    context, draw = preloaded_processes(), random.Random(0)
    config = write_random_config(tmp_path / 'config.py', images, epochs=4)
    process, log = _start(context, config, tmp_path / 'whole')
    _wait(process, lambda: 'training ' in log.read_text())
    start = time.monotonic()
    process.join(300)
    length = time.monotonic() - start
    assert process.exitcode == 0, log.read_text()
    for n in range(kills):
        work = tmp_path / f'killed_{n}'
        delay, process = length * draw.random(), None
        while process is None or process.exitcode != -signal.SIGKILL:      # it can end before the kill
            shutil.rmtree(work, ignore_errors=True)
            process, log = _start(context, config, work)
            _wait(process, lambda log=log: 'training ' in log.read_text())
            process.join(delay)
            process.kill()
            process.join(60)
            delay /= 2
        for path in work.glob('*.pth'):
            checkpoint_to_resume(str(work), str(path))
        _finish(context, config, work)
        assert _final(work) == _final(tmp_path / 'whole'), f'kill {n}'
        assert not list(work.glob('*.part'))


def test_killed_trainings_end_with_the_weights_of_an_undisturbed_run(images, tmp_path):
    _check_kills(2, images, tmp_path)


@pytest.mark.long
def test_ten_killed_trainings_end_with_the_weights_of_an_undisturbed_run(images, tmp_path):
    _check_kills(10, images, tmp_path)


def test_a_checkpoint_is_never_half_written_under_its_name(images, tmp_path):
    context, work = preloaded_processes(), tmp_path / 'run'
    config = write_random_config(tmp_path / 'config.py', images, epochs=2)
    process, log = _start(context, config, work, slowly=True)
    assert _wait(process, lambda: any(path.stat().st_size for path in work.glob('epoch_2.pth*.part'))), log.read_text()
    process.kill()
    process.join(60)
    part, = work.glob('*.part')
    assert 0 < part.stat().st_size < (work / 'epoch_1.pth').stat().st_size
    assert [path.name for path in find_checkpoints(work)] == ['epoch_1.pth']
    torch.load(work / 'epoch_1.pth', weights_only=False)
    _finish(context, config, work)
    assert {path.name for path in work.glob('epoch_*')} == {'epoch_1.pth', 'epoch_2.pth'}


def test_a_signal_to_the_whole_process_group_leaves_a_checkpoint(whole, tmp_path):
    """Job schedulers send SIGTERM to the workers of data loaders as well."""
    config, _ = whole(workers=2)
    context, log = preloaded_processes(), tmp_path / 'log'
    log.write_text('')
    process = context.Process(target=run_in_group, args=([*_arguments(config, tmp_path / 'run'), '--cfg-options',
                              'train_cfg.max_epochs=3000', 'train_cfg.val_interval=3000'], str(log)))
    process.start()
    assert _wait(process, lambda: (tmp_path / 'run' / 'epoch_1.pth').exists()), log.read_text()
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    os.killpg(process.pid, signal.SIGTERM)
    process.join(100)
    text = log.read_text()
    assert process.exitcode == 143, text
    assert 'SIGTERM: training stops after this step' in text and 'training state saved in ' in text
    assert 'DataLoader worker' not in text
    checkpoint_to_resume(str(tmp_path / 'run'), '')


def test_a_signal_after_the_last_step_promises_no_checkpoint(whole, tmp_path, monkeypatch, capfd):
    config, final = whole()
    _signal_at(monkeypatch, signal.SIGTERM, 'after_train', 1)
    assert train.main(_arguments(config, tmp_path)) == 0
    text = capfd.readouterr().err
    assert 'SIGTERM: the last step has run; training ends when its files are written' in text
    assert _final(tmp_path) == final


# ---- an earlier run in the same folder

def _fail(*_):
    raise UserError('not a step')


def test_resume_does_not_take_the_checkpoint_of_an_earlier_run(whole, tmp_path, monkeypatch, capfd):
    config, _ = whole()
    assert train.main(_arguments(config, tmp_path)) == 0
    capfd.readouterr()
    with monkeypatch.context() as patch:                             # killed before its first checkpoint
        _signal_at(patch, signal.SIGTERM, 'after_train_iter', 1)
        patch.setattr('subquad.tools.engine.checkpoints.interruptions.save_interrupted', lambda *_: None)
        with pytest.raises(Interrupted):
            train.main(_arguments(config, tmp_path))
    text = capfd.readouterr().err
    earlier, = tmp_path.glob('earlier_*/epoch_3.pth')
    assert f'the checkpoints of an earlier run (epoch_2.pth, epoch_3.pth) are now in {earlier.parent}' in text
    assert f'no checkpoint has been written to {tmp_path} yet' in text
    fails(_arguments(config, tmp_path, resume=True), f'the last run in {tmp_path} has written no checkpoint; '
          f'{earlier} is of an earlier run, which --resume {earlier} continues')
    assert checkpoint_to_resume(str(tmp_path), str(earlier)) == str(earlier)
    # A start that fails before its first step changes nothing.
    earlier.rename(tmp_path / 'epoch_3.pth')
    with monkeypatch.context() as patch:
        patch.setattr(EpochBasedTrainLoop, 'run_iter', _fail)
        fails(_arguments(config, tmp_path), 'not a step')
    assert [path.name for path in tmp_path.glob('**/epoch_3.pth')] == ['epoch_3.pth']
    assert train.main(_arguments(config, tmp_path)) == 0
    assert train.main(_arguments(config, tmp_path, resume=True)) == 0, 'of the run that has written all again'


# ---- the command that resumes

@pytest.mark.parametrize('environment, start', [
    ({}, 'subquad train'),
    (dict(LOCAL_WORLD_SIZE='2', GROUP_WORLD_SIZE='1', TORCHELASTIC_RUN_ID='none'),
     'torchrun --nproc_per_node 2 -m subquad train'),
    (dict(LOCAL_WORLD_SIZE='8', GROUP_WORLD_SIZE='2', GROUP_RANK='1', MASTER_ADDR='host', MASTER_PORT='7000',
          TORCHELASTIC_RUN_ID='7'),
     'torchrun --nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr host --master_port 7000 -m subquad train')])
def test_the_command_that_resumes_is_that_of_the_run(environment, start, monkeypatch):
    for name in ('LOCAL_WORLD_SIZE', 'GROUP_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR', 'TORCHELASTIC_RUN_ID'):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ['ppma-tiny_folder', '--data', 'my photos', '--strict', '--resume', 'a.pth', '--cfg-options', 'resume=True']
    assert resume_command(words, train._parser().parse_args(words), 'runs/a') == (
        f"{start} ppma-tiny_folder --data 'my photos' --strict --cfg-options resume=True --work-dir runs/a --resume")
