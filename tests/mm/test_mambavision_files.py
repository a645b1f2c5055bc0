"""Detectors and segmenters with MambaVision: windows, and the names in their files."""
import pytest

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import build_published
from pairwise import slow

from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools.engine.config import load

CONFIGS = [row.config for row in WEIGHTS.values() if row.format == 'mambavision' and row.config]


@pytest.mark.parametrize('name', ['upernet_mambavision-s_8xb2-160k_ade20k-512x512', *slow(*(
    name for name in CONFIGS if 'mambavision-s_' not in name))])
def test_published_models_take_every_name_of_their_files(name):
    config = load(name)
    model = build_published(config)
    windows = [stage.size for stage in model.backbone.stages[2:]]
    assert windows == ([112, 56] if 'rcnn' in name else [160, 56] if 'mambavision-s' in name else [64, 32])
    assert model.backbone.stages[3].blocks[-1].drop_path2.drop_prob == pytest.approx(0.2)
    assert 'rcnn' in name or config.model.test_cfg == dict(mode='whole')
