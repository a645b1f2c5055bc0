"""Loading detectors and segmenters is strict: no weight stays random unless the user asks for it."""
import copy
import json
import logging
import re
import time
import warnings

import pytest
import timm
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from dense_cases import MASK_RCNN, UPERNET, build_small_detector, make_shapes
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from mmengine.runner.checkpoint import load_checkpoint as lax_load
from training_cases import fails

from subquad.backbones.mm.checkpoints import NewHeadsHook, compare_weights, load_checkpoint
from subquad.backbones.weights import WeightsError, read_checkpoint, save_state_dict, save_weights
from subquad.tools import predict, test, train
from subquad.tools.engine.config import find, load
from subquad.tools.engine.dense.task import metadata, network_options

CLASSES = ['circle', 'ring', 'triangle', 'square', 'star']


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp('weights') / 'shapes', train=8, val=4, size=64)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """A detector's file of `subquad train`, the same of a Runner, and a classifier's file."""
    folder = tmp_path_factory.mktemp('files')
    torch.manual_seed(1)
    model = build_small_detector()
    save_weights(model, folder / 'detector.safetensors', dict(config=MASK_RCNN, classes=CLASSES))
    torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=1, iter=1)), folder / 'detector.pth')
    save_weights(timm.create_model('test_ppma'), folder / 'classifier.safetensors')
    return folder


@pytest.fixture
def log():
    """Lines of MMEngine's current log."""
    # A new logger, because the logger of an earlier test may write to a file.
    lines, logger = [], MMLogger.get_instance(f'log_{time.time_ns()}', log_level='INFO')
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


# ---- init_cfg

def test_log_names_weights_loaded_by_init_cfg(files, log):
    path = files / 'classifier.safetensors'
    detector = build_small_detector(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    assert detector.backbone.load_summary is None
    detector.init_weights()
    total, norms = len(detector.backbone.state_dict()), 8
    summary = f'PPMA backbone: {total - norms} of {total} weights are loaded from {path}; 8 are not'
    assert detector.backbone.load_summary.startswith(summary)
    assert all(key in detector.backbone.load_summary for key in ('output_norms.0.weight', 'head.fc.weight'))
    assert any(line.startswith(summary) for line in log)
    text = '\n'.join(log)
    about = {key: re.search(rf'\n{re.escape(key)} - .*\n(.*)', text)[1] for key, _ in detector.named_parameters()}
    for key, words in about.items():
        if key.startswith('backbone.'):
            assert words.startswith('Initial value' if 'output_norms' in key else f'Loaded from {path}'), key
    assert not any('user-defined' in words for key, words in about.items() if key.startswith('backbone.'))


def test_load_summary_names_prefix_and_unused_weights(files):
    path = files / 'detector.pth'
    for options in ({}, dict(prefix='backbone')):
        backbone = MODELS.build(dict(type='PPMA', arch='test', out_indices=(1, 2), init_cfg=dict(
            type='Pretrained', checkpoint=str(path), **options)))
        backbone.init_weights()
        assert f'all {len(backbone.state_dict())} weights are loaded from {path}' in backbone.load_summary
        assert 'in the file are not used' in backbone.load_summary, 'stage 3 and two output norms'
        assert ('(backbone.)' in backbone.load_summary) == bool(options)


@pytest.mark.parametrize('init_cfg, message', [
    ('weights.pth', r"init_cfg must be a dict such as dict\(type='Pretrained', .* got 'weights.pth'"),
    (dict(type='Pretrained'), "missing 1 required positional argument: 'checkpoint'"),
    (dict(type='Pretrained', checkpoint='w.pth', prefx='backbone.'), "unexpected keyword argument 'prefx'")])
def test_invalid_init_cfg_is_refused_at_construction(init_cfg, message):
    with pytest.raises(TypeError, match=message):
        MODELS.build(dict(type='PPMA', arch='test', init_cfg=init_cfg))


def test_missing_checkpoint_ends_training_with_one_sentence(data, tmp_path):
    for changes, message in (
            (['init_cfg.type=Pretrained', f'init_cfg.checkpoint={tmp_path}/none.pth'], 'no weight file at .*none.pth'),
            (['init_cfg=none.pth'], 'model: .*init_cfg must be a dict such as')):
        fails([MASK_RCNN, '--data', data, '--work-dir', tmp_path / 'work', '--cfg-options',
               *(f'model.backbone.{change}' for change in changes)], message)
    assert not (tmp_path / 'work').exists()


def test_init_cfg_may_list_other_initializers(files):
    backbone = MODELS.build(dict(type='PPMA', arch='test', init_cfg=[
        dict(type='Constant', layer='LayerNorm', val=0.5),
        dict(type='Pretrained', checkpoint=str(files / 'classifier.safetensors'))]))
    backbone.init_weights()
    assert (backbone.output_norms[0].weight == 0.5).all(), 'not in the file'
    assert (backbone.stages[0].blocks[0].norm1.weight == 1).all(), 'the file comes last'


# ---- heads

@pytest.mark.parametrize('change, message', [
    (lambda w: w.update({'roi_head.bbox_head.fc_cls.weight': torch.zeros(4, 128)}),
     r"1 shapes differ \(roi_head.bbox_head.fc_cls.weight .*add custom_hooks=\[dict\(type='NewHeadsHook'\)\]"),
    (lambda w: w.pop('neck.lateral_convs.0.conv.weight'), r'1 keys missing \(neck.lateral_convs.0.conv.weight\)'),
    (lambda w: w.update({'backbone.stages.7.x.weight': torch.zeros(1)}), 'stages.7.x.weight'),
    (lambda w: [w.pop(key) for key in list(w) if key.startswith('backbone.')], 'keys missing .*backbone.stem'),
    (lambda w: w.clear(), 'keys missing|holds no weights')])
def test_every_way_of_loading_a_detector_is_strict(files, change, message, tmp_path):
    model = build_small_detector()
    before = copy.deepcopy(model.state_dict())
    weights = dict(read_checkpoint(files / 'detector.pth')[0])
    change(weights)
    path = str(tmp_path / 'w.pth')
    torch.save(dict(state_dict=weights), path)
    wrapped = str(tmp_path / 'wrapped.pth')
    torch.save(dict(model=weights, epoch=1), wrapped)
    loaders = [lambda: lax_load(model, wrapped), lambda: lax_load(model, path),
               lambda: model.load_state_dict(weights, strict=False),
               lambda: lax_load(torch.nn.parallel.DataParallel(model).module, path)]
    for load_it in loaders:
        with pytest.raises(WeightsError, match=message):
            load_it()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), 'no weight may change'
    whole = build_small_detector()
    whole.init_cfg = dict(type='Pretrained', checkpoint=path)
    with pytest.raises(WeightsError, match=message):
        whole.init_weights()


def test_unused_weights_and_auxiliary_heads_may_differ(files, log, tmp_path):
    """A file may have more stages than the backbone, and may lack the auxiliary head."""
    detector = build_small_detector()
    weights = dict(read_checkpoint(files / 'detector.pth')[0])
    found = compare_weights(detector, {**weights, 'extra_head.weight': torch.zeros(1)})
    assert not found.problems and found.unused == ['extra_head.weight'] and not found.new
    lax_load(detector, str(files / 'detector.pth'))
    torch.save(dict(model=weights, epoch=1), tmp_path / 'wrapped.pth')
    for parameter in detector.parameters():
        torch.nn.init.zeros_(parameter)
    lax_load(detector, str(tmp_path / 'wrapped.pth'))
    assert all(torch.equal(value, weights[key]) for key, value in detector.state_dict().items())
    assert f'MaskRCNN: all {len(weights)} weights are loaded from the file' in log
    init_default_scope('mmseg')
    model = load(UPERNET).model
    model.auxiliary_head = dict(type='FCNHead', in_channels=64, in_index=2, channels=8, num_convs=1, num_classes=6,
                                norm_cfg=dict(type='BN'))
    segmenter = MODELS.build(model)
    weights = {key: value for key, value in segmenter.state_dict().items() if not key.startswith('auxiliary')}
    found = compare_weights(segmenter, weights)
    assert not found.problems and all(key.startswith('auxiliary_head.') for key in found.new) and found.new
    smaller = MODELS.build(dict(type='PPMA', arch='test', out_indices=(0, 1)))
    detector.backbone, full = smaller, detector.backbone.state_dict()
    left = compare_weights(detector, {f'backbone.{key}': value for key, value in full.items()}).unused
    assert 'backbone.output_norms.2.weight' in left and any(key.startswith('backbone.stages.3.') for key in left)


def _config(tmp_path, data, files, hooks, **more):
    """Write a config that loads a file with five classes and trains two of them for one epoch at rate 0."""
    path = tmp_path / 'other_classes.py'
    classes = dict(metainfo=dict(classes=('circle', 'star')))
    text = dict(load_from=str(files / 'detector.safetensors'), custom_hooks=hooks, allow_other_classes=True,
                data_root=str(data), train_cfg=dict(max_epochs=1, val_interval=5),
                optim_wrapper=dict(optimizer=dict(lr=1e-30), clip_grad=None),
                model=dict(roi_head=dict(bbox_head=dict(num_classes=2), mask_head=dict(num_classes=2))),
                **{f'{part}_dataloader': dict(dataset=dict(data_root=str(data), **classes))
                   for part in ('train', 'val', 'test')},
                **{f'{part}_evaluator': dict(ann_file=f'{data}/annotations/instances_val.json')
                   for part in ('val', 'test')}, **more)
    path.write_text(f'_base_ = [{str(find(MASK_RCNN))!r}]\n' + '\n'.join(f'{k} = {v!r}' for k, v in text.items()))
    return path


def test_training_other_classes_needs_new_heads_hook(files, data, tmp_path, capsys):
    given = read_checkpoint(files / 'detector.safetensors')[0]
    work = tmp_path / 'work'
    without_hook = _config(tmp_path, data, files, [])
    fails([without_hook, '--work-dir', work], '6 shapes differ.*NewHeadsHook')
    assert not work.exists()
    averaged = dict(type='EMAHook', momentum=0.5)
    torch.save(dict(model=given, epoch=3), tmp_path / 'wrapped.pth')           # as in the authors' files
    with_hook = _config(tmp_path, data, files, [averaged, dict(type='NewHeadsHook')])
    text = with_hook.read_text().replace(str(files / 'detector.safetensors'), str(tmp_path / 'wrapped.pth'))
    with_hook.write_text(text)
    capsys.readouterr()
    assert train.main([str(with_hook), '--work-dir', str(work)]) == 0
    said = capsys.readouterr().err
    assert re.search(r'load_from: MaskRCNN: \d+ of \d+ weights are loaded from .*wrapped.pth; 6 are not and '
                     r'keep their initial values \(roi_head.bbox_head.fc_cls.weight', said)
    weights = read_checkpoint(work / 'last.safetensors')[0]
    for key, value in weights.items():
        if 'running_' in key or 'num_batches' in key:
            continue
        same = value.shape == given[key].shape and torch.allclose(value, given[key], rtol=0, atol=1e-20)
        assert same != any(name in key for name in ('fc_cls', 'fc_reg', 'conv_logits')), key
    # Testing and resuming need every weight, also with NewHeadsHook.
    fails([with_hook, files / 'detector.pth'], 'was trained on the classes|shapes differ', test.main)
    fails([with_hook, '--work-dir', tmp_path / 'other', '--resume', files / 'detector.pth'], 'shapes differ')


def test_mmengine_runner_loads_strictly(files, data, tmp_path, log):
    """Runner.from_cfg, which train.py and test.py of both libraries use, loads a safetensors file strictly."""
    config = load(str(_config(tmp_path, data, files, [])))
    config.work_dir = str(tmp_path / 'work')
    with pytest.raises(WeightsError, match='shapes differ .*NewHeadsHook'):
        Runner.from_cfg(config).train()
    config.custom_hooks = [dict(type='NewHeadsHook')]
    config.experiment_name = 'second'
    runner = Runner.from_cfg(config)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    runner.logger.addHandler(handler)
    runner.train()
    assert any(re.match(r'MaskRCNN: \d+ of \d+ weights are loaded from the file; 6 are not', line) for line in lines)
    assert 'new_heads' not in runner.model.__dict__, 'the exception ends with the load'
    tested = load(str(_config(tmp_path, data, files, [dict(type='NewHeadsHook')])))
    tested.update(work_dir=str(tmp_path / 'tested'), experiment_name='third')
    with pytest.raises(WeightsError, match='shapes differ'):
        Runner.from_cfg(tested).test()


def test_new_heads_hook_allows_missing_modules(files):
    weights = {key: value for key, value in read_checkpoint(files / 'detector.pth')[0].items()
               if not key.startswith('roi_head.mask_head.')}
    model = build_small_detector()
    assert compare_weights(model, weights, ()).problems
    found = compare_weights(model, weights, ('roi_head.mask_head',))
    assert not found.problems and {key.split('.')[1] for key in found.new} == {'mask_head'}
    weights.pop('backbone.stem.conv1.conv.weight')
    assert compare_weights(model, weights, ('roi_head.mask_head', 'backbone')).problems, 'never the backbone'
    with pytest.raises(TypeError, match="missing must be a sequence of module names, got 'roi_head'"):
        NewHeadsHook('roi_head')


# ---- files of wrong kinds

def _wrong_files(folder, files):
    weights = read_checkpoint(files / 'detector.pth')[0]
    yield files / 'classifier.safetensors', 'is not a checkpoint of this MaskRCNN on PPMA: .* keys missing'
    yield folder, 'weight file|not a file'
    yield folder / 'none.pth', 'no weight file'
    for name in ('detector.safetensors', 'detector.pth'):
        cut = folder / f'cut-{name}'
        cut.write_bytes((files / name).read_bytes()[:20000])
        yield cut, 'is damaged or'
    for name, content, message in (
            ('integers.pth', {1: torch.zeros(1)}, 'names of weights must be strings, got 1'),
            ('one.pth', {**weights, 2: torch.zeros(1)}, 'names of weights must be strings, got 2'),
            ('list.pth', [torch.zeros(1)], 'holds no weights'), ('number.pth', 3, 'holds no weights'),
            ('none_inside.pth', {'state_dict': None}, 'holds no weights')):
        torch.save(content, folder / name)
        yield folder / name, message
    for n, metadata_value in enumerate((dict(classes=7), dict(classes='circle'), dict(classes={'circle': 1}),
                               dict(classes=[1, 2]), dict(classes=[None] * 5), ['circle'], 'text', 5)):
        save_state_dict(weights, folder / f'metadata-{n}.safetensors', metadata_value)
        yield folder / f'metadata-{n}.safetensors', 'metadata'
    for value in ('nan', 'inf', '-inf'):
        bad = {key: tensor.clone() for key, tensor in weights.items()}
        bad['roi_head.bbox_head.fc_cls.bias'][2] = float(value)
        torch.save(bad, folder / f'{value}.pth')
        yield folder / f'{value}.pth', r'holds NaN or infinite values in 1 of .*\(roi_head.bbox_head.fc_cls.bias\)'


def test_invalid_files_raise_one_line_errors(files, data, tmp_path):
    model = build_small_detector()
    for path, message in _wrong_files(tmp_path, files):
        with pytest.raises(WeightsError, match=message) as error:
            load_checkpoint(model, path, CLASSES)
        assert len(str(error.value).splitlines()) == 1, path
    # The commands print the same sentence.
    image = str(next((data / 'images' / 'val').iterdir()))
    for name, message in (('nan.pth', 'NaN or infinite'), ('metadata-0.safetensors', 'metadata')):
        fails([MASK_RCNN, tmp_path / name, '--data', data], message, test.main)
        fails([MASK_RCNN, tmp_path / name, image, '--out', tmp_path / 'out'], message, predict.main)
    fails([UPERNET, files / 'detector.safetensors', image, '--out', tmp_path / 'out'],
          'was trained on the classes circle, .* but the data has background, circle', predict.main)


def test_non_finite_weights_load_only_if_allowed(files, data, tmp_path):
    weights = {key: value.clone() for key, value in read_checkpoint(files / 'detector.pth')[0].items()}
    weights['backbone.stem.conv1.conv.bias'][0] = float('nan')
    torch.save(weights, tmp_path / 'nan.pth')
    model = build_small_detector()
    load_checkpoint(model, tmp_path / 'nan.pth', allow_nonfinite=True)
    assert model.backbone.stem.conv1.conv.bias[0].isnan()
    with pytest.raises(WeightsError, match='holds NaN or infinite values'):
        MODELS.build(dict(type='PPMA', arch='test', init_cfg=dict(
            type='Pretrained', checkpoint=str(tmp_path / 'nan.pth')))).init_weights()
    fails([MASK_RCNN, '--data', data, '--work-dir', tmp_path / 'work', '--cfg-options',
           f'load_from={tmp_path / "nan.pth"}'], 'load_from: .*holds NaN or infinite values')


def test_other_network_options_in_the_file_warn(files, tmp_path):
    """Weights of the same shapes load into networks with other options, so a warning names these."""
    config = load(MASK_RCNN)
    trained = metadata(load(MASK_RCNN, {'model.backbone.attention': ['crisscross'] * 4,
                                        'model.backbone.with_cp': True}))
    assert json.loads(json.dumps(trained)) == trained and 'backbone.with_cp' not in trained['network']
    save_state_dict(read_checkpoint(files / 'detector.pth')[0], tmp_path / 'w.safetensors', trained)
    model = build_small_detector()
    with pytest.warns(UserWarning, match=r"other options: model.backbone.attention was \['crisscross', .* its default"):
        load_checkpoint(model, tmp_path / 'w.safetensors', CLASSES, network=network_options(config))
    config.model.data_preprocessor.mean = [0., 0., 0.]
    weights, meta = read_checkpoint(files / 'detector.pth')[0], dict(cfg=load(MASK_RCNN).pretty_text)
    save_state_dict(weights, tmp_path / 'w.safetensors', metadata(load(MASK_RCNN)))
    torch.save(dict(state_dict=weights, meta=dict(meta, dataset_meta=dict(classes=CLASSES))), tmp_path / 'w.pth')
    for path in (tmp_path / 'w.safetensors', tmp_path / 'w.pth'):
        with pytest.warns(UserWarning, match=r'model.data_preprocessor.mean was \[123.*\] and is \[0.0, 0.0, 0.0\]'):
            load_checkpoint(model, path, CLASSES, network=network_options(config))
        with pytest.raises(WeightsError, match='was trained on the classes circle, .*, but the data has star, '):
            load_checkpoint(model, path, CLASSES[::-1])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        load_checkpoint(model, tmp_path / 'w.safetensors', CLASSES, network=network_options(load(MASK_RCNN)))
        load_checkpoint(model, files / 'detector.pth', CLASSES, network=network_options(config))


def test_load_from_reads_raw_weights_and_names_the_choice(tmp_path, log):
    torch.manual_seed(2)
    model = build_small_detector()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    average = {key: value * 2 if value.is_floating_point() else value for key, value in state.items()}
    torch.save({'model': state, 'model_ema': average}, tmp_path / 'both.pth')
    lax_load(build := build_small_detector(), str(tmp_path / 'both.pth'))
    assert all(torch.equal(value, state[key]) for key, value in build.state_dict().items())
    assert any('both.pth: its raw weights (model) are read, not the averaged ones' in line for line in log)
    with pytest.warns(UserWarning, match='its raw weights .model. are read'):
        load_checkpoint(build, tmp_path / 'both.pth')
    state['backbone.stem.conv1.conv.weight'][0] = float('nan')
    torch.save({'state_dict': state}, tmp_path / 'nan.pth')
    lax_load(build, str(tmp_path / 'nan.pth'))
    assert any('NaN or infinite values (backbone.stem.conv1.conv.weight)' in line for line in log)
