"""Detection configs build, follow the published recipes, and have the parameters and MACs that the papers report."""
import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from pairwise import slow
from torch import nn

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')

from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope

from subquad.backbones.weights.registry import WEIGHTS
from subquad.tools import stats
from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import configs_folder, load
from subquad.tools.engine.counting.counting_configs import count_config, reported_figures
from subquad.tools.engine.training import building

FOLDER = configs_folder() / 'detection'
PUBLISHED = {row.config: row for row in WEIGHTS.values() if row.task == 'detection' and not row.file}
NAMES = sorted(path.stem for path in FOLDER.glob('*.py'))
# Configs for which the papers report MACs.
ROWS = [name for name, figures in reported_figures().items() if 'gmacs' in figures]
# Parameters without the auxiliary head, multiply-adds of the weights in G, and fvcore's count in G, all measured with
# the authors' code (cvnets).
CVNETS = {
    'ssdlite_mobilevitv2-050_coco-320': (2_035_395, 0.8907, 0.9164),
    'ssdlite_mobilevitv2-075_coco-320': (3_584_955, 1.8012, 1.8393),
    'ssdlite_mobilevitv2-175_coco-320': (14_923_163, 8.8655, 8.9532),
    'deeplabv3_mobilevitv2-075_4xb4-120e_ade20k-512x512': (9_576_455, 39.67, 40.03),
    'deeplabv3_mobilevitv2-200_4xb4-120e_ade20k-512x512': (34_022_495, 146.32, 146.95),
    'pspnet_mobilevitv2-050_4xb4-120e_ade20k-512x512': (3_616_911, 15.11, 15.39),
    'pspnet_mobilevitv2-175_4xb4-120e_ade20k-512x512': (22_494_951, 95.84, 96.42)}


config_of = functools.lru_cache(None)(load)
pytestmark = pytest.mark.usefixtures('metafiles_read_once')


def build(config):
    with DefaultScope.overwrite_default_scope(config.default_scope), torch.device('meta'):
        return building.build(MODELS, config.model, 'model')


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (n % 5 > 0))
                                  for n, name in enumerate(NAMES)])
def test_config_builds_and_channels_match(name):
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


def test_configs_of_all_published_networks_exist():
    sizes = [f'{kind}_{name}-{size}_fpn_{schedule}_coco' for size in 'tsb' for kind, name, schedule in (
        ('mask-rcnn', 'ppma', '1x'), ('mask-rcnn', 'ppma', '3x-ms'), ('cascade-mask-rcnn', 'ppma', '3x-ms'),
        ('retinanet', 'ppma', '1x'), ('mask-rcnn', 'myo', '1x'), ('mask-rcnn', 'myo', '3x-ms'),
        ('cascade-mask-rcnn', 'myo', '3x-ms'), ('mask-rcnn', 'lcsm', '1x'), ('mask-rcnn', 'lcsm', '3x-ms'))]
    widths = [f'mask-rcnn_mobilevitv2-{width}_fpn_1x_coco' for width in ('050', '100', '150', '200')]
    assert {*sizes, *widths, *STOCK} <= {*NAMES}


def test_loaded_configs_have_no_helper_variables():
    for name in ('mask-rcnn_ppma-t_fpn_3x-ms_coco', 'mask-rcnn_test-ppma_shapes', 'upernet_test-ppma_shapes',
                 'ssdlite_test-mobilevitv2_shapes', 'myo_listops', 'myo_zmnist', 'myo_listops-short'):
        config = config_of(name)
        assert not [key for key in config if key.startswith('_') or key in ('resize', 'crop', 'roi_extractor')]
        assert '_resize' not in config.pretty_text and '_dataset =' not in config.pretty_text


@pytest.mark.parametrize('name, epochs', [('mask-rcnn_ppma-b_fpn_1x_coco', 12), ('retinanet_ppma-b_fpn_1x_coco', 12),
                                          ('cascade-mask-rcnn_ppma-s_fpn_3x-ms_coco', 36),
                                          ('mask-rcnn_mobilevitv2-100_fpn_1x_coco', 12)])
def test_recipe_is_the_published_one(name, epochs):
    config = config_of(name)
    assert config.train_cfg.max_epochs == epochs and config.train_dataloader.batch_size == 2
    assert config.auto_scale_lr.base_batch_size == 16
    warm_up, steps = config.param_scheduler
    assert (warm_up.type, warm_up.begin, warm_up.end, warm_up.start_factor) == ('LinearLR', 0, 500, 0.001)
    assert (steps.milestones, steps.end) == (
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
    # The authors of PPMA exempt names with "norm" from decay; BatchNorm layers of their stem have numbers as names.
    stem = {id(p) for p in model.backbone.stem.parameters()} & norms if 'ppma' in name else set()
    assert len(stem) == (8 if 'ppma' in name else 0) and norms > stem
    assert all(decays[id(p)] == (0 if id(p) in norms - stem else 0.05) for p in model.parameters())
    assert {group['lr'] for group in optimizer.param_groups} == {1e-4}


# Configs with MMDetection's own recipes -> options that make them small enough for a test.
STOCK = {'faster-rcnn_ppma-t_fpn_1x_coco': {}, 'rtmdet-s_ppma-t_8xb32-300e_coco': {},
         'dino-4scale_ppma-t_8xb2-12e_coco': {'model.num_queries': 20},
         'mask2former_ppma-t_8xb2-lsj-50e_coco': {'model.data_preprocessor.batch_augments': None}}


@pytest.mark.slow
@pytest.mark.parametrize('name', STOCK)
def test_stock_detectors_have_finite_losses_and_all_gradients(name):
    """Distributed training needs a gradient for every parameter."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData
    config = load(name, STOCK[name])
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(config.model)
        model.init_weights()
        height, width = 64, 96
        sample = DetDataSample(metainfo=dict(img_shape=(height, width), ori_shape=(height, width),
                                             scale_factor=(1., 1.)))
        sample.gt_instances = InstanceData(bboxes=torch.tensor([[10., 8, 50, 40], [40, 20, 90, 60]]),
                                           labels=torch.tensor([3, 7]))
        if 'mask2former' in name:
            masks = np.zeros((2, height, width), np.uint8)
            masks[0, 8:40, 10:50] = masks[1, 20:60, 40:90] = 1
            sample.gt_instances.masks = BitmapMasks(masks, height, width)
        images = torch.randint(256, (2, 3, height, width), dtype=torch.uint8)
        data = model.data_preprocessor(dict(inputs=list(images), data_samples=[sample, sample.clone()]), training=True)
        losses, _ = model.train().parse_losses(model(**data, mode='loss'))
    losses.backward()
    assert losses.isfinite()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path


def test_building_does_not_change_the_config():
    config = load('dino-4scale_ppma-t_8xb2-12e_coco')
    before = config.model.to_dict()
    for _ in range(2):
        build(config)
    assert config.model.to_dict() == before


def test_stock_detectors_keep_mmdetections_recipes():
    """Learning rates of the backbone and weight decay of norms are MMDetection's, image normalization is PPMA's."""
    for name in STOCK:
        config = config_of(name)
        preprocessor = config.model.data_preprocessor
        assert preprocessor.bgr_to_rgb and [round(mean) for mean in preprocessor.mean] == [124, 116, 104]
        assert config.model.backbone.get('init_cfg') is None and 'http' not in str(config.get('checkpoint'))
    for name, factor, decay, of_norms in (('dino-4scale_ppma-t_8xb2-12e_coco', 0.1, 1e-4, 1e-4),
                                          ('mask2former_ppma-t_8xb2-lsj-50e_coco', 0.1, 0.05, 0),
                                          ('rtmdet-s_ppma-t_8xb32-300e_coco', 1, 0.05, 0)):
        config = config_of(name)
        model = build(config)
        with DefaultScope.overwrite_default_scope('mmdet'):
            optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
        groups = {id(p): group for group in optimizer.param_groups for p in group['params']}
        norms = [p for m in model.backbone.modules() if isinstance(m, (nn.BatchNorm2d, nn.LayerNorm))
                 for p in m.parameters()]
        assert len(norms) > 50
        assert {groups[id(p)]['weight_decay'] for p in norms} == {of_norms}, name
        weights = [p for p in model.backbone.parameters() if p.ndim > 1]
        assert {groups[id(p)]['weight_decay'] for p in weights} == {decay}, name
        rate = config.optim_wrapper.optimizer.lr
        assert {groups[id(p)]['lr'] for p in model.backbone.parameters()} == {rate * factor}, name


def test_init_cfg_and_image_normalization_are_the_classifiers():
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


# The next tests but one counts the smallest Mask R-CNN.
COUNTED = ['upernet_ppma-t_8xb2-160k_ade20k-512x512', 'ssdlite_mobilevitv2-050_coco-320',
           'deeplabv3_mobilevitv2-075_4xb4-120e_ade20k-512x512', 'pspnet_mobilevitv2-050_4xb4-120e_ade20k-512x512']


@pytest.mark.parametrize('name', [*COUNTED, *slow(*(name for name in ROWS if name not in COUNTED))])
def test_counts_are_near_the_reported_ones(name):
    row = count_config(name)
    theirs = row['reported_by_authors']
    assert row['size'] == ([800, 1280] if 'rcnn' in name else [512, 2048] if 'upernet' in name
                           else [320, 320] if 'ssd' in name else [512, 512])
    whole = row['parameters'] + ('upernet' in name) * row['parameters_of_auxiliary_head']
    digits = 0 if isinstance(theirs['parameters_M'], int) else 1
    assert round(whole / 1e6, digits) == theirs['parameters_M']
    assert abs(row['deviation_percent']) < 1
    if name in CVNETS:
        parameters, weights, norms = CVNETS[name]
        assert row['parameters'] == parameters
        assert row['macs_without_attention'] / 1e9 == pytest.approx(weights, rel=5e-4)
        assert row['macs_with_norms'] / 1e9 == pytest.approx(norms, rel=1e-3)      # fvcore counts average pooling, too


def test_macs_of_box_and_mask_heads():
    """Box heads run on 1000 regions and mask heads on 100; a cascade has three of each."""
    small = {'model.backbone.arch': 'test', 'model.neck.in_channels': [32, 48, 64, 96]}
    one, three = (count_config(f'{name}_coco', 64, 64, **small)['macs_without_attention']
                  for name in ('mask-rcnn_ppma-t_fpn_1x', 'cascade-mask-rcnn_ppma-t_fpn_3x-ms'))
    shared = 256 * 7 * 7 * 1024 + 1024 * 1024 + 1024 * 81
    box, agnostic = (1000 * (shared + 1024 * n) for n in (320, 4))
    mask = 100 * (4 * 256 * 256 * 9 * 14 * 14 + 256 * 256 * 4 * 14 * 14 + 256 * 80 * 28 * 28)
    assert three - one == 3 * agnostic - box + 2 * mask
    without_masks = count_config('mask-rcnn_ppma-t_fpn_1x_coco', 64, 64, **small, **{
        'model.roi_head.mask_head': None, 'model.roi_head.mask_roi_extractor': None})
    assert without_masks['macs_without_attention'] == one - mask


def test_stats_table_json_and_sizes(capsys):
    stats.main(['mask-rcnn_ppma-t_fpn_1x_coco', 'test_ppma', 'deeplabv3_mobilevitv2-050_4xb4-120e_ade20k-512x512'])
    table = capsys.readouterr().out
    for words in ('800x1280', '32,935,856', '64x64', '487,182', 'mask AP',
                  '33 M, 218 G (without attention products, with norms: +0.01 %)',
                  '6,308,495 + 240,790', 'mIoU 31.93'):
        assert words in ' '.join(table.split()), table
    path = str(FOLDER / 'mask-rcnn_test-ppma_shapes.py')
    stats.main([path, '--size', '100x128', '--json', '--cfg-options', 'model.backbone.paths=none'])
    row, = json.loads(capsys.readouterr().out)
    assert row['size'] == [128, 128] and row['options'] == {'model.backbone.paths': 'none'}         # padded
    assert row['reported_by_authors'] == {} and 'nearest_count' not in row
    smaller = count_config('ssdlite_mobilevitv2-050_coco-320', 256, 256)
    assert smaller['reported_by_authors']['gmacs'] == 0.9 and 'nearest_count' not in smaller


def test_user_config_with_a_published_name_has_no_reported_values(tmp_path):
    own = tmp_path / 'mask-rcnn_ppma-t_fpn_1x_coco.py'
    own.write_text(f"_base_ = '{FOLDER / own.name}'\nmodel = dict(backbone=dict(arch='test'), "
                   "neck=dict(in_channels=[32, 48, 64, 96]))\n")
    assert count_config(str(own), 64, 64)['reported_by_authors'] == {}


@pytest.mark.parametrize('arguments, words', [
    (['mask-rcnn_ppma-x_fpn_1x_coco'], ['no config file', 'mask-rcnn_ppma-t_fpn_1x_coco']),
    (['ppma_tiny', 'nowhere/mask-rcnn_ppma-t.py'], ['nowhere/mask-rcnn_ppma-t.py', 'mask-rcnn_ppma-t_fpn_1x_coco']),
    (['test-ppma_digits'], ['trains a classifier', 'subquad stats test_ppma']),
    (['lcsm_language'], ['trains a model of tokens', 'subquad train lcsm_language --dry-run']),
    (['dino-4scale_ppma-t_8xb2-12e_coco'], ['with queries', 'DINO', 'not counted']),
    (['mask2former_ppma-t_8xb2-lsj-50e_coco'], ['with queries', 'Mask2Former', 'not counted']),
    (['mask-rcnn_test-ppma_shapes'], ['neither a crop size nor a Resize', '--size']),
    (['mask-rcnn_ppma-t_fpn_1x_coco', '--cfg-options', 'model.backbone.arch=huge'],
     ["'tiny', 'small', 'base'", "'huge'"]),
    (['mask-rcnn_ppma-t_fpn_1x_coco', '--cfg-options', 'modle.backbone.arch=tiny'],
     ["'modle' is no entry", 'did you mean model']),
    (['mask-rcnn_ppma-t_fpn_1x_coco', '--cfg-options', 'model.roi_head.type=DoubleHeadRoIHead',
      'model.roi_head.reg_roi_scale_factor=1.3'], ['CascadeRoIHead', 'DoubleHeadRoIHead'])])
def test_stats_errors(arguments, words):
    with pytest.raises(UserError) as caught:
        stats.main(arguments)
    message = str(caught.value)
    assert all(word in message for word in words) and '\n' not in message, message


def test_metafile_and_readme_have_the_reported_metrics():
    models = {model['Name']: model for model in yaml.safe_load((FOLDER / 'metafile.yml').read_text())['Models']}
    readme = (FOLDER / 'README.md').read_text()
    patterns = [re.sub(r'\{(.*?)\}', lambda x: f"({x[1].replace(',', '|')})", name).replace('SIZE', '[tsbl]')
                for name in re.findall(r'`(\S+)`', readme)]
    assert {*models} == {name for name in NAMES if not name.endswith('_shapes')}
    for name, model in models.items():
        assert model['Config'] == f'configs/detection/{name}.py'
        theirs, metadata = reported_figures()[name], model['Metadata']
        assert bool(theirs) == ('the authors' in metadata.get('Reported By', ''))
        # The link to the detector with MambaVision-S leads to another file.
        assert bool(theirs) == (name in PUBLISHED) or name == 'cascade-mask-rcnn_mambavision-s_fpn_3x-ms_coco', name
        assert ('Published File' in model) == (name in PUBLISHED and not PUBLISHED[name].page), name
        if 'Published File' in model:
            assert PUBLISHED[name].source.endswith(model['Published File'])
        length = config_of(name).train_cfg
        assert (length.get('max_epochs'), length.get('max_iters')) == (metadata.get('Epochs'),
                                                                       metadata.get('Iterations'))
        line = next((line for line in readme.splitlines() if f'({name}.py)' in line), '')
        assert all(f' {value} ' in line for value in theirs.values()), line
        assert line or any(re.fullmatch(pattern, name) for pattern in patterns), name
    assert all(Path(FOLDER, f'{name}.py').is_file() for name in models)
