"""Helpers for tests of exported detectors and segmenters: what a program does that has only the outputs of the file."""
import importlib.util

import numpy as np
from helpers import ROOT
from PIL import Image

from subquad.tools.exporters.subject import describe, preprocessing

EXAMPLES = ROOT / 'examples' / 'export'
SCRIPTS = {'onnx': 'onnx_runtime.py', 'ort': 'onnx_runtime.py', 'openvino': 'openvino_runtime.py',
           'pt2': 'pytorch_runtime.py', 'aoti': 'pytorch_runtime.py', 'executorch': 'executorch_runtime.py',
           'litert': 'litert_runtime.py', 'ncnn': 'ncnn_runtime.py'}
LABELS = ['circle', 'ring', 'square', 'star']
RESIZES = {
    'stretched': dict(size=[80, 96], keep_ratio=False, enlarge=True, interpolation='bilinear', antialias=False),
    'averaged': dict(size=[80, 96], keep_ratio=False, enlarge=True, interpolation='bicubic', antialias=True),
    'enlarged': dict(size=[80, 96], keep_ratio=True, enlarge=True, interpolation='bilinear', antialias=False),
    'kept': dict(size=[80, 96], keep_ratio=True, enlarge=False, interpolation='bilinear', antialias=False),
}


def _load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = _load('pictures')


def detections(boxes, scores, settings):
    """Select detections (boxes, scores, labels) from raw boxes (1, N, 4) and scores (1, N, classes), as examples do."""
    return pictures.detections(dict(boxes=boxes, scores=scores), {**settings, 'in_graph': False})


def original_boxes(boxes, prepared):
    """Convert boxes (n, 4) in pixels of the network's input to pixels of the image file."""
    (height, width), sizes = prepared.content, np.array(prepared.content) / np.array(prepared.original)
    limit = np.array([width, height, width, height], np.float32)
    return np.clip(boxes, 0, limit) / np.array([*sizes[::-1], *sizes[::-1]], np.float32)


def unmatched(found, sample, box=0.5, score=1e-3):
    """Count the detections that only one of two sides has.

    Args:
        found: boxes (n, 4) in pixels of the image file, scores (n,) and labels (n,).
        sample: what `Predictor` returns for the file.
        box: largest difference of a coordinate in pixels.
        score: largest difference of scores.
    """
    boxes, scores, labels = (list(values) for values in found)
    expected = sample.pred_instances
    missed = 0
    for corners, value, label in zip(expected.bboxes.numpy(), expected.scores.numpy(), expected.labels.numpy()):
        near = [n for n in range(len(boxes)) if labels[n] == label and abs(scores[n] - value) <= score
                and np.abs(boxes[n] - corners).max() <= box]
        missed += not near
        for values in (boxes, scores, labels) if near else ():
            values.pop(near[0])
    return missed + len(boxes)


def channels_last(metadata):
    """The metadata of the same model whose input is (1, H, W, C)."""
    batch, channels, height, width = metadata['input']['shape']
    return {**metadata, 'input': {**metadata['input'], 'layout': 'NHWC', 'shape': [batch, height, width, channels]}}


def noisy_picture(width, height):
    """Smooth colors with noise, of any size."""
    generator = np.random.default_rng(0)
    coarse = Image.fromarray(generator.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int64)
    return Image.fromarray((smooth + generator.integers(-40, 40, smooth.shape)).clip(0, 255).astype(np.uint8))


def dense_metadata(task, name, /, **postprocessing):
    """Metadata of a detector or segmenter for BGR images of 80 x 96, with the resize of this name."""
    transform = dict(input_size=(3, 80, 96), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), crop_pct=1.0,
                     interpolation='bilinear')
    metadata = describe('model', task, 'random', (1, 3, 80, 96), preprocessing(transform), LABELS, 'BGR',
                        postprocessing=postprocessing)
    pad = dict(to=[80, 96], value=[7, 8, 9]) if RESIZES[name]['keep_ratio'] else None
    metadata['preprocessing'].update(crop=None, pad=pad, resize=RESIZES[name])
    return metadata
