"""Metrics of each image's prediction: calibration, and accuracy where an image has several correct classes."""
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from torch import Tensor

from .model import _WRONG, AccuracyMetric

BINS = 15


class Predictions(NamedTuple):
    """Predictions of all images.

    Attributes:
        labels: (N,) int64; -1 for an image with several correct classes.
        predicted: (N,) int64, the class with the highest score; -1 for scores that are NaN or infinite.
        confidence: (N,) float64, the score of that class; 1 for scores that are NaN or infinite.
        correct: (N,) bool, as accuracy/top1 counts.
    """
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray

    @property
    def nonfinite(self) -> int:
        """Number of images with scores that are NaN or infinite."""
        return int((self.predicted < 0).sum())


def rank(scores: Tensor, correct: Tensor) -> int:
    """Return the number of wrong classes before the best correct class; wrong classes with equal scores come before it.

    Args:
        scores: (num_classes,).
        correct: (num_classes,), bool.
    """
    if not scores.isfinite().all():
        return _WRONG
    return int((scores[~correct] >= scores[correct].max()).sum())


def _correct_classes(sample: Dict[str, Any]) -> Tuple[Tensor, Tensor, int]:
    """Return the scores (num_classes,), the correct classes as a boolean vector, and the label or -1 for several."""
    scores = sample['scores'].detach().cpu()
    label = torch.as_tensor(sample['label']).cpu()
    if label.ndim:
        return scores, label.bool(), -1
    correct = torch.zeros(len(scores), dtype=torch.bool)
    correct[label] = True
    return scores, correct, int(label)


@METRICS.register_module()
class RealAccuracyMetric(AccuracyMetric):
    """Percentage of images with a correct class among the k best, for labels of several correct classes (ReaL)."""

    def process(self, data_batch: Any, data_samples: Sequence[Dict[str, Tensor]]) -> None:
        for sample in data_samples:
            scores, correct, _ = _correct_classes(sample)
            self.results.append([rank(scores, correct)])


@METRICS.register_module()
class CalibrationMetric(BaseMetric):
    """calibration/ece: the expected calibration error in percent, and the predictions themselves.

    After an evaluation, `predictions` holds them on the main process. An image whose scores are NaN or infinite counts
    as wrong with confidence 1. One with a negative label, which could not be read, does not count.
    """

    default_prefix = 'calibration'
    predictions: Predictions

    def process(self, data_batch: Any, data_samples: Sequence[Dict[str, Tensor]]) -> None:
        for sample in data_samples:
            if (torch.as_tensor(sample['label']) < 0).any():
                self.results.append(())                      # MMEngine joins processes by one result for each image
                continue
            scores, correct, label = _correct_classes(sample)
            right = rank(scores, correct) == 0
            if not scores.isfinite().all():
                self.results.append((label, -1, 1., False))
                continue
            # With equal scores, a wrong class is predicted, as AccuracyMetric counts.
            predicted = scores.where(correct if right else ~correct, -1.).argmax()
            self.results.append((label, int(predicted), float(scores[predicted]), right))

    def compute_metrics(self, results: List[Tuple[Any, ...]]) -> Dict[str, float]:
        columns = zip(*filter(None, results)) if any(results) else [()] * 4
        self.predictions = Predictions(*(np.array(column, dtype=kind) for column, kind in zip(
            columns, (np.int64, np.int64, np.float64, bool))))
        return dict(ece=expected_calibration_error(self.predictions) * 100)


def reliability(predictions: Predictions, bins: int = BINS) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the count, the accuracy and the mean confidence of images in bins of equal width.

    Bin i of n holds the images with a confidence in (i / n, (i + 1) / n]; the first one includes 0.

    Returns:
        Three arrays (bins,); accuracy and confidence of an empty bin are NaN.
    """
    place = np.clip(np.ceil(predictions.confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid='ignore'):
        accuracy = np.bincount(place, predictions.correct, bins) / count
        confidence = np.bincount(place, predictions.confidence, bins) / count
    return count, accuracy, confidence


def expected_calibration_error(predictions: Predictions, bins: int = BINS) -> float:
    """Return the sum over bins of (images in bin / all images) * |accuracy - mean confidence|.

    This is the definition of Guo et al., "On calibration of modern neural networks" (2017), equation 3.
    """
    count, accuracy, confidence = reliability(predictions, bins)
    used = count > 0
    return float((count[used] * abs(accuracy[used] - confidence[used])).sum() / count.sum())
