"""Detectors and segmenters with MLLA: recipes, and the names in their files."""
import pytest

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import build_published, check_schedule, weight_decays
from pairwise import slow
from torch import nn

from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools.engine.config import load

CONFIGS = [row.config for row in WEIGHTS.values() if row.format == 'mlla' and row.config]


@pytest.mark.parametrize('name', ['mask-rcnn_mlla-t_fpn_1x-ms_coco', *slow(*CONFIGS[1:])])
def test_published_models_take_every_name_of_their_files(name):
    config = load(name)
    model = build_published(config)
    decays, _ = weight_decays(model, config)
    norms = {id(p) for module in model.backbone.modules() if isinstance(module, (
        nn.modules.batchnorm._BatchNorm, nn.LayerNorm)) for p in module.parameters(recurse=False)}
    decay = 0.05 if 'rcnn' in name else 0.01
    assert norms and all(decays[id(p)] == (0 if id(p) in norms else decay) for p in model.parameters())
    rates = [getattr(block.drop_path1, 'drop_prob', 0) for stage in model.backbone.stages for block in stage.blocks]
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.5 if 'upernet' in name else 0.3 if '3x' in name else 0.1)
    check_schedule(config, '3x' in name)
    steps = [step.type for step in config.train_dataloader.dataset.pipeline]
    assert 'rcnn' not in name or 'RandomChoice' in steps
