"""Configs for generated shapes: test-time augmentation, confusion matrix, and synchronized norms on CPUs."""
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip('mmcv')
pytest.importorskip('mmseg')

from dense_cases import UPERNET, make_shapes

from subquad.tools import test
from subquad.tools.engine.config import find, load


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """16 training images and 8 test images."""
    return make_shapes(tmp_path_factory.mktemp('dense') / 'shapes', train=16, val=8, size=96)


def test_sync_bn_becomes_batch_norm_on_cpus(data, tmp_path, monkeypatch):
    """PyTorch has no SyncBatchNorm for CPUs, so it becomes BatchNorm, also under torchrun."""
    import socket
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        port = server.getsockname()[1]
    for key, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR='127.0.0.1', MASTER_PORT=port).items():
        monkeypatch.setenv(key, str(value))
    from subquad.tools.engine.training.runner import build_runner
    config = load(UPERNET)
    config.merge_from_dict({'model.decode_head.norm_cfg.type': 'SyncBN',
                            **{f'{part}_dataloader.dataset.data_root': str(data) for part in ('train', 'val')}})
    try:
        runner = build_runner(config, str(tmp_path / 'work'), training=True)
        assert torch.distributed.is_initialized()
        assert not any(isinstance(module, torch.nn.SyncBatchNorm) for module in runner.model.modules())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize('name', [UPERNET, 'deeplabv3_test-mobilevitv2_shapes'])
def test_tta_averages_six_predictions(name, data, tmp_path, capsys):
    """--tta averages over three sizes and their mirror images."""
    from mmengine.registry import MODELS, init_default_scope
    from safetensors.torch import save_file
    init_default_scope('mmseg')
    model = MODELS.build(load(name).model)
    save_file(model.state_dict(), tmp_path / 'weights.safetensors')
    found = []
    for options in ([], ['--tta']):
        assert test.main([name, str(tmp_path / 'weights.safetensors'), '--data', str(data), '--json', *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0].keys() == found[1].keys() and found[0] != found[1]
    transforms = load(name).tta_pipeline[1].transforms
    assert len(transforms[0]) * len(transforms[1]) == 6


def test_mmsegmentation_confusion_matrix_of_shapes(data, tmp_path, monkeypatch):
    """MMSegmentation's tool takes the classes from the data set's type.

    Predictions equal the labels, except for one image that is all background.
    """
    import importlib.util

    import mmseg
    from mmengine.registry import DATASETS, init_default_scope
    folder = Path(mmseg.__path__[0]) / '.mim' / 'tools' / 'analysis_tools'
    spec = importlib.util.spec_from_file_location('confusion_matrix', folder / 'confusion_matrix.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    predictions = tmp_path / 'predictions'
    shutil.copytree(data / 'annotations_seg' / 'val', predictions)
    first = sorted(predictions.iterdir())[0]
    true = np.array(Image.open(first))
    Image.fromarray(np.zeros_like(true)).save(first)
    drawn = []
    monkeypatch.setattr(tool, 'plot_confusion_matrix', lambda matrix, labels, **_: drawn.append((matrix, labels)))
    monkeypatch.setattr(sys, 'argv', ['confusion_matrix.py', str(find(UPERNET)), str(predictions), str(tmp_path),
                                      '--cfg-options', f'test_dataloader.dataset.data_root={data}'])
    init_default_scope('mmseg')
    tool.main()
    (matrix, labels), = drawn
    from subquad.tools.data.shapes import CLASSES
    assert tuple(labels) == ('background', *CLASSES)
    assert matrix.sum() == 8 * 96 * 96 and matrix[1:, 0].sum() == (true > 0).sum() > 0
    assert (matrix - np.diag(np.diag(matrix)))[:, 1:].sum() == 0
    dataset = DATASETS.build({**load(UPERNET).test_dataloader.dataset, 'data_root': str(data)})
    assert len(dataset.METAINFO['palette']) == len(labels)
