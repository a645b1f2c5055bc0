"""Data of detectors and segmenters that is damaged, empty or tiny: works, or is one sentence that names the file."""
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip('mmcv')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope
from user_errors import command_error, user_error

import subquad.backbones.mm  # noqa: F401  (registers)
from subquad.backbones.weights import save_weights
from subquad.tools import make_dataset, predict, stats, test, train
from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import find, known_configs, load
from subquad.tools.engine.dense.inputs import Steps, accept_tiny_images, build_dataset, check_evaluator
from subquad.tools.engine.dense.task import check_dataset

MASK_RCNN, UPERNET = 'mask-rcnn_test-ppma_shapes', 'upernet_test-ppma_shapes'
SHORT = ['--cfg-options', 'train_cfg.max_epochs=1', 'train_cfg.val_interval=1']


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp('inputs') / 'shapes'
    make_dataset.main(['shapes', str(folder), '--train', '4', '--val', '2', '--size', '64'])
    return folder


@pytest.fixture
def data(shapes, tmp_path):
    """A writable copy of the data set."""
    return shutil.copytree(shapes, tmp_path / 'shapes')


def _dataset(config, data, part='val'):
    init_default_scope(config.default_scope)
    dataset = config[f'{part}_dataloader'].dataset.to_dict()
    return {**dataset, 'data_root': str(data)}


@pytest.mark.parametrize('content, message', [
    (None, 'Unterminated string|Expecting'), ('', 'Expecting value'), ('{}', "no '(images|categories)'"),
    ('{"images": [{"id": 1}], "annotations": [], "categories": [{"id": 1, "name": "circle"}]}',
     "no '(file_name|height)'")])
def test_errors_name_the_annotation_file(content, message, data, tmp_path):
    """A truncated annotation file (content=None), and files of other content."""
    config = load(MASK_RCNN)
    for part in ('train', 'val'):
        path = data / 'annotations' / f'instances_{part}.json'
        path.write_text(path.read_text()[:700] if content is None else content)
        name = f'{part}_dataloader.dataset'
        said = user_error(lambda part=part, name=name: build_dataset(_dataset(config, data, part), name), match=message)
        assert str(path) in said and said.startswith(f'{name}: ')


def test_errors_name_files_of_nested_data_sets_and_evaluators(data):
    config = load(MASK_RCNN)
    path = data / 'annotations' / 'instances_val.json'
    inner = _dataset(config, data)
    fine = _dataset(config, data, 'train')
    check_evaluator(dict(type='CocoMetric', ann_file=str(path)), [])
    path.write_text(path.read_text()[:500])
    for dataset in (dict(type='RepeatDataset', times=2, dataset=inner),
                    dict(type='ConcatDataset', datasets=[fine, inner])):
        assert str(path) in user_error(lambda dataset=dataset: build_dataset(dataset, 'x'))
    for evaluator in (dict(type='CocoMetric', ann_file=str(path)), [dict(type='CocoMetric', ann_file=str(path))]):
        assert str(path) in user_error(lambda evaluator=evaluator: check_evaluator(evaluator, []),
                                       match='evaluator CocoMetric')
    user_error(lambda: check_evaluator(dict(type='CocoMetric', ann_file='none.json'), []),
               match='No such file or directory: .none.json')
    check_evaluator(dict(type='IoUMetric', iou_metrics=['mIoU']), [])


def test_unlisted_categories_are_rejected(data, tmp_path):
    """Categories that the config does not list: mmdet would ignore them, and mmseg would stop during an epoch."""
    path, work = data / 'annotations' / 'instances_train.json', tmp_path / 'work'
    annotations = json.loads(path.read_text())
    annotations['categories'].append(dict(id=9, name='hexagon'))
    path.write_text(json.dumps(annotations))
    label_map = sorted((data / 'annotations_seg' / 'train').iterdir())[0]
    Image.fromarray(np.full((64, 64), 6, np.uint8)).save(label_map)
    command_error(train.main, [MASK_RCNN, '--data', data, '--work-dir', work],
                  match="has a category 'hexagon' that metainfo")
    command_error(train.main, [UPERNET, '--data', data, '--work-dir', work],
                  match='has label 6, the data set has 6 classes')
    assert not work.exists()
    annotations['categories'] = annotations['categories'][1:5]
    path.write_text(json.dumps(annotations))
    command_error(train.main, [MASK_RCNN, '--data', data, '--work-dir', work],
                  match="has no category 'circle'; it has ring")


def test_a_file_without_annotations_is_rejected(data, tmp_path):
    """pycocotools accepts it, and training would see images without objects."""
    path = data / 'annotations' / 'instances_train.json'
    content = json.loads(path.read_text())
    del content['annotations']
    path.write_text(json.dumps(content))
    command_error(train.main, ['ssdlite_test-mobilevitv2_shapes', '--data', data, '--work-dir', tmp_path / 'work'],
                  match=f'{path} has no annotations')


def test_a_truncated_file_ends_training_and_testing_at_once(data, tmp_path):
    save_weights(_model(MASK_RCNN), tmp_path / 'w.safetensors')
    path = data / 'annotations' / 'instances_val.json'
    path.write_text(path.read_text()[:500])
    for call in (lambda: train.main([MASK_RCNN, '--data', str(data), '--work-dir', str(tmp_path / 'work')]),
                 lambda: test.main([MASK_RCNN, str(tmp_path / 'w.safetensors'), '--data', str(data)])):
        assert str(path) in user_error(call)
    assert not (tmp_path / 'work').exists()


def test_errors_name_empty_folders(data, tmp_path):
    config = load(UPERNET)
    folder = data / 'images' / 'val'
    for file in folder.iterdir():
        file.unlink()
    user_error(lambda: build_dataset(_dataset(config, data), 'x'), match=f'x: no images found in the folder {folder}')
    named = {**_dataset(config, data, 'train'), 'img_suffix': '.webp'}
    user_error(lambda: build_dataset(named, 'x'), match=r'no images found in the folder .*/train \(\*.webp\)')
    folder.rmdir()
    user_error(lambda: build_dataset(_dataset(config, data), 'x'), match=f'No such file or directory: .{folder}')
    user_error(lambda: train.main([UPERNET, '--data', str(data), '--work-dir', str(tmp_path / 'work'), '--cfg-options',
                               'train_dataloader.batch_size=2']),
               match=f'val_dataloader.dataset: .*No such file or directory: .{folder}')
    assert not (tmp_path / 'work').exists()


def test_classes_in_another_order_than_the_files(data, tmp_path):
    """mmdet would call circles stars and stars circles, with the same average precision."""
    config = load(MASK_RCNN)
    config.allow_other_classes = True
    for head in (config.model.roi_head.bbox_head, config.model.roi_head.mask_head):
        head.num_classes = 2
    for classes, fits in ((('circle', 'star'), True), (('star', 'circle'), False)):
        part = {**_dataset(config, data), 'metainfo': dict(classes=classes)}
        dataset = build_dataset(part, 'val_dataloader.dataset')
        if fits:
            check_dataset(dataset, config, 'val')
            continue
        user_error(lambda dataset=dataset: check_dataset(dataset, config, 'val'),
                   match='lists circle, star, metainfo.classes are star, circle: .* in that order')


@pytest.mark.parametrize('config, wrong, message', [
    (MASK_RCNN, 'model.neck.in_channels=[32,48,64,128]',
     r'model.neck.in_channels is \[32, 48, 64, 128\], but the backbone returns \[32, 48, 64, 96\] channels$'),
    (MASK_RCNN, 'model.backbone.out_indices=[1,2,3]',
     r'\[32, 48, 64, 96\], but the backbone returns \[48, 64, 96\] channels$'),
    (UPERNET, 'model.decode_head.in_channels=[32,48,64,64]', 'decode_head.in_channels is .32, 48, 64, 64.'),
    (UPERNET, 'model.decode_head.in_index=[0,1,3,2]',
     r'returns \[32, 48, 64, 96\] channels; in_index is \[0, 1, 3, 2\]')])
def test_other_channels_than_the_backbones_are_one_sentence(config, wrong, message, data, tmp_path):
    stats_error = command_error(stats.main, [config, '--size', '64x64', '--cfg-options', wrong])
    train_error = command_error(train.main, [config, '--data', str(data), '--work-dir', str(tmp_path / 'run'),
                                             '--cfg-options', 'train_dataloader.batch_size=2', wrong])
    for error in (stats_error, train_error):
        assert re.search(message, error), error
    assert not (tmp_path / 'run').exists()


def test_configs_use_every_level_of_the_backbone():
    """An output norm without gradient stops distributed training."""
    for name in known_configs():
        if 'mobilevitv2' in name or find(name).parent.name not in ('detection', 'segmentation'):
            continue
        model = load(name).model
        if model.backbone.type not in ('PPMA', 'Myo', 'LCSM'):
            continue
        count = len(model.backbone.get('out_indices', (0, 1, 2, 3)))
        neck = model.get('neck')
        neck = neck[0] if isinstance(neck, list) else neck
        if neck is not None:
            assert neck.get('start_level', 0) == 0 and len(neck.in_channels) == count, name
            continue
        heads = [head for key in ('decode_head', 'auxiliary_head', 'bbox_head', 'panoptic_head') for head in (
            model.get(key) if isinstance(model.get(key), list) else [model.get(key)]) if head]
        indices = [head.get('in_index', list(range(count))) for head in heads]
        used = {n % count for index in indices for n in (index if isinstance(index, (list, tuple)) else [index])}
        assert used == set(range(count)), name


# ---- images of a few pixels

def _model(name):
    config = load(name)
    init_default_scope(config.default_scope)
    return MODELS.build(config.model)


def _shrink(data, size=(1, 1), every=False):
    """Make the first image of each part, or every one, as small as that: width, height."""
    width, height = size
    for part in ('train', 'val'):
        path = data / 'annotations' / f'instances_{part}.json'
        annotations = json.loads(path.read_text())
        images = annotations['images'] if every else annotations['images'][:1]
        for image in images:
            image.update(width=width, height=height)
            file = data / 'images' / part / image['file_name']
            Image.new('RGB', size, 'red').save(file)
            Image.new('L', size, 1).save(data / 'annotations_seg' / part / f'{file.stem}.png')
        small = {image['id'] for image in images}
        for item in annotations['annotations']:
            if item['image_id'] in small:
                item.update(bbox=[0, 0, width, height], area=width * height,
                            segmentation=[[0, 0, width, 0, width, height, 0, height]])
        path.write_text(json.dumps(annotations))


@pytest.mark.parametrize('name', [MASK_RCNN, pytest.param('ssdlite_test-mobilevitv2_shapes', marks=pytest.mark.slow)])
def test_one_pixel_in_a_detector(name, data, tmp_path, capsys):
    _shrink(data)
    work = tmp_path / 'work'
    assert train.main([name, '--data', str(data), '--work-dir', str(work), *SHORT]) == 0
    _shrink(data, every=True)
    last = str(work / 'last.safetensors')
    assert test.main([name, last, '--data', str(data), '--json']) == 0
    image = next((data / 'images' / 'val').iterdir())
    capsys.readouterr()
    assert predict.main([name, last, str(image), '--out', str(tmp_path / 'out'), '--json', '--score', '0']) == 0
    row, = json.loads(capsys.readouterr().out)
    assert (row['height'], row['width']) == (1, 1)
    assert all(0 <= edge <= 1 for item in row['objects'] for edge in item['box'])


@pytest.mark.parametrize('size', [(1, 1), (1, 40), (33, 1)])
def test_one_pixel_in_a_segmenter(size, data, tmp_path):
    _shrink(data, size, every=True)
    dataset = build_dataset(_dataset(load(UPERNET), data, 'train'), 'train')
    dataset.pipeline = Steps(dataset.pipeline.transforms)
    for n in range(4):
        item = dataset[n]
        assert item['inputs'].shape[1:] == item['data_samples'].gt_sem_seg.shape == size[::-1]
        assert (item['data_samples'].gt_sem_seg.data == 1).all()
    if size != (1, 1):
        return
    save_weights(_model(UPERNET), tmp_path / 'w.safetensors')
    assert test.main([UPERNET, str(tmp_path / 'w.safetensors'), '--data', str(data), '--show-dir',
                      str(tmp_path / 'shown')]) == 0
    assert predict.main([UPERNET, str(tmp_path / 'w.safetensors'), str(data / 'images' / 'val'), '--out',
                         str(tmp_path / 'out')]) == 0
    assert len(list((tmp_path / 'out').glob('*.png'))) == len(list((tmp_path / 'shown').glob('*.png'))) == 2


def test_padding_tiny_images_changes_no_other_images(data):
    """Only a batch whose deepest map has one cell is padded further, and boxes stay within the image."""
    model = _model(MASK_RCNN).eval()
    plain = _model(MASK_RCNN).eval()
    plain.load_state_dict(model.state_dict())
    accept_tiny_images(model)
    for height, width, more in ((64, 64, False), (33, 20, False), (20, 32, True)):
        from mmdet.structures import DetDataSample
        inputs = [torch.randint(256, (3, height, width), dtype=torch.uint8)]
        size = dict(img_shape=(height, width), ori_shape=(height, width), scale_factor=(1., 1.))
        batches = [one.data_preprocessor(dict(inputs=list(inputs), data_samples=[DetDataSample(
            metainfo=size)]))['inputs'] for one in (plain, model)]
        assert (batches[0].shape != batches[1].shape) == more
        if not more:
            assert torch.equal(*batches)
            continue
        assert batches[1].shape[-2:] == (32, 64)
        sample = DetDataSample(metainfo=size)
        found = model.test_step(dict(inputs=list(inputs), data_samples=[sample]))[0].pred_instances
        assert (found.bboxes[:, 2] <= width).all() and (found.bboxes[:, 3] <= height).all()


def test_errors_name_the_image_of_a_failing_pipeline(data, tmp_path):
    broken = sorted((data / 'images' / 'train').iterdir())[1]
    broken.write_bytes(b'no image')
    for name, workers in ((MASK_RCNN, 0), (UPERNET, 1)):
        with pytest.raises(UserError, match=f'{broken} '):
            train.main([name, '--strict', '--data', str(data), '--work-dir', str(tmp_path / 'work'), *SHORT,
                        f'train_dataloader.num_workers={workers}', 'train_dataloader.batch_size=2'])


def test_fewer_images_than_a_batch(data, tmp_path):
    """The shapes segmenter drops batches that are not full."""
    user_error(lambda: train.main([UPERNET, '--data', str(data), '--work-dir', str(tmp_path / 'work')]),
               match='train_dataloader: the data set has 4 samples, fewer than batch_size=8, and drop_last leaves none')
    assert not (tmp_path / 'work').exists()


def test_wrapped_pipelines_return_the_same_data():
    seen = []
    steps = Steps([lambda results: seen.append(results) or results])
    assert steps(dict(img_path='x.png', img=np.zeros((2, 2, 3))))['img_path'] == 'x.png' and len(seen) == 1
    assert Steps([lambda results: None])(dict(img_path='x.png')) is None, 'MMEngine then takes another image'


def test_images_of_several_sizes_in_a_segmenters_batch(data, tmp_path):
    save_weights(_model(UPERNET), tmp_path / 'w.safetensors')
    _shrink(data, (40, 40))
    user_error(lambda: test.main([UPERNET, str(tmp_path / 'w.safetensors'), '--data', str(data)]),
               match='image size in a batch should be the same', kind=AssertionError)
    assert test.main([UPERNET, str(tmp_path / 'w.safetensors'), '--data', str(data), '--cfg-options',
                      'test_dataloader.batch_size=1']) == 0


# ---- maps that MobileViTv2 rounds up

def _with_neck(**backbone):
    """RetinaNet with the neck of PANet, which joins levels of exact sizes."""
    init_default_scope('mmdet')
    return MODELS.build(ConfigDict(
        type='SingleStageDetector', data_preprocessor=dict(type='DetDataPreprocessor', pad_size_divisor=32),
        backbone=dict(type='MobileViTv2', arch='test', out_indices=(2, 3, 4), **backbone),
        neck=dict(type='PAFPN', in_channels=[64, 96, 128], out_channels=8, num_outs=3),
        bbox_head=dict(type='RetinaHead', num_classes=2, in_channels=8, feat_channels=8, stacked_convs=1,
                       anchor_generator=dict(type='AnchorGenerator', scales=[4], ratios=[1.0], strides=[8, 16, 32])),
        test_cfg=dict(nms_pre=10, score_thr=0.05, nms=dict(type='nms', iou_threshold=0.5), max_per_img=5))).eval()


def _run(model, size=96):
    from mmdet.structures import DetDataSample
    sample = DetDataSample(metainfo=dict(img_shape=(size, size), ori_shape=(size, size), scale_factor=(1., 1.)))
    return model.test_step(dict(inputs=[torch.zeros(3, size, size, dtype=torch.uint8)], data_samples=[sample]))


def _fail(*_):
    raise AssertionError


def _fail_with_text(*_):
    raise AssertionError('the sizes of two batches differ')


UNRELATED = [lambda *_: torch.zeros(1, 80) + torch.zeros(1, 2),                              # other classes
             lambda *_: torch.zeros(6).view(4),
             lambda *_: torch.nn.BatchNorm2d(3)(torch.zeros(1, 3, 1, 1)),
             lambda *_: torch.nn.Conv2d(3, 8, 3)(torch.zeros(1, 4, 8, 8)),
             _fail_with_text]


@pytest.mark.parametrize('unrelated', UNRELATED)
def test_unrelated_errors_that_name_a_size_stay_as_they_are(unrelated):
    model = _with_neck()
    model.neck.forward = unrelated
    with pytest.raises((RuntimeError, ValueError, AssertionError)) as error:
        _run(model)
    assert re.search('size|shape|channels', str(error.value)) and 'exact_size' not in str(error.value)


def test_maps_that_cannot_be_concatenated_name_the_option():
    model = _with_neck()
    model.neck.forward = lambda maps: torch.cat([maps[1], torch.nn.functional.interpolate(maps[2], scale_factor=2)], 1)
    with pytest.raises(RuntimeError, match='Sizes of tensors must match.*exact_size=True'):
        _run(model)


def test_batches_of_several_sizes_name_the_option():
    model = _with_neck()
    with pytest.raises(RuntimeError, match=r'size of tensor.*MobileViTv2 rounds .*model.backbone.exact_size=True'):
        _run(model)
    _run(model, 128)
    _run(_with_neck(exact_size=True))
    model.data_preprocessor.pad_size_divisor = 64
    _run(model)
    # CondInst asserts, without a word.
    model.neck.forward = _fail
    with pytest.raises(AssertionError, match='sizes do not match .*exact_size=True'):
        model.data_preprocessor.pad_size_divisor = 32
        _run(model)
    with pytest.raises(AssertionError, match='^$'):
        _run(model, 128)
    del model.neck.forward
    model.data_preprocessor.pad_size_divisor = 64
    # Errors of other kinds stay as they are.
    del model.bbox_head
    with pytest.raises(AttributeError) as error:
        _run(model)
    assert 'exact_size' not in str(error.value)
    assert not _with_neck(exact_size=True)._forward_hooks and not _model(MASK_RCNN)._forward_hooks
