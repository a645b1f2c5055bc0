"""Subjects of exports for tests."""
from subquad.tools.bench.export_matrix import randomize_norms
from subquad.tools.exporters.subject import Subject, classifier_subject, random_classifier


def subject_of(name: str, **options) -> Subject:
    """A classifier, or with features=True its feature pyramid, with random weights and randomized norms."""
    read = random_classifier(name)
    randomize_norms(read.model)
    return classifier_subject(read, 'random', **options)
