"""Metrics of classifiers: accuracy of images and tokens, average precision, perplexity, and calibration."""
import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from torch import Tensor

from ...common.cli import UserError

BINS = 15
_WRONG = 2 ** 31                                                # a rank larger than every k
Samples = Sequence[Dict[str, Any]]


def _rows(sample: Dict[str, Any]) -> Tuple[Tensor, Tensor]:
    """Return scores (n, num_classes) and labels (n, 1) of an image, n = 1 (0 without label), or of n tokens.

    The labels of an image with several correct classes (ReaL) are a boolean vector, (1, num_classes).
    """
    scores = sample['scores'].reshape(-1, sample['scores'].shape[-1])
    label = torch.as_tensor(sample['label'], device=scores.device)
    if label.dtype == torch.bool:
        return scores, label[None]
    label = label.reshape(-1, 1)
    if len(label) != len(scores):
        raise UserError("labels of several classes for each image need the metric dict(type='MultiLabelMetric')")
    known = label[:, 0] >= 0
    return scores[known], label[known]


def _correct(scores: Tensor, label: Tensor) -> Tensor:
    """Return the correct classes as booleans of the shape of `scores`, from what `_rows` returns."""
    return label if label.dtype == torch.bool else torch.zeros_like(scores, dtype=torch.bool).scatter_(1, label, True)


def ranks(scores: Tensor, correct: Tensor) -> Tensor:
    """Return the number of wrong classes before the best correct class; wrong classes with equal scores come before it.

    Scores that are NaN or infinite give a rank above every k.

    Args:
        scores: (n, num_classes).
        correct: (n, num_classes), bool.
    """
    best = scores.masked_fill(~correct, -math.inf).amax(1, keepdim=True)
    return ((scores >= best) & ~correct).sum(1).where(scores.isfinite().all(1), _WRONG)


@METRICS.register_module()
class AccuracyMetric(BaseMetric):
    """Percentage of images, or of labeled tokens, with a correct class among the k best: accuracy/top1, accuracy/top5.

    Images with a negative label, which could not be read, do not count. A wrong class with the same score ranks before
    a correct one, and an image with a score that is NaN or infinite counts as wrong. A network with constant outputs
    therefore has an accuracy of 0. A label can be a boolean vector of several correct classes (ReaL).
    """

    default_prefix = 'accuracy'

    def __init__(self, topk: Sequence[int] = (1, 5), **kwargs: Any):
        super().__init__(**kwargs)
        self.topk = topk

    def process(self, data_batch: Any, data_samples: Samples) -> None:
        for scores, label in map(_rows, data_samples):
            self.results.append(ranks(scores, _correct(scores, label)).tolist())

    def compute_metrics(self, results: List[List[int]]) -> Dict[str, float]:
        found = torch.tensor([rank for sample in results for rank in sample])
        return {f'top{k}': (found < k).float().mean().item() * 100 for k in self.topk}


@METRICS.register_module()
class MultiLabelMetric(BaseMetric):
    """multi_label/mAP: the mean over the classes that images have of the average precision, in percent.

    The average precision of a class is the sum over images in the order of its score, the highest first, of
    (recall - recall before) * precision; images with equal scores count together, and a score that is not finite is the
    lowest. An image with a negative label, which could not be read, does not count.
    """

    default_prefix = 'multi_label'

    def process(self, data_batch: Any, data_samples: Samples) -> None:
        self.results += [(sample['scores'].cpu().nan_to_num(-1., -1., -1.), sample['label'].cpu())
                         for sample in data_samples]

    def compute_metrics(self, results: List[Tuple[Tensor, Tensor]]) -> Dict[str, float]:
        scores, labels = (torch.stack(part) for part in zip(*results))
        known = (labels >= 0).all(1)
        found = [_average_precision(s, n) for s, n in zip(scores[known].T, labels[known].T > 0.5) if n.any()]
        return dict(mAP=100 * sum(found) / len(found) if found else math.nan)


def _average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the average precision of a class, see `MultiLabelMetric`, of scores (n,) and booleans (n,)."""
    order = scores.argsort(descending=True)
    scores, found = scores[order], positive[order].double().cumsum(0)
    last = torch.cat([scores[1:] != scores[:-1], torch.tensor([True])]).nonzero()[:, 0]        # of equal scores
    gained = found[last].diff(prepend=torch.zeros(1, dtype=torch.double))
    return float((gained * found[last] / (last + 1)).sum() / found[-1])


@METRICS.register_module()
class PerplexityMetric(BaseMetric):
    """language/perplexity, and language/log_likelihood: its negative logarithm, the mean over tokens in nats."""

    default_prefix = 'language'

    def process(self, data_batch: Any, data_samples: Samples) -> None:
        for scores, label in map(_rows, data_samples):
            self.results.append((scores.double().gather(1, label).log().sum().item(), len(label)))

    def compute_metrics(self, results: List[Tuple[float, int]]) -> Dict[str, float]:
        total, count = (sum(part) for part in zip(*results))
        return dict(perplexity=math.exp(min(-total / count, 700)), log_likelihood=total / count)


class Predictions(NamedTuple):
    """Predictions of all images."""
    labels: np.ndarray        # (N,) int64; -1 for an image with several correct classes
    predicted: np.ndarray     # (N,) int64, the class with the highest score; -1 for scores that are NaN or infinite
    confidence: np.ndarray    # (N,) float64, the score of that class; 1 for scores that are NaN or infinite
    correct: np.ndarray       # (N,) bool, as accuracy/top1 counts

    @property
    def nonfinite(self) -> int:
        """Number of images with scores that are NaN or infinite."""
        return int((self.predicted < 0).sum())


@METRICS.register_module()
class CalibrationMetric(BaseMetric):
    """calibration/ece: the expected calibration error in percent, and the predictions themselves.

    After an evaluation, `predictions` holds them on the main process. An image whose scores are NaN or infinite counts
    as wrong with confidence 1. One with a negative label, which could not be read, does not count.
    """

    default_prefix = 'calibration'
    predictions: Predictions

    def process(self, data_batch: Any, data_samples: Samples) -> None:
        for scores, label in map(_rows, data_samples):
            if not len(scores):
                self.results.append(())                      # MMEngine joins processes by one result for each image
                continue
            correct = _correct(scores, label)
            number = -1 if label.dtype == torch.bool else int(label)
            right = bool(ranks(scores, correct) == 0)
            if not scores.isfinite().all():
                self.results.append((number, -1, 1., False))
                continue
            # With equal scores, a wrong class is predicted, as AccuracyMetric counts.
            confidence, predicted = scores.where(correct if right else ~correct, -1.).max(1)
            self.results.append((number, int(predicted), float(confidence), right))

    def compute_metrics(self, results: List[Tuple[Any, ...]]) -> Dict[str, float]:
        columns = zip(*filter(None, results)) if any(results) else [()] * 4
        self.predictions = Predictions(*(np.array(column, dtype=kind) for column, kind in zip(
            columns, (np.int64, np.int64, np.float64, bool))))
        return dict(ece=expected_calibration_error(self.predictions) * 100)


def reliability(predictions: Predictions) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the count, the accuracy and the mean confidence of images in `BINS` bins of equal width.

    Bin i of n holds the images with a confidence in (i / n, (i + 1) / n]; the first one includes 0.

    Returns:
        Three arrays (BINS,); accuracy and confidence of an empty bin are NaN.
    """
    place = np.clip(np.ceil(predictions.confidence * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(place, minlength=BINS)
    with np.errstate(invalid='ignore'):
        accuracy, confidence = (np.bincount(place, values, BINS) / count
                                for values in (predictions.correct, predictions.confidence))
    return count, accuracy, confidence


def expected_calibration_error(predictions: Predictions) -> float:
    """Return the sum over bins of (images in bin / all images) * |accuracy - mean confidence|.

    This is the definition of Guo et al., "On calibration of modern neural networks" (2017), equation 3.
    """
    count, accuracy, confidence = reliability(predictions)
    used = count > 0
    return float((count[used] * abs(accuracy[used] - confidence[used])).sum() / count.sum())
