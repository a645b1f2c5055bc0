"""Draw detected objects and label maps over a photograph."""
from pathlib import Path
from typing import Any, List, Sequence, Tuple

import cv2
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Images with smaller sides are enlarged by a whole factor, so that their labels can be read.
_LEAST_SIDE = 400
_OPACITY = 0.45
# The class that segmenters of shapes and of Pascal VOC give to everything else is left transparent.
_TRANSPARENT = 'background'


class Drawing:
    """A photograph, RGB (H, W, 3), uint8, on which predictions or annotations are drawn; `image` is the picture so far.
    """

    def __init__(self, pixels: np.ndarray, classes: Sequence[str], palette: Sequence[Sequence[int]]):
        self.factor = max(1, round(_LEAST_SIDE / max(pixels.shape[:2])))
        self.image = Image.fromarray(self._enlarged(pixels))
        self.classes, self.palette = classes, np.asarray(palette, np.uint8)
        self.unit = max(1, max(self.image.size) // 400)
        fonts = Path(matplotlib.get_data_path()) / 'fonts' / 'ttf'
        self.font = ImageFont.truetype(str(fonts / 'DejaVuSans.ttf'), 12 * self.unit)
        self.taken: List[Tuple[int, int, int, int]] = []

    def add_map(self, labels: np.ndarray) -> None:
        """Color the pixels of a label map (H, W) by class, and name each class inside its widest part."""
        labels = self._enlarged(labels)
        for n in np.unique(labels):
            if n < len(self.classes) and self.classes[n] != _TRANSPARENT:
                region = labels == n
                self._blend(region, self.palette[n])
                depth = cv2.distanceTransform(np.pad(region, 1).astype(np.uint8), cv2.DIST_L2, 3)[1:-1, 1:-1]
                y, x = np.unravel_index(depth.argmax(), depth.shape)
                self._label(self.classes[n], self.palette[n], int(x), int(y) - 7 * self.unit, centered=True)

    def add_objects(self, found: Any, score: float = 0.0) -> None:
        """Draw the masks, boxes and labels of an InstanceData; its objects below `score` are left out.

        A label that has no free place is left out; the labels of higher scores are placed first.
        """
        scores = found.scores.tolist() if 'scores' in found else [None] * len(found)
        order = sorted((n for n, s in enumerate(scores) if s is None or s >= score), key=lambda n: -(scores[n] or 0))
        boxes = (np.asarray(getattr(found.bboxes, 'tensor', found.bboxes)) * self.factor).round().astype(int)
        masks = getattr(found, 'masks', None)
        masks = masks.to_ndarray() if hasattr(masks, 'to_ndarray') else masks
        for n in reversed(order):
            color = self.palette[int(found.labels[n])]
            if masks is not None:
                self._blend(self._enlarged(np.asarray(masks[n], bool)), color)
            x0, x1 = sorted(boxes[n, [0, 2]].tolist())
            y0, y1 = sorted(boxes[n, [1, 3]].tolist())
            ImageDraw.Draw(self.image).rectangle((x0, y0, x1, y1), outline=tuple(color.tolist()), width=2 * self.unit)
        for n in order:
            name = self.classes[int(found.labels[n])] + ('' if scores[n] is None else f' {scores[n]:.0%}')
            self._label(name, self.palette[int(found.labels[n])], int(boxes[n, 0]), int(boxes[n, 1]))

    def _enlarged(self, array: np.ndarray) -> np.ndarray:
        return array.repeat(self.factor, 0).repeat(self.factor, 1)

    def _blend(self, region: np.ndarray, color: np.ndarray) -> None:
        pixels = np.array(self.image)
        pixels[region] = (pixels[region] * (1 - _OPACITY) + color * _OPACITY).astype(np.uint8)
        self.image = Image.fromarray(pixels)

    def _label(self, text: str, color: np.ndarray, x: int, y: int, centered: bool = False) -> None:
        """Write a label at (x, y), or at the nearest place above or below where it covers no other label."""
        draw = ImageDraw.Draw(self.image)
        width, height = int(draw.textlength(text, self.font)) + 6 * self.unit, 16 * self.unit
        x = max(0, min(x - width // 2 if centered else x, self.image.width - width))
        last = max(0, self.image.height - height)
        for top in sorted(range(0, last + 1, self.unit), key=lambda top: abs(top - y)):
            box = (x, top, x + width, top + height)
            if all(box[0] >= b[2] or b[0] >= box[2] or box[1] >= b[3] or b[1] >= box[3] for b in self.taken):
                self.taken.append(box)
                dark = np.dot(color, (0.299, 0.587, 0.114)) < 140
                draw.rectangle(box, fill=tuple(color.tolist()))
                draw.text((x + 3 * self.unit, top), text, 'white' if dark else 'black', self.font)
                return


def draw_sample(pixels: np.ndarray, sample: Any, classes: Sequence[str], palette: Sequence[Sequence[int]],
                score: float = 0.0, annotations: bool = False) -> Image.Image:
    """Return the picture of a data sample of MMDetection or MMSegmentation: its predictions, without objects below
    `score`, to the right of its annotations if these are asked for and there are any. `pixels` is RGB (H, W, 3), uint8.
    """
    parts = []
    for kind in ('gt', 'pred') if annotations else ('pred',):
        drawing = Drawing(pixels, classes, palette)
        if f'{kind}_sem_seg' in sample:
            drawing.add_map(np.asarray(sample.get(f'{kind}_sem_seg').data)[0])
        elif 'bboxes' in sample.get(f'{kind}_instances', ()):
            drawing.add_objects(sample.get(f'{kind}_instances'), score)
        else:
            continue
        parts.append(np.array(drawing.image))
    return Image.fromarray(np.concatenate(parts, axis=1))
