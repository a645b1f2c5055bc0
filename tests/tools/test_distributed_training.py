"""Training in several processes: the same losses as in one, sharded parameters, and signals."""
import json
import os
import signal
import socket
import time

import numpy as np
import pytest
import timm
import torch
from training_cases import fails, preloaded_processes, run_train

from subquad.backbones.weights import load_weights, read_checkpoint

# Without batch norm, whose statistics are of each process. There are two steps an epoch of 4 images each; MMEngine's
# sampler gives process r of n the images r, r + n, ... of one order, so that each step has the same images.
CONFIG = """
_base_ = {base!r}
image = dict(_delete_=True, input_size=(3, 32, 32), interpolation='bilinear', crop_pct=1.0)
model = dict(name='test_vit', img_size=32)
train_dataloader = dict(batch_size={batch}, num_workers=0, dataset=dict(root={data!r} + '/train', transform=image))
val_dataloader = dict(num_workers=0, dataset=dict(root={data!r} + '/val', transform=image))
param_scheduler = []
train_cfg = dict(max_epochs=10)
custom_hooks = [dict(type='LossFileHook', path={losses!r})]
"""
SHARDED = ['--cfg-options', 'model_wrapper_cfg.type=FullyShardedModel']


@pytest.fixture(scope='module')
def context():
    return preloaded_processes()


def _config(folder, images, batch):
    from subquad.tools.engine.config import find
    path = folder / 'config.py'
    path.write_text(CONFIG.format(base=str(find('ppma-tiny_folder')), data=str(images), batch=batch,
                                  losses=str(folder / 'losses')))
    return path


def _start(context, folder, processes, arguments):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        environment = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR='127.0.0.1',
                           MASTER_PORT=str(port))
        log = folder / f'log_{rank}.txt'
        started.append(context.Process(target=run_train, args=(
            [*map(str, arguments), '--work-dir', str(folder / 'run')], str(log), False,
            list(environment.items()) if processes > 1 else [])))
        started[-1].start()
    return started


def _train(context, folder, images, processes, *arguments):
    """Train with 4 images a step on several processes; return the losses, means over the processes."""
    started = _start(context, folder, processes, [_config(folder, images, 4 // processes), *arguments])
    for process in started:
        process.join(580)
    assert [process.exitcode for process in started] == [0] * processes, (folder / 'log_0.txt').read_text()
    return np.mean([[json.loads(line) for line in (folder / f'losses.{rank}').read_text().splitlines()]
                    for rank in range(processes)], axis=0)


@pytest.fixture(scope='module')
def single(context, images, tmp_path_factory):
    folder = tmp_path_factory.mktemp('single')
    return folder, _train(context, folder, images, 1)


def test_two_processes_have_the_losses_of_one_with_twice_the_batch(single, context, images, tmp_path):
    losses = _train(context, tmp_path, images, 2)
    assert len(losses) == 20 and single[1][0] - single[1][-1] > 0.1, 'it learns'
    assert np.abs(losses - single[1]).max() < 1e-4
    lines = [[line for line in (folder / 'log_0.txt').read_text().splitlines() if line.startswith('epoch ')]
             for folder in (single[0], tmp_path)]
    assert len(lines[0]) == 10
    for one, two in zip(*lines):
        assert one.split('  ')[:3] == two.split('  ')[:3], 'the mean of both processes is reported'
    logs = []
    for folder in (single[0], tmp_path):
        file, = (folder / 'run').glob('*/vis_data/scalars.json')
        logs.append([line['loss'] for line in map(json.loads, file.read_text().splitlines()) if 'loss' in line])
    assert logs[0] == pytest.approx(np.reshape(single[1], (10, 2)).mean(1), abs=1e-5), 'of the epoch'
    assert logs[1] == pytest.approx(logs[0], abs=1e-4), 'and of both processes'


def test_sharded_training_resumes_and_its_files_are_ordinary(single, context, images, tmp_path):
    _train(context, tmp_path, images, 2, *SHARDED, 'train_cfg.max_epochs=5')
    losses = _train(context, tmp_path, images, 2, '--resume', *SHARDED)
    assert 'resuming after epoch 5' in (tmp_path / 'log_0.txt').read_text()
    assert len(losses) == 20 and np.abs(losses - single[1]).max() < 1e-4
    model = timm.create_model('test_vit', num_classes=2, img_size=32)
    load_weights(model, tmp_path / 'run' / 'last.safetensors')
    expected = read_checkpoint(single[0] / 'run' / 'last.safetensors')[0]
    for name, value in model.state_dict().items():
        assert (value - expected[name]).abs().max() < 1e-3, name
    states = [torch.load(folder / 'run' / 'epoch_10.pth', weights_only=False)['optimizer']['state']
              for folder in (single[0], tmp_path)]
    for key, value in states[0].items():
        assert type(states[1][key]['exp_avg']) is torch.Tensor
        assert states[1][key]['exp_avg'].shape == value['exp_avg'].shape


def test_a_signal_to_one_process_stops_all(context, images, tmp_path):
    config = _config(tmp_path, images, 1)                        # 4 steps an epoch
    started = _start(context, tmp_path, 2, [config, '--epochs', '5000'])
    end = time.monotonic() + 580
    while not (tmp_path / 'losses.1').exists() and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(started[1].pid, signal.SIGTERM)
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [143, 143]
    text = (tmp_path / 'log_0.txt').read_text()
    assert 'training state saved in ' in text and ' --resume' in text
    assert list((tmp_path / 'run').glob('*.pth'))


def test_sharding_needs_several_processes_and_no_average(context, images, tmp_path):
    fails([_config(tmp_path, images, 4), '--work-dir', tmp_path / 'run', *SHARDED],
          'model_wrapper_cfg: FullyShardedModel needs several processes')
    assert not (tmp_path / 'run').exists()
    config = tmp_path / 'config.py'
    config.write_text(config.read_text() + "custom_hooks += [dict(type='EMAHook')]\n")
    started = _start(context, tmp_path, 2, [config, *SHARDED])
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [2, 2]
    assert 'FullyShardedModel does not support EMAHook' in (tmp_path / 'log_0.txt').read_text()
