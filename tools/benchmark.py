"""`subquad benchmark`: time and memory of operators and models on this CPU, as ratios, beside their targets.

Times of one machine say little about another, so what counts are ratios of times taken in turn within one process: to
the plain formula, or to the floor that the arithmetic alone would take at the speed of a large matrix product.
"""
import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import kernels
from ..kernels.decay import column_log_decay, row_log_decay
from . import zoo
from .cli import UserError, nearest
from .measure import OtherLoad, count_macs, environment, floor, gemm, peak_memory, time_interleaved

FILE = 'cpu.jsonl'
GEMMS_A_ROUND = 5


def figure(name: str, value: Optional[float], unit: str, at_least: Optional[float] = None,
           at_most: Optional[float] = None) -> Dict[str, Any]:
    """One line of the table: a value (None: not measured), its target, if it has one, and whether that is met."""
    bound, target = ('at least', at_least) if at_least is not None else ('at most', at_most)
    met = None
    if value is not None and target is not None:
        met = value >= target if bound == 'at least' else value <= target
    return {'name': name, 'value': value, 'unit': unit, 'bound': None if target is None else bound, 'target': target,
            'met': met}


# --- polyline attention against the plain formula

def dense_polyline_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The formula as one would write it down, with its N x N matrices: 1/2 (softmax(q k' + log L) +
    softmax(q k' + log L~)) v. Arguments and result as for kernels.polyline_attention."""
    tokens = q.shape[2] * q.shape[3]
    row, column = row_log_decay(a, a.dtype), column_log_decay(b, b.dtype)
    log_mask = (row[..., :, :, None, :] + column[..., :, None, :, :]).reshape(*q.shape[:2], tokens, tokens)
    logits = q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2)
    weights = (logits + log_mask).softmax(-1) + (logits + log_mask.transpose(-1, -2)).softmax(-1)
    # The mean's 1/2 on the small output rather than on the weights: a pass over memory that the formula can do without.
    return ((weights @ v.flatten(2, 3)) * 0.5).view(v.shape)


def attention_inputs(batch: int, heads: int, grid: Tuple[int, int], dim: int) -> List[Tensor]:
    """q, k (scaled), v: (B, heads, H, W, D) and step logs a, b: (B, heads, H, W) between -1 and 0; float32."""
    q, k, v = (torch.randn(batch, heads, *grid, dim) for _ in range(3))
    a, b = (-torch.rand(batch, heads, *grid) for _ in range(2))
    return [q, k * dim ** -0.5, v, a, b]


def attention(repeats: int, *, grid: Tuple[int, int], batch: int, heads: int = 8, dim: int = 32, speed_up: float,
              memory: Optional[float] = None) -> Dict[str, Any]:
    """The portable implementation and the dense formula, in turn.

    Args:
        repeats: rounds of timing.
        grid: height and width in tokens.
        speed_up: target, at least (times).
        memory: target for the portable implementation, at most (MB beyond inputs and output), or None.
    """
    contestants: Dict[str, Callable[..., Tensor]] = {
        'portable': partial(kernels.polyline_attention, backend='portable'), 'dense': dense_polyline_attention}
    tiny, inputs = attention_inputs(1, 1, (2, 2), dim), attention_inputs(batch, heads, grid, dim)
    for call in contestants.values():
        call(*tiny)
    calls = {name: partial(call, *inputs) for name, call in contestants.items()}
    peaks = {name: peak_memory(call, beyond_output=True) for name, call in calls.items()}
    macs = count_macs(calls['portable'])
    times = time_interleaved({**calls, 'gemm': gemm()}, repeats, {'gemm': GEMMS_A_ROUND})
    low = floor(macs, times['gemm']['p50'])
    ratios = {'dense / portable': times['dense']['p50'] / times['portable']['p50'],
              'portable / floor': times['portable']['p50'] / low['ms']}
    return {'times_ms': times, 'ratios': ratios, 'peak_mb': peaks, 'floor': low, 'figures': [
        figure('speed-up over dense', ratios['dense / portable'], 'x', at_least=speed_up),
        figure('time over floor', ratios['portable / floor'], 'x'),
        figure('peak memory, portable', peaks['portable'], 'MB', at_most=memory),
        figure('peak memory, dense', peaks['dense'], 'MB')]}


# --- the polyline scan's growth with the number of tokens

def scan_growth(repeats: int, *, sides: Sequence[int], heads: int = 8, dim: int = 32,
                exponent: float) -> Dict[str, Any]:
    """Time of the scan on growing square grids, and the exponent p of time ~ tokens^p from the first to the last.

    Args:
        repeats: rounds of timing.
        sides: grid sides in tokens, growing.
        exponent: target, at most.
    """
    scan = partial(kernels.polyline_scan, order='both', backend='portable')
    inputs = {f'{n}x{n}': (torch.randn(1, heads, n, n, dim), *(-torch.rand(1, heads, n, n) for _ in range(2)))
              for n in sides}
    # Short and long axes take different paths: the warm-up before the memory is measured takes both.
    scan(torch.randn(1, 1, 2, 65, 1), -torch.rand(1, 1, 2, 65), -torch.rand(1, 1, 2, 65))
    calls = {name: partial(scan, *tensors) for name, tensors in inputs.items()}
    first, last = list(calls)[0], list(calls)[-1]
    peak = peak_memory(calls[last], beyond_output=True)
    times = time_interleaved(calls, repeats)
    ratio = times[last]['p50'] / times[first]['p50']
    slope = math.log(ratio) / (2 * math.log(sides[-1] / sides[0]))               # tokens grow with the side squared
    return {'times_ms': times, 'ratios': {f'{last} / {first}': ratio, 'exponent': slope}, 'peak_mb': {last: peak},
            'floor': None, 'figures': [figure('growth exponent', slope, '', at_most=exponent),
                                       figure(f'peak memory, {last}', peak, 'MB')]}


# --- whole models beside the floor of their arithmetic

def model(repeats: int, *, name: str, size: Tuple[int, int], batch: int, over_floor: float,
          memory: Optional[float] = None) -> Dict[str, Any]:
    """A timm model's forward pass in float32 beside the floor.

    Args:
        repeats: rounds of timing.
        name: timm model name.
        size: image height and width in pixels.
        over_floor: target, at most (times).
        memory: target, at most (MB above the process with the model and its input), or None.
    """
    network, images = zoo.create(name).eval(), torch.randn(batch, 3, *size)
    with kernels.use_backend('portable'):
        network(torch.randn(1, 3, 64, 64))
        call = partial(network, images)
        peak = peak_memory(call)
        macs = count_macs(call)
        times = time_interleaved({name: call, 'gemm': gemm()}, repeats, {'gemm': GEMMS_A_ROUND})
    low = floor(macs, times['gemm']['p50'])
    ratio = times[name]['p50'] / low['ms']
    return {'times_ms': times, 'ratios': {f'{name} / floor': ratio}, 'peak_mb': {name: peak}, 'floor': low,
            'figures': [figure('time over floor', ratio, 'x', at_most=over_floor),
                        figure('peak memory', peak, 'MB', at_most=memory)]}


@dataclass(frozen=True)
class Preset:
    """What is measured, how many rounds by default, and the measurement (rounds -> record without environment)."""
    what: str
    repeats: int
    measure: Callable[[int], Dict[str, Any]]


PRESETS = {
    'polyline_attention-50x80': Preset(
        'polyline attention against the dense formula, 50 x 80 tokens, 8 heads of 32', 7,
        partial(attention, grid=(50, 80), batch=1, speed_up=2.5, memory=300)),
    'polyline_attention-14x14': Preset(
        'the same on 14 x 14 tokens, batch 8', 30,
        partial(attention, grid=(14, 14), batch=8, speed_up=1.0)),
    'polyline_scan-growth': Preset(
        'polyline scan on 32 x 32 to 256 x 256 tokens: growth of its time', 15,
        partial(scan_growth, sides=(32, 64, 128, 256), exponent=1.1)),
    'ppma_tiny-800x1280': Preset(
        'PPMA-Tiny on one 800 x 1280 image, beside the floor', 7,
        partial(model, name='ppma_tiny', size=(800, 1280), batch=1, over_floor=5, memory=600)),
    'ppma_tiny-224': Preset(
        'PPMA-Tiny on eight 224 x 224 images, beside the floor', 15,
        partial(model, name='ppma_tiny', size=(224, 224), batch=8, over_floor=2.4)),
}


# --- one process a preset, the file and the table

def measure_here(preset: str, threads: int, repeats: Optional[int]) -> Dict[str, Any]:
    """Measure a preset in this process. Returns its record, ready for JSON."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    repeats, others = repeats or PRESETS[preset].repeats, OtherLoad()
    with torch.no_grad():
        measured = PRESETS[preset].measure(repeats)
    return {'preset': preset, 'what': PRESETS[preset].what, 'repeats': repeats, **measured,
            'other_cpus': others.cpus(), **environment()}


def measure_in_fresh_process(preset: str, threads: int, repeats: Optional[int]) -> Dict[str, Any]:
    """The same in a process of its own, whose allocator and peaks no other preset has touched.

    Raises:
        UserError: the process failed; what it wrote stands on stderr.
    """
    command = [sys.executable, '-m', 'subquad.tools.benchmark', preset, '--one', '--threads', str(threads)]
    command += [] if repeats is None else ['--repeats', str(repeats)]
    # It must find what this process found, an uninstalled checkout too, and nothing else that the working directory
    # happens to hold.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    counts = dict.fromkeys(('OMP_NUM_THREADS', 'MKL_NUM_THREADS'), str(threads))
    done = subprocess.run(command, env={**os.environ, **counts, 'PYTHONPATH': path, 'PYTHONSAFEPATH': '1'},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(done.stderr)
    why = 'killed, perhaps for lack of memory' if done.returncode < 0 else 'its message stands above'
    raise UserError(f'{preset} could not be measured ({why})')


def prepare(out: Path) -> Path:
    """Make the folder and the results file, so that what cannot be written is known before minutes of measuring.

    Raises:
        UserError: the folder cannot be made or the file not written.
    """
    path = out / FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.open('ab').close()
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}; choose another folder with --out, or --no-save') \
            from error
    return path


def append(path: Path, record: Dict[str, Any]) -> None:
    """Add a record as one line, in one write: whoever else appends or reads sees whole lines.

    Raises:
        UserError: the disk did not take it.
    """
    line = json.dumps(record, allow_nan=False).encode() + b'\n'
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        with os.fdopen(os.dup(descriptor), 'rb') as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b'\n':
                line = b'\n' + line                              # a write that was cut short: leave it on its own line
        if os.write(descriptor, line) != len(line):
            raise UserError(f'{path}: the disk is full; the last line is incomplete')
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from error
    finally:
        os.close(descriptor)


def _number(value: Optional[float]) -> str:
    return 'not measured' if value is None else f'{value:.3g}' if value < 1000 else f'{value:.0f}'


def disturbed(record: Dict[str, Any]) -> bool:
    """Whether other programs left too few CPUs for the threads, so that the times mean little."""
    return record['threads'] + (record['other_cpus'] or 0) > max(record['cpus'], record['threads']) + 0.1


def figures(record: Dict[str, Any]) -> List[Tuple[str, str, str, str]]:
    """(figure, value, target, met) of a record: median times with their 20th and 80th percentiles, floor, figures."""
    rows = [(f'time, {name}', '{} ms ({} to {})'.format(*(_number(t[p]) for p in ('p50', 'p20', 'p80'))), '', '')
            for name, t in record['times_ms'].items()]
    if record['floor']:
        low = record['floor']
        rows.append(('floor', f"{_number(low['ms'])} ms ({low['macs'] / 1e9:.3g} GMACs at "
                              f"{_number(low['gemm_gflops'])} GFLOP/s)", '', ''))
    for f in record['figures']:
        target = '' if f['target'] is None else f"{f['bound']} {f['target']:g} {f['unit']}".rstrip()
        met = '' if f['target'] is None else {True: 'yes', False: 'no', None: '?'}[f['met']]
        rows.append((f['name'], f"{_number(f['value'])} {f['unit']}".rstrip(), target, met))
    return rows


def table(records: Sequence[Dict[str, Any]]) -> Table:
    """The figures of the records for a screen; what other programs disturbed is marked."""
    result = Table('preset', 'figure', 'value', 'target', 'met',
                   title='CPU, {threads} threads, torch {torch}, {cpu}'.format(**records[0]))
    for record in records:
        rows = figures(record)
        if disturbed(record):
            rows.append(('[bold]disturbed[/bold]', f"others used {record['other_cpus']:.2g} of {record['cpus']} CPUs: "
                                                   'measure again', '', ''))
        for n, row in enumerate(rows):
            result.add_row(record['preset'] if n == 0 else '', *row, end_section=n == len(rows) - 1)
    return result


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='subquad benchmark',
        description='Measure time and peak memory of operators and models on this CPU, each preset in a process of '
                    'its own, and print them beside their targets. All presets take a few minutes; close what else '
                    'is running. A target that is missed is shown as such and is no error.',
        epilog='Example: subquad benchmark polyline_attention-14x14 --threads 4')
    parser.add_argument('presets', nargs='*', metavar='PRESET', help='what to measure (--list shows them); default all')
    parser.add_argument('--list', action='store_true', help='list the presets and stop')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads for torch (default %(default)s)')
    parser.add_argument('--repeats', type=int, metavar='N',
                        help='rounds of timing: more are steadier and take longer (default: set for each preset)')
    parser.add_argument('--out', type=Path, default=Path('benchmarks'), metavar='DIR',
                        help=f'folder of the results file {FILE}, to which each run adds lines (default ./%(default)s)')
    parser.add_argument('--no-save', action='store_true', help='only print the table')
    parser.add_argument('--one', action='store_true', help=argparse.SUPPRESS)     # this process measures, prints JSON
    args = parser.parse_args(argv)
    for name in args.presets:
        if name not in PRESETS:
            raise UserError(f'unknown preset {name!r}{nearest(name, list(PRESETS))} (--list shows them all)')
    for option in ('threads', 'repeats'):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f'--{option} must be at least 1, got {value}')
    if args.one and len(args.presets) != 1:
        raise UserError('--one takes exactly one preset')
    args.presets = list(dict.fromkeys(args.presets)) or list(PRESETS)
    return args


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    args = parse(argv)
    if args.list:
        print('\n'.join(f'{name:26s} {preset.what}' for name, preset in PRESETS.items()))
        return None
    if args.one:
        print(json.dumps(measure_here(args.presets[0], args.threads, args.repeats), allow_nan=False))
        return None
    path = None if args.no_save else prepare(args.out)
    records, failures = [], []
    try:
        for name in args.presets:
            print(f'measuring {name}: {PRESETS[name].what}', file=sys.stderr, flush=True)
            try:
                records.append(measure_in_fresh_process(name, args.threads, args.repeats))
            except UserError as error:                           # the others can still be measured
                failures.append(str(error))
                continue
            if path:
                append(path, records[-1])
    finally:                                                     # what was measured is shown, come what may
        if records:
            console = Console()
            Console(width=None if console.is_terminal else 132).print(table(records))
    if path and records:
        print(f'added {len(records)} line(s) to {path}')
    if failures:
        raise UserError('; '.join(failures))
    return None


if __name__ == '__main__':
    from .cli import run
    run(main)
