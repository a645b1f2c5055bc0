"""Backbones of detectors and segmenters: arguments, frozen stages, activation checkpointing, weights, layer decay."""
import copy
import json
import logging

import pytest
import timm
import torch
from families import FAMILIES
from helpers import DATA
from pairwise import pairwise
from safetensors import safe_open
from torch import nn

pytest.importorskip('mmcv')
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_checkpoint as lax_load
from mmengine.runner.checkpoint import save_checkpoint
from torch.nn.modules.batchnorm import _BatchNorm

import subquad.backbones.mm as mm
from subquad.backbones.weights import WeightsError, save_weights

FAMILIES = {cls.__name__: (name, 5 if name == 'test_mobilevitv2' else 4) for name, cls in FAMILIES.items()}


def _build(family, **kwargs):
    return MODELS.build(dict(type=family, arch='test', **kwargs))


@pytest.fixture(autouse=True)
def silence():
    """Switch off MMEngine's log, which has a line for each weight."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize('family', FAMILIES)
def test_feature_maps_equal_the_classifiers_stages(family):
    name, count = FAMILIES[family]
    classifier = timm.create_model(name).eval()
    backbone = _build(family, out_indices=range(count), output_norms=False).eval()
    backbone.load_state_dict({k: v for k, v in classifier.state_dict().items() if not k.startswith('head.')})
    x = torch.rand(2, 3, 75, 98)
    expected = classifier.forward_intermediates(x, norm=True, intermediates_only=True)
    levels = backbone(x)
    assert backbone.out_channels == [y.shape[1] for y in levels]
    for level, other in zip(levels, expected, strict=True):
        torch.testing.assert_close(level, other)
    keys = {k for k in classifier.state_dict() if not k.startswith('head.')}
    assert set(backbone.state_dict()) == keys, 'detectors and classifiers share their key names'


@pairwise('family, indices', FAMILIES, [(0,), (3,), (1, 3), (0, 1, 2), (0, 1, 2, 3)], together=1)
def test_out_indices_select_levels(family, indices):
    whole = _build(family, out_indices=(0, 1, 2, 3), output_norms=True).eval()
    part = _build(family, out_indices=indices, output_norms=True).eval()
    part.load_state_dict({k: v for k, v in whole.state_dict().items() if k in part.state_dict()})
    x = torch.rand(1, 3, 64, 96)
    for n, level in zip(indices, part(x), strict=True):
        torch.testing.assert_close(level, whole(x)[n])
    sum(y.sum() for y in part.train()(torch.rand(2, 3, 64, 64))).backward()
    unused = [name for name, p in part.named_parameters() if p.grad is None]
    assert not unused, 'a parameter without gradient stops distributed training'


@pytest.mark.parametrize('family', FAMILIES)
def test_output_norms_normalize_each_level(family):
    backbone = _build(family, output_norms=True).eval()
    for level, channels in zip(backbone(torch.rand(1, 3, 64, 64)), backbone.out_channels, strict=True):
        assert level.shape[1] == channels
        torch.testing.assert_close(level.mean(1), torch.zeros_like(level[:, 0]), atol=1e-5, rtol=0)
    assert backbone.output_norms[-1].eps == 1e-5


@pairwise('family, frozen', FAMILIES, [-1, 0, 1, 3], together=1)
def test_frozen_stages_get_no_gradients_and_stay_in_eval_mode(family, frozen):
    backbone = _build(family, frozen_stages=frozen, drop_path_rate=0.5).train()
    still = [backbone.stem, *list(backbone.stages)[:frozen]] if frozen >= 0 else []
    before = copy.deepcopy(backbone.state_dict())
    sum(y.square().sum() for y in backbone(torch.rand(2, 3, 64, 64))).backward()
    frozen_ids = {id(p) for module in still for p in module.parameters()}
    for name, p in backbone.named_parameters():
        assert (p.grad is None) == (id(p) in frozen_ids) != p.requires_grad, name
    for module in still:
        for child in module.modules():
            assert not child.training
    moved = {name for name, value in backbone.state_dict().items()
             if name.endswith('running_mean') and not torch.equal(value, before[name])}
    assert not any(name.startswith(('stem', *(f'stages.{n}.' for n in range(frozen)))) for name in moved) or frozen < 0
    assert bool(moved) == any(isinstance(module, _BatchNorm) and module.training for module in backbone.modules())


@pytest.mark.parametrize('family', [name for name in FAMILIES if name not in ('VMamba', 'Vim')])    # without BatchNorm
def test_norm_eval_keeps_batch_norm_in_eval_mode(family):
    backbone = _build(family, norm_eval=True).train()
    norms = [module for module in backbone.modules() if isinstance(module, _BatchNorm)]
    assert norms and not any(norm.training for norm in norms) and backbone.training
    assert all(p.requires_grad for p in backbone.parameters())
    assert all(norm.training for norm in _build(family).train().modules() if isinstance(norm, _BatchNorm))


@pytest.mark.parametrize('family', FAMILIES)
def test_activation_checkpointing_keeps_outputs_and_gradients(family):
    results = []
    backbone = _build(family, norm_eval=True).train()
    checkpointed = _build(family, norm_eval=True, with_cp=True).train()
    checkpointed.load_state_dict(backbone.state_dict())
    for model in (backbone, checkpointed):
        levels = model(torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1)))
        sum(y.square().mean() for y in levels).backward()
        results.append([*levels, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize('family', FAMILIES)
def test_bfloat16_autocast_trains(family):
    # A random MobileViTv2 amplifies rounding errors from level to level, as timm's does; the test network does so most.
    backbone = MODELS.build(dict(type=family, arch='050' if family == 'MobileViTv2' else 'test')).eval()
    x = torch.rand(2, 3, 64, 96)
    with torch.autocast('cpu', torch.bfloat16):
        levels = backbone(x)
        loss = sum(y.float().square().mean() for y in levels)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())
    with torch.no_grad():
        for level, exact in zip(levels, backbone(x)):
            limit = 0.2 if family == 'MobileViTv2' else 0.02
            assert (level.float() - exact).norm() <= limit * exact.norm()


def test_output_stride_of_mobilevitv2():
    for stride in (8, 16, 32):
        backbone = _build('MobileViTv2', output_stride=stride)
        assert backbone.out_strides == [4, 8, min(16, stride), stride]
        assert [64 // y.shape[2] for y in backbone(torch.rand(2, 3, 64, 64))] == backbone.out_strides


@pytest.mark.parametrize('family', FAMILIES)
def test_roi_align_reads_the_maps_in_the_right_layout(family):
    """mmcv's RoIAlign ignores strides, so maps must be contiguous."""
    from mmcv.ops import roi_align
    levels = _build(family).eval()(torch.rand(2, 3, 64, 96))
    convolution = nn.Conv2d(levels[0].shape[1], 4, 1)
    regions = torch.tensor([[0., 2., 1., 14., 11.], [1., 0., 3., 9., 15.]])
    for y in (levels[0], convolution(levels[0])):
        torch.testing.assert_close(roi_align(y, regions, (3, 3)), roi_align(y.clone(
            memory_format=torch.contiguous_format), regions, (3, 3)))


# ---- weights

def _first_stage(model):
    return [value for name, value in model.state_dict().items() if name.startswith('stages.0.')]


@pytest.mark.parametrize('family', FAMILIES)
def test_init_cfg_loads_classifiers_and_detectors(family, tmp_path):
    classifier = timm.create_model(FAMILIES[family][0])
    for module in classifier.modules():                # values that differ from initialization
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, _BatchNorm)):
            nn.init.normal_(module.weight)
    save_weights(classifier, tmp_path / 'c.safetensors')
    detector = nn.Module()
    detector.backbone = _build(family, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'c.safetensors')))
    detector.backbone.init_weights()
    for ours, theirs in zip(_first_stage(detector.backbone), _first_stage(classifier), strict=True):
        assert torch.equal(ours, theirs)
    # The same weights load from a detector's file.
    path = str(tmp_path / 'detector.pth')
    save_checkpoint(dict(state_dict=detector.state_dict(), meta={}), path)
    for options in (dict(prefix='backbone.'), dict(prefix='backbone'), {}):
        other = _build(family, init_cfg=dict(type='Pretrained', checkpoint=path, **options))
        other.init_weights()
        for name, value in other.state_dict().items():
            assert torch.equal(value, detector.backbone.state_dict()[name]), name


def test_init_cfg_translates_published_keys(tmp_path):
    """The authors' classifier has other keys, a Relpos buffer, and a head that detectors do not have."""
    with safe_open(DATA / 'ppma_layerscale_nonsquare.safetensors', 'pt') as file:
        state = {key.removeprefix('state/'): file.get_tensor(key) for key in file.keys() if key.startswith('state/')}
        config = json.loads(file.metadata()['config'])
    state.update((f'{key.removesuffix("running_mean")}num_batches_tracked', torch.tensor(0)) for key in list(state)
                 if key.endswith('running_mean'))       # published files have them
    attention = ['crisscross' if on else 'full' for on in config['chunkwise_recurrents']]
    torch.save({'model': {k: v for k, v in state.items() if not k.startswith('outnorm')}}, tmp_path / 'published.pth')
    arch = dict(dims=config['embed_dims'], depths=config['depths'], num_heads=config['num_heads'],
                mlp_ratios=config['mlp_ratios'], attention=attention,
                layer_scale=config.get('layerscales', (False,) * 4))
    backbone = mm.PPMA(arch, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'published.pth')))
    backbone.init_weights()
    theirs = state['layers.0.blocks.0.retention.q_proj.weight']
    assert torch.equal(backbone.state_dict()['stages.0.blocks.0.mixer.q.weight'], theirs)


@pytest.mark.parametrize('change, message', [
    (lambda w: w.pop('stem.conv1.conv.weight'), r'1 keys missing \(.*stem.conv1.conv.weight'),
    (lambda w: w.update({'stem.conv1.konv.weight': w.pop('stem.conv1.conv.weight')}), 'stem.conv1.conv.weight'),
    (lambda w: w.update({'stem.conv1.conv.weight': torch.zeros(1)}), r'1 shapes differ .*\(1,\) instead of'),
    (lambda w: w.pop('output_norms.1.weight'), 'output_norms.1.weight'),
    (lambda w: w.clear(), 'keys missing')])
def test_every_way_of_loading_a_backbone_is_strict(change, message, tmp_path):
    backbone = _build('PPMA')
    weights = dict(backbone.state_dict())
    change(weights)
    before = copy.deepcopy(backbone.state_dict())
    path = str(tmp_path / 'w.pth')
    torch.save(dict(state_dict={f'backbone.{k}': v for k, v in weights.items()}), path)
    detector = nn.Module()
    detector.backbone = backbone
    with pytest.raises(WeightsError, match=message):
        lax_load(detector, path)                       # used by a Runner's load_from and resume
    with pytest.raises(WeightsError, match=message):
        backbone.load_state_dict(weights, strict=False)
    if weights:
        torch.save(weights, path)
        with pytest.raises(WeightsError, match=message):
            _build('PPMA', init_cfg=dict(type='Pretrained', checkpoint=path)).init_weights()
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), 'no weight may change'


def test_init_cfg_errors_name_the_file(tmp_path):
    save_weights(timm.create_model('test_myo'), tmp_path / 'myo.safetensors')
    (tmp_path / 'cut.safetensors').write_bytes((tmp_path / 'myo.safetensors').read_bytes()[:5000])
    for checkpoint, options, message in (
            ('myo.safetensors', {}, 'is not a checkpoint of this PPMA'), ('cut.safetensors', {}, 'damaged'),
            ('none.pth', {}, 'no weight file'),
            ('myo.safetensors', dict(prefix='neck.'), "begin with 'neck.'.*stages.")):
        cfg = dict(type='Pretrained', checkpoint=str(tmp_path / checkpoint), **options)
        with pytest.raises(WeightsError, match=message):
            _build('PPMA', init_cfg=cfg).init_weights()
    with pytest.raises(WeightsError, match='https://nowhere/x.pth is an address: download the file first'):
        _build('PPMA', init_cfg=dict(type='Pretrained', checkpoint='https://nowhere/x.pth')).init_weights()


@pytest.mark.parametrize('kwargs, message', [
    (dict(arch='huge'), "arch must be one of 'tiny', 'small', 'base', 'test', .* or a dict, got 'huge'"),
    (dict(out_indices=(2, 1)), r'out_indices must be increasing stage numbers from 0 to 3, got \(2, 1\)'),
    (dict(out_indices=()), 'out_indices'), (dict(out_indices=(0, 4)), 'out_indices'),
    (dict(out_indices=(1, 1)), 'increasing'),
    (dict(frozen_stages=5), 'frozen_stages must be from -1 to 4, got 5'), (dict(drop_path_rate=2.), 'drop_path_rate'),
    (dict(attention='none'), 'attention'), (dict(deep_stem=True), 'deep_stem')])
def test_invalid_backbone_arguments(kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        _ = MODELS.build({**dict(type='PPMA', arch='test'), **kwargs})


# ---- optimizers

class _Detector(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(2, 2)


@pytest.mark.parametrize('family', FAMILIES)
def test_layer_decay_sets_learning_rates_per_block(family):
    model = _Detector(_build(family, output_norms=True, frozen_stages=0))
    wrapper = mm.LayerDecayConstructor(
        dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.1)),
        dict(layer_decay=0.5, norm_decay_mult=0.))(model)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(group['params'][0])]: group for group in wrapper.optimizer.param_groups}
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
    rates = {name: group['lr'] for name, group in found.items()}
    assert rates['head.weight'] == 1 and rates['backbone.output_norms.3.weight'] == 1
    part = '' if family == 'MobileViTv2' else 'blocks.'
    blocks = [f'{i}.{part}{j}' for i, stage in enumerate(model.backbone.stages)
              for j in range(len(getattr(stage, 'blocks', stage)))
              ] if family != 'Vim' else range(4)
    for n, block in enumerate(reversed(blocks), 1):
        rate = {rates[name] for name in rates if name.startswith(f'backbone.stages.{block}.')}
        assert rate == {0.5 ** n}, block
    for name, group in found.items():
        if name.removeprefix('backbone.') in model.backbone.no_weight_decay() or 'output_norms' in name:
            assert group['weight_decay'] == 0, name
    assert found['head.weight']['weight_decay'] == 0.1


@pytest.mark.parametrize('decay', [0, 1.5, '0.9'])
def test_layer_decay_out_of_range(decay):
    with pytest.raises(ValueError, match=f'layer_decay must be above 0 and at most 1, got {decay!r}'):
        mm.LayerDecayConstructor(dict(optimizer=dict(type='SGD', lr=1.)), dict(layer_decay=decay))


def test_layer_decay_needs_group_matcher():
    constructor = mm.LayerDecayConstructor(dict(optimizer=dict(type='SGD', lr=1.)), dict(layer_decay=0.9))
    with pytest.raises(ValueError, match='needs a backbone with group_matcher, got Linear'):
        constructor(_Detector(nn.Linear(2, 2)))


@pytest.mark.parametrize('family', ['PPMA', 'RMT', 'Myo', 'LCSM'])
def test_hybrids_load_weights_of_the_same_mixers_only(family, tmp_path):
    options = dict(mixers=['tree', 'eos', 'depthwise', 'attention'], attention_share=0.25)
    classifier = timm.create_model(FAMILIES[family][0], **options).eval()
    save_weights(classifier, tmp_path / 'hybrid.safetensors')
    pretrained = dict(type='Pretrained', checkpoint=str(tmp_path / 'hybrid.safetensors'))
    backbone = MODELS.build(dict(type=family, arch='test', **options, init_cfg=pretrained, output_norms=False)).eval()
    backbone.init_weights()
    x = torch.randn(1, 3, 64, 96)
    for found, wanted in zip(backbone(x), classifier.forward_intermediates(x, intermediates_only=True)):
        torch.testing.assert_close(found, wanted)
    for other in (dict(mixers='polyline'), dict(attention_share=1.0)):
        backbone = MODELS.build(dict(type=family, arch='test', **other, init_cfg=pretrained))
        before = copy.deepcopy(backbone.state_dict())
        with pytest.raises(WeightsError, match=f'not a checkpoint of this {family}: .*the model has {list(other)[0]}='):
            backbone.init_weights()
        assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
    backbone = MODELS.build(dict(type='PPMA', arch='tiny', mixers='polyline', init_cfg=dict(
        type='Pretrained', checkpoint='subquad://ppma_tiny.in1k')))
    with pytest.raises(WeightsError, match="ppma_tiny.in1k was trained .* does not fit mixers='polyline'"):
        backbone.init_weights()
