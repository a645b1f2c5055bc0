"""A backbone in MMPretrain's ImageClassifier, with MMPretrain's own train and test tools."""
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from PIL import Image

pytest.importorskip('mmpretrain')
import mmpretrain

from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import load

CONFIG = ROOT / 'configs' / 'mmpretrain' / 'image-classifier_ppma-t_8xb128-300e_imagenet.py'
SMALL = """
_base_ = {config!r}
model = dict(backbone=dict(arch='test'), head=dict(in_channels=96, num_classes=2))
data_preprocessor = dict(num_classes=2)
loader = dict(num_workers=0, persistent_workers=False)
folder = dict(_delete_=True, type='CustomDataset', data_root={data!r})
train_dataloader = dict(batch_size=8, dataset=dict(data_prefix='train', pipeline=_base_.train_pipeline, **folder),
                        **loader)
val_dataloader = dict(dataset=dict(data_prefix='val', pipeline=_base_.test_pipeline, **folder), **loader)
test_dataloader = val_dataloader
val_evaluator = dict(topk=1)
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=2)
param_scheduler = None
"""


@pytest.fixture
def small(tmp_path):
    """The config with the small network and dark and light images; it learns them in eight steps."""
    rng = np.random.default_rng(0)
    for split, count in (('train', 16), ('val', 4)):
        for level, name in enumerate(('dark', 'light')):
            folder = tmp_path / 'data' / split / name
            folder.mkdir(parents=True)
            for n in range(count):
                pixels = (rng.integers(0, 90, (40, 50, 3)) + 160 * level).astype('uint8')
                Image.fromarray(pixels).save(folder / f'{n}.png')
    file = tmp_path / 'small.py'
    file.write_text(SMALL.format(config=str(CONFIG), data=str(tmp_path / 'data')))
    return file


def _run(tool, monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [tool, *map(str, arguments)])
    runpy.run_path(str(Path(mmpretrain.__file__).parent / '.mim' / 'tools' / tool), run_name='__main__')


def test_trains_and_tests_with_the_stock_tools(small, tmp_path, monkeypatch):
    _run('train.py', monkeypatch, small, '--work-dir', tmp_path / 'run', '--no-persistent-workers')
    _run('test.py', monkeypatch, small, tmp_path / 'run' / 'epoch_2.pth', '--work-dir', tmp_path / 'test',
         '--cfg-options', 'test_dataloader.persistent_workers=False')
    scalars = next((tmp_path / 'test').glob('*/*.json')).read_text()
    assert json.loads(scalars)['accuracy/top1'] == 100.0
    with pytest.raises(UserError, match=r"small.py is a config of MMPretrain: use MMPretrain's tools/train.py and"):
        load(str(small))


def test_builds_the_network_of_the_config():
    """The backbone is ppma_tiny without its head; a linear layer follows the pooled features."""
    import timm
    from mmengine.config import Config
    from mmpretrain.registry import MODELS
    config = Config.fromfile(CONFIG)
    model = MODELS.build(config.model)
    keys = {f'backbone.{key}' for key in timm.create_model('ppma_tiny').state_dict() if not key.startswith('head.')}
    assert set(model.state_dict()) - keys == {'backbone.output_norms.3.weight', 'backbone.output_norms.3.bias',
                                              'head.fc.weight', 'head.fc.bias'}
