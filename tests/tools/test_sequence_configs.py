"""The configs of the sequence network: they load, their networks take their data, and two of them train."""
import gzip
import struct

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS

from subquad.tools import test as test_tool
from subquad.tools import train
from subquad.tools.common.cli import UserError
from subquad.tools.data import sequences  # noqa: F401  (registers the data sets)
from subquad.tools.engine.config import known_configs, load
from subquad.tools.engine.zoo import create

NAMES = [name for name in known_configs() if name.startswith('myo_')]


def network(config, **changes):
    options = {key: value for key, value in config.model.to_dict().items()
               if key not in ('type', 'name', 'label_smoothing', 'data_preprocessor')}
    return create(config.model.name, **{**options, 'dim': 16, 'depth': 1, 'num_heads': 2, **changes})


def test_configs_of_the_papers_tables_exist():
    tasks = ['smnist', 'scifar', 'zmnist', 'zcifar', 'listops', 'pathfinder', 'pathx', 'smnist5k', 'zmnist5k',
             'sdigits', 'zdigits', 'listops-generated', 'listops-short', 'pathfinder-like', 'pathx-like']
    assert sorted(NAMES) == sorted(f'myo_{task}' for task in tasks)
    for task in tasks:
        order = load(f'myo_{task}').model.get('order')
        assert order == {'s': 'snake', 'z': 'morton', 'p': 'snake', 'l': None}[task[0]]


@pytest.mark.parametrize('name', NAMES)
def test_network_and_baseline_take_the_data(name):
    config = load(name)
    dataset = config.train_dataloader.dataset
    if 'root' in dataset:
        side = dict(LRAPathfinder=dataset.get('size'), MNIST=28, CIFAR10=32).get(dataset.type)
        inputs = torch.randint(1, 18, (2, 2048))
        if side:
            inputs = torch.randn(2, config.model.get('in_chans', 3), side, side)
        with pytest.raises(UserError):
            DATASETS.build(dict(dataset, root='nowhere'))
    else:
        counted = {} if dataset.type in ('Digits', 'MNIST5k') else dict(count=2)
        items = DATASETS.build(dict(dataset, **counted))
        inputs = torch.stack([items[n]['inputs'] for n in range(2)])
        assert len(items.classes) == config.model.num_classes
    for mixer in ('tree', 'scan'):
        with torch.no_grad():
            assert network(config, mixer=mixer)(inputs).shape == (2, config.model.num_classes)


def idx(path, array):
    kind = gzip.open if path.suffix == '.gz' else open
    with kind(path, 'wb') as file:
        file.write(struct.pack(f'>HBB{array.ndim}I', 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.mark.parametrize('name, options', [('myo_zmnist', ['model.mixer=scan']),
                                           ('myo_listops-short', ['train_dataloader.dataset.count=64',
                                                                  'val_dataloader.dataset.count=20',
                                                                  'test_dataloader.dataset.count=20'])])
def test_training(name, options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / 'files').mkdir()
    for part, count in (('train', 120), ('t10k', 20)):
        idx(tmp_path / 'files' / f'{part}-images-idx3-ubyte.gz', rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        idx(tmp_path / 'files' / f'{part}-labels-idx1-ubyte', np.arange(count, dtype=np.uint8) % 10)
    small = ['model.dim=16', 'model.depth=1', 'model.num_heads=2', *options]
    arguments = [name, '--cfg-options', *small] + (['--data', 'files'] if 'mnist' in name else [])
    train.main([*arguments, '--epochs', '1'])
    weights = f'runs/{name}/last.safetensors'
    test_tool.main([*arguments[:1], weights, *arguments[1:], '--record', 'results.jsonl'])
    assert 'accuracy/top1' in capsys.readouterr().out
    record = (tmp_path / 'results.jsonl').read_text()
    assert f'"config": "{name}"' in record and '"accuracy/top1"' in record and options[0] in record
