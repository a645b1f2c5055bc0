"""Recipes of the segmentation configs: names, optimizer groups, learning rates, norms, and the metafile."""
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT

pytest.importorskip('mmseg')

import mmseg
from dense_cases import CONFIGS as FOLDERS
from dense_cases import build_on_meta, load_segmentation
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS, init_default_scope

from subquad.backbones.weights.registry import WEIGHTS

FOLDER = FOLDERS / 'segmentation'
PUBLISHED = {row.config: row for row in WEIGHTS.values() if row.task == 'segmentation' and not row.file}
CONFIGS = sorted(path.stem for path in FOLDER.glob('*.py'))


@functools.lru_cache(None)
def config_of(name):
    """Return a config that is read once; no test changes it."""
    return load_segmentation(name)


@pytest.fixture(autouse=True)
def mmseg_scope():
    init_default_scope('mmseg')


def test_troubleshooting_base_config_loads(tmp_path):
    """The replacement of `mmseg::` in docs/troubleshooting.md works as printed."""
    text = (ROOT / 'docs' / 'troubleshooting.md').read_text()
    base, = re.findall(r"^(_base_ = __import__\('mmseg'\).*)$", text, re.MULTILINE)
    backbone = "dict(_delete_=True, type='PPMA')"
    (tmp_path / 'own.py').write_text(f'{base}\nmodel = dict(pretrained=None, backbone={backbone})\n')
    model = Config.fromfile(tmp_path / 'own.py').model
    assert model.decode_head.type == 'UPerHead' and model.backbone == dict(type='PPMA')


@pytest.mark.slow
def test_troubleshooting_command_runs_get_flops(tmp_path):
    """The command in docs/troubleshooting.md that imports subquad before a script works as printed."""
    text = (ROOT / 'docs' / 'troubleshooting.md').read_text()
    code, = re.findall(r'^python -c "(.*)" get_flops.py CONFIG$', text, re.MULTILINE)
    script = Path(mmseg.__path__[0]) / '.mim' / 'tools' / 'analysis_tools' / 'get_flops.py'
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code, script, FOLDER / 'upernet_test-ppma_shapes.py',
                           '--shape', '64', '64'], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0 and 'Flops:' in done.stdout, done.stderr[-2000:]


def test_config_names_state_batch_and_length():
    for name in CONFIGS:
        if name.endswith('_shapes'):
            continue
        config = config_of(name)
        gpus, images, length, unit = re.fullmatch(r'\w+?_[\w-]+_(\d+)xb(\d+)-(\d+)([ke])_[\w-]+', name).groups()
        assert config.train_dataloader.batch_size == int(images)
        assert config.auto_scale_lr.base_batch_size == int(gpus) * int(images)
        cfg = config.train_cfg
        assert (cfg.max_iters == int(length) * 1000) if unit == 'k' else (cfg.max_epochs == int(length))


def decays_of(config):
    """Return the network and the weight decay of each parameter by name."""
    model = build_on_meta(config)
    optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
    by_id = {id(parameter): group['weight_decay'] for group in optimizer.param_groups for parameter in group['params']}
    return model, {name: by_id[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize('name', ['upernet_ppma-b_8xb2-160k_ade20k-512x512',
                                  'upernet_ppma-t_8xb1-160k_cityscapes-1024x1024'])
def test_ppma_weight_decay_follows_the_authors_names(name):
    """Parameters called "norm" by PPMA's authors have no decay; BatchNorm of the stem and the heads has decay."""
    model, decays = decays_of(config_of(name))
    norms = {f'{path}.{kind}' for path, module in model.named_modules() for kind in ('weight', 'bias')
             if isinstance(module, (torch.nn.modules.batchnorm._BatchNorm, torch.nn.LayerNorm))}
    decayed = {name for name in norms if decays[name]}
    assert len(decayed) == 34
    assert decayed == {name for name in norms if name.startswith('backbone.stem.') or '_head.' in name}
    assert {name for name in decays if not decays[name]} == norms - decayed
    assert set(decays.values()) == {0, 0.05}


def test_mobilevitv2_has_no_weight_decay_on_norms_and_biases():
    _, decays = decays_of(config_of('pspnet_mobilevitv2-100_4xb4-120e_ade20k-512x512'))
    model = build_on_meta(config_of('pspnet_mobilevitv2-100_4xb4-120e_ade20k-512x512'))
    assert all(decays[name] == (0 if parameter.ndim == 1 else 1e-4) for name, parameter in model.named_parameters())


def test_batch_norms_are_synchronized_as_published():
    sync = torch.nn.SyncBatchNorm
    for name in CONFIGS:
        config = config_of(name)
        if re.match('(upernet|fpn)_(ppma|myo|lcsm)-t', name):
            model = build_on_meta(config)
            assert config.get('sync_bn') is None and not any(isinstance(m, sync) for m in model.backbone.modules())
            for head in [model.decode_head] + ([model.auxiliary_head] if model.with_auxiliary_head else []):
                norms = [m for m in head.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
                assert norms and all(isinstance(m, sync) for m in norms)
        elif 'mobilevitv2' in name:
            assert config.get('sync_bn') == (None if name.endswith('_shapes') else 'torch'), name


def test_validation_intervals_are_the_published_ones():
    for name in CONFIGS:
        if name.startswith('upernet_ppma') and not name.endswith('_shapes'):
            assert config_of(name).train_cfg.val_interval == (4000 if 'cityscapes' in name else 16000)


def schedule_of(config):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], config.optim_wrapper.optimizer.lr)
    return optimizer, [PARAM_SCHEDULERS.build(dict(cfg, optimizer=optimizer)) for cfg in config.param_scheduler]


def test_learning_rate_schedule_of_upernet():
    """The rate falls linearly to 0 and is multiplied by a warm-up over 1,500 iterations, as in MMCV 1."""
    optimizer, schedulers = schedule_of(config_of('upernet_ppma-t_8xb2-160k_ade20k-512x512'))
    total, warm, ratio = 160_000, 1500, 1e-6
    for step in range(3001):
        expected = 6e-5 * (1 - step / total) * (1 - (1 - step / warm) * (1 - ratio) if step < warm else 1)
        assert optimizer.param_groups[0]['lr'] == pytest.approx(expected, rel=1e-3), step
        [scheduler.step() for scheduler in schedulers]


def test_learning_rate_schedules_of_mobilevitv2():
    """After a warm-up, the rate is a cosine of the epoch, not of the iteration."""
    def rates(name, epochs, iterations):
        config = config_of(name)
        optimizer, schedulers = schedule_of(config)
        seen = []
        for _ in range(epochs):
            for _ in range(iterations):
                seen.append(optimizer.param_groups[0]['lr'])
                [scheduler.step() for scheduler in schedulers if not scheduler.by_epoch]
            [scheduler.step() for scheduler in schedulers if scheduler.by_epoch]
        return np.array(seen).reshape(epochs, iterations)

    def cosine(epochs, highest, lowest):
        return lowest + (highest - lowest) * (1 + np.cos(np.pi * np.arange(epochs) / epochs)) / 2
    ade = rates('deeplabv3_mobilevitv2-050_4xb4-120e_ade20k-512x512', 120, 2)
    np.testing.assert_allclose(ade, np.repeat(cosine(120, 0.02, 0.0002)[:, None], 2, 1))
    voc = rates('pspnet_mobilevitv2-050_4xb32-50e_voc12-coco-512x512', 50, 600)
    np.testing.assert_allclose(voc[0, [0, 499]], [5e-5, 5e-4], rtol=0.01)
    np.testing.assert_allclose(voc[1:, 0], cosine(50, 5e-4, 1e-6)[1:])
    np.testing.assert_allclose(voc[1:].std(1), 0, atol=1e-9)


def test_metafile_lists_all_configs():
    yaml = pytest.importorskip('yaml')
    content = yaml.safe_load((FOLDER / 'metafile.yml').read_text())
    entries = {entry['Name']: entry for entry in content['Models']}
    assert list(entries) == [entry['Name'] for entry in content['Models']]
    assert set(entries) == {name for name in CONFIGS if 'shapes' not in name}
    collections = {collection['Name'] for collection in content['Collections']}
    for name, entry in entries.items():
        assert entry['Config'] == f'configs/segmentation/{name}.py' and entry['In Collection'] in collections
        assert ('Results' in entry) == ('Reported By' in entry)
        # The paper reports one network for which the authors' model zoo has no file.
        assert ('Results' in entry) == (name in PUBLISHED) or name.startswith('pspnet_mobilevitv2-175_4xb32'), name
        assert ('Published File' in entry) == (name in PUBLISHED and not PUBLISHED[name].page), name
        if 'Published File' in entry:
            assert PUBLISHED[name].source.endswith(entry['Published File'])
    metrics = {name: entry['Results'][0]['Metrics'] for name, entry in entries.items() if 'Results' in entry}
    assert metrics['upernet_ppma-b_8xb2-160k_ade20k-512x512'] == {'mIoU': 52.3, 'mIoU(ms+flip)': 53.0}
    assert metrics['deeplabv3_mobilevitv2-200_4xb4-120e_ade20k-512x512'] == {'mIoU': 40.94}
    assert len(metrics) == len(PUBLISHED) + 1
