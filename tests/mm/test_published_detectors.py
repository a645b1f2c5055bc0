"""Detectors and segmenters under published names: round trips, strict loading, and the libraries' own loaders."""
import functools
import os
import warnings

import pytest
import torch

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from cvnets_files import authors_file, encoder_entries, segmenter_entries, ssd_entries, transformers_names
from dense_cases import MASK_RCNN, UPERNET, build_on_meta, load_segmentation
from mmdet.apis import DetInferencer, init_detector
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import CheckpointLoader, Runner
from mmengine.runner.checkpoint import load_checkpoint as lax_load
from mmseg.apis import MMSegInferencer, init_model
from pairwise import slow
from torch import nn

from subquad.backbones.mm import cvnets
from subquad.backbones.mm.checkpoints import compare_weights, load_checkpoint
from subquad.backbones.mm.published_keys import to_published_keys, translate_keys
from subquad.backbones.weights import WeightsError, read_file
from subquad.backbones.weights.convert import convert
from subquad.tools.engine.config import load
from subquad.tools.engine.weights.starting_weights import StartHook

pytestmark = pytest.mark.usefixtures('metafiles_read_once')

KINDS = ('mask_rcnn', 'upernet', 'ssdlite', 'deeplabv3', 'pspnet')
SEGMENTERS = ('upernet', 'deeplabv3', 'pspnet')
AUXILIARY = dict(type='FCNHead', in_channels=64, in_index=2, channels=8, num_convs=1, concat_input=False, num_classes=6,
                 norm_cfg=dict(type='BN'))


@functools.lru_cache(None)
def _config(kind):
    """A config with the structure of the published model and the small backbone."""
    name = {'mask_rcnn': MASK_RCNN, 'upernet': UPERNET, 'ssdlite': 'ssdlite_mobilevitv2-050_coco-320',
            'deeplabv3': 'deeplabv3_mobilevitv2-050_4xb4-120e_ade20k-512x512',
            'pspnet': 'pspnet_mobilevitv2-050_4xb4-120e_ade20k-512x512'}[kind]
    config = load(name)
    model = config.model
    if kind == 'upernet':
        model.auxiliary_head = AUXILIARY
    elif kind == 'ssdlite':
        model.backbone.arch, model.neck.in_channels = 'test', [96, 128]
        model.bbox_head.in_channels = [96, 128, 256, 128, 128, 64]
    elif kind != 'mask_rcnn':
        model.backbone.arch = 'test'
        model.decode_head.update(in_channels=128, channels=32)
        model.auxiliary_head.in_channels = 96
    return config


def _build(kind):
    config = _config(kind)
    init_default_scope('mmseg' if kind in SEGMENTERS else 'mmdet')
    return MODELS.build(config.model)


def _randomized(model):
    """Give every weight a random value, also statistics and counters."""
    for value in model.state_dict().values():
        value.normal_() if value.is_floating_point() else value.fill_(7)
    return model


@pytest.fixture(scope='module', params=KINDS)
def published(request, tmp_path_factory):
    """The kind, the state dict, the same under published names, and the authors' file of it."""
    model = _randomized(_build(request.param))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    theirs = to_published_keys(state, model)
    path = tmp_path_factory.mktemp('published') / f'{request.param}.pth'
    of_ppma = request.param in ('mask_rcnn', 'upernet')
    torch.save(dict(state_dict=theirs, meta={}, message_hub={}) if of_ppma else theirs, path)
    return request.param, state, theirs, str(path)


SOME_KINDS = pytest.mark.parametrize('published', ['mask_rcnn', 'deeplabv3', *slow('upernet', 'ssdlite', 'pspnet')],
                                     indirect=True)


def _equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# ---- round trips and strictness

def test_round_trip_is_bit_equal(published):
    kind, state, theirs, _ = published
    model = _build(kind)
    assert _equal(translate_keys(theirs, model), state)
    assert _equal(to_published_keys(translate_keys(theirs, model), model), theirs)
    unchanged = translate_keys(state, model)
    assert _equal(unchanged, state)
    prefixes = {key.split('.')[0] for key in theirs}
    expected = {'mask_rcnn': {'backbone', 'neck', 'rpn_head', 'roi_head'},
                'upernet': {'backbone', 'decode_head', 'auxiliary_head'},
                'ssdlite': {'encoder', 'extra_layers', 'ssd_heads'}}.get(kind, {'encoder', 'seg_head'})
    assert prefixes == expected
    if kind in ('mask_rcnn', 'upernet'):
        inner = {key.split('.')[1] for key in theirs if key.startswith('backbone.')}
        assert inner == {'patch_embed', 'layers', 'outnorm0', 'outnorm1', 'outnorm2', 'outnorm3'}


@pytest.mark.parametrize('name, entries', [
    ('ssdlite_mobilevitv2-050_coco-320', lambda: ssd_entries(0.5)),
    ('ssdlite_mobilevitv2-100_coco-320', lambda: ssd_entries(1.0)),
    ('deeplabv3_mobilevitv2-050_4xb4-120e_ade20k-512x512', lambda: segmenter_entries(0.5, 'deeplabv3')),
    ('pspnet_mobilevitv2-050_4xb4-120e_ade20k-512x512', lambda: segmenter_entries(0.5, 'pspnet'))])
def test_cvnets_names_and_shapes_of_whole_networks(name, entries):
    """The names that are written are those that follow from the rules of the authors' library."""
    config = load(name)
    init_default_scope(config.default_scope)
    model = build_on_meta(config)
    width = 1.0 if '-100_' in name else 0.5
    written = {key: tuple(value.shape) for key, value in to_published_keys(model.state_dict(), model).items()}
    assert written == dict([*encoder_entries(width), *entries()])


@pytest.mark.parametrize('change, message', [
    ('missing', 'keys? missing|keys missing'), ('misshaped', 'shapes differ'), ('extra', 'not in the model')])
def test_every_way_of_loading_published_names_is_strict(published, change, message, tmp_path):
    kind, _, theirs, _ = published
    model = _build(kind)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    weights = dict(theirs)
    first = next(iter(weights))
    prefix = first.partition('.')[0]
    weights.update({f'{prefix}.layer_9.weight': torch.zeros(1)} if change == 'extra' else {first: torch.zeros(1)})
    if change == 'missing':
        del weights[first]
    path = tmp_path / 'w.pth'
    torch.save(weights, path)
    for load_it in (lambda: model.load_state_dict(weights, strict=False), lambda: lax_load(model, str(path)),
                    lambda: load_checkpoint(model, path)):
        with pytest.raises(WeightsError, match=message):
            load_it()
    assert _equal(model.state_dict(), before), 'no weight may change'


def test_models_without_published_names_are_refused():
    model = _build('ssdlite')
    state = model.state_dict()
    with pytest.raises(WeightsError, match=r"no name for 1 of the keys .neck.other.weight"):
        to_published_keys({**state, 'neck.other.weight': torch.zeros(1)}, model)
    small = load('mask-rcnn_test-myo_shapes')
    init_default_scope('mmdet')
    detector = build_on_meta(small)
    with pytest.raises(WeightsError, match='no published names for Myo'):
        to_published_keys(detector.state_dict(), detector)


# ---- the libraries' own loaders

def _weights_of(model):
    return {key: value for key, value in model.state_dict().items()}


@SOME_KINDS
def test_apis_of_both_libraries_load_published_names(published):
    kind, state, _, path = published
    config = _config(kind)
    # Files of cvnets do not name their classes. The libraries warn of it and reset the filters.
    with warnings.catch_warnings(record=True):
        if kind in SEGMENTERS:
            models = [init_model(config.copy(), path, device='cpu'),
                      MMSegInferencer(config.copy(), path, device='cpu').model]
        else:
            models = [init_detector(config.copy(), path, device='cpu'),
                      DetInferencer(config.copy(), path, device='cpu').model]
    for model in models:
        assert _equal(_weights_of(model), state)


@SOME_KINDS
def test_load_from_of_a_runner_loads_published_names(published, tmp_path):
    """With EMAHook, which reads `state_dict` from the checkpoint; a file of cvnets has no such entry."""
    kind, state, _, path = published
    config = _config(kind).copy()
    config.update(load_from=path, work_dir=str(tmp_path), experiment_name=f'published_{kind}',
                  custom_hooks=[dict(type='EMAHook')])
    config.pop('visualizer', None)
    init_default_scope(config.default_scope)
    runner = Runner.from_cfg(config)
    ema = next(hook for hook in runner.hooks if type(hook).__name__ == 'EMAHook')
    ema.before_run(runner)
    runner.load_or_resume()
    assert _equal(_weights_of(runner.model), state)
    assert _equal(_weights_of(ema.ema_model.module), state)


def test_transformers_segmenter_loads_without_its_auxiliary_head():
    weights = transformers_names(authors_file(encoder_entries(0.5), segmenter_entries(0.5, 'deeplabv3')))
    config = load_segmentation('deeplabv3_mobilevitv2-050_4xb4-120e_ade20k-512x512')
    model = MODELS.build(config.model)
    found = compare_weights(model, weights)
    assert not found.problems and all(key.startswith('auxiliary_head.') for key in found.new)
    model.load_state_dict(weights, strict=False)
    assert torch.equal(model.decode_head.aspp[4].conv.weight,
                       weights['segmentation_head.aspp.convs.4.conv_1x1.convolution.weight'])


def test_local_pickles_are_read_without_running_code(tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'was_run'),)

    torch.save(dict(state_dict={}, hook=Code()), tmp_path / 'w.pth')
    with pytest.raises(WeightsError, match='could run code'):
        lax_load(nn.Linear(1, 1), str(tmp_path / 'w.pth'))
    assert not (tmp_path / 'was_run').exists()
    for name, content, message in (('none.pth', None, 'no weight file at'), ('list.pth', [1], 'holds no weights'),
                                   ('empty.pth', dict(epoch=3), 'holds no weights')):
        if content is not None:
            torch.save(content, tmp_path / name)
        with pytest.raises(WeightsError, match=message):
            CheckpointLoader.load_checkpoint(str(tmp_path / name))
    runner = dict(state_dict={'w': torch.ones(1)}, optimizer=dict(state={}), meta=dict(epoch=2))
    torch.save(runner, tmp_path / 'epoch_2.pth')
    assert CheckpointLoader.load_checkpoint(str(tmp_path / 'epoch_2.pth'))['meta'] == dict(epoch=2)
    torch.save({**runner, 'state_dict': {'a._orig_mod.w': torch.ones(1)}}, tmp_path / 'compiled.pth')
    assert CheckpointLoader.load_checkpoint(str(tmp_path / 'compiled.pth'))['state_dict'].keys() == {'a.w'}
    torch.save(dict(model={'w': torch.ones(1)}), tmp_path / 'flat.pth')
    assert CheckpointLoader.load_checkpoint(str(tmp_path / 'flat.pth')) == dict(
        state_dict={'w': torch.ones(1)}, meta={})


# ---- the 150 classes of the files for Cityscapes

def _cityscapes(built, wanted, auxiliary=True):
    """Weights under published names for `built` classes, and a model for `wanted` classes."""
    models = []
    for classes in (built, wanted):
        config = _config('upernet').model.copy()
        config.decode_head.num_classes = config.auxiliary_head.num_classes = classes
        config.decode_head.loss_decode = dict(type='CrossEntropyLoss')
        init_default_scope('mmseg')
        models.append(MODELS.build(config))
    weights = to_published_keys(_randomized(models[0]).state_dict(), models[0])
    return {key: value for key, value in weights.items() if auxiliary or 'auxiliary' not in key}, models[1]


@pytest.mark.parametrize('auxiliary', [True, False])
def test_first_19_of_150_classes_are_kept(auxiliary, tmp_path, capsys):
    weights, model = _cityscapes(150, 19, auxiliary)
    path = tmp_path / 'iter_160000.pth'
    torch.save(dict(state_dict=weights, meta={}), path)
    with pytest.warns(UserWarning, match='iter_160000.pth have 150 classes, of which the first 19 are kept'):
        load_checkpoint(model, path)
    for head in ('decode_head', 'auxiliary_head')[:1 + auxiliary]:
        for part in ('weight', 'bias'):
            ours = model.state_dict()[f'{head}.conv_seg.{part}']
            assert torch.equal(ours, weights[f'{head}.conv_seg.{part}'][:19])
    _, model = _cityscapes(150, 19)
    lax_load(model, str(path))                            # the libraries' own way
    assert torch.equal(model.decode_head.conv_seg.weight, weights['decode_head.conv_seg.weight'][:19])
    assert 'the first 19 are kept' in compare_weights(model, weights).summary('the file')
    hook = StartHook(str(path))                           # `subquad train --weights`
    hook.prepare(model, ['road'])
    assert 'the first 19 are kept' in capsys.readouterr().err
    assert torch.equal(hook.weights['decode_head.conv_seg.weight'], weights['decode_head.conv_seg.weight'][:19])
    found = compare_weights(model, weights, ())           # NewHeadsHook starts other classes with new heads
    assert not found.classes_left_out and 'decode_head.conv_seg.weight' in found.new


@pytest.mark.parametrize('built, wanted, change', [
    (150, 21, None), (151, 19, None), (19, 150, None), (6, 19, None), (150, 19, 'own names'), (150, 19, 'one head'),
    (150, 19, 'width')])
def test_other_numbers_of_classes_are_refused(built, wanted, change):
    weights, model = _cityscapes(built, wanted)
    if change == 'own names':                             # not a file of the authors
        weights = translate_keys(weights, model)
    elif change == 'one head':
        weights.update({f'auxiliary_head.conv_seg.{part}': weights[f'auxiliary_head.conv_seg.{part}'][:19].clone()
                        for part in ('weight', 'bias')})
    elif change == 'width':
        weights['decode_head.conv_seg.weight'] = torch.zeros(150, 7, 1, 1)
    with pytest.raises(WeightsError, match=r'shapes differ .*decode_head.conv_seg'):
        model.load_state_dict(weights, strict=False)


@pytest.mark.parametrize('names', [19, 150, 0])
def test_conversion_of_files_for_cityscapes(names, tmp_path):
    weights, model = _cityscapes(150, 19)
    meta = dict(dataset_meta=dict(classes=tuple(map(str, range(names))))) if names else {}
    torch.save(dict(state_dict=weights, meta=meta), tmp_path / 'iter_160000.pth')
    out = tmp_path / 'out.safetensors'
    if names == 150:                                             # the same shapes, but a file for ADE20K
        with pytest.raises(WeightsError, match='it was trained on 150 classes .0, 1, 2'):
            convert(tmp_path / 'iter_160000.pth', out, model)
        with pytest.raises(WeightsError, match='shapes differ .decode_head.conv_seg.weight .150, '):
            load_checkpoint(model, tmp_path / 'iter_160000.pth')
        assert not out.exists()
        return
    result = convert(tmp_path / 'iter_160000.pth', out, model)
    assert 'the first 19 are kept' in result.notes[0] and result.notes == result.metadata['provenance']['notes']
    assert len(read_file(out).weights['decode_head.conv_seg.weight']) == 19


@pytest.mark.parametrize('kind', ['deeplabv3', 'pspnet'])
def test_authors_segmenter_files_load(kind):
    weights = authors_file(encoder_entries(0.5), segmenter_entries(0.5, kind))
    assert len(weights) == (313 if kind == 'deeplabv3' else 307)
    cfg = load_segmentation(f'{kind}_mobilevitv2-050_4xb4-120e_ade20k-512x512').model
    model = MODELS.build(cfg)
    translated = cvnets.translate(weights, model)
    assert translated.keys() == model.state_dict().keys() and model.load_state_dict(translated)
    theirs = [value for key, value in weights.items() if key.startswith(('seg_head.aspp.', 'seg_head.psp_layer.'))]
    ours = [value for key, value in model.decode_head.state_dict().items() if 'conv_seg' not in key]
    assert len(theirs) == len(ours) and all(torch.equal(a, b) for a, b in zip(theirs, ours))   # in the same order
    without = {key: value for key, value in weights.items() if '.aux_head.' not in key}
    auxiliary = {key for key in translated if key.startswith('auxiliary_head.')}
    assert len(auxiliary) == 8 and cvnets.translate(without, model).keys() == translated.keys() - auxiliary
    del cfg.auxiliary_head
    model = MODELS.build(cfg)
    assert all(cvnets.translate(file, model).keys() == model.state_dict().keys() for file in (weights, without))
