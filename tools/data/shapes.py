"""Generate images of colored shapes on photographs, with instance masks and class labels.

The photographs are part of the wheels of scikit-learn and scikit-image, so nothing is downloaded. The left 70 % of each
photograph is background for training images, the rest for validation images, so no pixel is in both. The random numbers
of an image depend on (seed, part, index) only, so a smaller data set is the beginning of a larger one.
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
SIZES = (48, 1024)              # smallest and largest side; limited by the smallest recognizable shape and by memory
TRAIN_SHARE = 0.7               # fraction of a photograph's width
EMPTY_EVERY = 20                # images 1, 21, 41, ... have no shapes
MOST_SHAPES = 6
RADII = (0.07, 0.22)            # smallest and largest radius, as fractions of the image's shorter side
LEAST_VISIBLE = 0.4             # fraction of a shape's area that must be visible, also after later shapes are drawn
LEAST_CONTRAST = 50             # difference (of 255) to the mean of the covered pixels in at least one channel
OVERSAMPLING = 4                # shapes are drawn at this multiple of their size, for smooth edges
HOLE = 0.55                     # inner radius of a ring, as a fraction of the outer one
NOTCH = 0.45                    # inner radius of a star, as a fraction of the outer one
DISTRIBUTIONS = {'sklearn': 'scikit-learn', 'skimage': 'scikit-image'}
PHOTOGRAPHS = {                 # module, file in the module, credit
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
    """An image with its shapes."""
    image: np.ndarray        # uint8 (H, W, 3)
    # index of the shape that each pixel belongs to, uint8 (H, W): 0 is the background, n the n-th shape drawn
    owner: np.ndarray
    categories: List[int]    # category id of each shape


def photograph_files() -> Dict[str, Path]:
    """Return the paths of the photographs by name.

    Raises:
        FileNotFoundError: a package or a photograph is missing; the error names it.
    """
    files = {}
    for name, (module, inside, _) in PHOTOGRAPHS.items():
        package = module.split('.')[0]
        # Look up the top-level package only: for a submodule, find_spec imports the package, which takes a second.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f'{DISTRIBUTIONS[package]} is not installed')
        folder = Path(spec.submodule_search_locations[0]).joinpath(*module.split('.')[1:])
        if not (folder / inside).is_file():
            raise FileNotFoundError(f'this {DISTRIBUTIONS[package]} comes without {inside}')
        files[name] = folder / inside
    return files


def photograph_metadata() -> Dict[str, Dict[str, str]]:
    """Return credit, origin and sha256 of each photograph."""
    return {name: {'by': PHOTOGRAPHS[name][2], 'from': '/'.join((PHOTOGRAPHS[name][0], PHOTOGRAPHS[name][1])),
                   'sha256': hashlib.sha256(file.read_bytes()).hexdigest()}
            for name, file in photograph_files().items()}


def backgrounds(part: str) -> List[Image.Image]:
    """Return the region of each photograph that belongs to a part ('train' or 'val')."""
    images = []
    for file in photograph_files().values():
        with Image.open(file) as photograph:
            width, height = photograph.size
            cut = round(width * TRAIN_SHARE)
            box = (0, 0, cut, height) if part == 'train' else (cut, 0, width, height)
            images.append(photograph.convert('RGB').crop(box))
    return images


def random_crop(rng: np.random.Generator, photograph: Image.Image, size: Tuple[int, int]) -> np.ndarray:
    """Crop one to two times `size` (H, W), at most the photograph, and resize the crop to `size`: uint8 (H, W, 3)."""
    height, width = size
    zoom = min(rng.uniform(1, 2), photograph.width / width, photograph.height / height)
    left = rng.uniform(0, photograph.width - zoom * width)
    top = rng.uniform(0, photograph.height - zoom * height)
    box = (left, top, min(left + zoom * width, photograph.width), min(top + zoom * height, photograph.height))
    return np.array(photograph.resize((width, height), Image.Resampling.BILINEAR, box=box))


def coverage(kind: str, radius: float, angle: float) -> np.ndarray:
    """Return the fraction of each pixel that a shape of CLASSES covers.

    `radius` is that of the circumscribed circle in pixels, and `angle` in radians.

    Returns:
        uint8 (2h, 2h) with h = ceil(radius) + 1, 255 for a fully covered pixel; the shape is centered.
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

    A pixel belongs to the last shape that covers at least half of it. A shape is skipped if it, or an earlier shape,
    would be mostly hidden.
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
    """Draw one random shape into image and owner, and append to categories and areas; False if it does not fit."""
    height, width = owner.shape
    shorter = min(height, width)
    category = int(rng.integers(len(CLASSES))) + 1
    radius = math.exp(rng.uniform(*np.log(RADII))) * shorter
    cover = coverage(CLASSES[category - 1], radius, rng.uniform(0, 2 * math.pi))
    area, half = int((cover >= 128).sum()), len(cover) // 2
    y, x = int(rng.integers(height)) - half, int(rng.integers(width)) - half       # top left corner of the patch
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
    """Generate image `index` (from 0) of a part, of size (H, W), on crops of `photographs`, its backgrounds."""
    rng = np.random.default_rng([seed, PARTS.index(part), index])
    background = random_crop(rng, photographs[rng.integers(len(photographs))], size)
    return draw_scene(rng, background, 0 if index % EMPTY_EVERY == 1 else int(rng.integers(1, MOST_SHAPES + 1)))


def run_lengths(mask: np.ndarray) -> List[int]:
    """Return COCO's uncompressed RLE of a mask (H, W): lengths of runs in column-major order, zeros first."""
    flat = np.concatenate([[0], mask.ravel(order='F').astype(np.int8)])
    starts = np.flatnonzero(np.diff(flat))
    return np.diff(starts, prepend=0, append=mask.size).tolist()


def annotations(scene: Scene) -> List[Dict[str, Any]]:
    """Return COCO annotations, without ids, of the visible parts of shapes; as RLE, because a ring has a hole."""
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
    """Return the class of each pixel, uint8 (H, W): 0 for the background, otherwise the category id."""
    return np.array([0, *scene.categories], np.uint8)[scene.owner]
