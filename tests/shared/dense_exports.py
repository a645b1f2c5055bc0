"""Helpers for tests of exported detectors and segmenters: what a program does that has only the outputs of the file."""
import importlib.util

import numpy as np
from helpers import ROOT

EXAMPLES = ROOT / 'examples' / 'export'


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
