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

# Longest side of an input whose deepest map, at stride 32, has one cell.
_ONE_CELL = 32


def build_dataset(config: Dict[str, Any], name: str) -> Any:
    """Build the data set of a config; errors name its place in the whole config, and the missing or damaged file."""
    try:
        return DATASETS.build(config)
    except UserError:
        raise
    except Exception as error:             # libraries and users' classes raise any error
        files = _files(config)
        empty = next((f'no images found in the folder {path} ({pattern})' for path, pattern in files
                      if path.is_dir() and not any(path.rglob(pattern))), None)
        read = f" (reading {', '.join(str(path) for path, _ in files)})" if files else ''
        if any('shapes' in path.parts for path, _ in files) and isinstance(error, FileNotFoundError):
            read += '; `subquad make-dataset shapes` draws data/shapes'
        raise UserError(f'{name}: {empty or one_line(error) + read}') from error


def check_evaluator(config: Any, known: List[Any]) -> None:
    """Refuse evaluators whose annotation file is missing or damaged, before hours of training.

    The files of the data sets `known` have been read already.
    """
    read = [path for dataset in known for path, _ in _files(dataset)]
    for part in config if isinstance(config, (list, tuple)) else [config]:
        name = part.get('ann_file') if isinstance(part, dict) else None
        if not isinstance(name, str) or Path(name) in read or '://' in name or not name.endswith('.json'):
            continue
        try:
            json.loads(Path(name).read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"evaluator {part.get('type')}: {name} cannot be read ({one_line(error)})") from error


def _files(config: Any) -> List[Tuple[Path, str]]:
    """Return the annotation files, or else folders of images, of a data set, each with the pattern of its images."""
    found = []
    for part in _parts(config):
        root, prefix = part.get('data_root') or '', part.get('data_prefix')
        names = [part.get('ann_file')] if part.get('ann_file') else [
            prefix.get(key) for key in ('img', 'img_path')] if isinstance(prefix, dict) else []
        pattern = f"*{part.get('img_suffix') or ''}"
        found += [(Path(root, name), pattern) for name in names if isinstance(name, str)]
    return found


def _parts(config: Any) -> Iterator[Dict[str, Any]]:
    """Yield the configs of the data sets that read files, inside those that concatenate or repeat others."""
    for inner in config.get('datasets') or ([config['dataset']] if 'dataset' in config else []):
        yield from _parts(inner)
    if 'dataset' not in config and 'datasets' not in config:
        yield config


class Steps(Compose):
    """The steps of a data pipeline with errors that name the image; it accepts images with sides of one pixel."""

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
