"""Detectors and segmenters of VMamba's authors: their names, strict loading, weight decay, and all configs."""
import pytest
import timm
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import MASK_RCNN, UPERNET, build_on_meta
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import load_checkpoint as lax_load
from pairwise import slow
from vmamba_files import authors_name, authors_state

from subquad.backbones.mm import VMamba
from subquad.backbones.mm.checkpoints import load_checkpoint
from subquad.backbones.mm.published_keys import to_published_keys, translate_keys
from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.convert import convert
from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools.engine.config import load

CONFIGS = {row.config: row for row in WEIGHTS.values() if row.format == 'vmamba' and row.config}
FIRST = ('mask-rcnn_vmamba-t-s1l8_fpn_1x_coco', 'upernet_vmamba-vanilla-b_4xb4-160k_ade20k-512x512')
CHANNELS = [16, 32, 64, 128]


def _detector(**backbone):
    init_default_scope('mmdet')
    model = load(MASK_RCNN).model
    model.backbone.update(type='VMamba', arch='test', **backbone)
    model.neck.in_channels = CHANNELS
    return MODELS.build(model)


def _segmenter(**backbone):
    init_default_scope('mmseg')
    model = load(UPERNET).model
    model.backbone.update(type='VMamba', arch='test', **backbone)
    model.decode_head.in_channels = CHANNELS
    return MODELS.build(model)


@pytest.mark.parametrize('build, vanilla', [(_detector, False), (_segmenter, True)], ids=['mask_rcnn', 'upernet'])
def test_published_detectors_and_segmenters_load_strictly(build, vanilla, tmp_path):
    model = build(vanilla=vanilla)
    for value in model.state_dict().values():
        value.normal_() if value.is_floating_point() else value.fill_(7)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    theirs = to_published_keys(state, model)
    inner = {key.removeprefix('backbone.'): x for key, x in theirs.items() if key.startswith('backbone.')}
    expected = authors_state(model.backbone)
    assert inner.keys() == expected.keys() and all(torch.equal(inner[key], expected[key]) for key in inner)
    torch.save(dict(state_dict=theirs, meta={}), tmp_path / 'epoch_12.pth')
    for load_file in (lax_load, load_checkpoint):
        other = build(vanilla=vanilla)
        load_file(other, str(tmp_path / 'epoch_12.pth'))
        assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    convert(tmp_path / 'epoch_12.pth', tmp_path / 'ours.safetensors', model)
    convert(tmp_path / 'ours.safetensors', tmp_path / 'back.pth', model, 'vmamba')
    back = torch.load(tmp_path / 'back.pth')['state_dict']
    assert back.keys() == theirs.keys() and all(torch.equal(back[key], theirs[key]) for key in back)
    with pytest.raises(WeightsError, match='ssm_ratio=1, .*and this model has .*ssm_ratio=2'):
        lax_load(build(vanilla=vanilla, ssm_ratio=2.), str(tmp_path / 'epoch_12.pth'))
    del theirs['backbone.layers.1.blocks.0.op.Ds']
    torch.save(dict(state_dict=theirs), tmp_path / 'less.pth')
    with pytest.raises(WeightsError, match='stages.1.blocks.0.mixer.scan.D'):
        lax_load(other, str(tmp_path / 'less.pth'))


def test_a_classifiers_file_starts_a_backbone(tmp_path):
    """It may lack the output norms, all at once, and has a classifier to spare."""
    classifier = timm.create_model('test_vmamba')
    state, key = authors_state(classifier), 'stages.2.blocks.1.mixer.scan.A_log'
    torch.save({'model': state}, tmp_path / 'ckpt.pth')
    for indices in ((0, 1, 2, 3), (0, 2)):
        backbone = VMamba('test', out_indices=indices, init_cfg=dict(type='Pretrained',
                                                                     checkpoint=str(tmp_path / 'ckpt.pth')))
        with pytest.warns(UserWarning, match='it has no output norms; they start untrained'):
            backbone.init_weights()
        assert torch.equal(backbone.state_dict()[key], classifier.state_dict()[key])
    state['layers.0.blocks.0.op.out_norm.weight'] = state.pop('layers.0.blocks.0.norm.weight')[:3]
    torch.save({'model': state}, tmp_path / 'bad.pth')
    backbone = VMamba('test', init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'bad.pth')))
    with pytest.raises(WeightsError, match='keys missing .stages.0.blocks.0.norm1.weight.*shapes differ'):
        backbone.init_weights()


@pytest.mark.parametrize('name', [*FIRST, *slow(*(name for name in CONFIGS if name not in FIRST))])
def test_every_config_builds_the_network_of_its_file(name):
    """Names and shapes of the whole network, its recipe, and weight decay by the authors' names."""
    config, row = load(name), CONFIGS[name]
    init_default_scope(config.default_scope)
    model = build_on_meta(config)
    classifier = timm.create_model(row.arch, device='meta')
    vanilla, expected = 'vanilla' in row.arch, authors_state(classifier)
    theirs = to_published_keys(model.state_dict(), model)
    inner = {key.removeprefix('backbone.'): x.shape for key, x in theirs.items() if key.startswith('backbone.')}
    assert {key: shape for key, shape in inner.items() if not key.startswith('outnorm')} == {
        key: value.shape for key, value in expected.items() if not key.startswith('classifier')}
    assert [inner[f'outnorm{n}.bias'] for n in range(4)] == [(width,) for width in model.backbone.out_channels]
    assert translate_keys(theirs, model).keys() == model.state_dict().keys()
    optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
    decays = {id(value): group['weight_decay'] for group in optimizer.param_groups for value in group['params']}
    full = 0.05 if row.task == 'detection' else 0.01
    for key, value in model.backbone.named_parameters():
        assert decays[id(value)] == (0 if 'norm' in authors_name(key, vanilla) else full), key
    assert {group['lr'] for group in optimizer.param_groups} == {1e-4 if row.task == 'detection' else 6e-5}
    assert config.param_scheduler[0].end == (1000 if row.task == 'detection' else 1500)
    if row.task == 'detection':
        epochs = 36 if '3x' in row.tag else 12
        assert config.train_cfg.max_epochs == config.param_scheduler[1].end == epochs
        assert config.param_scheduler[1].milestones == ([8, 11] if epochs == 12 else [27, 33])
        assert config.train_dataloader.batch_size == (1 if 'bs8' in row.tag else 2)
    else:
        assert config.model.test_cfg == dict(mode='whole') and config.param_scheduler[1].begin == 1500
