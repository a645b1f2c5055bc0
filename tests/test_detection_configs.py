"""The configs of detectors: they build, their recipe is the published one, and they count what the papers report."""
import functools
import json
from pathlib import Path

import pytest
import timm
import torch
import yaml
from torch import nn

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')

import mmengine.config.utils
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope

from subquad.tools import stats
from subquad.tools.cli import UserError
from subquad.tools.config import configs_folder, load
from subquad.tools.stats_config import REPORTED, count_config

FOLDER = configs_folder() / 'detection'
NAMES = sorted(path.stem for path in FOLDER.glob('*.py'))
# The papers' rows with MACs, and the count that is nearest.
ROWS = {
    'mask-rcnn_ppma-t_fpn_1x_coco': 'macs_with_norms', 'mask-rcnn_ppma-s_fpn_1x_coco': 'macs_with_norms',
    'mask-rcnn_ppma-b_fpn_1x_coco': 'macs_with_norms',
    'upernet_ppma-t_160k_ade20k-512x512': 'macs', 'upernet_ppma-s_160k_ade20k-512x512': 'macs',
    'upernet_ppma-b_160k_ade20k-512x512': 'macs',
    'ssdlite_mobilevitv2-050_coco-320': 'macs', 'ssdlite_mobilevitv2-075_coco-320': 'macs_of_weights',
    'ssdlite_mobilevitv2-175_coco-320': 'macs_with_norms',
    'deeplabv3_mobilevitv2-075_ade20k-512x512': 'macs_with_norms',
    'deeplabv3_mobilevitv2-200_ade20k-512x512': 'macs_with_norms',
    'pspnet_mobilevitv2-050_ade20k-512x512': 'macs_with_norms', 'pspnet_mobilevitv2-175_ade20k-512x512': 'macs'}
# Exact parameters without the auxiliary head, multiply-adds of the weights, and fvcore's count, both in G: measured on
# the authors' own code (cvnets).
CVNETS = {
    'ssdlite_mobilevitv2-050_coco-320': (2_035_395, 0.8907, 0.9164),
    'ssdlite_mobilevitv2-075_coco-320': (3_584_955, 1.8012, 1.8393),
    'ssdlite_mobilevitv2-175_coco-320': (14_923_163, 8.8655, 8.9532),
    'deeplabv3_mobilevitv2-075_ade20k-512x512': (9_576_455, 39.67, 40.03),
    'deeplabv3_mobilevitv2-200_ade20k-512x512': (34_022_495, 146.32, 146.95),
    'pspnet_mobilevitv2-050_ade20k-512x512': (3_616_911, 15.11, 15.39),
    'pspnet_mobilevitv2-175_ade20k-512x512': (22_494_951, 95.84, 96.42)}


config_of = functools.lru_cache(None)(load)


@pytest.fixture(scope='module', autouse=True)
def metafiles_read_once():
    """mmengine reads MMDetection's hundred metafiles anew for each base of each config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmengine.config.utils, 'load', functools.lru_cache(None)(mmengine.config.utils.load))
        yield


def build(config):
    with DefaultScope.overwrite_default_scope(config.default_scope), torch.device('meta'):
        return MODELS.build(config.model)


@pytest.mark.parametrize('name', NAMES)
def test_every_config_builds_and_its_parts_fit(name):
    model = build(config_of(name))
    levels, strides = model.backbone.out_channels, model.backbone.out_strides
    if model.with_neck and hasattr(model.neck, 'lateral_convs'):
        assert model.neck.in_channels == levels
        head = getattr(model, 'rpn_head', None) or model.bbox_head
        assert [pair[0] for pair in head.prior_generator.strides][:len(strides)] == strides
    if getattr(model, 'with_roi_head', False):
        extractors = model.roi_head.bbox_roi_extractor
        extractors = extractors if isinstance(extractors, nn.ModuleList) else [extractors]
        assert all(e.featmap_strides == strides for e in extractors)
    assert all(p.requires_grad for p in model.parameters())


def test_the_folder_has_the_networks_of_the_papers():
    sizes = [f'{kind}_{name}-{size}_fpn_{schedule}_coco' for size in 'tsb' for kind, name, schedule in (
        ('mask-rcnn', 'ppma', '1x'), ('mask-rcnn', 'ppma', '3x-ms'), ('cascade-mask-rcnn', 'ppma', '3x-ms'),
        ('retinanet', 'ppma', '1x'), ('mask-rcnn', 'myo', '1x'))]
    assert {*sizes, 'mask-rcnn_mobilevitv2-100_fpn_1x_coco'} <= {*NAMES}


@pytest.mark.parametrize('name, epochs', [('mask-rcnn_ppma-t_fpn_1x_coco', 12), ('retinanet_ppma-b_fpn_1x_coco', 12),
                                          ('cascade-mask-rcnn_ppma-s_fpn_3x-ms_coco', 36),
                                          ('mask-rcnn_mobilevitv2-100_fpn_1x_coco', 12)])
def test_recipe(name, epochs):
    config = config_of(name)
    assert config.train_cfg.max_epochs == epochs and config.train_dataloader.batch_size == 2
    assert config.auto_scale_lr.base_batch_size == 16
    warm_up, steps = config.param_scheduler
    assert warm_up.type == 'LinearLR' and (steps.milestones, steps.end) == (
        ([8, 11], 12) if epochs == 12 else ([27, 33], 36))
    shape = {12: 'Resize', 36: 'RandomChoice'}[epochs]
    assert shape in [step.type for step in config.train_dataloader.dataset.pipeline]
    model = build(config)
    with DefaultScope.overwrite_default_scope('mmdet'):
        optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    decays = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    norms = {id(p) for m in model.modules() if isinstance(m, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm))
             for p in m.parameters()}
    assert norms and all(decays[id(p)] == (0 if id(p) in norms else 0.05) for p in model.parameters())
    assert {group['lr'] for group in optimizer.param_groups} == {1e-4}


def test_weights_and_colours_are_the_classifiers():
    pretrained = {'model.backbone.init_cfg.type': 'Pretrained', 'model.backbone.init_cfg.checkpoint': 'file'}
    config = load('mask-rcnn_ppma-t_fpn_1x_coco', pretrained)
    assert build(config).backbone.init_cfg == dict(type='Pretrained', checkpoint='file')
    for name in ('mask-rcnn_ppma-t_fpn_1x_coco', 'mask-rcnn_mobilevitv2-100_fpn_1x_coco'):
        config = config_of(name)
        assert config.model.backbone.get('init_cfg') is None and config.model.data_preprocessor.bgr_to_rgb
        mean = torch.tensor(config.model.data_preprocessor.mean) / 255
        std = torch.tensor(config.model.data_preprocessor.std) / 255
        ours = timm.get_pretrained_cfg('ppma_tiny' if 'ppma' in name else 'subquad_mobilevitv2_100')
        assert torch.allclose(torch.stack([mean, std]), torch.tensor([ours.mean, ours.std]), atol=1e-4)


def test_every_row_with_macs_is_tried():
    assert {name for name, figures in REPORTED.items() if 'gmacs' in figures} == {*ROWS}


@pytest.mark.parametrize('name', ROWS)
def test_the_papers_figures(name):
    row = count_config(name)
    theirs = row['reported_by_authors']
    assert row['size'] == ([800, 1280] if 'rcnn' in name else [512, 2048] if 'upernet' in name
                           else [320, 320] if 'ssd' in name else [512, 512])
    whole = row['parameters'] + ('upernet' in name) * row['parameters_of_auxiliary_head']
    digits = 0 if 'ppma' in name else 1
    assert round(whole / 1e6, digits) == theirs['parameters_M']
    assert row['nearest_count'] == ROWS[name] and abs(row['deviation_percent']) < 1
    assert row[ROWS[name]] / 1e9 == pytest.approx(theirs['gmacs'] * (1 + row['deviation_percent'] / 100), rel=1e-4)
    if name in CVNETS:
        parameters, weights, norms = CVNETS[name]
        assert row['parameters'] == parameters
        assert row['macs_of_weights'] / 1e9 == pytest.approx(weights, rel=5e-4)
        assert row['macs_with_norms'] / 1e9 == pytest.approx(norms, rel=1e-3)      # fvcore counts average pooling, too


def test_heads_are_counted():
    """By hand: box heads on 1000 regions, mask heads on 100, three stages of each in a cascade."""
    small = {'model.backbone.arch': 'test', 'model.neck.in_channels': [32, 48, 64, 96]}
    one, three = (count_config(f'{name}_coco', 64, 64, **small)['macs_of_weights']
                  for name in ('mask-rcnn_ppma-t_fpn_1x', 'cascade-mask-rcnn_ppma-t_fpn_3x-ms'))
    shared = 256 * 7 * 7 * 1024 + 1024 * 1024 + 1024 * 81
    box, agnostic = (1000 * (shared + 1024 * n) for n in (320, 4))
    mask = 100 * (4 * 256 * 256 * 9 * 14 * 14 + 256 * 256 * 4 * 14 * 14 + 256 * 80 * 28 * 28)
    assert three - one == 3 * agnostic - box + 2 * mask
    assert count_config('mask-rcnn_ppma-t_fpn_1x_coco', 64, 64, **small, **{
        'model.roi_head.mask_head': None, 'model.roi_head.mask_roi_extractor': None})['macs_of_weights'] == one - mask


def test_table_json_and_other_sizes(capsys):
    stats.main(['mask-rcnn_ppma-t_fpn_1x_coco', 'test_ppma', 'deeplabv3_mobilevitv2-050_ade20k-512x512'])
    table = capsys.readouterr().out
    for words in ('800x1280', '32,935,856', '33 M, 218 G (with norms +0.01 %)', 'mask AP', '64x64', '487,182',
                  '6,308,495 + 240,790', 'mIoU 31.93'):
        assert words in ' '.join(table.split()), table
    path = str(FOLDER / 'mask-rcnn_test-ppma_shapes.py')
    stats.main([path, '--size', '100x128', '--json', '--set', 'model.backbone.paths=none'])
    row, = json.loads(capsys.readouterr().out)
    assert row['size'] == [128, 128] and row['options'] == {'model.backbone.paths': 'none'}         # padded
    assert row['reported_by_authors'] == {} and 'nearest_count' not in row
    smaller = count_config('ssdlite_mobilevitv2-050_coco-320', 256, 256)
    assert smaller['reported_by_authors']['gmacs'] == 0.9 and 'nearest_count' not in smaller


def test_a_users_config_of_the_same_name(tmp_path):
    own = tmp_path / 'mask-rcnn_ppma-t_fpn_1x_coco.py'
    own.write_text(f"_base_ = '{FOLDER / own.name}'\nmodel = dict(backbone=dict(arch='test'), "
                   "neck=dict(in_channels=[32, 48, 64, 96]))\n")
    assert count_config(str(own), 64, 64)['reported_by_authors'] == {}


@pytest.mark.parametrize('arguments, words', [
    (['mask-rcnn_ppma-x_fpn_1x_coco'], ['no config file', 'mask-rcnn_ppma-t_fpn_1x_coco']),
    (['ppma_tiny', 'nowhere/mask-rcnn_ppma-t.py'], ['nowhere/mask-rcnn_ppma-t.py', 'mask-rcnn_ppma-t_fpn_1x_coco']),
    (['test-ppma_digits'], ['trains a classifier', 'subquad stats test_ppma']),
    (['mask-rcnn_test-ppma_shapes'], ['cannot tell the image size', '--size']),
    (['mask-rcnn_ppma-t_fpn_1x_coco', '--set', 'model.backbone.arch=huge'], ["'tiny', 'small', 'base'", "'huge'"]),
    (['mask-rcnn_ppma-t_fpn_1x_coco', '--set', 'modle.backbone.arch=tiny'], ["no 'modle'", 'model']),
    (['mask-rcnn_ppma-t_fpn_1x_coco', '--set', 'model.roi_head.type=DoubleHeadRoIHead',
      'model.roi_head.reg_roi_scale_factor=1.3'], ['CascadeRoIHead', 'DoubleHeadRoIHead'])])
def test_mistakes(arguments, words):
    with pytest.raises(UserError) as caught:
        stats.main(arguments)
    message = str(caught.value)
    assert all(word in message for word in words) and '\n' not in message, message


def test_metafile_and_readme_have_the_reported_figures():
    models = {model['Name']: model for model in yaml.safe_load((FOLDER / 'metafile.yml').read_text())['Models']}
    readme = (FOLDER / 'README.md').read_text()
    assert {*models} == {name for name in NAMES if not name.endswith('_shapes')}
    for name, model in models.items():
        assert model['Config'] == f'configs/detection/{name}.py'
        theirs, metadata = REPORTED.get(name, {}), model['Metadata']
        found = {key: value for result in model.get('Results', []) for key, value in result['Metrics'].items()}
        assert found == {key.replace('_', ' '): theirs[key] for key in ('box_AP', 'mask_AP') if key in theirs}
        assert (metadata.get('Parameters (M)'), metadata.get('FLOPs (G)')) == (theirs.get('parameters_M'),
                                                                               theirs.get('gmacs'))
        assert bool(theirs) == ('the authors' in metadata.get('Reported By', ''))
        assert config_of(name).train_cfg.max_epochs == metadata['Epochs']
        line, = (line for line in readme.splitlines() if f'({name}.py)' in line)
        assert all(f' {value} ' in line for value in theirs.values()), line
    assert all(Path(FOLDER, f'{name}.py').is_file() for name in models)
