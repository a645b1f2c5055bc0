"""Cases of a grid that hold every pair of values; the slow tests run the whole grid."""
from itertools import combinations, product

import pytest


def pairwise(names: str, *axes):
    """Parametrize a test by the product of `axes` and mark cases as slow as long as the others hold every pair.

    A value of one axis meets each value of each other axis in a case that runs by default.
    """
    axes = [list(axis) for axis in axes]
    cases = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    left, chosen = set().union(*pairs.values()), set()
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        chosen.add(best)
        left -= pairs[best]
    return pytest.mark.parametrize(names, [
        pytest.param(*(axis[n] for axis, n in zip(axes, case)),
                     marks=() if case in chosen else pytest.mark.slow) for case in cases])
