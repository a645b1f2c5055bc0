"""Detectors and segmenters of RMT's authors: their names, strict loading, and the families that they are not."""
import pytest
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import UPERNET, build_small_detector
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import load_checkpoint as lax_load
from ppma_files import authors_name

from subquad.backbones.mm.checkpoints import load_checkpoint
from subquad.backbones.mm.published_keys import to_published_keys
from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.convert import convert
from subquad.tools.engine.config import load


def _segmenter(**backbone):
    init_default_scope('mmseg')
    model = load(UPERNET).model
    model.backbone.update(backbone)
    return MODELS.build(model)


@pytest.mark.parametrize('build', [build_small_detector, _segmenter], ids=['mask_rcnn', 'upernet'])
def test_published_detectors_and_segmenters_load_strictly(build, tmp_path):
    model = build(type='RMT')
    for value in model.state_dict().values():
        value.normal_() if value.is_floating_point() else value.fill_(7)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    theirs = to_published_keys(state, model)
    inner = [key.removeprefix('backbone.') for key in theirs if key.startswith('backbone.')]
    buffers = [f'layers.{n}.Relpos.{name}' for n in range(4) for name in ('angle', 'decay')]
    ours = [key.removeprefix('backbone.') for key in state if key.startswith('backbone.')]
    assert sorted(inner) == sorted([*(authors_name(key).replace('outnorm', 'extra_norms.') for key in ours), *buffers])
    torch.save(dict(state_dict=theirs, meta={}), tmp_path / 'epoch_12.pth')
    for load_file in (lax_load, load_checkpoint):
        other = build(type='RMT')
        load_file(other, str(tmp_path / 'epoch_12.pth'))
        assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    convert(tmp_path / 'epoch_12.pth', tmp_path / 'ours.safetensors', model)
    convert(tmp_path / 'ours.safetensors', tmp_path / 'back.pth', model, 'rmt')
    back = torch.load(tmp_path / 'back.pth')['state_dict']
    assert back.keys() == theirs.keys() and all(torch.equal(back[key], theirs[key]) for key in back)
    with pytest.raises(WeightsError, match='weights of RMT .*, not of PPMA'):
        lax_load(build(type='PPMA'), str(tmp_path / 'epoch_12.pth'))
    del theirs['backbone.extra_norms.2.weight']
    torch.save(dict(state_dict=theirs), tmp_path / 'less.pth')
    with pytest.raises(WeightsError, match='output_norms.2.weight'):
        lax_load(other, str(tmp_path / 'less.pth'))
