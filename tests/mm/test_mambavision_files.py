"""Detectors and segmenters with MambaVision: the authors' names, windows and recipes, and both libraries' loaders."""
import pytest
import torch

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import build_on_meta
from mmdet.apis import init_detector
from mmengine.registry import MODELS, init_default_scope
from mmseg.apis import init_model
from pairwise import slow

from subquad.backbones.mm.published_keys import to_published_keys, translate_keys
from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools.engine.config import load

CONFIGS = [row.config for row in WEIGHTS.values() if row.format == 'mambavision' and row.config]
SMALL = {'mask-rcnn-narrow_test-ppma_shapes': init_detector, 'upernet_test-ppma_shapes': init_model}


def _small(name):
    """A config with the structure of a published model and the small backbone."""
    config = load(name)
    config.model.backbone = dict(type='MambaVision', arch='test')
    part = config.model.neck if 'rcnn' in name else config.model.decode_head
    part.in_channels = [12, 24, 48, 96]
    init_default_scope(config.default_scope)
    return config


@pytest.mark.parametrize('name', SMALL)
def test_published_names_load_by_the_libraries(name, tmp_path):
    config = _small(name)
    model = MODELS.build(config.model)
    for value in model.state_dict().values():
        value.normal_() if value.is_floating_point() else value.fill_(7)
    state = model.state_dict()
    theirs = to_published_keys(state, model)
    inner = {key.split('.')[1] for key in theirs if key.startswith('backbone.')}
    assert inner == {'patch_embed', 'levels', 'outnorm0', 'outnorm1', 'outnorm2', 'outnorm3'}
    torch.save(dict(state_dict=theirs, meta={}), tmp_path / 'latest.pth')
    found = SMALL[name](config.copy(), str(tmp_path / 'latest.pth'), device='cpu').state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
    for change, message in ((lambda w: w.pop('backbone.outnorm1.bias'), 'missing'),
                            (lambda w: w.pop('backbone.levels.2.blocks.0.mixer.conv1d_x.weight'), 'missing'),
                            (lambda w: w.update({'backbone.outnorm9.bias': torch.zeros(4)}), 'not in the model')):
        weights = dict(theirs)
        change(weights)
        with pytest.raises(WeightsError, match=message):
            model.load_state_dict(weights, strict=False)


@pytest.mark.parametrize('name', ['upernet_mambavision-s_8xb2-160k_ade20k-512x512', *slow(*(
    name for name in CONFIGS if 'mambavision-s_' not in name))])
def test_published_models_take_every_name_of_their_files(name):
    config = load(name)
    init_default_scope(config.default_scope)
    model = build_on_meta(config)
    state = model.state_dict()
    back = translate_keys(to_published_keys(state, model), model)
    assert {key: value.shape for key, value in back.items()} == {key: value.shape for key, value in state.items()}
    windows = [stage.size for stage in model.backbone.stages[2:]]
    assert windows == ([112, 56] if 'rcnn' in name else [160, 56] if 'mambavision-s' in name else [64, 32])
    last = model.backbone.stages[3].blocks[-1]
    assert last.drop_path2.drop_prob == pytest.approx(0.2)
    assert 'rcnn' in name or config.model.test_cfg == dict(mode='whole')
