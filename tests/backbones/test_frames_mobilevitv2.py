"""Count what a reader steps through: the Python calls of one forward pass of MobileViTv2, by file."""
import os
import sys
from collections import Counter

import timm
import torch

import subquad

# Folders whose calls count.
_ROOTS = tuple(os.path.join(os.path.realpath(folder), '') for folder in
               (*subquad.backbones.__path__, *subquad.kernels.__path__, *timm.__path__))


def calls_by_file(model, x):
    """Return how many Python functions of subquad and timm a forward pass calls, by file."""
    found = Counter()

    def count(frame, event, argument):
        file = os.path.realpath(frame.f_code.co_filename)
        if event == 'call' and file.startswith(_ROOTS):
            found[file] += 1

    sys.setprofile(count)
    try:
        model(x)
    finally:
        sys.setprofile(None)
    return found


def test_a_forward_pass_is_short():
    model, x = timm.create_model('test_mobilevitv2').eval(), torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        model(x)                                         # what is computed once, such as masks of groups
        found = calls_by_file(model, x)
    assert 0 < sum(found.values()) <= 250 and len(found) <= 10, found
