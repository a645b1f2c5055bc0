"""The reader's budget: Python calls, and files that they lie in, of one forward pass on a CPU."""
import sys
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch

import subquad

ROOTS = tuple(f'{Path(package.__file__).resolve().parent}/' for package in (timm, subquad.backbones, subquad.kernels))


@pytest.mark.parametrize('name, calls, files', [
    ('test_ppma', 500, 14),
    ('test_mobilevitv2', 250, 10),
    ('test_myo', 600, 14),
    ('test_lcsm', 600, 14),
    ('test_rmt', 500, 14),
    ('test_mlla', 420, 14),
    ('test_vmamba', 500, 14),
    ('test_vim', 600, 14),
    ('test_mambavision', 250, 12),
])
def test_a_forward_pass_keeps_the_budget(name, calls, files):
    model, x, seen = timm.create_model(name).eval(), torch.randn(1, 3, 64, 64), Counter()

    def count(frame, event, argument):
        if event == 'call' and frame.f_code.co_filename.startswith(ROOTS):
            seen[frame.f_code.co_filename] += 1

    with torch.no_grad():
        model(x)                                         # tables are kept from here on
        sys.setprofile(count)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    assert 0 < sum(seen.values()) <= calls and len(seen) <= files, seen
