"""Detectors and segmenters as subjects of an export: outputs, preparation of images, selection of detections."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_cases import make_shapes
from dense_exports import detections, original_boxes, unmatched
from helpers import relative_error
from pairwise import slow
from PIL import Image
from sklearn.datasets import load_sample_image

from subquad.tools.common.cli import UserError
from subquad.tools.engine.config import load
from subquad.tools.engine.dense.prediction import Predictor
from subquad.tools.exporters.dense_heads import MatrixPool, SelectingDetector, replace_pools
from subquad.tools.exporters.dense_preprocessing import input_size, preparation, read_image
from subquad.tools.exporters.dense_subject import dense_subject
from subquad.tools.exporters.subject import with_normalization

pytestmark = pytest.mark.usefixtures('metafiles_read_once')
SSDLITE, WEIGHTS = 'ssdlite_test-mobilevitv2_shapes', 'test_mobilevitv2.ssdlite_shapes'
DEEPLAB, UPERNET = 'deeplabv3_test-mobilevitv2_shapes', 'upernet_test-ppma_shapes'
SEGMENTERS = {DEEPLAB: 'test_mobilevitv2.deeplabv3_shapes', UPERNET: 'test_ppma.upernet_shapes'}
SETTINGS = dict(score_threshold=0.1, iou_threshold=0.5, candidates_per_class=30, max_detections=25)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """Files: two generated images of 128 x 128, and a photograph of 213 x 320."""
    folder = tmp_path_factory.mktemp('images')
    make_shapes(folder / 'shapes', train=1, val=2, size=128)
    Image.fromarray(load_sample_image('china.jpg')).resize((320, 213)).save(folder / 'photograph.png')
    return [*sorted((folder / 'shapes/images/val').iterdir()), folder / 'photograph.png']


def _run(module, images):
    with torch.inference_mode():
        return module(images)


# ---- the outputs of a detector

@pytest.mark.parametrize('resize', [
    *slow(None, dict(type='Resize', scale=(192, 128), keep_ratio=False, interpolation='bicubic', backend='pillow')),
    dict(type='Resize', scale=(256, 192), keep_ratio=True)])
def test_ssdlite_finds_what_predict_finds(images, resize):
    config = load(SSDLITE)
    if resize:
        config.test_dataloader.dataset.pipeline[1] = resize
    predictor = Predictor(config, WEIGHTS)
    sizes = {None: [None, (128, 128), (256, 320)]}.get(resize and resize['scale'], [None] * 3)
    if resize and resize['keep_ratio']:
        sizes = [(192, 192), (192, 192), (192, 256)]        # the sides that mmdet's pipeline ends with, padded
    for file, size in zip(images, sizes):
        subject = dense_subject(config, WEIGHTS, size)
        prepared, sample = read_image(file, subject.metadata), predictor(file)
        assert len(sample.pred_instances) > 20
        raw = [y.numpy() for y in _run(subject.module, prepared.images)]
        boxes, scores, labels = detections(*raw, subject.metadata['postprocessing'])
        assert unmatched((original_boxes(boxes, prepared), scores, labels), sample) == 0
        swapped = [y.numpy() for y in _run(subject.module, prepared.images.flip(1))]
        boxes, scores, labels = detections(*swapped, subject.metadata['postprocessing'])
        assert unmatched((original_boxes(boxes, prepared), scores, labels), sample) > 0, 'colors make no difference'


def test_raw_outputs_of_large_ssdlite():
    subject = dense_subject(load('ssdlite_mobilevitv2-050_coco-320'), None)
    assert subject.size == (320, 320) and subject.outputs == ('boxes', 'scores')
    example = subject.example(seed=1)
    (boxes, scores), expected = _run(subject.module, example), _run(subject.eager, example)
    assert boxes.shape == (1, 3232, 4) and scores.shape == (1, 3232, 80)
    for actual, reference in zip((boxes, scores), expected):
        assert relative_error(actual, reference) < 1e-5
    assert subject.metadata['labels'][:2] == ['person', 'bicycle'] and len(subject.metadata['labels']) == 80


def test_box_coder_with_means():
    config = load(SSDLITE)
    config.model.bbox_head.bbox_coder = dict(type='SSDLiteBoxCoder', target_means=(0.1, -0.2, 0.3, -0.1))
    subject = dense_subject(config, WEIGHTS)
    plain = _run(dense_subject(load(SSDLITE), WEIGHTS).module, subject.example(seed=1))[0]
    actual, expected = (_run(module, subject.example(seed=1))[0] for module in (subject.module, subject.eager))
    assert relative_error(actual, expected) < 1e-5 < 1e-2 < relative_error(plain, expected)


# ---- the selection of detections

def _random_raw(seed, anchors=200, classes=4):
    generator = np.random.default_rng(seed)
    corner, extent = generator.uniform(-10, 90, (anchors, 2)), generator.uniform(5, 50, (anchors, 2))
    boxes = np.concatenate((corner, corner + extent), 1).astype(np.float32)
    return boxes[None], generator.uniform(0, 1, (1, anchors, classes)).astype(np.float32) ** 3


def _nms_graph(anchors, classes):
    """An ONNX model that cuts an image (1, 1, anchors, 4 + classes) into boxes and scores."""
    import onnx
    return onnx.parser.parse_model(f'''
        <ir_version: 8, opset_import: ["" : 18]>
        cut (float[1, 1, {anchors}, {4 + classes}] image)
            => (float[1, {anchors}, 4] boxes, float[1, {anchors}, {classes}] scores)
        <int64[1] one = {{1}}, int64[2] sides = {{4, {classes}}}> {{
            rows = Squeeze (image, one)
            boxes, scores = Split <axis = 2> (rows, sides)
        }}''')


def _selected_by_onnx(settings):
    append_nms = pytest.importorskip('subquad.tools.exporters.onnx_graph').append_nms
    runtime = pytest.importorskip('onnxruntime')
    model = append_nms(_nms_graph(200, 4), settings)
    session = runtime.InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])
    assert [output.name for output in session.get_outputs()] == ['boxes', 'scores', 'labels', 'raw_boxes', 'raw_scores']
    return lambda image: session.run(None, {'image': image})


class _Cut(torch.nn.Module):
    """The graph of `_nms_graph`."""

    def forward(self, image):
        return image[0, ..., :4].clone(), image[0, ..., 4:].clone()


def _selected_by_pytorch(settings):
    network = SelectingDetector(_Cut(), (200, 8), settings)
    program = torch.export.export(network, (torch.zeros(1, 1, 200, 8),)).module()
    return lambda image: [output.numpy() for output in program(torch.from_numpy(image))]


@pytest.mark.parametrize('select', [_selected_by_onnx, _selected_by_pytorch])
@pytest.mark.parametrize('settings', [SETTINGS, {**SETTINGS, 'candidates_per_class': 2 ** 31 - 1},
                                      {**SETTINGS, 'score_threshold': 0.9999}, {**SETTINGS, 'max_detections': 1000}])
def test_nms_in_the_graph(settings, select):
    run, counts = select(settings), []
    for seed in range(5):
        raw = _random_raw(seed)
        image = np.concatenate(raw, -1)[None]
        boxes, scores, labels, *same = run(image)
        expected = detections(*raw, settings)
        assert all(np.array_equal(*pair) for pair in zip(same, raw))
        assert np.array_equal(boxes, expected[0].clip(0, [8, 200, 8, 200]))         # the size of this image
        assert np.array_equal(scores, expected[1]) and np.array_equal(labels, expected[2])
        assert labels.dtype == np.int64 and boxes.dtype == np.float32
        counts.append(len(boxes))
    assert max(counts) <= settings['max_detections']
    assert (max(counts) == 0) == (settings['score_threshold'] > 0.999), counts


def test_detections_are_those_of_the_head():
    from mmengine.config import ConfigDict
    subject = dense_subject(load(SSDLITE), WEIGHTS)
    head = subject.eager.model.bbox_head
    test_cfg = ConfigDict(score_thr=0.05, nms_pre=20, nms=dict(type='nms', iou_threshold=0.4), max_per_img=30)
    settings = dict(score_threshold=0.05, candidates_per_class=20, iou_threshold=0.4, max_detections=30)
    for seed in range(3):
        example = subject.example(seed=seed)
        with torch.inference_mode():
            logits, codes = head(subject.eager.model.extract_feat(example))
            expected = head.predict_by_feat(logits, codes, batch_img_metas=[dict(
                batch_input_shape=(128, 128), img_shape=(128, 128))], cfg=test_cfg)[0]
        boxes, scores, labels = detections(*(y.numpy() for y in _run(subject.eager, example)), settings)
        assert len(expected) == len(boxes) > 5
        assert np.array_equal(labels, expected.labels) and np.allclose(scores, expected.scores, atol=1e-6)
        assert np.allclose(boxes.clip(0, 128), expected.bboxes, atol=1e-3)


# ---- segmenters

@pytest.mark.parametrize('name, size', [(DEEPLAB, (128, 128)), (UPERNET, (160, 128)),
                                        ('pspnet_mobilevitv2-050_4xb4-120e_ade20k-512x512', (128, 192))])
def test_segmenters(name, size):
    config, checkpoint = load(name), SEGMENTERS.get(name)
    subject = dense_subject(config, checkpoint, size)
    example = subject.example(seed=1)
    (logits, labels), expected = _run(subject.module, example), _run(subject.eager, example)
    assert relative_error(logits, expected[0]) < 1e-5
    assert labels.shape == (1, *size) and labels.dtype == torch.int64
    assert (labels != expected[1]).float().mean() <= 1e-3
    assert subject.metadata['postprocessing']['resize']['align_corners'] is config.model.decode_head.get(
        'align_corners', True)
    raw = dense_subject(config, checkpoint, size, labels=False)
    assert raw.outputs == ('logits',) and raw.metadata['postprocessing']['in_graph'] is False
    assert torch.equal(_run(raw.module, example)[0], logits)
    assert not any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in subject.module.modules())


@pytest.mark.parametrize('name, padded', [(DEEPLAB, (256, 320)), (UPERNET, (224, 320))])
def test_labels_are_those_of_predict(images, name, padded, tmp_path):
    config = load(name)
    wide = make_shapes(tmp_path / 'wide', train=1, val=1, size='213x320') / 'images/val/000000.jpg'
    for file, size in ((images[0], (128, 128)), (wide, padded)):
        subject = dense_subject(config, SEGMENTERS[name], size)
        prepared = read_image(file, subject.metadata)
        expected = Predictor(config, SEGMENTERS[name])(file).pred_sem_seg.data[0]
        height, width = prepared.content
        labels = _run(subject.module, prepared.images)[1][0, :height, :width]
        shares = torch.bincount(expected.flatten(), minlength=6) / expected.numel()
        assert (shares > 0.01).sum() >= 2, shares
        assert (labels == expected).float().mean() >= 0.999
        swapped = _run(subject.module, prepared.images.flip(1))[1][0, :height, :width]
        assert (swapped == expected).float().mean() < 0.999, 'colors make no difference'


@pytest.mark.parametrize('cells, size', [((6, 6), (8, 10)), ((2, 3), (5, 3)), ((3, 3), (2, 7)), ((1, 2), (3, 3))])
def test_pools_of_fixed_sizes(cells, size):
    x = torch.randn(2, 5, *size)
    expected = F.adaptive_avg_pool2d(x.double(), cells)
    assert relative_error(MatrixPool(cells, size)(x), expected) < 1e-6


def test_pools_that_are_replaced():
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(6), torch.nn.AdaptiveAvgPool2d((None, 3)),
                                torch.nn.AdaptiveAvgPool2d((4, 2)), torch.nn.AdaptiveAvgPool2d(1))
    x = torch.randn(2, 3, 13, 12)
    expected = model(x)
    replace_pools(model, x)
    assert [type(module).__name__ for module in model] == ['MatrixPool', 'AvgPool2d', 'MatrixPool', 'AdaptiveAvgPool2d']
    assert relative_error(model(x), expected) < 1e-5


# ---- how images are prepared

@pytest.mark.parametrize('name, size, expected', [
    (SSDLITE, (128, 192), dict(size=[128, 192], keep_ratio=True, enlarge=False, interpolation='bilinear',
                               antialias=False)),
    ('ssdlite_mobilevitv2-100_coco-320', (320, 320), dict(size=[320, 320], keep_ratio=False, enlarge=True,
                                                          interpolation='bicubic', antialias=True)),
    ('deeplabv3_mobilevitv2-050_4xb4-120e_ade20k-512x512', (512, 512), dict(
        size=[512, 512], keep_ratio=True, enlarge=True, interpolation='bicubic', antialias=True)),
    ('upernet_ppma-t_8xb1-160k_cityscapes-1024x1024', (1024, 1024), dict(
        size=[1024, 1024], keep_ratio=True, enlarge=True, interpolation='bilinear', antialias=False)),
    ('rtmdet-s_ppma-t_8xb32-300e_coco', (640, 640), dict(size=[640, 640], keep_ratio=True, enlarge=True,
                                                         interpolation='bilinear', antialias=False))])
def test_preparation(name, size, expected):
    config = load(name)
    assert name == SSDLITE or input_size(config, None, None) == size
    described, color = preparation(config, size)
    assert described['resize'] == expected and color == 'RGB'
    mean, std = ((0,) * 3, (1,) * 3) if 'mobilevitv2' in name else ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert described['mean'] == pytest.approx(mean) and described['std'] == pytest.approx(std)
    border = [(114 / 255 - m) / s for m, s in zip(mean, std)] if 'rtmdet' in name else [0] * 3
    assert described['pad'] == dict(to=list(size), value=pytest.approx(border))


def test_preparation_of_other_configs(images):
    config = load(SSDLITE)
    config.model.data_preprocessor = dict(type='DetDataPreprocessor', pad_size_divisor=64)
    described, color = preparation(config, (128, 128))
    assert color == 'BGR'
    metadata = dict(preprocessing=described, input=dict(color=color))
    pixels = np.asarray(Image.open(images[0]).convert('RGB'))[..., ::-1]
    assert np.allclose(read_image(images[0], metadata).images[0].numpy().transpose(1, 2, 0), pixels, atol=1e-3)
    config.test_dataloader.dataset.pipeline.insert(1, dict(type='Rotate'))
    with pytest.raises(UserError, match='has a step Rotate, which the metadata'):
        preparation(config, (128, 128))


def test_normalization_in_the_graph(images):
    config = load(UPERNET)
    subject = dense_subject(config, None, (224, 352))
    inside = with_normalization(subject)
    assert inside.metadata['preprocessing']['pad']['value'] == pytest.approx([123.675, 116.28, 103.53])
    outer, inner = subject.prepare(images[2]), inside.prepare(images[2])
    assert inner.max() > 200 and torch.allclose(inner[0, :, -1, -1], torch.tensor([123.675, 116.28, 103.53]))
    expected, actual = _run(subject.module, outer)[0], _run(inside.module, inner)[0]
    assert relative_error(actual, expected) < 1e-5


# ---- maps of backbone and neck, and what cannot be exported

@pytest.mark.parametrize('name, strides', [('mask-rcnn_test-ppma_shapes', (4, 8, 16, 32)), (SSDLITE, None)])
def test_feature_maps(name, strides):
    subject = dense_subject(load(name), None, (128, 128), features=True)
    example = subject.example()
    maps, expected = _run(subject.module, example), _run(subject.eager, example)
    assert subject.task == 'features' and not subject.metadata['labels']
    assert strides is None or subject.outputs == tuple(f'stride_{n}' for n in strides)
    assert len(maps) == len(subject.outputs) == len(set(subject.outputs)) > 3
    for actual, reference in zip(maps, expected):
        assert relative_error(actual, reference) < 1e-5


@pytest.mark.parametrize('name, options, message', [
    ('mask-rcnn_test-ppma_shapes', dict(size=(128, 128)), 'the head of a MaskRCNN cannot be exported .*--features'),
    (SSDLITE, {}, 'the config does not fix the size of the images; give it as --size'),
    (SSDLITE, dict(size=(128, 130)), 'multiples of 64 for this config, got 128x130'),
    (SSDLITE, dict(size=(0, 64)), 'sides from 32 to 4096'),
    (SSDLITE, dict(checkpoint='test_ppma.digits'), 'was trained on the classes 0, 1, .*, but the data has circle'),
    (SSDLITE, dict(checkpoint='test_ppma.nonsense'), 'no weight file at test_ppma.nonsense'),
    ('test-ppma_digits', {}, 'test-ppma_digits is a classification config')])
def test_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        dense_subject(load(name), **options)


def test_refused_settings():
    config = load(SSDLITE)
    config.model.test_cfg.nms.type = 'soft_nms'
    with pytest.raises(UserError, match="selects detections by 'soft_nms'; only 'nms'"):
        dense_subject(config, None, (128, 128))
    config = load(SSDLITE)
    config.pop('test_dataloader')
    with pytest.raises(UserError, match='no test_dataloader'):
        dense_subject(config)
    assert 'cannot be dynamic' in dense_subject(load(SSDLITE), WEIGHTS).sizes
