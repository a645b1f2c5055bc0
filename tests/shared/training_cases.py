"""What the tests of `subquad train` share: a few images in folders, and how a small network is trained on them."""
import json
import multiprocessing
import os
import sys
import time

import numpy as np
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from PIL import Image
from user_errors import command_error

from subquad.tools import train

# A config with whatever draws random numbers in training, four steps an epoch.
RANDOM_CONFIG = """
_base_ = {base!r}
size = (3, 32, 32)
model = dict(name='test_ppma', drop_path_rate=0.3, data_preprocessor=dict(type='MixupPreprocessor'))
train_dataloader = dict(
    batch_size=2, drop_last=True, num_workers={workers},
    dataset=dict(root={data!r} + '/train', transform=dict(input_size=size)))
val_dataloader = dict(num_workers=0, dataset=dict(root={data!r} + '/val', transform=dict(input_size=size)))
param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True, convert_to_iter_based=True)]
optim_wrapper = dict(accumulative_counts={accumulation})
custom_hooks = [dict(type='EMAHook', momentum=0.3)]
train_cfg = dict(max_epochs={epochs})
"""


def make_images(folder):
    """FOLDER/{train,val}/{dark,light}/*.png, 4 images each."""
    rng = np.random.default_rng(0)
    for part in ('train', 'val'):
        for name, level in (('dark', 40), ('light', 200)):
            (folder / part / name).mkdir(parents=True)
            for n in range(4):
                pixels = rng.integers(level, level + 50, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f'{n}.png')
    return folder


def folder_arguments(images, work, *options, config='ppma-tiny_folder', epochs=1):
    """Two steps an epoch with a small network."""
    return [config, '--data', str(images), '--model', 'test_ppma', '--work-dir', str(work), '--epochs', str(epochs),
            '--cfg-options', 'train_dataloader.batch_size=4', 'train_dataloader.num_workers=0',
            'val_dataloader.num_workers=0', 'train_dataloader.dataset.transform.input_size=(3,32,32)',
            'val_dataloader.dataset.transform.input_size=(3,32,32)', *options]


def fails(arguments, message, main=train.main):
    """Return the message of the UserError, which matches a regular expression, for these arguments."""
    return command_error(main, arguments, match=message)


@HOOKS.register_module(force=True)
class LossFileHook(Hook):
    """Writes the loss of every step to the file {path}.{rank}, as JSON lines."""

    def __init__(self, path):
        self.path = f"{path}.{os.environ.get('RANK', 0)}"

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with open(self.path, 'a') as file:
            file.write(json.dumps(outputs['loss'].item()) + '\n')


def write_random_config(path, images, epochs=3, accumulation=1, workers=0):
    """Write RANDOM_CONFIG for the images of `make_images`, and return its path."""
    from subquad.tools.engine.config import find
    path.write_text(RANDOM_CONFIG.format(base=str(find('ppma-tiny_folder')), data=str(images), epochs=epochs,
                                         accumulation=accumulation, workers=workers))
    return path


def preloaded_processes():
    """Return a multiprocessing context whose processes have loaded what training needs; call their target `run_train`.

    Its server inherits the environment, so that the processes have one thread each.
    """
    before = {name: os.environ.get(name) for name in ('PYTHONPATH', 'OMP_NUM_THREADS')}
    os.environ.update(PYTHONPATH=os.pathsep.join(entry or os.getcwd() for entry in sys.path), OMP_NUM_THREADS='1')
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['training_cases', 'subquad.tools.engine.training.runner',
                                    'subquad.tools.data.registry', 'subquad.tools.engine.registry'])
    from multiprocessing import forkserver
    forkserver.ensure_running()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def run_train(arguments, log, slowly=False, environment=()):
    """Run `subquad train` in this process, with its messages in the file `log`, and exit with its code.

    With `slowly`, checkpoints are written in small pieces with pauses. `environment` holds pairs of name and value.
    """
    from subquad.tools.common.cli import run
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(n, 'w', buffering=1, closefd=False) for n in (1, 2))
    if slowly:
        from subquad.tools.engine.checkpoints import runner_checkpoints
        runner_checkpoints.open = _open_slowly
    run(train.main, [str(argument) for argument in arguments])


def run_in_group(arguments, log):
    """Run `subquad train` as `run_train`, in a process group of its own, as a shell or a job scheduler starts it."""
    os.setpgid(0, 0)
    run_train(arguments, log)


class _SlowFile:
    def __init__(self, file):
        self.file, self.fileno, self.flush = file, file.fileno, file.flush

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        size = len(content) // 20 + 1
        for start in range(0, len(content), size):
            self.file.write(content[start:start + size])
            self.file.flush()
            time.sleep(0.05)


def _open_slowly(path, mode):
    return _SlowFile(open(path, mode))
