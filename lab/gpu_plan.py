"""`python -m lab.gpu_plan [PART]`: half an hour on a GPU in three parts of at most nine minutes, each useful alone.

Each step runs in a process of its own with a time limit. What fails is recorded, and the next step runs. The most
valuable steps come first. Every step adds a line to `gpu_plan.jsonl` as soon as it ends.
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from subquad.kernels.common.launch import interpreted
from subquad.tools.bench.operators import OPERATORS
from subquad.tools.common.cli import UserError
from subquad.tools.engine.records import append

from .documents import ROOT
from .gpu_checks import GRIDS, check_operator
from .presets import PRESETS
from .processes import search_path

FILE = 'gpu_plan.jsonl'
# Seconds that a part may take.
LIMIT = 530.
PARTS = {'1': 'correctness', '2': 'tables and profile', '3': 'models'}
# Test files that run on a GPU.
TESTS = ('tests/kernels/test_*triton*.py', 'tests/kernels/test_separable_attention.py',
         'tests/kernels/test_depthwise_conv.py', 'tests/kernels/test_rotary_embedding.py',
         'tests/kernels/test_quadtree.py', 'tests/kernels/test_backends.py', 'tests/backbones/test_prepare_gpu.py',
         'tests/backbones/test_ppma.py', 'tests/backbones/test_mobilevitv2.py',
         'tests/backbones/test_mobilevitv2_options.py', 'tests/backbones/test_myo.py', 'tests/backbones/test_lcsm.py')
_TEST_PROCESSES = 12
_OPERATOR_PRESETS = ('gpu-polyline_attention-50x80', 'gpu-polyline_scan-56x56', 'gpu-separable_attention-32x32',
                     'gpu-quadtree_solve-56x56', 'gpu-crisscross_attention-56x56',
                     'gpu-polyline_attention-50x80-train',
                     *(f'gpu-{op}-{side}{train}' for op in ('eos_elementwise', 'eos_matmul')
                       for side in ('56x56', '28x28') for train in ('', '-train')))
_MODEL_PRESETS = ('gpu-graphs-224-batch128', 'gpu-graphs-224-batch1', 'gpu-graphs-published-224', 'gpu-models-224',
                  'gpu-models-224-train', 'gpu-mobilevitv2_100-256', 'gpu-models-800x1280', 'gpu-figure10',
                  'gpu-ppma_tiny-224', 'gpu-ppma_tiny-224-train', 'gpu-lcsm_tiny-224', 'gpu-lcsm_tiny-224-train')


@dataclass(frozen=True)
class Step:
    """One process of a part.

    Attributes:
        name: of the step.
        command: arguments of Python; '{out}' stands for the folder of the results.
        seconds: its time limit.
        together: steps that follow each other with the same word run at the same time (never steps that measure times).
        table: whether the step uses the launch table that part 2 has tuned.
    """
    name: str
    command: Tuple[str, ...]
    seconds: float
    together: str = ''
    table: bool = False


def _checks(seconds: float, table: bool = False) -> List[Step]:
    return [Step(f"check {op}{' with the tuned table' if table else ''}",
                 ('-m', 'lab.gpu_checks', op, str(seconds - 15)), seconds, 'checks', table)
            for op in GRIDS if op in OPERATORS or not table]                       # the others have no row in the table


def _tests() -> List[Step]:
    paths = sorted(path for pattern in TESTS for path in ROOT.glob(pattern))
    ordered = sorted(paths, key=lambda path: -path.stat().st_size)                 # the longest first
    return [Step(f'test {path.relative_to(ROOT)}', ('-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'not slow',
                                                   str(path)), 200, 'tests') for path in ordered]


def _preset(name: str, seconds: float, repeats: int) -> Step:
    return Step(f'preset {name}', ('-m', 'lab.benchmark', name, '--repeats', str(repeats), '--processes', '1',
                                   '--out', '{out}'), seconds, table=True)


def _sanitizer() -> List[Step]:
    """compute-sanitizer on the kernels with the most intricate addresses, where the machine has it."""
    tool = shutil.which('compute-sanitizer')
    if tool is None:
        return []
    return [Step(f'compute-sanitizer {op}', ('-c', f'import subprocess, sys; sys.exit(subprocess.call([{tool!r}, '
                 f'"--error-exitcode", "9", sys.executable, "-m", "lab.gpu_checks", "{op}", "30"]))'), 60,
                 'sanitizer') for op in ('polyline_scan', 'quadtree_solve')]


def steps(part: str) -> List[Step]:
    """The steps of a part, the most valuable first."""
    if part == '1':
        return [*_checks(150), *_tests(), *_sanitizer()]
    if part == '2':
        return [Step('tune', ('-m', 'lab.tuning', '{out}/launch_table.json', '--seconds', '220'), 260),
                *_checks(60, table=True),
                *(_preset(name, 80, 20) for name in _OPERATOR_PRESETS[:4]),
                Step('profile', ('-m', 'lab.gpu_probe'), 60, table=True),
                *(_preset(name, 80, 20) for name in _OPERATOR_PRESETS[4:])]
    return [_preset(name, 150 if n < 2 else 90, 10) for n, name in enumerate(_MODEL_PRESETS)]


def _environment(step: Step, out: Path) -> Dict[str, str]:
    """The process imports what this one imports; with a tuned table, it uses it."""
    environment = {**os.environ, 'PYTHONPATH': search_path()}
    table = out / 'launch_table.json'
    if step.table and table.exists():
        environment['SUBQUAD_LAUNCH_TABLE'] = str(table)
    return environment


def _run_step(step: Step, out: Path, end: float) -> Dict[str, Any]:
    """Run a step until its time limit or the part's end, and return its record."""
    start = time.monotonic()
    if end - start < 1:
        return {'step': step.name, 'status': 'no time left', 'seconds': 0., 'result': None}
    process = subprocess.Popen([sys.executable, *(word.replace('{out}', str(out)) for word in step.command)],
                               cwd=ROOT, env=_environment(step, out), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    late = False
    try:
        output, errors = process.communicate(timeout=min(step.seconds, end - start))
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)              # its session, with the processes that it started
        output, errors = process.communicate()
    code = process.returncode
    status = ('timed out' if late else 'ok' if code == 0 else f'killed by signal {-code}' if code < 0
              else f'failed with exit code {code}')
    return {'step': step.name, 'status': status, 'seconds': round(time.monotonic() - start, 1),
            'result': _result(output), 'output': '' if status == 'ok' else output[-1500:],
            'errors': '' if status == 'ok' else errors[-1500:]}


def _result(output: str) -> Any:
    """The JSON of the last line, or that line."""
    lines = output.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return lines[-1]


def run_part(part: str, found: Sequence[Step], out: Path, limit: float = LIMIT) -> List[Dict[str, Any]]:
    """Run the steps of a part within its time limit, and return their records, which are also added to FILE."""
    out.mkdir(parents=True, exist_ok=True)
    end, records = time.monotonic() + limit, []
    with ThreadPoolExecutor(_TEST_PROCESSES) as pool:
        for _, together in groupby(found, lambda step: step.together or step.name):
            for record in pool.map(lambda step: _run_step(step, out, end), list(together)):
                records.append({'plan': part, **record})
                append(out / FILE, records[-1])
                print(f"part {part}: {record['step']}: {record['status']}, {record['seconds']:.0f} s", flush=True)
    return records


def dry_run(part: str, found: Sequence[Step]) -> List[str]:
    """Say what each step would run; run the checks on tiny grids in the interpreter. Return what is wrong."""
    wrong = []
    for step in found:
        print(f"part {part}: {step.name}, at most {step.seconds:.0f} s: python {' '.join(step.command)}")
        if step.name.startswith('check ') and not step.table:
            report = check_operator(step.command[2], 'cpu', small=True)
            print(f"    ran on the CPU: {report['checked']} case(s), {len(report['failed'])} failed")
            wrong += [f"{step.name}: {case['fault']}" for case in report['failed']]
        elif step.name.startswith('preset ') and step.command[2] not in PRESETS:
            wrong.append(f'{step.name}: there is no such preset')
    return wrong


def run_interpreted(module: str, *arguments: str) -> int:
    """Run a module in a process that imports Triton with its interpreter, and return the exit code."""
    return subprocess.call([sys.executable, '-m', module, *arguments],
                           env={**os.environ, 'PYTHONPATH': search_path(), 'TRITON_INTERPRET': '1'})


def run(parts: Sequence[str], out: Path, dry: bool) -> int:
    """Run parts of the plan, or say what they would run; return the exit code: 1 if a step failed."""
    import torch
    for part in parts:
        if part not in PARTS:
            raise UserError(f"there is no part {part!r} (allowed: {', '.join(PARTS)})")
    if dry and not interpreted():
        return run_interpreted('lab.gpu_plan', *parts, '--dry-run')
    if not dry and not torch.cuda.is_available():
        raise UserError('the plan needs a GPU, and torch finds none here; --dry-run shows the plan')
    failed: List[str] = []
    for part in parts:
        print(f'part {part}: {PARTS[part]}, at most {LIMIT / 60:.0f} minutes', flush=True)
        if dry:
            failed += dry_run(part, steps(part))
        else:
            failed += [f"{record['step']}: {record['status']}" for record in run_part(part, steps(part), out.resolve())
                       if record['status'] != 'ok']
    print('\n'.join(f'not ok: {text}' for text in failed) or 'all steps are ok')
    return int(bool(failed))


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser('python -m lab.gpu_plan', description=__doc__)
    parser.add_argument('parts', nargs='*', metavar='PART', help='1 (correctness), 2 (tables and profile) or 3 '
                        f'(models), each at most {LIMIT / 60:.0f} minutes (default: all)')
    parser.add_argument('--out', type=Path, default=Path('benchmarks'), metavar='FOLDER',
                        help=f'folder of the records; each step adds a line to {FILE} (default: ./%(default)s)')
    parser.add_argument('--dry-run', action='store_true', help='only say what the steps would run, and run the '
                        'checks on tiny grids on the CPU')
    args = parser.parse_args(argv)
    return run(args.parts or list(PARTS), args.out, args.dry_run)


if __name__ == '__main__':
    from subquad.tools.common import cli
    cli.run(main)
