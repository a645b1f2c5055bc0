"""Subjects of exports for tests."""
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from lab.export_matrix import randomize_norms
from subquad.tools.exporters.subject import Subject, classifier_subject, describe, random_classifier

LABELS = ['cat', 'dog', 'the "third"']


def subject_of(name: str, model: Optional[Dict[str, Any]] = None, **options) -> Subject:
    """A classifier, or with features=True its feature pyramid, with random weights and randomized norms.

    `model` are options of the model, the others those of `classifier_subject`.
    """
    read = random_classifier(name, **(model or {}))
    randomize_norms(read.model)
    return classifier_subject(read, 'random', **options)


def small_lcsm(mixer: str) -> Subject:
    """A small LCSM with another recurrence: the columns of its maps have 16, 8, 4 and 2 tokens."""
    sizes = dict(dims=(16, 16, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), head_hidden_size=16)
    return subject_of('test_lcsm', dict(sizes, mixer=mixer, num_classes=10))


class Small(nn.Module):
    """A classifier of images with two convolutions; only the second one has a large weight."""

    def __init__(self, channels: int):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(channels, 64, 1), nn.Conv2d(64, 64, 3, 2), nn.Linear(64, 3)

    def forward(self, images: Tensor) -> Tuple[Tensor]:
        return (self.head(self.conv(self.stem(images).relu()).mean((2, 3))),)


def small_classifier(color: str = 'RGB', mean: Sequence[float] = (0.5, 0.25, 0.125),
                     std: Sequence[float] = (0.5, 0.25, 0.2), labels: Sequence[str] = LABELS) -> Subject:
    """A small classifier for images of 16 x 24 with a given normalization."""
    torch.manual_seed(0)
    model, channels = Small(len(mean)).eval(), len(mean)
    transform = dict(resize=None, crop=[16, 24], scale=1 / 255, mean=list(mean), std=list(std),
                     normalize_in_graph=False)
    metadata = describe('small', 'classification', 'random', (1, channels, 16, 24), transform, labels, color,
                        postprocessing=dict(type='softmax', in_graph=False))
    return Subject('small', 'classification', model, model, (16, 24), channels, ('logits',), metadata, 'fixed')
