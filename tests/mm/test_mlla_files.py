"""Detectors and segmenters with MLLA: the authors' names and recipes, and the libraries' own loaders."""
import pytest
import torch

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import build_on_meta
from mmdet.apis import init_detector
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmseg.apis import init_model
from pairwise import slow
from torch import nn

from subquad.backbones.mm.published_keys import to_published_keys, translate_keys
from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools.engine.config import load

CONFIGS = [row.config for row in WEIGHTS.values() if row.format == 'mlla' and row.config]
SMALL = {'mask-rcnn-narrow_test-ppma_shapes': init_detector, 'upernet_test-ppma_shapes': init_model}


def _small(name):
    """A config with the structure of the published model and the small backbone."""
    config = load(name)
    config.model.backbone = dict(type='MLLA', arch='test')
    if 'rcnn' in name:
        config.model.neck.in_channels = [16, 32, 48, 64]
    else:
        config.model.decode_head.in_channels = [16, 32, 48, 64]
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
    assert inner == {'patch_embed', 'layers', 'norm0', 'norm1', 'norm2', 'norm3'}
    assert 'backbone.layers.2.blocks.1.attn.rope.rotations' in theirs
    torch.save(dict(state_dict=theirs, meta={}), tmp_path / 'latest.pth')
    found = SMALL[name](config.copy(), str(tmp_path / 'latest.pth'), device='cpu').state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
    for change, message in ((lambda w: w.pop('backbone.norm1.bias'), 'missing'),
                            (lambda w: w.update({'backbone.norm9.bias': torch.zeros(4)}), 'not in the model')):
        weights = dict(theirs)
        change(weights)
        with pytest.raises(WeightsError, match=message):
            model.load_state_dict(weights, strict=False)


@pytest.mark.parametrize('name', ['mask-rcnn_mlla-t_fpn_1x-ms_coco', *slow(*CONFIGS[1:])])
def test_published_models_take_every_name_of_their_files(name):
    config = load(name)
    init_default_scope(config.default_scope)
    model = build_on_meta(config)
    state = model.state_dict()
    back = translate_keys(to_published_keys(state, model), model)
    assert {key: value.shape for key, value in back.items()} == {key: value.shape for key, value in state.items()}
    optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
    decays = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    norms = {id(p) for module in model.modules() for p in module.parameters(recurse=False) if isinstance(
        module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)) and module in {*model.backbone.modules()}}
    decay = 0.05 if 'rcnn' in name else 0.01
    assert norms and all(decays[id(p)] == (0 if id(p) in norms else decay) for p in model.parameters())
    rates = [getattr(block.drop_path1, 'drop_prob', 0) for stage in model.backbone.stages for block in stage.blocks]
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.5 if 'upernet' in name else 0.3 if '3x' in name else 0.1)
    if 'rcnn' in name:
        epochs = 36 if '3x' in name else 12
        assert config.train_cfg.max_epochs == config.param_scheduler[1].end == epochs
        assert config.param_scheduler[1].milestones == ([27, 33] if epochs == 36 else [8, 11])
        assert 'RandomChoice' in [step.type for step in config.train_dataloader.dataset.pipeline]
    else:
        assert config.model.test_cfg == dict(mode='whole')
