"""What training reports besides the loss: times of data and steps, and loggers."""
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from training_cases import fails, folder_arguments

from subquad.tools import train
from subquad.tools.engine import config as settings
from subquad.tools.engine.training import progress
from subquad.tools.engine.training.progress import ProgressHook


@pytest.mark.parametrize('data, binds', [(0.62, True), (0.1, False)])
def test_the_slower_part_is_named_once(data, binds, monkeypatch, capsys):
    now, hook = [0.], ProgressHook()
    monkeypatch.setattr(progress.time, 'perf_counter', lambda: now[0])
    runner = SimpleNamespace(
        iter=0, max_iters=10, train_loop=None, write_config=lambda: None,
        train_dataloader=SimpleNamespace(num_workers=2), optim_wrapper=SimpleNamespace(get_lr=lambda: dict(lr=[0.1])),
        message_hub=SimpleNamespace(get_scalar=lambda key: SimpleNamespace(mean=lambda steps: float(steps))))

    def step(wait, work):
        now[0] += wait
        hook.before_train_iter(None, 0)
        now[0] += work
        hook.after_train_iter(runner, 0)
        return capsys.readouterr().err
    hook.before_train_epoch(None)
    assert step(100., 100.) == 'iteration 1/10  loss 1.000  lr 1.0e-01\n', 'the first step, with the start of workers'
    runner.max_iters = 1
    for n in range(10):
        text = step(data, 1 - data)
        assert text.startswith(f'iteration 1/1  loss 1.000  lr 1.0e-01  data {data:.2g} s  step {1 - data:.2g} s\n')
        assert ('more train_dataloader.num_workers than 2 may help' in text) == (binds and n == 9)
    for after_validation in (hook.after_val_epoch, hook.before_train_epoch):
        now[0] += 1000
        after_validation(None)
        assert 'the loader binds' not in step(data, 1 - data)
    hook.after_train(None)
    assert capsys.readouterr().err == (f'a step took 1 s on average: {data:.2g} s to wait for data ({data:.0%}), '
                                       f'{1 - data:.2g} s for model, optimizer and hooks\n')


def test_the_table_of_normalized_values_is_exact():
    from subquad.tools.data.image_sets import NormalizedTensor, build_transform
    options = dict(input_size=(3, 32, 24), crop_pct=1.0)
    fast, plain = build_transform(options), timm.data.create_transform(**options)
    assert any(isinstance(step, NormalizedTensor) for step in fast.transforms)
    rng = np.random.default_rng(0)
    for mode in ('RGB', 'YCbCr'):
        image = Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).convert(mode)
        if mode == 'RGB':
            assert torch.equal(fast(image), plain(image)) and fast(image).shape == (3, 32, 24)
        else:                                                    # another mode takes torchvision's way
            step = next(step for step in fast.transforms if isinstance(step, NormalizedTensor))
            assert torch.equal(step(image), step.normalize(step.convert(image)))
    erased = build_transform(dict(input_size=(3, 32, 32), is_training=True, re_prob=1.))
    assert erased(Image.new('RGB', (40, 40))).unique().numel() > 3


# ---- loggers

@pytest.mark.parametrize('name', settings.LOGGERS)
def test_a_missing_package_is_one_error_before_anything_is_written(name, images, tmp_path, monkeypatch):
    kind, package = settings.LOGGERS[name]
    monkeypatch.setattr(settings, 'find_spec', lambda _: None)
    work = tmp_path / 'run'
    fails([*folder_arguments(images, work), '--log-to', name], f'^{kind} needs {package}, which is not installed: '
          f'pip install {package}$')
    config = tmp_path / 'config.py'
    config.write_text(f"_base_ = 'ppma-tiny_folder.py'\nvisualizer = dict(type='Visualizer', vis_backends=["
                      f"dict(type='{kind}')])\n".replace("'ppma", f"'{_configs()}/ppma"))
    fails(folder_arguments(images, work, config=str(config)), f'{kind} needs {package}')
    assert not work.exists()


def _configs():
    from subquad.tools.engine.config import find
    return find('ppma-tiny_folder').parent


def test_curves_go_to_the_logger(images, tmp_path, monkeypatch):
    """A stand-in for the package receives what MMEngine's backend sends."""
    calls, package = [], type(sys)('mlflow')
    package.__spec__ = sys.__spec__
    package.get_experiment_by_name = lambda name: None
    for name in ('set_tracking_uri', 'create_experiment', 'set_experiment', 'set_tags', 'log_params', 'log_metrics',
                 'log_metric', 'log_text', 'log_artifact', 'start_run', 'end_run'):
        setattr(package, name, lambda *args, name=name, **kwargs: calls.append((name, args)))
    package.active_run = lambda: None
    monkeypatch.setitem(sys.modules, 'mlflow', package)
    assert train.main([*folder_arguments(images, tmp_path), '--log-to', 'mlflow']) == 0
    logged = {key for name, args in calls if name == 'log_metrics' for key in args[0]}
    assert {'loss', 'data_time', 'time', 'accuracy/top1'} <= logged | {args[0] for name, args in calls
                                                                      if name == 'log_metric'}
    assert (tmp_path / 'last.safetensors').exists()


@pytest.mark.parametrize('metrics, line', [
    ({'coco/bbox_mAP': 0.25, 'coco/bbox_mAP_l': -1}, 'validation  coco/bbox_mAP 0.250'),
    ({}, 'validation  no metrics: the model found nothing in any image')], ids=len)
def test_every_validation_prints_a_line(metrics, line, capsys):
    """MMDetection returns no metrics if a model detects nothing."""
    ProgressHook().after_val_epoch(None, metrics)
    assert capsys.readouterr().err == line + '\n'
