"""Prepare a picture for an exported model, and show what the model finds in it. The examples of this folder share this.

Everything a model needs to know about its input and its outputs is in the metadata that `subquad export` writes. Only
numpy and Pillow are needed.
"""
import argparse
import colorsys
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

Metadata = Dict[str, Any]
Run = Callable[[np.ndarray], Sequence[np.ndarray]]


def open_picture(path: str) -> Image.Image:
    """Read a picture upright, as RGB; transparent pixels become white, and 16 bits are scaled to 8."""
    with Image.open(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith('I;16'):
            return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8)).convert('RGB')
        if image.has_transparency_data:
            page = Image.new('RGBA', image.size, 'white')
            page.alpha_composite(image.convert('RGBA'))
            image = page
        return image.convert('RGB')


# Before the model: resize, crop, normalize and pad, as in training and evaluation.

def prepare(picture: Image.Image, metadata: Metadata) -> Tuple[np.ndarray, Tuple[int, int]]:
    """Return the model's input, float32, and the width and height to which the picture was resized.

    The input is (1, C, H, W), or (1, H, W, C) for a model whose layout is NHWC.
    """
    steps, color = metadata['preprocessing'], metadata['input']['color']
    image = picture.convert('L') if color == 'gray' else picture
    if steps['resize']:
        size = resized_size(*picture.size, steps['resize'])
        if steps['resize'].get('antialias', True):
            image = image.resize(size, Image.Resampling[steps['resize']['interpolation'].upper()])
        elif size != image.size and steps['resize']['interpolation'] == 'bilinear':
            image = resize_like_opencv(image, *size)
        elif size != image.size:
            sys.exit(f"error: this example cannot resize by OpenCV's {steps['resize']['interpolation']} filter")
    size = image.size
    if steps['crop']:
        height, width = steps['crop']
        left, top = _margin(image.width, width), _margin(image.height, height)
        image = image.crop((left, top, left + width, top + height))     # black where the picture ends
    pixels = np.asarray(image, dtype=np.float32).reshape(image.height, image.width, -1).transpose(2, 0, 1)
    pixels = pixels[::-1] if color == 'BGR' else pixels
    if steps['normalize_in_graph']:
        pixels = pixels * np.float32(metadata['input']['range'][1] / 255)
    else:
        mean, std = (np.array(steps[name], dtype=np.float32)[:, None, None] for name in ('mean', 'std'))
        pixels = (pixels / np.float32(1 / steps['scale']) - mean) / std
    if steps.get('pad'):
        page = np.empty((len(pixels), *steps['pad']['to']), dtype=np.float32)
        page[:] = np.array(steps['pad']['value'], dtype=np.float32)[:, None, None]
        page[:, :pixels.shape[1], :pixels.shape[2]] = pixels
        pixels = page
    order = ['NCHW'.index(axis) for axis in metadata['input']['layout']]
    return np.ascontiguousarray(pixels[None].transpose(order)), size


def input_size(metadata: Metadata) -> Tuple[int, int]:
    """Return the height and width of the model's input."""
    sides = dict(zip(metadata['input']['layout'], metadata['input']['shape']))
    return sides['H'], sides['W']


def resized_size(width: int, height: int, resize: Metadata) -> Tuple[int, int]:
    """Return the width and height to which `resize` of the metadata's preprocessing takes a picture."""
    size = resize['size']
    if isinstance(size, int):                               # the shorter side
        longer = int(size * max(width, height) / min(width, height))
        return (size, longer) if width <= height else (longer, size)
    if not resize['keep_ratio']:
        return size[1], size[0]
    factors = size[0] / height, size[1] / width
    if 'enlarge' not in resize:                             # a classifier's picture covers the size, and is cropped
        ratio = min(height / size[0], width / size[1])
        return round(width / ratio), round(height / ratio)
    factor = min(factors) if resize['enlarge'] else min(*factors, 1)        # others lie within the size
    return max(1, int(width * factor + 0.5)), max(1, int(height * factor + 0.5))


def resize_like_opencv(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resize by two neighbors a side, with the integer arithmetic of OpenCV; Pillow averages when it shrinks."""
    pixels = np.asarray(image, dtype=np.int32).reshape(image.height, image.width, -1)
    (left, right, weight_x), (above, below, weight_y) = (_neighbors(size, to) for size, to in
                                                         ((image.width, width), (image.height, height)))
    x0, x1 = (np.rint(2048 * w).astype(np.int32)[None, :, None] for w in (1 - weight_x, weight_x))
    y0, y1 = (np.rint(2048 * w).astype(np.int32)[:, None, None] for w in (1 - weight_y, weight_y))
    pixels = pixels[:, left] * x0 + pixels[:, right] * x1 >> 4
    pixels = (pixels[above] * y0 >> 16) + (pixels[below] * y1 >> 16) + 2 >> 2
    pixels = pixels.astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if image.mode == 'L' else pixels)


def resize_bilinear(planes: np.ndarray, height: int, width: int, align_corners: bool) -> np.ndarray:
    """Resize planes (C, h, w) of floating-point numbers as PyTorch does."""
    above, below, weight = _neighbors(planes.shape[1], height, align_corners)
    planes = planes[:, above] * (1 - weight[:, None]) + planes[:, below] * weight[:, None]
    left, right, weight = _neighbors(planes.shape[2], width, align_corners)
    return planes[..., left] * (1 - weight) + planes[..., right] * weight


def _neighbors(size: int, to: int, align_corners: bool = False) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each of `to` places on a side of `size` pixels both neighbors, and the weight of the second."""
    places = np.arange(to) * ((size - 1) / max(to - 1, 1)) if align_corners else (np.arange(to) + 0.5) * size / to - 0.5
    places = places.astype(np.float32)
    first = np.floor(places).astype(np.int64)               # the pixels at the border repeat beyond it
    return first.clip(0, size - 1), (first + 1).clip(0, size - 1), places - first


def _margin(size: int, crop: int) -> int:
    """Return where a crop of the center begins; below 0 if the picture is smaller."""
    return round((size - crop) / 2) if size >= crop else -((crop - size) // 2)


# After the model.

def top_classes(logits: np.ndarray, labels: Sequence[str], count: int, kind: str = 'softmax'
                ) -> List[Tuple[str, float]]:
    """Return the likeliest classes of logits (classes,) with their probabilities, the likeliest first.

    A model without labels names its classes by their numbers. `kind` is 'sigmoid' for several classes in a picture.
    """
    logits = logits.astype(np.float64)
    odds = np.exp(logits - logits.max())
    probabilities = odds / odds.sum() if kind == 'softmax' else 1 / (1 + np.exp(-logits))
    order = np.argsort(-probabilities, kind='stable')[:count].tolist()
    return [(labels[n] if labels else str(n), float(probabilities[n])) for n in order]


def detections(outputs: Dict[str, np.ndarray], postprocessing: Metadata) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return boxes (n, 4) in the input's pixels, scores (n,) and labels (n,); non-maximum suppression if it is due."""
    if postprocessing['in_graph']:
        return outputs['boxes'], outputs['scores'], outputs['labels']
    boxes, scores = outputs['boxes'][0], outputs['scores'][0]
    chosen: List[Tuple[int, int]] = []                      # (box, class)
    for label in range(scores.shape[1]):
        order = np.argsort(-scores[:, label], kind='stable')[:postprocessing['candidates_per_class']]
        order = order[scores[order, label] > postprocessing['score_threshold']]
        while len(order):
            best, order = order[0], order[1:]
            chosen.append((best, label))
            order = order[_overlap(boxes[best], boxes[order]) <= postprocessing['iou_threshold']]
    n, label = np.array(chosen, dtype=np.int64).reshape(-1, 2).T
    order = np.argsort(-scores[n, label], kind='stable')[:postprocessing['max_detections']]
    return boxes[n[order]], scores[n[order], label[order]], label[order]


def _overlap(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the intersection over union of a box (4,) and boxes (n, 4)."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    shared = sides.clip(0).prod(1)
    return shared / ((box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(1) - shared).clip(1e-6)


def segments(outputs: Dict[str, np.ndarray], metadata: Metadata, size: Tuple[int, int]) -> np.ndarray:
    """Return the class of each pixel, (H, W); `size` is the width and height to which the picture was resized."""
    postprocessing = metadata['postprocessing']
    if postprocessing['in_graph']:
        return outputs['labels'][0, :size[1], :size[0]]
    logits = resize_bilinear(outputs['logits'][0], *input_size(metadata), postprocessing['resize']['align_corners'])
    return logits[:, :size[1], :size[0]].argmax(0)


def show_objects(picture: Image.Image, metadata: Metadata, found: Tuple[np.ndarray, ...], size: Tuple[int, int],
                 least: float) -> Image.Image:
    """Print the objects with a score of at least `least`, and return the picture with their boxes."""
    drawn = picture.copy()
    pen, colors = ImageDraw.Draw(drawn), palette(len(metadata['labels']))
    line = max(2, max(picture.size) // 300)
    scale = np.array(picture.size * 2) / np.array(size * 2)
    objects = [row for row in zip(*found) if row[1] >= least]
    if not objects:
        print(f'no object has a score of {least:g} or more')
    boxes = [(box.clip(0, size * 2) * scale).tolist() for box, _, _ in objects]
    for (x1, y1, x2, y2), (_, score, label) in zip(boxes, objects):
        print(f"{score:7.2%}  {metadata['labels'][int(label)]}  {x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}")
    for (x1, y1, x2, y2), (_, score, label) in reversed(list(zip(boxes, objects))):     # the best on top
        color = tuple(colors[int(label)].tolist())
        pen.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=color, width=line)
        pen.text((x1 + 2 * line, y1 + line), f"{metadata['labels'][int(label)]} {score:.0%}", fill=color,
                 stroke_width=1, stroke_fill='black')
    return drawn


def show_segments(picture: Image.Image, metadata: Metadata, labels: np.ndarray) -> Image.Image:
    """Print the classes with their shares of the picture, and return the picture with the classes' colors over it."""
    labels = np.asarray(Image.fromarray(labels.astype(np.int32)).resize(picture.size, Image.Resampling.NEAREST))
    shares = {n: float((labels == n).mean()) for n in np.unique(labels).tolist()}
    for n in sorted(shares, key=lambda n: -shares[n]):
        print(f"{shares[n]:7.2%}  {metadata['labels'][n]}")
    return Image.blend(picture, Image.fromarray(palette(len(metadata['labels']))[labels]), 0.5)


def palette(count: int) -> np.ndarray:
    """Return different colors (count, 3) as uint8."""
    colors = [colorsys.hsv_to_rgb(n * 0.618 % 1, 0.9 - 0.3 * (n % 2), 1 - 0.25 * (n % 3)) for n in range(count)]
    return (np.array(colors) * 255).astype(np.uint8)


# The command line.

def main(load: Callable[[str], Tuple[Metadata, Run]]) -> None:
    """Run an example: read the command line, load the model, run it on the picture and show what it finds.

    Args:
        load: Returns a file's metadata, and a function from the array that `prepare` returns to the model's outputs. A
            KeyError means that the file has no metadata.
    """
    parser = argparse.ArgumentParser(description='Classify a picture; detect or segment if the model does.')
    parser.add_argument('model', metavar='MODEL', help='file that `subquad export` has written')
    parser.add_argument('picture', metavar='PICTURE', help='image file')
    parser.add_argument('--out', metavar='FILE', default='found.png',
                        help='where a detector or segmenter writes its picture (default: found.png)')
    parser.add_argument('--topk', type=int, default=5, help='number of classes to print (default: 5)')
    parser.add_argument('--score', type=float, default=0.3, help='minimum score of objects (default: 0.3)')
    args = parser.parse_args()
    for file in (args.model, args.picture):
        if not Path(file).is_file():
            sys.exit(f'error: there is no file {file}')
    if Path(args.out).resolve() == Path(args.picture).resolve():
        sys.exit(f'error: --out would replace {args.picture}')
    try:
        picture = open_picture(args.picture)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        sys.exit(f'error: {args.picture} is not an image that can be read ({error})')
    try:
        metadata, run = load(args.model)
    except KeyError:
        sys.exit(f'error: {args.model} has no metadata of `subquad export`')
    except Exception as error:                              # each runtime has its own kinds
        sys.exit(f'error: {args.model} cannot be loaded ({str(error).splitlines()[0] if str(error) else error!r})')
    pixels, size = prepare(picture, metadata)
    start = time.perf_counter()
    try:
        outputs = dict(zip([output['name'] for output in metadata['outputs']], run(pixels)))
    except Exception as error:                              # each runtime has its own kinds
        height, width = input_size(metadata)
        sys.exit(f'error: {args.model} cannot run on an image of {width} x {height} pixels '
                 f'({str(error).splitlines()[0] if str(error) else error!r})')
    seconds = time.perf_counter() - start
    if not all(np.isfinite(output).all() for output in outputs.values()):
        sys.exit('error: the model returns NaN or infinities for this picture')
    print(f"{metadata['model']} ({metadata['precision']}): {1000 * seconds:.1f} ms")
    show(picture, metadata, outputs, size, args)


def show(picture: Image.Image, metadata: Metadata, outputs: Dict[str, np.ndarray], size: Tuple[int, int],
         args: argparse.Namespace) -> None:
    """Print what the model has found, and write a picture of it if it is more than a class."""
    if metadata['task'] == 'classification':
        for label, probability in top_classes(outputs['logits'][0], metadata['labels'], args.topk,
                                              metadata['postprocessing']['type']):
            print(f'{probability:7.2%}  {label}')
    elif metadata['task'] == 'detection':
        found = detections(outputs, metadata['postprocessing'])
        save(show_objects(picture, metadata, found, size, args.score), args.out)
    elif metadata['task'] == 'segmentation':
        save(show_segments(picture, metadata, segments(outputs, metadata, size)), args.out)
    else:                                                   # features
        for name, output in outputs.items():
            print(f"{name}: {' x '.join(map(str, output.shape))}")


def save(picture: Image.Image, path: str) -> None:
    """Write a picture, and print where it is."""
    try:
        picture.save(path)
    except (OSError, ValueError) as error:
        sys.exit(f'error: {path} cannot be written ({error})')
    print(f'see {path}')
