"""The plan of a rented GPU, without one: steps in processes, limits, checks of kernels, and the dry run."""
import json
import os
import shutil
import subprocess
import time

import pytest
import torch
from helpers import ROOT

pytest.importorskip('triton')

from lab import gpu_checks, gpu_plan, presets
from lab.gpu_checks import Case
from lab.gpu_plan import Step
from subquad import kernels
from subquad.kernels.common import launch
from subquad.tools.common.cli import UserError


def _step(name, script, seconds=60., **options):
    return Step(name, ('-S', '-c', script), seconds, **options)


def _lines(out):
    return [json.loads(line) for line in (out / gpu_plan.FILE).read_text().splitlines()]


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path, capsys):
    found = gpu_plan.run_part('1', [
        _step('good', 'print("first"); print(\'{"worst": 0.5}\')'),
        _step('bad', 'import sys; print("half"); sys.exit("no such kernel")'),
        _step('crash', 'import os, signal; os.kill(os.getpid(), signal.SIGSEGV)'),
        _step('hang', 'import subprocess, sys; subprocess.run([sys.executable, "-c", "import time; time.sleep(99)"])',
              2.),
        _step('last', 'print("not JSON")'),
    ], tmp_path / 'new')
    assert [record['status'] for record in found] == ['ok', 'failed with exit code 1', 'killed by signal 11',
                                                      'timed out', 'ok']
    assert found[0]['result'] == {'worst': .5} and found[4]['result'] == 'not JSON'
    assert 'no such kernel' in found[1]['errors'] and 'half' in found[1]['output']
    assert _lines(tmp_path / 'new') == found and all(record['plan'] == '1' for record in found)
    assert 'part 1: hang: timed out, 2 s' in capsys.readouterr().out


def test_a_part_ends_in_time_and_says_what_it_left(tmp_path):
    start = time.monotonic()
    steps = [_step('long', 'import time; time.sleep(99)'), _step('late', '')]
    found = gpu_plan.run_part('2', steps, tmp_path, limit=3.)
    assert [record['status'] for record in found] == ['timed out', 'no time left']
    assert time.monotonic() - start < 60 and _lines(tmp_path) == found


def test_steps_that_run_together_wait_for_each_other(tmp_path):
    """Each of the two waits for the other's file, so neither could end alone."""
    script = ('import pathlib, time\npathlib.Path({0!r}).touch()\n'
              'while not pathlib.Path({1!r}).exists(): time.sleep(.05)')
    files = [str(tmp_path / name) for name in 'ab']
    found = gpu_plan.run_part('1', [_step('a', script.format(*files), together='x'),
                                    _step('b', script.format(*files[::-1]), together='x')], tmp_path)
    assert [record['status'] for record in found] == ['ok', 'ok']


def test_later_steps_use_the_tuned_table(tmp_path):
    script = 'import os; print(os.environ.get("SUBQUAD_LAUNCH_TABLE"))'
    steps = [_step('plain', script), _step('tuned', script, table=True)]
    assert [record['result'] for record in gpu_plan.run_part('2', steps, tmp_path)] == ['None', 'None']
    (tmp_path / 'launch_table.json').write_text('{}')
    assert [record['result'] for record in gpu_plan.run_part('2', steps, tmp_path)] == [
        'None', str(tmp_path / 'launch_table.json')]


def test_parts_name_modules_files_and_presets_that_exist():
    every = [step for part in gpu_plan.PARTS for step in gpu_plan.steps(part)]
    assert len({step.name for step in every}) == len(every)
    assert {f'check {op}' for op in gpu_checks.GRIDS} <= {step.name for step in every}
    for step in every:
        if step.name.startswith('preset '):
            assert presets.PRESETS[step.command[2]].device == 'cuda' and not step.together
        elif step.name.startswith('test '):
            assert os.path.exists(step.command[-1])
        elif step.command[0] == '-m':
            module = step.command[1].removeprefix('subquad.').replace('.', '/')
            assert (ROOT / f'{module}.py').exists(), step
    measured = [name for name, preset in presets.PRESETS.items() if preset.device == 'cuda']
    left_out = set(measured) - {step.command[2] for step in every if step.name.startswith('preset ')}
    assert left_out == {'gpu-separable_attention-32x32-train', 'gpu-quadtree_solve-56x56-train'}


def test_every_operator_with_kernels_of_its_own_is_checked():
    """The others run those of polyline_scan and quadtree_solve."""
    assert set(gpu_checks.GRIDS) == set(kernels.__all__) - {
        'tree_solve', 'polyline_linear_attention', 'quadtree_attention', 'use_backend', 'why_not'}


@pytest.mark.slow
@pytest.mark.skipif(not launch.interpreted(), reason='runs kernels in the interpreter')
def test_dry_run_goes_through_every_step(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gpu_plan.main(['--dry-run']) == 0
    printed = capsys.readouterr().out
    for part in gpu_plan.PARTS:
        for step in gpu_plan.steps(part):
            assert f'part {part}: {step.name}, at most' in printed
    assert printed.count('ran on the CPU: 1 case(s), 0 failed') == len(gpu_checks.GRIDS)
    assert printed.endswith('all steps are ok\n') and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_dry_run_needs_no_variable_of_the_environment(python):
    done = python('from lab import gpu_plan\nraise SystemExit(gpu_plan.main(["1", "--dry-run"]))', TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr
    assert 'check polyline_attention' in done.stdout and ', 0 failed' in done.stdout
    assert 'all steps are ok' in done.stdout


def test_dry_run_reports_a_wrong_kernel(monkeypatch, capsys):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(gpu_plan, 'check_operator', lambda op, device, small: {
        'checked': 1, 'failed': [{'fault': 'two runs differ'}] if op == 'polyline_scan' else []})
    assert gpu_plan.run(['1'], None, dry=True) == 1
    assert 'not ok: check polyline_scan: two runs differ' in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_the_plan_without_a_gpu_is_one_error(tmp_path):
    with pytest.raises(UserError, match='needs a GPU, and torch finds none here; --dry-run shows the plan'):
        gpu_plan.main(['1', '--out', str(tmp_path)])
    with pytest.raises(UserError, match="there is no part '4'"):
        gpu_plan.main(['4', '--dry-run'])


# --- checks of kernels

def _check(kernel):
    """Check a kernel of x -> 2 x."""
    def call(x, backend):
        return x * 2 if backend == 'reference' else kernel(x)
    torch.manual_seed(0)
    return gpu_checks.check(Case('double', call, [torch.randn(5, 3)]))


def test_a_right_kernel_passes():
    report = _check(lambda x: x * 2)
    assert (report['fault'], report['repeats'], report['with_one_warp']) == ('', True, None)
    assert 0 <= report['error'] <= 1


def test_faults_of_kernels_are_found():
    def unwritten(x):
        y = torch.empty_like(x)
        y[:4] = 2 * x[:4]
        return y
    assert _check(unwritten)['fault'] == 'the output is not finite'
    assert _check(lambda x: x * 2.001)['fault'].endswith('times the tolerance')
    assert _check(lambda x: x * 2 + torch.rand(()) * 1e-6)['fault'] == 'two runs differ'
    assert _check(lambda x: x.detach() * 2 + 0 * x.sum())['fault'].endswith('times the tolerance')    # the gradient

    def broken(x):
        raise RuntimeError('out of\nresource')
    report = _check(broken)
    assert report['fault'] == report['with_one_warp'] == 'RuntimeError: out of resource'


def test_ci_gpu_calls_the_plan(tmp_path):
    python = tmp_path / 'python'
    python.write_text('#!/usr/bin/env bash\necho "$@"\n')
    python.chmod(0o755)
    done = subprocess.run([shutil.which('bash'), str(ROOT / '.ci' / 'gpu'), str(python), 'out', '2'], text=True,
                          capture_output=True)
    assert done.stdout.split() == ['-m', 'lab.gpu_plan', '2', '--out', 'out'], done.stderr
