"""Pictures of detected objects and of label maps."""
import itertools

import numpy as np
import pytest

pytest.importorskip('mmengine')
from mmengine.structures import InstanceData

from subquad.tools.engine.dense.overlays import Drawing

CLASSES, PALETTE = ('background', 'cat', 'dog'), ((0, 0, 0), (255, 0, 0), (0, 0, 255))
GRAY = np.full((400, 500, 3), 100, np.uint8)


def test_classes_are_colored_over_the_image_and_background_is_not():
    labels = np.zeros((400, 500), np.uint8)
    labels[:200, :250], labels[200:, 250:], labels[200:, :250] = 1, 2, 255          # 255: no class
    drawing = Drawing(GRAY, CLASSES, PALETTE)
    drawing.add_map(labels)
    picture = np.array(drawing.image)
    assert (picture[:200, 250:] == 100).all() and (picture[200:, :250] == 100).all()
    assert tuple(picture[3, 3]) == (169, 55, 55) and tuple(picture[-3, -3]) == (55, 55, 169)
    assert len(drawing.taken) == 2, 'one label a class'


def test_labels_of_equal_boxes_do_not_overlap():
    found = InstanceData(bboxes=np.tile([30.0, 10, 90, 80], (12, 1)), labels=np.ones(12, int),
                         scores=np.linspace(0.1, 0.9, 12))
    drawing = Drawing(GRAY, CLASSES, PALETTE)
    drawing.add_objects(found, 0.3)
    assert len(drawing.taken) == (found.scores >= 0.3).sum()
    for a, b in itertools.combinations(drawing.taken, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert min(a) >= 0 and a[2] <= 500 and a[3] <= 400


@pytest.mark.parametrize('size', [(1, 1), (40, 3), (96, 128)])
def test_small_images_are_enlarged_with_their_masks(size):
    masks = np.zeros((1, *size), bool)
    masks[0, 0, 0] = True
    found = InstanceData(bboxes=np.array([[0.0, 0, size[1], size[0]]]), labels=np.array([2]), masks=masks)
    drawing = Drawing(np.full((*size, 3), 100, np.uint8), CLASSES, PALETTE)
    drawing.add_objects(found)
    factor = drawing.factor
    assert drawing.image.size == (size[1] * factor, size[0] * factor) and 300 <= max(drawing.image.size) <= 600
