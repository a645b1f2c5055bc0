"""Evaluate published classifiers as their authors do, and compare with the figures that they report."""
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Comparison:
    """A metric as reported and as measured here, in percent.

    Attributes:
        metric: Name in the table of published weights, such as 'top1'.
        reported, measured: The figures.
        tolerance: The largest difference that passes.
    """
    metric: str
    reported: float
    measured: float
    tolerance: float

    @property
    def difference(self) -> float:
        return self.measured - self.reported

    @property
    def passed(self) -> bool:
        """False also for a figure that is NaN."""
        return abs(self.difference) <= self.tolerance + _ROUNDING


def published_classifier(name: str) -> PublishedWeights:
    """Return the published weights of a classifier."""
    with weight_errors():
        entry = find(name)
    if entry.task != 'classification':
        raise UserError(f'{entry.name} are weights for {entry.task}; subquad reproduce takes classifiers only so far '
                        f'(subquad test {entry.config} {entry.name} --data FOLDER evaluates them)')
    if not entry.reported:
        raise UserError(f'no figures are reported for {entry.name}')
    return entry


def protocol(entry: PublishedWeights, data: Optional[str], batch_size: int, workers: int) -> Config:
    """Return the config of a published classifier's evaluation.

    The images are RGB, resized to input size / crop_pct on their shorter side, cropped at the center and normalized.
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
        model=dict(type='TimmClassifier', name=entry.arch, num_classes=entry.num_classes),
        test_dataloader=dict(batch_size=batch_size, num_workers=workers, dataset=dataset,
                             sampler=dict(type='DefaultSampler', shuffle=False)),
        test_evaluator=dict(type='AccuracyMetric', topk=topk), test_cfg=dict()))


def describe(entry: PublishedWeights) -> str:
    """Return the protocol in one line."""
    height, width = entry.input_size[1:]
    resized = int(height / (entry.crop_pct or 1))
    numbers = {key: ' '.join(f'{value:g}' for value in getattr(entry, key)) for key in ('mean', 'std')}
    return (f'{entry.interpolation} to {resized} pixels, center crop {height} x {width} (crop_pct '
            f"{entry.crop_pct:g}), RGB, mean {numbers['mean']}, std {numbers['std']}")


def check_complete(config: Config, partial: bool) -> Dict[str, int]:
    """Return the numbers of images and classes of the test data."""
    dataset = build(DATASETS, config.test_dataloader.dataset.to_dict(), 'the data')
    found = dict(images=len(dataset), classes=getattr(dataset, 'present', len(dataset.classes)))
    if config.test_dataloader.dataset.type == 'ImageNetFolder' and not partial and (
            found != dict(images=VALIDATION_IMAGES, classes=CLASSES)):
        raise UserError(f"{config.test_dataloader.dataset.root} has {found['images']:,} images of {found['classes']:,} "
                        f'classes, but ImageNet\'s validation set has {VALIDATION_IMAGES:,} of {CLASSES:,}; --partial '
                        'evaluates these (all classes can be predicted, and absent ones do not count)')
    return found


def compare(entry: PublishedWeights, config: Config, checkpoint: Optional[str], tolerance: float,
            choice: Optional[str] = None) -> Dict[str, Comparison]:
    """Evaluate the weights by a config of `protocol`, and compare each reported metric.

    `checkpoint` is a file to evaluate instead of the published one, and `choice` as in `evaluate`. A difference of at
    most `tolerance` percentage points passes.
    """
    given = [f'test_dataloader.dataset.transform.{key}' for key in config.test_dataloader.dataset.transform]
    measured = evaluate(config, checkpoint or entry.name, allow_nonfinite=False, choice=choice, given=given)
    return {metric: Comparison(metric, reported, measured[f'accuracy/{metric}'], tolerance)
            for metric, reported in entry.reported.items()}
