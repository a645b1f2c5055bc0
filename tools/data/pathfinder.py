"""Generate Pathfinder-like images: do two dots mark the ends of the same dashed curve?

This is NOT the data of Linsley et al. (2018) or of Long Range Arena, whose generator cannot reproduce its output. It is
a simpler version of the same task at the sizes of Pathfinder (32 x 32) and Path-X (128 x 128). As in the original, two
curves of 14 dashes and shorter distractors keep clear of themselves, of each other and of the frame, and the label only
decides which two of the four ends are marked.

The positions of the dots must not reveal the answer. An image is kept only if two ends of one curve and two ends of
different curves have similar distances, face each other to a similar degree and are similarly central. One of the two
pairs is drawn.
"""
from dataclasses import dataclass
from typing import List, Sequence, Tuple, Union

import numpy as np
from PIL import Image, ImageDraw

from .generated import check_least

_IMAGES = 256                   # batch size of the sampling; changing it changes the data of a seed
_TRIALS = 16                    # directions tried for each dash
_TURNS = np.linspace(0.4, 1.0, _TRIALS)     # standard deviation of the turn in each trial, radians; smooth turns first
_SHARPEST = 1.2                 # largest turn, radians
_DELAY = 2                      # a curve must keep clear of its own dashes, except the last _DELAY
_FINENESS = 6                   # cells per margin
_ATTEMPTS = 4                   # attempts to grow a curve
_SECONDS = 4                    # second curves tried for each first one
_DISTANCE, _FACING, _CENTRAL = 1 / 20, 0.4, 1 / 16      # tolerances of the pairs; lengths in units of the image side


@dataclass(frozen=True)
class Style:
    """Appearance of an image; lengths in pixels."""

    size: int               # side of the square image
    dash: float             # length of a dash
    gap: float              # length of a gap
    thickness: float        # thickness of dashes
    radius: float           # radius of dots
    margin: float           # smallest distance between center lines of curves, and from a dot's rim to other curves
    dashes: int = 14
    distractors: int = 5
    distractor_dashes: int = 4
    oversampling: int = 4   # the image is drawn at this multiple of its size


PATHFINDER = Style(size=32, dash=2., gap=1., thickness=0.75, radius=1.5, margin=2.25)
PATH_X = Style(size=128, dash=5., gap=2.5, thickness=1.5, radius=3., margin=6., distractors=8, oversampling=2)


def _clearance(style: Style) -> float:
    """Return the smallest distance in pixels from a dot's center to another curve."""
    return style.radius + style.margin - style.thickness / 2


class _Canvas:
    """Occupancy grids of a batch of images: the cells that are too close to a curve or to the frame."""

    def __init__(self, style: Style):
        self.style = style
        self.cells = round(_FINENESS * style.size / style.margin)
        self.per_pixel = self.cells / style.size
        self.taken = np.ones((_IMAGES, self.cells, self.cells), bool)
        self.taken[:, _FINENESS:-_FINENESS, _FINENESS:-_FINENESS] = False
        y, x = np.mgrid[-_FINENESS:_FINENESS + 1, -_FINENESS:_FINENESS + 1]
        self.disc = (y * self.cells + x)[np.hypot(y, x) <= _FINENESS]

    def _cells(self, images: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Return the flat indices into `taken` of points (n, ..., 2) in the images (n,)."""
        cells = np.clip((points * self.per_pixel).astype(np.int64), 0, self.cells - 1)
        rows = images.reshape(-1, *[1] * (points.ndim - 2)) * self.cells + cells[..., 1]
        return rows * self.cells + cells[..., 0]

    def free(self, images: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Return bool (n, T): whether all of the points (n, T, P, 2), as (x, y), are in free cells."""
        return ~self.taken.reshape(-1)[self._cells(images, points)].any(-1)

    def take(self, images: np.ndarray, points: np.ndarray) -> None:
        """Occupy the cells nearer than the margin to points (n, P, 2), all of which were free."""
        self.taken.reshape(-1)[self._cells(images, points)[..., None] + self.disc] = True

    def take_dot(self, images: np.ndarray, centers: np.ndarray) -> None:
        """Occupy the cells within _clearance of centers (n, 2)."""
        angle = np.arange(12) * np.pi / 6
        rim = np.stack([np.cos(angle), np.sin(angle)], 1) * (_clearance(self.style) - self.style.margin)
        inner = (_FINENESS + 0.5) / self.per_pixel                      # the frame beyond is occupied anyway
        self.take(images, np.clip(centers[:, None] + rim, inner, self.style.size - inner))


def _grow(rng: np.random.Generator, canvas: _Canvas, images: np.ndarray,
          dashes: int) -> Tuple[np.ndarray, np.ndarray]:
    """Grow one more curve in each of these images, dash by dash, each in the first free one of some random directions.

    `images` are indices, int64 (n,), in ascending order; the occupancy of the canvas is updated.

    Returns:
        indices of the images in which the curve is complete, int64 (k,), in ascending order; and the two ends (x, y) of
        all dashes there, float (k, dashes, 2, 2).
    """
    lines = np.zeros((_IMAGES, dashes, 2, 2))
    waiting = images
    for _ in range(_ATTEMPTS):
        done, found = _attempt(rng, canvas, waiting, dashes)
        lines[done] = found
        waiting = np.setdiff1d(waiting, done)
    done = np.setdiff1d(images, waiting)
    return done, lines[done]


def _attempt(rng: np.random.Generator, canvas: _Canvas, images: np.ndarray,
             dashes: int) -> Tuple[np.ndarray, np.ndarray]:
    """Make one attempt of `_grow`."""
    style, before, all_images = canvas.style, canvas.taken[images], images
    traveled = (style.dash + style.gap) * np.array([0, 1 / 3, 2 / 3, 1])[:, None]
    lines = np.zeros((len(images), 0, 2, 2))
    passed = np.zeros((len(images), 0, 4, 2))
    for n in range(dashes):
        if n == 0:
            tail = rng.uniform(0, style.size, (len(images), _TRIALS, 1, 2))
            heading = rng.uniform(0, 2 * np.pi, (len(images), _TRIALS))
        else:
            tail = np.broadcast_to(passed[:, -1, None, -1:], (len(images), _TRIALS, 1, 2))
            turn = rng.normal(0, 1, (len(images), _TRIALS)) * _TURNS
            heading = heading[:, None] + np.clip(turn, -_SHARPEST, _SHARPEST)
        along = np.stack([np.cos(heading), np.sin(heading)], -1)[:, :, None]
        points = tail + traveled * along
        free = canvas.free(images, points)
        found = free.any(1)
        first = free[found].argmax(1)
        rows = np.flatnonzero(found)
        images, heading, points = images[found], heading[rows, first], points[rows, first]
        line = np.stack([points[:, 0], points[:, 0] + style.dash * along[rows, first, 0]], 1)
        lines = np.concatenate([lines[found], line[:, None]], 1)
        passed = np.concatenate([passed[found], points[:, None]], 1)
        # The last dashes of the curve itself are always nearer than the margin.
        if n + 1 >= _DELAY:
            canvas.take(images, passed[:, n + 1 - _DELAY])
    for n in range(max(0, dashes - _DELAY + 1), dashes):
        canvas.take(images, passed[:, n])
    lost = ~np.isin(all_images, images)
    canvas.taken[all_images[lost]] = before[lost]
    return images, lines


# Pairs of the ends, which are numbered first of A, last of A, first of B, last of B.
_PAIRS = np.array([(0, 1), (2, 3), (0, 2), (0, 3), (1, 2), (1, 3)])
_TOGETHER = 2                   # the first two pairs belong to one curve


def _clear(style: Style, curves: np.ndarray) -> np.ndarray:
    """Return bool (n, 4): whether a dot at each end is clear of all dashes except the nearest ones of its own curve."""
    ends = curves[:, :, [0, -1], [0, 1]].reshape(-1, 4, 1, 1, 2)
    points = np.concatenate([curves, curves.mean(3, keepdims=True)], 3).reshape(-1, 1, 2, style.dashes * 3, 2)
    distance = np.linalg.norm(points - ends, axis=-1)                   # (n, 4, 2, points)
    own = 3 * (_DELAY + 1)
    for end in range(4):
        distance[:, end, end // 2, slice(own) if end % 2 == 0 else slice(-own, None)] = np.inf
    return distance.min((2, 3)) > _clearance(style)


def _marks(rng: np.random.Generator, style: Style, curves: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Choose the ends of curves (n, 2, dashes, 2, 2), as `_grow` returns them, to mark for either answer.

    Returns:
        whether an image has two similar pairs, bool (n,); and the ends of these pairs, float (k, 2, 2, 2): answer, end,
        (x, y).
    """
    ends = curves[:, :, [0, -1], [0, 1]].reshape(-1, 4, 2)
    inwards = (curves[:, :, [0, -1], [1, 0]] - curves[:, :, [0, -1], [0, 1]]).reshape(-1, 4, 2) / style.dash
    ends, inwards = ends[:, _PAIRS], inwards[:, _PAIRS]
    usable = _clear(style, curves)[:, _PAIRS].all(2)
    apart = ends[:, :, 1] - ends[:, :, 0]
    distance = np.linalg.norm(apart, axis=-1)
    facing = ((inwards[:, :, 0] - inwards[:, :, 1]) * apart).sum(-1) / distance      # from -2 to 2
    central = np.linalg.norm(ends.mean(2) - style.size / 2, axis=-1)
    agree = usable[:, :_TOGETHER, None] & usable[:, None, _TOGETHER:]
    for values, tolerance in ((distance, _DISTANCE * style.size), (facing, _FACING), (central, _CENTRAL * style.size)):
        agree &= np.abs(values[:, :_TOGETHER, None] - values[:, None, _TOGETHER:]) < tolerance
    agree = agree.reshape(len(agree), -1)
    chosen = np.where(agree, rng.random(agree.shape), -1).argmax(1)
    found = agree.any(1)
    together, across = np.divmod(chosen, len(_PAIRS) - _TOGETHER)
    rows = np.flatnonzero(found)
    return found, np.stack([ends[rows, _TOGETHER + across[found]], ends[rows, together[found]]], 1)


def _scenes(rng: np.random.Generator, style: Style) -> List[Tuple[np.ndarray, np.ndarray]]:
    """Sample _IMAGES scenes; return the dashes, float (d, 2, 2), and marks, float (2, 2, 2), of each valid one."""
    canvas = _Canvas(style)
    curves = np.zeros((_IMAGES, 2, style.dashes, 2, 2))
    marks = np.zeros((_IMAGES, 2, 2, 2))
    firsts, lines = _grow(rng, canvas, np.arange(_IMAGES), style.dashes)
    curves[firsts, 0] = lines
    alone, waiting = canvas.taken.copy(), firsts
    for _ in range(_SECONDS):
        seconds, lines = _grow(rng, canvas, waiting, style.dashes)
        curves[seconds, 1] = lines
        found, ends = _marks(rng, style, curves[seconds])
        marks[seconds[found]] = ends
        waiting = np.setdiff1d(waiting, seconds[found])
        canvas.taken[waiting] = alone[waiting]
    images = np.setdiff1d(firsts, waiting)
    for end in marks[images].reshape(-1, 4, 2).swapaxes(0, 1):
        canvas.take_dot(images, end)
    dashes = {image: [curves[image].reshape(-1, 2, 2)] for image in images}
    for _ in range(style.distractors):
        for image, line in zip(*_grow(rng, canvas, images, style.distractor_dashes)):
            dashes[image].append(line)
    return [(np.concatenate(dashes[image]), marks[image]) for image in images]


def _draw(style: Style, dashes: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Draw an image, uint8 (size, size), light on dark and antialiased; marks (2, 2) are the (x, y) of the dots."""
    scale = style.oversampling
    image = Image.new('L', (style.size * scale,) * 2)
    pen = ImageDraw.Draw(image)
    for line in np.round(dashes.reshape(-1, 4) * scale).astype(int).tolist():
        pen.line(line, fill=255, width=round(style.thickness * scale))
    for x, y in marks * scale:
        r = style.radius * scale
        pen.ellipse((x - r, y - r, x + r, y + r), fill=255)
    return np.asarray(image.reduce(scale))


def pathfinder_like(count: int, seed: Union[int, Sequence[int]] = 0,
                    style: Style = PATHFINDER) -> Tuple[np.ndarray, np.ndarray]:
    """Generate images and labels. Exactly one of the images 2i and 2i + 1 has the label 1.

    The first k images do not depend on `count`.

    Args:
        count: number of images, at least 1.
        seed: any seed that numpy.random.SeedSequence accepts.
        style: PATHFINDER, or PATH_X for images like Path-X.

    Returns:
        images, uint8 (count, size, size), and labels, int64 (count,): 1 if both dots are on one curve.
    """
    check_least('count', count, 1)
    scenery, answers = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
    even = answers.integers(0, 2, (count + 1) // 2)
    labels = np.stack([even, 1 - even], 1).ravel()[:count]
    images = np.empty((count, style.size, style.size), np.uint8)
    made = 0
    while made < count:
        for dashes, marks in _scenes(scenery, style)[:count - made]:
            images[made] = _draw(style, dashes, marks[labels[made]])
            made += 1
    return images, labels
