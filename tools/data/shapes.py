"""Colored shapes on real photographs, each pixel's owner known: images with instance masks and class labels.

The photographs come inside the wheels of scikit-learn and scikit-image, so nothing is downloaded. The left 70 % of each
is background of training images, the rest of validation images: no pixel is in both. Every image has random numbers of
its own, from (seed, part, index): the first images of a larger data set are those of a smaller one.
"""
import hashlib
import importlib.util
import math
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ('circle', 'ring', 'triangle', 'square', 'star')      # category ids and labels 1 to 5; 0 is the background
PARTS = ('train', 'val')
SIZES = (48, 1024)              # least and largest height and width: the smallest shapes still have a form; memory
TRAIN_SHARE = 0.7               # of a photograph's width
EMPTY_EVERY = 20                # images 1, 21, 41, ... have no shape
MOST_SHAPES = 6
RADII = (0.07, 0.22)            # of the image's shorter side
LEAST_VISIBLE = 0.4             # of a shape's area: one that would show less, or leave another less, is not drawn
LEAST_CONTRAST = 50             # of 255, in at least one channel, from the mean of what a shape covers
OVERSAMPLING = 4                # of the drawing, for smooth edges
HOLE = 0.55                     # a ring's inner radius, of its outer one
NOTCH = 0.45                    # a star's inner radius, of its outer one
DISTRIBUTIONS = {'sklearn': 'scikit-learn', 'skimage': 'scikit-image'}
PHOTOGRAPHS = {                 # module, file inside it, whose it is
    'china': ('sklearn.datasets', 'images/china.jpg', 'danielbuechele on Flickr, CC BY 2.0'),
    'flower': ('sklearn.datasets', 'images/flower.jpg', 'vultilion on Flickr, CC BY 2.0'),
    'astronaut': ('skimage', 'data/astronaut.png', 'NASA, public domain'),
    'chelsea': ('skimage', 'data/chelsea.png', 'Stefan van der Walt, CC0'),
    'coffee': ('skimage', 'data/coffee.png', 'Rachel Michetti, CC0'),
    'rocket': ('skimage', 'data/rocket.jpg', 'SpaceX, public domain'),
    'hubble_deep_field': ('skimage', 'data/hubble_deep_field.jpg', 'NASA, public domain'),
    'retina': ('skimage', 'data/retina.jpg', 'Mikael Häggström, CC0'),
}


class Scene(NamedTuple):
    """An image (H, W, 3) uint8, the owner of each pixel (H, W) uint8 (0: background, n: the n-th shape drawn), and the
    category id of each shape."""
    image: np.ndarray
    owner: np.ndarray
    categories: List[int]


def photograph_files() -> Dict[str, Path]:
    """Where the photographs lie.

    Raises:
        FileNotFoundError: a package, or a photograph in it, is missing; says which.
    """
    files = {}
    for name, (module, inside, _) in PHOTOGRAPHS.items():
        package = module.split('.')[0]
        # The top package's spec alone is found without importing it, which takes a second.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f'{DISTRIBUTIONS[package]} is not installed')
        folder = Path(spec.submodule_search_locations[0]).joinpath(*module.split('.')[1:])
        if not (folder / inside).is_file():
            raise FileNotFoundError(f'this {DISTRIBUTIONS[package]} comes without {inside}')
        files[name] = folder / inside
    return files


def photograph_metadata() -> Dict[str, Dict[str, str]]:
    """Of each photograph: whose it is, where it comes from, sha256.

    Raises:
        FileNotFoundError: as for `photograph_files`.
    """
    return {name: {'by': PHOTOGRAPHS[name][2], 'from': '/'.join((PHOTOGRAPHS[name][0], PHOTOGRAPHS[name][1])),
                   'sha256': hashlib.sha256(file.read_bytes()).hexdigest()}
            for name, file in photograph_files().items()}


def backgrounds(part: str) -> List[Image.Image]:
    """The share of each photograph that belongs to a part ('train' or 'val').

    Raises:
        FileNotFoundError: as for `photograph_files`.
    """
    images = []
    for file in photograph_files().values():
        with Image.open(file) as photograph:
            width, height = photograph.size
            cut = round(width * TRAIN_SHARE)
            box = (0, 0, cut, height) if part == 'train' else (cut, 0, width, height)
            images.append(photograph.convert('RGB').crop(box))
    return images


def random_crop(rng: np.random.Generator, photograph: Image.Image, size: Tuple[int, int]) -> np.ndarray:
    """A crop of one to two times `size` (H, W), or what the photograph allows, resized to it: (H, W, 3) uint8."""
    height, width = size
    zoom = min(rng.uniform(1, 2), photograph.width / width, photograph.height / height)
    left = rng.uniform(0, photograph.width - zoom * width)
    top = rng.uniform(0, photograph.height - zoom * height)
    box = (left, top, min(left + zoom * width, photograph.width), min(top + zoom * height, photograph.height))
    return np.array(photograph.resize((width, height), Image.Resampling.BILINEAR, box=box))


def coverage(kind: str, radius: float, angle: float) -> np.ndarray:
    """How much of each pixel a shape covers.

    Args:
        kind: one of CLASSES.
        radius: of the circle around it, in pixels.
        angle: rotation in radians.

    Returns:
        (2h, 2h) uint8, 255 for the whole pixel, h = ceil(radius) + 1, the shape's center in the middle.
    """
    half = math.ceil(radius) + 1
    canvas = Image.new('L', (2 * half * OVERSAMPLING,) * 2)
    draw = ImageDraw.Draw(canvas)
    middle, radius = half * OVERSAMPLING, radius * OVERSAMPLING
    if kind in ('circle', 'ring'):
        draw.circle((middle, middle), radius, fill=255)
        if kind == 'ring':
            draw.circle((middle, middle), radius * HOLE, fill=0)
    else:
        corners = {'triangle': 3, 'square': 4, 'star': 10}[kind]
        radii = [radius * (NOTCH if kind == 'star' and n % 2 else 1) for n in range(corners)]
        angles = [angle + 2 * math.pi * n / corners for n in range(corners)]
        draw.polygon([(middle + r * math.cos(a), middle + r * math.sin(a)) for r, a in zip(radii, angles)], fill=255)
    return np.asarray(canvas.reduce(OVERSAMPLING))


def draw_scene(rng: np.random.Generator, background: np.ndarray, count: int) -> Scene:
    """Draw up to `count` random shapes over a background (H, W, 3); later ones cover earlier ones.

    A pixel belongs to a shape that covers at least half of it. A shape that finds no place, where enough is seen of it
    and of those before, is left out.
    """
    image, owner = background.astype(np.float32), np.zeros(background.shape[:2], np.uint8)
    categories, areas = [], []
    for _ in range(count):
        for _ in range(10):
            if _try_shape(rng, image, owner, categories, areas):
                break
    return Scene(np.rint(image).astype(np.uint8), owner, categories)


def _try_shape(rng: np.random.Generator, image: np.ndarray, owner: np.ndarray, categories: List[int],
               areas: List[int]) -> bool:
    """Draw one random shape into image and owner, and append to categories and areas, where there is place for it."""
    height, width = owner.shape
    shorter = min(height, width)
    category = int(rng.integers(len(CLASSES))) + 1
    radius = math.exp(rng.uniform(*np.log(RADII))) * shorter
    cover = coverage(CLASSES[category - 1], radius, rng.uniform(0, 2 * math.pi))
    area, half = int((cover >= 128).sum()), len(cover) // 2
    y, x = int(rng.integers(height)) - half, int(rng.integers(width)) - half        # the patch's corner
    color = rng.uniform(0, 255, 3).astype(np.float32)

    rows, columns = slice(max(y, 0), y + 2 * half), slice(max(x, 0), x + 2 * half)
    cover = cover[max(-y, 0):height - y, max(-x, 0):width - x]
    solid = cover >= 128
    if solid.sum() < LEAST_VISIBLE * area:
        return False
    hidden = np.bincount(owner[rows, columns][solid], minlength=len(areas) + 1)[1:]
    seen = np.bincount(owner.ravel(), minlength=len(areas) + 1)[1:]
    if (seen - hidden < LEAST_VISIBLE * np.array(areas)).any():
        return False
    if abs(color - image[rows, columns][solid].mean(0)).max() < LEAST_CONTRAST:
        return False
    alpha = cover[..., None].astype(np.float32) / 255
    image[rows, columns] += alpha * (color - image[rows, columns])
    owner[rows, columns][solid] = len(areas) + 1
    categories.append(category)
    areas.append(area)
    return True


def random_scene(seed: int, part: str, index: int, photographs: List[Image.Image], size: Tuple[int, int]) -> Scene:
    """Image `index` (from 0) of a part, of size (H, W), over crops of that part's `backgrounds`."""
    rng = np.random.default_rng([seed, PARTS.index(part), index])
    background = random_crop(rng, photographs[rng.integers(len(photographs))], size)
    return draw_scene(rng, background, 0 if index % EMPTY_EVERY == 1 else int(rng.integers(1, MOST_SHAPES + 1)))


def run_lengths(mask: np.ndarray) -> List[int]:
    """COCO's uncompressed RLE of a mask (H, W): lengths of runs down the columns, the first of zeros."""
    flat = np.concatenate([[0], mask.ravel(order='F').astype(np.int8)])
    starts = np.flatnonzero(np.diff(flat))
    return np.diff(starts, prepend=0, append=mask.size).tolist()


def annotations(scene: Scene) -> List[Dict[str, Any]]:
    """A scene's shapes as COCO annotations of what is seen of them, without ids: RLE, for a ring has a hole."""
    height, width = scene.owner.shape
    found = []
    for number, category in enumerate(scene.categories, 1):
        mask = scene.owner == number
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        found.append(dict(category_id=category, iscrowd=0, area=int(mask.sum()),
                          bbox=[int(columns[0]), int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1],
                          segmentation=dict(size=[height, width], counts=run_lengths(mask))))
    return found


def label_map(scene: Scene) -> np.ndarray:
    """The class of each pixel: (H, W) uint8, 0 for background, else the category id."""
    return np.array([0, *scene.categories], np.uint8)[scene.owner]
