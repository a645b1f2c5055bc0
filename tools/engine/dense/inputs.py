"""Build data sets and pipelines of detectors and segmenters with errors that name the file; accept tiny images."""
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
from mmengine.dataset import Compose
from mmengine.registry import DATASETS
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.cli import UserError, one_line

# Required lists of a COCO annotation file.
_COCO_KEYS = ('images', 'annotations', 'categories')
# Longest side of an input whose deepest map, at stride 32, has one cell.
_ONE_CELL = 32


def build_dataset(config: Dict[str, Any], name: str) -> Any:
    """Build the data set of a config; errors name its place in the whole config, and the missing or damaged file."""
    try:
        return DATASETS.build(config)
    except UserError:
        raise
    except Exception as error:             # libraries and users' classes raise any error
        parts = list(_parts(config))
        fault = next(filter(None, (_fault(part) for part in parts)), None)
        if fault is None:
            where = ', '.join(str(path) for part in parts if (path := _path(part, part.get('ann_file'))))
            text = one_line(error)
            fault = f'{text}{f" (reading {where})" if where and where not in text else ""}'
        raise UserError(f'{name}: {fault}') from error


def check_evaluator(config: Any, known: List[Any]) -> None:
    """Refuse evaluators whose annotation file is missing or damaged, before hours of training.

    The files of the data sets `known` have been read already.
    """
    read = {_path(part, part.get('ann_file')) for dataset in known for part in _parts(dataset)}
    for part in config if isinstance(config, (list, tuple)) else [config]:
        path = Path(part['ann_file']) if isinstance(part, dict) and isinstance(part.get('ann_file'), str) else None
        if path is None or path in read or '://' in str(path) or path.suffix != '.json':
            continue
        fault = _coco_fault(path) if path.is_file() else f'no file {path}'
        if fault:
            raise UserError(f'evaluator {part.get("type")}: {fault}')


def _parts(config: Any) -> Iterator[Dict[str, Any]]:
    """Yield the configs of the data sets that read files, inside those that concatenate or repeat others."""
    for inner in config.get('datasets') or ([config['dataset']] if 'dataset' in config else []):
        yield from _parts(inner)
    if 'dataset' not in config and 'datasets' not in config:
        yield config


def _path(part: Dict[str, Any], name: Any) -> Optional[Path]:
    return Path(part.get('data_root') or '', name) if isinstance(name, str) and name else None


def _fault(part: Dict[str, Any]) -> Optional[str]:
    """Return what is wrong with the files of a data set, or None."""
    path = _path(part, part.get('ann_file'))
    if path is not None and '://' not in str(path) and not path.is_file():
        return f'no annotation file {path}'
    if path is not None and path.suffix == '.json':
        fault = _coco_fault(path, _COCO_KEYS if 'Coco' in str(part.get('type')) else ())
        if fault:
            return fault
    prefix = part.get('data_prefix')
    for key in ('img', 'img_path'):
        folder = _path(part, prefix.get(key)) if isinstance(prefix, dict) else None
        if folder is None:
            continue
        if not folder.is_dir():
            return f'no images found: there is no folder {folder}'
        suffix = part.get('img_suffix') or ''
        if next((file for file in folder.rglob(f'*{suffix}') if file.is_file()), None) is None:
            return f"no images found in the folder {folder}{f' (*{suffix})' if suffix else ''}"
    return None


def _coco_fault(path: Path, keys: Tuple[str, ...] = _COCO_KEYS) -> Optional[str]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return f'{path} is not valid JSON ({one_line(error)})'
    if not keys:
        return None
    if not isinstance(content, dict):
        return f'{path} is not a COCO annotation file: it holds a {type(content).__name__}, not an object'
    missing = [key for key in keys if not isinstance(content.get(key), list)]
    if missing:
        return f'{path} is not a COCO annotation file: the list {missing[0]!r} is missing'
    return None if content.get('images', True) else f'{path} lists no images'


class Steps(Compose):
    """A data pipeline whose errors name the image, and that accepts images with sides of one pixel.

    Args:
        transforms: The steps of another pipeline, already built.
    """

    def __init__(self, transforms: List[Any]):
        steps: List[Any] = []
        for step in transforms:
            kind = type(step).__name__
            steps += [_positive_strides] if kind.startswith('Pack') else []
            steps.append(step)
            steps += [_restored_label_map] if kind == 'LoadAnnotations' else []
        super().__init__(steps)

    def __call__(self, data: Dict[str, Any]) -> Any:
        file = data.get('img_path')
        try:
            return super().__call__(data)
        except UserError:
            raise
        except Exception as error:                # the message of a step does not name the image
            raise UserError(f'{file} cannot be prepared: {one_line(error)}') from error


def _positive_strides(results: Dict[str, Any]) -> Dict[str, Any]:
    """Copy flipped arrays of one pixel: numpy calls them contiguous, and torch refuses their negative strides."""
    for key in ('img', 'gt_seg_map'):
        array = results.get(key)
        if isinstance(array, np.ndarray) and any(stride < 0 for stride in array.strides):
            results[key] = array.copy()
    return results


def _restored_label_map(results: Dict[str, Any]) -> Dict[str, Any]:
    """Restore the sides of one pixel that mmseg squeezes out of label maps."""
    labels, image = results.get('gt_seg_map'), results.get('img')
    if isinstance(labels, np.ndarray) and labels.ndim < 2 and image is not None and labels.size == image[..., 0].size:
        results['gt_seg_map'] = labels.reshape(image.shape[:2])
    return results


def use_steps(dataset: Any) -> None:
    """Make `Steps` the pipeline of a data set and of those that it concatenates or repeats."""
    for inner in getattr(dataset, 'datasets', None) or ([dataset.dataset] if hasattr(dataset, 'dataset') else []):
        use_steps(inner)
    if type(getattr(dataset, 'pipeline', None)) is Compose:
        dataset.pipeline = Steps(dataset.pipeline.transforms)


def accept_tiny_images(model: nn.Module) -> None:
    """Pad batches whose deepest map would have a single cell, on which mmdet's RPN head with one anchor fails."""
    model = getattr(model, 'module', model)                  # of test-time augmentation
    if getattr(model, 'rpn_head', None) is not None:
        model.data_preprocessor.register_forward_pre_hook(_two_cells)


def _two_cells(preprocessor: nn.Module, args: Tuple[Any, ...]) -> Optional[Tuple[Any, ...]]:
    data, *rest = args
    images = data.get('inputs') if isinstance(data, dict) else None
    if not isinstance(images, (list, tuple)) or not images or not all(isinstance(image, Tensor) for image in images):
        return None
    if max(max(image.shape[-2:]) for image in images) > _ONE_CELL:
        return None
    wider = [F.pad(image, (0, _ONE_CELL + 1 - image.shape[-1])) for image in images]
    return ({**data, 'inputs': wider}, *rest)
