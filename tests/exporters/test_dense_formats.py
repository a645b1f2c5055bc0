"""Exported detectors and segmenters find in image files what `subquad predict` finds."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_cases import make_shapes
from dense_exports import detections, original_boxes, unmatched
from pairwise import slow
from PIL import Image
from sklearn.datasets import load_sample_image

from subquad.tools.engine.config import load
from subquad.tools.engine.dense.prediction import Predictor
from subquad.tools.exporters.dense_preprocessing import read_image
from subquad.tools.exporters.dense_subject import dense_subject
from subquad.tools.exporters.formats import FORMATS, WITH_NMS, Options, exporter, missing_packages
from subquad.tools.exporters.pipeline import export

pytestmark = pytest.mark.usefixtures('metafiles_read_once')
SSDLITE, WEIGHTS = 'ssdlite_test-mobilevitv2_shapes', 'test_mobilevitv2.ssdlite_shapes'
DEEPLAB, UPERNET = 'deeplabv3_test-mobilevitv2_shapes', 'upernet_test-ppma_shapes'
SEGMENTERS = {DEEPLAB: 'test_mobilevitv2.deeplabv3_shapes', UPERNET: 'test_ppma.upernet_shapes'}
PSPNET = 'pspnet_mobilevitv2-050_4xb4-120e_ade20k-512x512'


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """Files: two generated images of 128 x 128, and a photograph of 427 x 640."""
    folder = tmp_path_factory.mktemp('images')
    make_shapes(folder / 'shapes', train=1, val=2, size=128)
    Image.fromarray(load_sample_image('china.jpg')).save(folder / 'photograph.png')
    return [*sorted((folder / 'shapes/images/val').iterdir()), folder / 'photograph.png']


def _export(name, folder, config, checkpoint, size=None, **options):
    """Export a config: (report, metadata in the file)."""
    if missing_packages(name):
        pytest.skip(f'{", ".join(missing_packages(name))} missing')
    subject = dense_subject(config, checkpoint, size, nms=name in WITH_NMS, labels=name != 'ncnn')
    report = export(subject, name, folder / f'model{FORMATS[name].suffix}', Options(**options), repeats=0)
    assert report.passed and report.path.exists(), report.errors
    return report, exporter(name).read_metadata(report.path)


def _detect(name, path, metadata, images):
    """Detect as a program does that has the file only: boxes in pixels of the input, scores, labels."""
    if name == 'openvino':
        import openvino
        results = openvino.compile_model(path, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})(images.numpy())
        return [results[output] for output in ('boxes', 'scores', 'labels')]
    if name in ('pt2', 'aoti'):
        return [output.numpy() for output in exporter(name).load(path)(images)[:3]]
    if name in WITH_NMS:
        import onnxruntime
        session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
        return session.run(['boxes', 'scores', 'labels'], {'image': images.numpy()})
    raw = exporter(name).load(path)(images)
    return detections(*(y.numpy() for y in raw), metadata['postprocessing'])


@pytest.mark.parametrize('name', ['ncnn', *slow('onnx', 'ort', 'openvino', 'pt2', 'aoti', 'executorch', 'litert')])
def test_ssdlite(name, images, tmp_path):
    config = load(SSDLITE)
    report, metadata = _export(name, tmp_path, config, WEIGHTS)
    assert metadata['task'] == 'detection' and metadata['labels'][:2] == ['circle', 'ring']
    assert metadata['input']['color'] == 'RGB' and metadata['format'] == name
    names = [output['name'] for output in metadata['outputs']]
    assert names[:2] == ['boxes', 'scores'] and ('raw_boxes' in names) == (name in WITH_NMS)
    assert metadata['postprocessing']['in_graph'] == (name in WITH_NMS)
    predictor = Predictor(config, WEIGHTS)
    for file in images[:2]:
        prepared, sample = read_image(file, metadata), predictor(file)
        boxes, scores, labels = _detect(name, report.path, metadata, prepared.images)
        assert len(sample.pred_instances) > 20
        assert unmatched((original_boxes(boxes, prepared), scores, labels), sample) == 0
        boxes, scores, labels = _detect(name, report.path, metadata, prepared.images.flip(1))
        assert unmatched((original_boxes(boxes, prepared), scores, labels), sample) > 0, 'colors make no difference'


@pytest.mark.slow
@pytest.mark.parametrize('name', ['onnx', 'ncnn', 'executorch'])
def test_ssdlite_on_a_photograph_that_is_resized(name, images, tmp_path):
    config = load(SSDLITE)
    config.test_dataloader.dataset.pipeline[1] = dict(
        type='Resize', scale=(192, 128), keep_ratio=False, interpolation='bicubic', backend='pillow')
    report, metadata = _export(name, tmp_path, config, WEIGHTS)
    assert metadata['input']['shape'] == [1, 3, 128, 192]
    prepared, sample = read_image(images[2], metadata), Predictor(config, WEIGHTS)(images[2])
    boxes, scores, labels = _detect(name, report.path, metadata, prepared.images)
    assert sample.ori_shape == (427, 640) and len(boxes) > 20
    assert unmatched((original_boxes(boxes, prepared), scores, labels), sample) == 0


def _labels(name, path, metadata, prepared):
    """Segment as a program does that has the file only: labels (h, w) of the resized image."""
    outputs = exporter(name).load(path)(prepared.images)
    height, width = prepared.content
    if metadata['postprocessing']['in_graph']:
        return outputs[1][0, :height, :width]
    resized = F.interpolate(outputs[0], prepared.images.shape[2:], mode='bilinear',
                            align_corners=metadata['postprocessing']['resize']['align_corners'])
    return resized[0, :, :height, :width].argmax(0)


@pytest.mark.slow
@pytest.mark.parametrize('config', [DEEPLAB, UPERNET])
@pytest.mark.parametrize('name', ['onnx', 'ncnn', 'ort', 'openvino', 'pt2', 'aoti', 'executorch', 'litert'])
def test_segmenters(name, config, images, tmp_path):
    checkpoint, config = SEGMENTERS[config], load(config)
    report, metadata = _export(name, tmp_path, config, checkpoint, (128, 128))
    assert metadata['task'] == 'segmentation' and metadata['labels'][:2] == ['background', 'circle']
    expected = Predictor(config, checkpoint)(images[0]).pred_sem_seg.data[0]
    assert (torch.bincount(expected.flatten()) > 0.01 * expected.numel()).sum() >= 2
    prepared = read_image(images[0], metadata)
    assert (_labels(name, report.path, metadata, prepared) == expected).float().mean() >= 0.999
    swapped = _labels(name, report.path, metadata, prepared._replace(images=prepared.images.flip(1)))
    assert (swapped == expected).float().mean() < 0.999, 'colors make no difference'


@pytest.mark.slow
@pytest.mark.parametrize('name', ['onnx', 'ncnn', 'openvino', 'pt2', 'executorch', 'litert', 'coreml'])
@pytest.mark.parametrize('config, size', [(PSPNET, (128, 192)), ('ssdlite_mobilevitv2-100_coco-320', None)])
def test_larger_networks(name, config, size, tmp_path):
    """The bins of this PSPNet are no multiples of its map's sides, which are 16 and 24."""
    _export(name, tmp_path, load(config), None, size)


@pytest.mark.slow
@pytest.mark.parametrize('config', [SSDLITE, DEEPLAB, UPERNET])
def test_core_ml(config, tmp_path):
    report, metadata = _export('coreml', tmp_path, load(config), None, (128, 128))
    assert metadata['model'] == config and metadata['input']['range'] == [0, 255]
    description = exporter('coreml')._reload(report.path).get_spec().description
    kinds = {65568: 'float32', 131104: 'int32'}
    assert [(output['name'], output['shape'], output['dtype']) for output in metadata['outputs']] == [
        (output.name, list(output.type.multiArrayType.shape), kinds[output.type.multiArrayType.dataType])
        for output in description.output]
    assert description.input[0].type.imageType.width == 128


@pytest.mark.slow
@pytest.mark.parametrize('name', ['onnx', 'executorch'])
def test_ssdlite_in_fp16(name, images, tmp_path):
    config = load(SSDLITE)
    report, metadata = _export(name, tmp_path, config, WEIGHTS, precision='fp16')
    prepared, sample = read_image(images[0], metadata), Predictor(config, WEIGHTS)(images[0])
    boxes, scores, labels = _detect(name, report.path, metadata, prepared.images)
    clear = sample.pred_instances[sample.pred_instances.scores > 0.2]
    found = [n for n in range(len(scores)) if scores[n] > 0.2]
    assert len(clear) > 2 and abs(len(found) - len(clear)) <= 1
    for corners, value, label in zip(clear.bboxes.numpy(), clear.scores.numpy(), clear.labels.numpy()):
        near = [n for n in range(len(boxes)) if labels[n] == label and abs(scores[n] - value) < 0.02]
        assert min(np.abs(boxes[n] - corners).max() for n in near) < 0.5


@pytest.mark.slow
def test_ssdlite_in_int8(tmp_path):
    """The clear detections of eight images remain, with boxes that overlap by at least 0.7."""
    shapes = make_shapes(tmp_path / 'shapes', train=32, val=8, size=128)
    config = load(SSDLITE)
    subject = dense_subject(config, WEIGHTS)
    calibration = [subject.prepare(file) for file in sorted((shapes / 'images/train').iterdir())]
    report, metadata = _export('onnx', tmp_path, config, WEIGHTS, precision='int8', calibration=calibration)
    predictor, clear = Predictor(config, WEIGHTS), 0
    for file in sorted((shapes / 'images/val').iterdir()):
        expected = predictor(file).pred_instances
        boxes, scores, labels = _detect('onnx', report.path, metadata, read_image(file, metadata).images)
        for n in (expected.scores > 0.3).nonzero()[:, 0].tolist():
            clear += 1
            same = labels == int(expected.labels[n])
            overlaps = _overlaps(boxes[same], expected.bboxes[n].numpy())
            assert overlaps.max() > 0.7 and abs(scores[same][overlaps.argmax()] - float(expected.scores[n])) < 0.2
    assert clear > 10


def _overlaps(boxes, other):
    """Intersection over union of boxes (n, 4) with one box (4,)."""
    sides = np.minimum(boxes[:, 2:], other[2:]) - np.maximum(boxes[:, :2], other[:2])
    common = sides.clip(min=0).prod(1)
    return common / ((boxes[:, 2:] - boxes[:, :2]).prod(1) + (other[2:] - other[:2]).prod() - common)
