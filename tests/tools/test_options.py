"""--cfg-options and the keys of config files: keys that nothing reads are reported."""
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import check_options, find, load

DIGITS, MASK_RCNN, UPERNET = 'test-ppma_digits', 'mask-rcnn_ppma-t_fpn_1x_coco', 'upernet_test-ppma_shapes'


@pytest.fixture(scope='module')
def digits():
    return load(DIGITS)


@pytest.mark.parametrize('key, message', [
    ('epochs', "'epochs' is only used while .* is read; did you mean train_cfg.max_epochs"),
    ('epocs', "'epocs' is no entry of test-ppma_digits.py; did you mean train_cfg.max_epochs"),
    ('work_dir', 'give --work-dir'), ('nonsense.deep', "'nonsense' is no entry of test-ppma_digits.py$"),
    ('default_hooks.checkpoint.intervall', 'did you mean interval'),
    ('param_scheduler.0.endd', "param_scheduler.0 has no 'endd'; did you mean end"),
    ('default_hooks.chekpoint.interval', 'did you mean checkpoint'),
    ('train_cfg.max_epoch', 'did you mean max_epochs'),
    ('train_cfg.by_epoch.x', 'train_cfg.by_epoch is True, which has no entries'),
    ('train_dataloader.batchsize', 'did you mean batch_size'),
    ('train_dataloader.dataset.splt', 'did you mean split'),
    ('param_scheduler.2.begin', 'param_scheduler is a list of 2 entries, from param_scheduler.0 on')])
def test_an_option_without_effect_is_an_error(digits, key, message):
    with pytest.raises(UserError, match=message):
        check_options(digits, {key: 1}, 'test-ppma_digits.py')


def test_text_for_a_boolean_entry_is_an_error(digits):
    key = 'train_dataloader.sampler.shuffle'
    with pytest.raises(UserError, match=f"{key} must be True or False, got 'Tru'"):
        check_options(digits, {key: 'Tru'}, 'test-ppma_digits.py')
    check_options(digits, {key: False}, 'test-ppma_digits.py')


def test_options_are_checked_when_a_config_is_read():
    with pytest.raises(UserError, match='--cfg-options epochs: '):
        load(DIGITS, {'epochs': 1})


def test_valid_options_print_nothing(capsys):
    options = {
        'load_from': 'x.pth', 'resume': True, 'randomness.seed': 4, 'randomness.deterministic': True,
        'optim_wrapper.clip_grad.norm_type': 1, 'optim_wrapper.accumulative_counts': 2, 'param_scheduler.0.begin': 1,
        'optim_wrapper.optimizer.layer_decay': 0.5, 'train_dataloader.dataset.transform.vflip': 0.5,
        'train_dataloader.persistent_workers': False, 'model.mask_mode': 'multiplicative', 'train_cfg.val_interval': 2,
        'default_hooks.checkpoint.save_best': 'auto', 'default_hooks.average.type': 'EMAHook',
        'default_hooks.average.momentum': 0.1, 'auto_scale_lr.enable': True, 'find_unused_parameters': True,
        'default_hooks.logger.interval': 5, 'default_hooks.logger.priority': 'LOW', 'test_evaluator.topk': (1,)}
    config = load(DIGITS, options)
    assert config.randomness == dict(seed=4, deterministic=True) and config.param_scheduler[0].begin == 1
    assert config.model.mask_mode == 'multiplicative' and config.default_hooks.average.momentum == 0.1
    assert capsys.readouterr().err == '', 'nothing is unsure'


def test_options_of_dense_configs(capsys):
    pytest.importorskip('mmdet')
    pytest.importorskip('mmseg')
    config = load(MASK_RCNN, {
        'model.backbone.init_cfg.type': 'Pretrained', 'model.backbone.init_cfg.checkpoint': 'x.pth',
        'train_dataloader.dataset.pipeline.2.scale': (640, 480), 'train_dataloader.sampler.seed': 3,
        'val_evaluator.classwise': True, 'model.roi_head.bbox_head.num_classes': 3})
    assert config.model.backbone.init_cfg == dict(type='Pretrained', checkpoint='x.pth')
    for key, message in (('train_pipeline.2.scale', "'train_pipeline' is only used while"),
                         ('data_root', 'give --data'), ('model.test_cfg.rcnn.scor_thr', 'did you mean score_thr')):
        with pytest.raises(UserError, match=message):
            load(MASK_RCNN, {key: 1})
    assert load(UPERNET, {'model.test_cfg.crop_size': (64, 64)}).model.test_cfg.crop_size == (64, 64)
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('option, bound', [
    ('optim_wrapper.optimizer.lr=0', 'more than 0, got 0'), ('optim_wrapper.optimizer.lr=inf', 'finite, got inf'),
    ('optim_wrapper.optimizer.layer_decay=-0.5', 'more than 0'),
    ('optim_wrapper.optimizer.weight_decay=-0.1', '0 or more, got -0.1'),
    ('optim_wrapper.clip_grad.max_norm=-1', 'more than 0, got -1'),
    ('test_dataloader.dataset.transform.crop_pct=0', 'more than 0, got 0')])
def test_a_number_out_of_its_bounds_is_an_error(option, bound):
    key, _, value = option.partition('=')
    with pytest.raises(UserError, match=f'^{key} must be {bound}'):
        load(DIGITS, {key: float(value)})


def test_a_config_that_is_its_own_base_is_refused(tmp_path):
    (tmp_path / 'a.py').write_text("_base_ = 'b.json'\n")
    (tmp_path / 'b.json').write_text('{"_base_": "a.py"}')
    with pytest.raises(UserError, match=r'the config is its own _base_ \(a.py -> b.json -> a.py\)'):
        load(str(tmp_path / 'a.py'))


def test_an_error_in_a_base_file_names_that_file(tmp_path):
    (tmp_path / 'a.py').write_text("_base_ = 'b.py'\n")
    (tmp_path / 'b.py').write_text('model = (1\n')
    with pytest.raises(UserError, match=f'{tmp_path}/b.py.* line 1'):
        load(str(tmp_path / 'a.py'))


def test_config_files_may_have_own_variables(tmp_path, capsys):
    path = tmp_path / 'config.py'
    base = f'_base_ = {str(find(DIGITS))!r}\n'
    path.write_text(base + 'train_pipeline_stage2 = [1]\nmodels = dict(stages=train_pipeline_stage2)\n'
                    'custom_hooks = [dict(type="EMAHook", momentum=models["stages"][0])]\n')
    assert load(str(path)).train_pipeline_stage2 == [1]
    assert capsys.readouterr().err == ''


def test_a_misspelled_entry_of_a_classifiers_config_is_one_error(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(f'_base_ = {str(find(DIGITS))!r}\ntrain_dataloder = dict(batch_size=3)\n')
    with pytest.raises(UserError, match=f"{re.escape(str(path))}: nothing uses 'train_dataloder'; did you mean"):
        load(str(path))


def test_a_misspelled_entry_of_another_config_is_a_warning(tmp_path, capsys):
    path = tmp_path / 'config.py'
    path.write_text("model = dict(type='FasterRCNN')\ntrain_dataloder = dict(batch_size=3)\n")
    load(str(path))
    assert capsys.readouterr().err == (
        f"warning: {path}: nothing uses 'train_dataloder'; did you mean 'train_dataloader'?\n")


def test_further_default_hooks_may_have_any_name(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(f'_base_ = {str(find(DIGITS))!r}\ndefault_hooks = dict(average=dict(type="ModelEMAHook"))\n')
    assert load(str(path)).default_hooks.average.type == 'ModelEMAHook'


def _stock(library):
    return Path(find_spec(library).submodule_search_locations[0]) / '.mim' / 'configs'


@pytest.mark.parametrize('library, name', [
    ('mmdet', 'rtmdet/rtmdet_tiny_8xb32-300e_coco.py'), ('mmdet', 'gn+ws/faster-rcnn_r50_fpn_gn-ws-all_1x_coco.py'),
    ('mmdet', 'glip/odinw/glip_atss_swin-t_a_fpn_dyhead_pretrain_odinw13.py'),
    ('mmdet', 'soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py'),
    ('mmdet', 'mm_grounding_dino/grounding_dino_swin-l_pretrain_all.py'),
    ('mmdet', 'retinanet/retinanet_r50_fpn_1x_coco.py'), ('mmdet', 'dino/dino-4scale_r50_8xb2-12e_coco.py'),
    ('mmseg', 'bisenetv2/bisenetv2_fcn_4xb4-ohem-160k_cityscapes-1024x1024.py'),
    ('mmseg', 'segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py')])
def test_stock_configs_load(library, name, capsys):
    pytest.importorskip(library)
    assert 'model' in load(str(_stock(library) / name))
    assert capsys.readouterr().err == ''


@pytest.mark.slow
@pytest.mark.parametrize('library', ['mmdet', 'mmseg'])
def test_every_stock_config_loads(library):
    """But those that MMEngine itself cannot read here (a base file), those of MMPretrain, and parts of configs."""
    pytest.importorskip(library)
    from mmengine.config import Config
    refused, count = [], 0
    for path in sorted(_stock(library).rglob('*.py')):
        if '_base_' in path.parts:
            continue
        count += 1
        try:
            load(str(path))
        except UserError as error:
            refused.append((path, str(error)))
    assert count > 600
    for path, message in refused:
        try:
            config = Config.fromfile(str(path))
            whole = 'model' in config and config.get('default_scope') != 'mmpretrain'
        except (Exception, SystemExit):
            continue
        assert not whole, f'{path}: {message}'


@pytest.mark.skipif(find_spec('mmengine') is None, reason='MMEngine is not installed')
def test_a_detector_without_mmdetection_names_the_command_that_installs_it(python):
    result = python('import sys, importlib.util as util, importlib.metadata as metadata\n'
                    'find, version = util.find_spec, metadata.distribution\n'
                    'util.find_spec = lambda name, *a: None if name == "mmdet" else find(name, *a)\n'
                    'def distribution(name):\n'
                    '    if name == "mmdet": raise metadata.PackageNotFoundError(name)\n'
                    '    return version(name)\n'
                    'metadata.distribution = distribution\n'
                    'sys.modules["mmdet"] = None\n'
                    'import subquad\n'
                    'from subquad.tools.common import cli\n'
                    f'cli.main(["stats", {MASK_RCNN!r}])\n')
    assert result.returncode == 2 and result.stderr == (
        "error: mmdet is not installed: pip install 'subquad[mm]' (mmcv is compiled: docs/installation.md)\n")
