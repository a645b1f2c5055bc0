"""Detect or segment in image files: pictures, and results as dicts."""
import colorsys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import MODELS, init_default_scope
from pycocotools import mask as rle
from torch import nn

from ....backbones.mm.checkpoints import load_checkpoint
from ....backbones.prepare import prepare
from ...common.cli import UserError, one_line, quiet, shown, weight_errors
from ...common.images import LeftOut, UnreadableImage
from ...common.output import print_rows, progress
from ..training.building import build
from .inputs import accept_tiny_images
from .overlays import draw_sample
from .photographs import pixels, with_photographs
from .task import classes_of, known_metainfo, network_options


class Predictor:
    """Apply a detector or segmenter to image files.

    Args:
        config: As `subquad.tools.engine.config.load` returns it.
        checkpoint: File of weights, or the name of published ones.
        device: torch device; by default a GPU if there is one, else the CPU.
        allow_nonfinite: Accept weights that hold NaN or infinities.
    """

    def __init__(self, config: Config, checkpoint: str, device: str = '', allow_nonfinite: bool = False):
        init_default_scope(config.get('default_scope', 'mmengine'))
        if config.get('test_dataloader') is None:
            raise UserError('the config has no test_dataloader, which defines how images are prepared')
        model: nn.Module = build(MODELS, config.model, 'model')
        dataset = config.test_dataloader.dataset
        self.classes = classes_of(dataset)
        with weight_errors('; --allow-nonfinite loads it anyway'):
            load_checkpoint(model, checkpoint, self.classes, allow_nonfinite, network_options(config))
        accept_tiny_images(model)
        self.model = prepare(model.to(device or ('cuda' if torch.cuda.is_available() else 'cpu')).eval())
        # Image files of a user have no annotations.
        self.pipeline = Compose(with_photographs([step for step in dataset.pipeline
                                                  if 'Annotations' not in str(step['type'])], 'raise'))
        self.palette = palette_of(dataset)

    def __call__(self, file: Path) -> Any:
        """Return the data sample that the model predicts for an image file."""
        try:
            data = self.pipeline(dict(img_path=str(file), img_id=0, seg_fields=[]))
        except UserError:
            raise
        except (OSError, ValueError, AttributeError, AssertionError, cv2.error) as error:     # errors of pipeline steps
            raise UnreadableImage(f'{shown(file)} cannot be prepared: {one_line(error)}') from error
        with torch.inference_mode():
            return self.model.test_step(dict(inputs=[data['inputs']], data_samples=[data['data_samples']]))[0].cpu()

    def draw(self, file: Path, sample: Any, path: Path, score: float) -> None:
        """Write the image with its predictions as a picture; objects below `score` are left out."""
        draw_sample(pixels(file, sample.ori_shape), sample, self.classes, self.palette, score).save(path)

    def describe(self, file: Path, sample: Any, score: float) -> Dict[str, Any]:
        """Return the predictions for an image as a dict that JSON can hold.

        Its keys are file, height, width, and objects or classes. Objects are sorted by score; each has class, score,
        box [x1, y1, x2, y2] in pixels and, if the model predicts masks, mask. Each class of a segmentation has name,
        share of the pixels, and mask. A mask is COCO's run-length encoding, dict(size=[height, width], counts).
        """
        height, width = sample.ori_shape
        result: Dict[str, Any] = dict(file=str(file), height=height, width=width)
        if 'pred_sem_seg' in sample:
            labels = sample.pred_sem_seg.data[0].numpy()
            result['classes'] = [dict(name=self.classes[n], share=round(float((labels == n).mean()), 6),
                                      mask=_rle(labels == n)) for n in np.unique(labels)]
            return result
        found = sample.pred_instances
        order = [n for n in found.scores.argsort(descending=True).tolist() if found.scores[n] >= score]
        result['objects'] = [{'class': self.classes[found.labels[n]], 'score': round(float(found.scores[n]), 4),
                              'box': [round(x, 2) for x in found.bboxes[n].tolist()],
                              **({'mask': _rle(found.masks[n].numpy())} if 'masks' in found else {})} for n in order]
        return result


def palette_of(dataset: Dict[str, Any]) -> Sequence[Sequence[int]]:
    """Return the colors of a data set's classes (RGB, 0 to 255): its own palette, or hues at equal distances."""
    return known_metainfo(dataset).get('palette') or hues(len(classes_of(dataset)))


def hues(count: int) -> Sequence[Sequence[int]]:
    """Return colors (RGB, 0 to 255) of hues at equal distances."""
    return [tuple(round(255 * part) for part in colorsys.hsv_to_rgb(n / count, 0.8, 0.9)) for n in range(count)]


def _rle(mask: np.ndarray) -> Dict[str, Any]:
    code = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
    return dict(size=[int(n) for n in code['size']], counts=code['counts'].decode('ascii'))


def predict(make: Callable[[], Predictor], files: Sequence[Path], out: Path, score: float,
            left_out: Optional[LeftOut] = None) -> List[Dict[str, Any]]:
    """Draw the predictions for every file into the folder `out`, and return them.

    `make` returns the predictor; `score` is the least score of an object; `left_out` receives the errors of files that
    cannot be read, which are raised without it.

    Returns:
        What `Predictor.describe` returns for each file, with the path of its picture.
    """
    names, left_out = PictureNames(), left_out or LeftOut(len(files), strict=True)
    pictures = [(file, out / names(file)) for file in files]
    inputs = {file.resolve() for file in files}
    for _, picture in pictures:
        if picture.resolve() in inputs:
            raise UserError(f'--out: {shown(picture)} is one of the images; choose another folder')
    with quiet():                                   # the standard output may hold JSON
        predictor = make()
    results = []
    for file, picture in progress(pictures, 'images'):
        try:
            sample = predictor(file)
        except UnreadableImage as error:
            left_out(error)
            continue
        predictor.draw(file, sample, picture, score)
        results.append(dict(predictor.describe(file, sample, score), picture=str(picture)))
    return results


def print_found(results: List[Dict[str, Any]]) -> None:
    """Print the results of `predict` as a table."""
    rows = []
    for row in results:
        if 'classes' in row:
            largest = sorted(row['classes'], key=lambda c: -c['share'])
            found = ', '.join(f"{c['name']} {c['share']:.1%}" for c in largest)
        else:
            names = [item['class'] for item in row['objects']]
            found = ', '.join(f'{names.count(name)} {name}' for name in dict.fromkeys(names)) or 'nothing'
        rows.append((row['file'], found, row['picture']))
    print_rows(['image', 'found', 'picture'], rows)


class PictureNames:
    """Names NAME.png for image files, with numbers where several folders hold the same name."""

    def __init__(self) -> None:
        self.used: Set[str] = set()

    def __call__(self, file: Path) -> str:
        number, name = 1, f'{file.stem}.png'
        while name in self.used:
            number += 1
            name = f'{file.stem}-{number}.png'
        self.used.add(name)
        return name
