"""Triton kernels compile ahead of time for GPUs that this machine need not have, and no register spills."""
import json
import re

import pytest
from helpers import ROOT

pytest.importorskip('triton')


def _compiled(python, target, *only):
    script = ('import sys; from lab import machine_code\n'
              f'sys.exit(machine_code.main(["{target}", "--json", "--only", *{only!r}]))')
    done = python(script, TRITON_INTERPRET='0')
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def _assert_compiled(resources, kernels_, spills_known=True):
    found = [k for case in resources.values() for k in case]
    assert {k['kernel'].removesuffix('_kernel') for k in found} >= kernels_
    if spills_known:
        assert all(k['registers'] > 0 for k in found)
        assert [k for k in found if k['stack']] == []


# All kernels, by their sources.
ALL_KERNELS = {name for path in (ROOT / 'kernels').glob('*/*.py')
               for name in re.findall(r'^def _(\w+)_kernel\(', path.read_text(), re.MULTILINE)}


# Cases that hold every kernel.
EACH_KERNEL = (
    'polyline_attention, additive, 14 x 14, bfloat16, 32', 'crisscross_attention, additive, lines of 56, bfloat16, 32',
    'crisscross_attention, additive, lines of 100, bfloat16, 32', 'polyline_scan, lines of 56, bfloat16, 32',
    '1 latent, keys, 32 x 32, bfloat16, 128', '8 latent, mapped keys, 32 x 32, bfloat16, 128',
    'skew, 28 x 28, bfloat16, 32', '5 x 5, sum, bfloat16, 32', 'rotary_embedding, 14 x 14, bfloat16, 32',
    'eos_matmul, states, bfloat16, 32', 'selective_scan, four paths, bfloat16, 16',
    'full rank, sigmoid, bfloat16, 32', 'rows, lines of 100, bfloat16, 32',
    'quadtree_attention, laplacian, 56 x 56, bfloat16, 32')


def test_kernels_compile_without_spills(python):
    cases = EACH_KERNEL[3], *EACH_KERNEL[9:12], EACH_KERNEL[-1]
    _assert_compiled(_compiled(python, 'cuda:90', *cases), set())


@pytest.mark.slow
@pytest.mark.parametrize('target', ['cuda:80', 'cuda:90', 'hip:gfx942'])
def test_every_kernel_compiles_without_spills(target, python):
    _assert_compiled(_compiled(python, target, *EACH_KERNEL), ALL_KERNELS, target.startswith('cuda'))


@pytest.mark.slow
def test_bfloat16_and_float32_at_the_head_size_of_ppma_do_not_spill(python):
    resources = _compiled(python, 'cuda:90', 'bfloat16, 32 channels', '14 x 14, float32, 32',
                          'lines of 100, float32, 32', 'lines of 28, float32, 32')
    _assert_compiled(resources, ALL_KERNELS)


@pytest.mark.long
@pytest.mark.parametrize('target', ['cuda:80', 'cuda:90'])
def test_no_shipped_configuration_spills_or_repeats_work(target, python):
    """For heads of 16 to 64 channels. Attention of 128 channels, which no network here has, may spill a little."""
    resources = _compiled(python, target, '')
    wide = {case: found for case, found in resources.items() if case.endswith('128 channels')}
    narrow = {case: found for case, found in resources.items() if case not in wide}
    _assert_compiled(narrow, ALL_KERNELS)
    for case, found in resources.items():
        assert [k['kernel'] for k in found if k['duplicates'] > 1] == [], case
    assert max(k['stack'] for found in wide.values() for k in found) <= 128


def test_wrong_targets_are_refused(python):
    cases = [*((target, 'additive', 'target must be like cuda:90') for target in ('sm90', 'cuda:999', 'hip:nonsense')),
             ('cuda:90', 'nonsense', "no case contains 'nonsense'")]
    done = python('from lab import machine_code\nfrom subquad.tools.common import cli\n'
                  f'for target, only, _ in {cases!r}:\n'
                  '    try: cli.run(machine_code.main, [target, "--only", only])\n'
                  '    except SystemExit as stop: assert stop.code == 2', TRITON_INTERPRET='0')
    errors = done.stderr.splitlines()
    assert done.returncode == 0 and len(errors) == len(cases), done.stderr
    assert all(message in error for error, (*_, message) in zip(errors, cases))
