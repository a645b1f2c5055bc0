"""Evaluate published classifiers as their authors do, and compare with the figures that they report."""
from typing import Any, Dict, Optional

from mmengine.config import Config
from mmengine.registry import DATASETS

from ....backbones.weights.registry import PublishedWeights, find
from ...common.cli import UserError, weight_errors
from ..training.building import build
from .evaluation import evaluate
from .label_spaces import imagenet_folder
from .weight_files import published_transform

VALIDATION_IMAGES, CLASSES = 50_000, 1000           # of ImageNet-1k
# Rounding of floating-point numbers must not decide at the tolerance itself.
_ROUNDING = 1e-6


def reproduce(name: str, data: Optional[str], partial: bool, batch_size: int, workers: int,
              tolerance: float, checkpoint: Optional[str] = None,
              choice: Optional[str] = None) -> Dict[str, Any]:
    """Evaluate published weights by their authors' protocol, and compare each metric that they report.

    Args:
        name: Name of the weights.
        data: See `protocol`.
        partial: Accept a part of ImageNet's validation set.
        batch_size, workers: Options of the data loader.
        tolerance: Largest difference that passes, in percentage points.
        checkpoint: File to evaluate instead of the published one.
        choice: As in `evaluate`.

    Returns:
        dict(name, protocol, images, classes, whole, passed, tolerance, metrics), where `metrics`
        has what `compare` returns by the name of the metric, and `whole` is False for a part of
        the data.
    """
    with weight_errors():
        entry = find(name)
    if entry.task != 'classification':
        raise UserError(f'{entry.name} are weights for {entry.task}; subquad reproduce takes classifiers only so far '
                        f'(subquad test {entry.config} {entry.name} --data FOLDER evaluates them)')
    if not entry.reported:
        raise UserError(f'no figures are reported for {entry.name}')
    config = protocol(entry, data, batch_size, workers)
    options = config.test_dataloader.dataset
    dataset = build(DATASETS, options.to_dict(), 'the data')
    images, classes = len(dataset), getattr(dataset, 'present', len(dataset.classes))
    if data and not partial and (images, classes) != (VALIDATION_IMAGES, CLASSES):
        raise UserError(f"{options.root} has {images:,} images of {classes:,} classes, but ImageNet's validation set "
                        f'has {VALIDATION_IMAGES:,} of {CLASSES:,}; --partial evaluates these (all classes can be '
                        'predicted, and absent ones do not count)')
    measured = evaluate(config, checkpoint or entry.name, allow_nonfinite=False, choice=choice,
                        given=[f'test_dataloader.dataset.transform.{key}' for key in options.transform])
    metrics = {metric: compare(reported, measured[f'accuracy/{metric}'], tolerance)
               for metric, reported in entry.reported.items()}
    return dict(name=entry.name, protocol=describe(entry), images=images, classes=classes,
                whole=not (data and partial), passed=all(row['passed'] for row in metrics.values()),
                tolerance=tolerance, metrics=metrics)


def compare(reported: float, measured: float, tolerance: float) -> Dict[str, Any]:
    """Return dict(reported, measured, difference, passed); NaN never passes."""
    difference = measured - reported
    return dict(reported=reported, measured=measured, difference=difference,
                passed=abs(difference) <= tolerance + _ROUNDING)


def protocol(entry: PublishedWeights, data: Optional[str], batch_size: int, workers: int) -> Config:
    """Return the config of a published classifier's evaluation.

    The images are RGB, resized to input size / crop_pct on their shorter side (both sides with
    crop_mode 'squash'), cropped at the center and normalized.
    `data` is the folder of ImageNet: the folders of the classes, or `val` with them; None for the package's own
    classifiers, whose test images come with scikit-learn.
    """
    transform = published_transform(entry)
    if entry.tag == 'digits':
        if data:
            raise UserError(f'--data is not supported: {entry.name} is tested on scikit-learn\'s digits')
        dataset: Dict[str, Any] = dict(type='Digits', split='test', transform=transform)
    else:
        if not data:
            raise UserError(f'{entry.name} needs ImageNet\'s validation images: --data FOLDER')
        dataset = imagenet_folder(data, 'imagenet', transform, strict=True)
    topk = sorted(int(metric.removeprefix('top')) for metric in entry.reported)
    return Config(dict(
        model=dict(type='TimmClassifier', name=entry.arch, num_classes=entry.num_classes, **entry.options),
        test_dataloader=dict(batch_size=batch_size, num_workers=workers, dataset=dataset,
                             sampler=dict(type='DefaultSampler', shuffle=False)),
        test_evaluator=dict(type='AccuracyMetric', topk=topk), test_cfg=dict()))


def describe(entry: PublishedWeights) -> str:
    """Return the protocol in one line."""
    height, width = entry.input_size[1:]
    resized = int(height / (entry.crop_pct or 1))
    numbers = {key: ' '.join(f'{value:g}' for value in getattr(entry, key)) for key in ('mean', 'std')}
    both = ' on both sides' if entry.crop_mode == 'squash' else ''
    return (f'{entry.interpolation} to {resized} pixels{both}, center crop {height} x {width} (crop_pct '
            f"{entry.crop_pct:g}), RGB, mean {numbers['mean']}, std {numbers['std']}")
