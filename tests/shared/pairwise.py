"""Cases of a grid that hold every pair of values, or every value; the slow tests run the whole grid."""
from itertools import combinations, product

import pytest


def pairwise(names: str, *axes, together: int = 2):
    """Parametrize a test by the product of `axes` and mark cases as slow as long as the others hold every pair.

    A value of one axis meets each value of each other axis in a case that runs by default. With `together=1`, each
    value is in one such case, whatever it meets.
    """
    axes = [list(axis) for axis in axes]
    cases = list(product(*(range(len(axis)) for axis in axes)))
    parts = {case: set(combinations(enumerate(case), together)) for case in cases}
    left, chosen = set().union(*parts.values()), set()
    while left:
        best = max(cases, key=lambda case: len(parts[case] & left))
        chosen.add(best)
        left -= parts[best]
    return pytest.mark.parametrize(names, ids=str, argvalues=[
        pytest.param(*(axis[n] for axis, n in zip(axes, case)),
                     marks=() if case in chosen else pytest.mark.slow) for case in cases])


def slow(*cases) -> list:
    """Mark cases of one argument as slow."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def slow_cases(*cases) -> list:
    """Mark cases of several arguments as slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
