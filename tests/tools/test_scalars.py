"""Scalars of a training: when they are read from the device, how many are kept, and what a line of the log averages."""
import json

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from training_cases import folder_arguments, make_images

from subquad.tools import train
from subquad.tools.engine.config import find
from subquad.tools.engine.training.scalars import ScalarHub, noted

READS = ('item', 'tolist', '__float__', '__bool__', '__int__', 'cpu', 'numpy')


@HOOKS.register_module(force=True)
class CountReadsHook(Hook):
    """Notes the steps in which a value of a tensor with a single element or a stack of such is read."""

    priority = 'HIGHEST'
    patch, steps = None, []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.patch.undo()
        for name in READS:
            self.patch.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name), runner.iter + 1))

    def _noting(self, read, step):
        def noting(tensor, *args, **kwargs):
            if tensor.is_floating_point():
                self.steps.append(step)
            return read(tensor, *args, **kwargs)
        return noting


def _config(path, base, text):
    path.write_text(f'_base_ = {str(find(base))!r}\n{text}\n')
    return str(path)


def test_losses_are_read_every_ten_steps(tmp_path, monkeypatch):
    """Reading a tensor waits for the device. The first steps are read at once, and the last before the checkpoint."""
    steps = []
    monkeypatch.setattr(CountReadsHook, 'steps', steps)
    config = _config(tmp_path / 'config.py', 'test-mobilevitv2_digits', """
optim_wrapper = dict(optimizer=dict(_delete_=True, opt='momentum', lr=0.01))
custom_hooks = [dict(type='CountReadsHook'), dict(type='ModelEMAHook')]
train_dataloader = dict(batch_size=2, num_batch_per_epoch=24)
""")
    with pytest.MonkeyPatch.context() as patch:
        monkeypatch.setattr(CountReadsHook, 'patch', patch)
        train.main([config, '--epochs', '1', '--work-dir', str(tmp_path / 'run')])
    assert sorted({step for step in steps if step > 10}) == [20, 24]
    kept = torch.load(tmp_path / 'run' / 'epoch_1.pth', weights_only=False)['message_hub']['log_scalars']
    assert {len(kept[f'train/{name}'].data[0]) for name in ('loss', 'lr', 'time', 'grad_norm')} == {24}


def test_values_are_those_of_the_tensors_and_only_the_last_are_kept():
    hub = ScalarHub('test_values')
    hub.length = 25
    values = torch.rand(60)
    for n, value in enumerate(values):
        hub.update_scalar('train/loss', value)
        hub.update_scalar('train/lr', 0.1 * n)
        if n == 13:
            assert hub.get_scalar('train/loss').current() == value.item()
            assert hub.get_scalar('train/lr').current() == 1.3
    assert noted(lambda: torch.tensor(2.), hub, 'train/grad_norm')() is None
    assert hub.log_scalars['train/loss'].data[0].tolist() == values[-25:].tolist()
    assert hub.state_dict()['log_scalars']['train/grad_norm'].current() == 2
    assert len(hub.log_scalars['train/lr'].data[0]) == 25
    hub.update_scalar('train/loss', values[0], count=3)
    assert hub.get_scalar('train/loss').data[1][-1] == 3
    with pytest.raises(KeyError):
        hub.get_scalar('train/none')


@pytest.mark.parametrize('log, windows', [('', [(0, 3), (3, 4), (4, 7), (7, 8)]),
                                          ('log_processor = dict(window_size=9)', [(0, 3), (0, 4), (4, 7), (4, 8)])])
def test_a_line_averages_the_steps_since_the_line_before(log, windows, tmp_path):
    """Or as many as the config says, but never those of the epoch before."""
    images = make_images(tmp_path / 'data')
    config = _config(tmp_path / 'config.py', 'ppma-tiny_folder',
                     f"custom_hooks = [dict(type='LossFileHook', path='{tmp_path}/losses')]\n{log}\n")
    train.main(folder_arguments(images, tmp_path / 'run', 'train_dataloader.batch_size=2',
                                'default_hooks.logger.interval=3', 'default_hooks.logger.ignore_last=False',
                                config=config, epochs=2))
    losses = [json.loads(line) for line in (tmp_path / 'losses.0').read_text().splitlines()]
    file, = (tmp_path / 'run').glob('*/vis_data/scalars.json')
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if 'loss' in line]
    assert [line['step'] for line in lines] == [stop for _, stop in windows]
    for line, (start, stop) in zip(lines, windows):
        assert line['loss'] == pytest.approx(np.mean(losses[start:stop]), rel=1e-6)
