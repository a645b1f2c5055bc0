"""Helpers for tests of detectors and segmenters: generated images, configs and small networks."""
from pathlib import Path

import torch
from golden_networks import shapes
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope

import subquad.backbones.mm
import subquad.configs
from subquad.backbones.mm.published_keys import to_published_keys, translate_keys
from subquad.tools import make_dataset
from subquad.tools.engine.config import load

CONFIGS = Path(subquad.configs.__path__[0])
MASK_RCNN, UPERNET = 'mask-rcnn_test-ppma_shapes', 'upernet_test-ppma_shapes'


def make_shapes(folder, train, val, size):
    """Generate images of shapes in a folder, and return the folder."""
    make_dataset.main(['shapes', str(folder), '--train', str(train), '--val', str(val), '--size', str(size)])
    return folder


def load_segmentation(name, **options):
    """Read a segmentation config, set options (path -> value), and make MMSegmentation the default scope."""
    config = Config.fromfile(CONFIGS / 'segmentation' / f'{name}.py')
    config.merge_from_dict(options)
    init_default_scope('mmseg')
    return config


def build_on_meta(config):
    """Build the model of a config without memory for its weights, in the current default scope."""
    with torch.device('meta'):
        return MODELS.build(config.model)


def build_small_detector(classes=5, **backbone):
    """Build the Mask R-CNN for generated shapes with this number of classes and these options of the backbone."""
    init_default_scope('mmdet')
    model = load(MASK_RCNN).model
    model.backbone.update(backbone)
    for head in (model.roi_head.bbox_head, model.roi_head.mask_head):
        head.num_classes = classes
    return MODELS.build(model)


def build_published(config):
    """Build a published model on the meta device; each of its weights has a published name."""
    init_default_scope(config.default_scope)
    model = build_on_meta(config)
    state = model.state_dict()
    back = translate_keys(to_published_keys(state, model), model)
    assert shapes(back) == shapes(state)
    return model


def weight_decays(model, config):
    """The weight decay of each parameter by its id, and the learning rates."""
    groups = build_optim_wrapper(model, config.optim_wrapper).optimizer.param_groups
    return ({id(x): group['weight_decay'] for group in groups for x in group['params']},
            {group['lr'] for group in groups})


def check_schedule(config, long):
    """The epochs of detectors, 36 or 12, and whole images for segmenters."""
    if 'roi_head' in config.model:
        epochs = 36 if long else 12
        assert config.train_cfg.max_epochs == config.param_scheduler[1].end == epochs
        assert config.param_scheduler[1].milestones == ([27, 33] if long else [8, 11])
    else:
        assert config.model.test_cfg == dict(mode='whole')
