"""Subjects of exports for tests."""
from typing import Any, Dict, Optional

from lab.export_matrix import randomize_norms
from subquad.tools.exporters.subject import Subject, classifier_subject, random_classifier


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
