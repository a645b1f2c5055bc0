"""Data that timm's readers open: tar files, streams, and what the user's mistakes say."""
import io
import json
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import timm.data
import torch
from mmengine.registry import DATASETS
from PIL import Image
from timm.data import IterableImageDataset
from timm.data.readers.shared_count import SharedCount
from training_cases import fails, folder_arguments

from subquad.backbones.weights import read_checkpoint
from subquad.tools import predict, test, train
from subquad.tools.data import timm_sets
from subquad.tools.engine.config import find

CLASSES = ('dark', 'light')


def _png(label, n):
    pixels = np.full((40, 40, 3), 40 + 160 * label + n, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, 'png')
    return file.getvalue()


def write_tar(path, damaged=()):
    """CLASS/N.png, 4 images each, in a tar file."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, 'w') as tar:
        for label, name in enumerate(CLASSES):
            for n in range(4):
                info, data = tarfile.TarInfo(f'{name}/{n}.png'), _png(label, n)
                data = data[:40] if f'{name}/{n}' in damaged else data
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def tars(tmp_path):
    write_tar(tmp_path / 'data' / 'train.tar')
    write_tar(tmp_path / 'data' / 'val.tar', damaged=['light/1'])
    return tmp_path / 'data'


def test_tar_files_are_read_as_folders_are(tars):
    data = DATASETS.build(dict(type='TimmDataset', root=str(tars / 'train.tar')))
    assert data.classes == [*CLASSES] and len(data) == 8
    found = [data[n] for n in range(8)]
    assert [item['label'] for item in found] == [0] * 4 + [1] * 4
    assert [np.asarray(item['inputs'])[0, 0, 0] for item in found] == [40, 41, 42, 43, 200, 201, 202, 203]
    data = DATASETS.build(dict(type='TimmDataset', root=str(tars / 'val.tar')))
    assert np.asarray(data[5]['inputs'])[0, 0, 0] == 202, 'the next one in training'
    data.evaluated = True
    assert data[5]['label'] == -100


def test_training_and_testing_on_tar_files(tars, tmp_path, capsys):
    arguments = folder_arguments(tars, tmp_path / 'run')
    assert train.main(arguments) == 0
    error = capsys.readouterr().err
    assert 'on 8 images of 2 classes, 8 to validate on' in error and 'light/1.png is not an image' in error
    assert '1 image could not be read' in error
    weights = str(tmp_path / 'run' / 'last.safetensors')
    assert read_checkpoint(weights)[1]['classes'] == [*CLASSES]
    assert test.main(['ppma-tiny_folder', weights, '--data', str(tars), '--model', 'test_ppma', '--json', '--report',
                      '--cfg-options', 'test_dataloader.num_workers=2', 'test_dataloader.batch_size=4']) == 0
    classes = json.loads(capsys.readouterr().out)['report']['classes']
    assert {row['name']: row['count'] for row in classes} == {'dark': 4, 'light': 3}


class _Reader:
    """A stream of n images as timm's readers give them, which shuffles by seed and epoch and distributes them."""

    def __init__(self, n, is_training, seed, several=False, names=()):
        self.num_samples, self.is_training, self.seed, self.several = n, is_training, seed, several
        self.class_to_idx = {name: label for label, name in enumerate(names)}
        self.batch_size, self.num_workers, self.dist_rank, self.dist_num_replicas = 1, 1, 0, 1
        self.epoch = SharedCount()

    def set_epoch(self, epoch):
        self.epoch.value = epoch

    def set_loader_cfg(self, num_workers=None):
        self.num_workers = max(1, num_workers)

    def __len__(self):
        return -(-self.num_samples // self.batch_size) * self.batch_size

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        order = [n % self.num_samples for n in range(len(self) if self.is_training else self.num_samples)]
        if self.is_training:
            np.random.default_rng([self.seed, self.epoch.value]).shuffle(order)
        for n in order[start::step]:
            image = Image.open(io.BytesIO(_png(n % 2, n)))
            yield image, ([0, 1] if n == 4 else [n % 2]) if self.several else n % 2


@pytest.fixture
def streamed(monkeypatch):
    """A function that makes create_dataset return a stream, and the list of what it was asked for."""
    asked = []

    def use(**options):
        def create(name, root, split, **given):
            asked.append(dict(name=name, root=root, split=split, **given))
            reader = _Reader(7 if split == 'train' else 5, given['is_training'], given['seed'], **options)
            return IterableImageDataset(root, reader=reader)
        monkeypatch.setattr(timm.data, 'create_dataset', create)
        monkeypatch.setattr(timm_sets, 'find_spec', lambda name: SimpleNamespace())
        return asked
    return use


@pytest.mark.parametrize('workers', [0, 2])
def test_training_on_a_stream(workers, streamed, tmp_path, capsys):
    asked = streamed()
    arguments = folder_arguments('wds/https://host/shards', tmp_path / 'run', 'model.num_classes=2',
                           "train_dataloader.dataset.split=train", 'val_dataloader.dataset.split=a-{0..1}.tar|5',
                           f'val_dataloader.num_workers={workers}', epochs=2)
    assert train.main([*arguments, '--dry-run']) == 0
    assert '7 training samples of 2 classes' in capsys.readouterr().out
    asked.clear()
    assert train.main(arguments) == 0
    train_set, val_set = asked
    assert (train_set['name'], train_set['root'], train_set['split']) == ('wds/https://host/shards',
                                                                          'https://host/shards', 'train')
    assert train_set['is_training'] and not val_set['is_training'] and val_set['split'] == 'a-{0..1}.tar|5'
    error = capsys.readouterr().err
    assert 'on 8 images of 2 classes, 5 to validate on' in error and '2 epochs of 2 steps' in error
    assert read_checkpoint(tmp_path / 'run' / 'last.safetensors')[1]['classes'] == ['class 0', 'class 1']


def test_a_stream_has_another_order_in_each_epoch_and_for_each_seed(streamed):
    streamed()
    seen = {}
    for seed in (0, 1):
        data = DATASETS.build(dict(type='TimmDataset', name='wds/', is_training=True, seed=seed))
        for epoch in (0, 1):
            data.set_epoch(epoch)
            seen[seed, epoch] = tuple(int(np.asarray(item['inputs'])[0, 0, 0]) for item in data)
    assert len(set(seen.values())) == 4


def test_several_labels_for_each_image(streamed, tmp_path, capsys):
    """They are trained by the binary cross-entropy, also mixed, and `predict` gives each class its own probability."""
    streamed(several=True, names=CLASSES)
    config = tmp_path / 'several.py'
    config.write_text(
        f'_base_ = {str(find("ppma-tiny_folder"))!r}\n'
        "model = dict(bce=dict(), data_preprocessor=dict(type='MixupPreprocessor'))\n"
        'train_dataloader = dict(drop_last=True)\n'
        "val_evaluator = dict(_delete_=True, type='MultiLabelMetric')\ntest_evaluator = val_evaluator\n")
    several = [f'{part}_dataloader.dataset.multi_label=True' for part in ('train', 'val', 'test')]
    work = tmp_path / 'run'
    assert train.main(folder_arguments('hfids/x/y', work, *several, config=str(config))) == 0
    assert 'multi_label/mAP' in capsys.readouterr().err
    weights = str(work / 'best.safetensors')
    assert read_checkpoint(weights)[1]['multi_label'] is True
    assert test.main([str(config), weights, '--data', 'hfids/x/y', '--model', 'test_ppma', '--json', '--cfg-options',
                      'test_dataloader.num_workers=0', *several]) == 0
    assert 0 < json.loads(capsys.readouterr().out)['multi_label/mAP'] <= 100
    (tmp_path / 'a.png').write_bytes(_png(0, 0))
    assert predict.main([weights, str(tmp_path / 'a.png'), '--json']) == 0
    rows = json.loads(capsys.readouterr().out)[0]['classes']
    assert abs(sum(row['probability'] for row in rows) - 1) > 1e-3, 'they do not add up to 1'
    fails([*folder_arguments('hfids/x/y', tmp_path / 'other', *several)],
          r'several classes each, which needs model.bce=dict\(\)')
    fails([*folder_arguments('hfids/x/y', tmp_path / 'other')], 'has the labels .*: set multi_label=True')


@pytest.mark.parametrize('data, message', [
    ('wds/photos', 'wds/photos needs webdataset: pip install webdataset'),
    ('hfds/x/y', 'hfds/x/y needs datasets: pip install datasets'),
    ('TFDS/x', 'TFDS/x needs tensorflow_datasets: pip install tensorflow tensorflow-datasets')])
def test_a_missing_package_is_one_sentence(data, message, tmp_path, monkeypatch):
    monkeypatch.setattr(timm_sets, 'find_spec', lambda name: None)
    fails(['ppma-tiny_folder', '--data', data, '--work-dir', str(tmp_path / 'run')], message)
    fails(['test-ppma_digits', '--data', data], 'needs a config of image folders, such as ppma-tiny_folder')


def test_what_a_stream_must_know(streamed, tmp_path, monkeypatch):
    streamed()
    fails(folder_arguments('wds/x', tmp_path / 'run'), 'give their number with --cfg-options model.num_classes=N')
    monkeypatch.setattr(_Reader, '__init__', lambda self, *_, **__: setattr(self, 'num_samples', 0))
    fails(folder_arguments('wds/x', tmp_path / 'run'), 'wds/x train: the number of images is unknown; give it as num_')


def test_shards_of_webdataset(tmp_path):
    pytest.importorskip('webdataset')
    for shard in range(2):
        with tarfile.open(tmp_path / f'a-{shard}.tar', 'w') as tar:
            for n in range(4):
                for ending, data in (('png', _png(n % 2, 4 * shard + n)), ('cls', str(n % 2).encode())):
                    info = tarfile.TarInfo(f'{shard}{n}.{ending}')
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    options = dict(type='TimmDataset', name='wds/', root=str(tmp_path), split='a-{0..1}.tar|8')
    found = [(item['label'], int(np.asarray(item['inputs'])[0, 0, 0])) for item in DATASETS.build(options)]
    assert found == [(n % 2, 40 + 160 * (n % 2) + n) for n in range(8)]
    assert len(list(DATASETS.build(dict(options, is_training=True)))) == 8
