"""Measure presets, each in processes of its own, and append their records: what the tables of benchmarks show.

Missed targets are reported, not raised.
"""
import argparse
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

from subquad.tools.bench.measure import measured
from subquad.tools.bench.metrics import medians, prepare, table
from subquad.tools.common.cli import UserError, nearest
from subquad.tools.common.output import dumps, print_table
from subquad.tools.engine.records import append

from .presets import DEFAULTS, GPU_DEFAULTS, PRESETS, Preset
from .processes import KILLED, ProcessFailed, run_in_fresh_process


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser('python -m lab.benchmark', description=__doc__)
    parser.add_argument('presets', nargs='*', metavar='PRESET',
                        help='(default: the CPU presets with a target for time or memory, or all GPU presets if '
                             'there is a GPU)')
    parser.add_argument('--list', action='store_true', help='list the presets, and exit')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads of torch (default: %(default)s)')
    parser.add_argument('--repeats', type=int, metavar='N', help='rounds of timing (default: set by each preset)')
    parser.add_argument('--processes', type=int, metavar='N',
                        help='processes per preset, whose median counts (default: set by each preset)')
    parser.add_argument('--out', type=Path, default=Path('benchmarks'), metavar='FOLDER',
                        help='folder of pictures and of cpu.jsonl and gpu.jsonl, to which records are added '
                             '(default: ./%(default)s)')
    parser.add_argument('--one', action='store_true', help=argparse.SUPPRESS)       # measure here and print JSON
    args = parser.parse_args(argv)
    if args.list:
        print('\n'.join(f'{name:36s} {preset.description}' for name, preset in PRESETS.items()))
        return
    names = list(dict.fromkeys(args.presets or (GPU_DEFAULTS if torch.cuda.is_available() else DEFAULTS)))
    for name in names:
        if name not in PRESETS:
            raise UserError(f'unknown preset {name!r}{nearest(name, list(PRESETS))} (--list shows all presets)')
        if PRESETS[name].device == 'cuda' and not torch.cuda.is_available():
            raise UserError(f'{name}: torch finds no GPU here')
    chosen = [PRESETS[name] for name in names]
    if args.one:
        job, = chosen
        print(dumps(measured(job.name, job.description, job.run, args.repeats or job.repeats, args.threads,
                             job.device)))
    else:
        measure_all(chosen, args.threads, args.repeats, args.processes, args.out)


def measure_in_fresh_process(job: Preset, threads: int, repeats: Optional[int]) -> Dict[str, Any]:
    """Measure a preset in a new process, whose allocator and peak memory nothing else has touched."""
    argv = [job.name, '--one', '--threads', str(threads), *(['--repeats', str(repeats)] if repeats else [])]
    try:
        return run_in_fresh_process('lab.benchmark', argv, threads)
    except UserError as error:
        raise UserError(f'{job.name}: {error}') from error
    except ProcessFailed as error:
        sys.stderr.write(error.messages)
        why = KILLED if error.code < 0 else 'its message is above'
        raise UserError(f'{job.name} could not be measured ({why})') from error


def measure_all(jobs: List[Preset], threads: int, repeats: Optional[int], processes: Optional[int], out: Path) -> None:
    """Measure presets one after the other, save each record as soon as it is complete, and print a
    table. If one fails, the others are measured all the same."""
    paths = {job.device: prepare(out, job.device) for job in jobs}
    records, failures = [], []
    try:
        for job in jobs:
            print(f'measuring {job.name}: {job.description}', file=sys.stderr, flush=True)
            try:
                records.append(medians([measure_in_fresh_process(job, threads, repeats)
                                        for _ in range(processes or job.processes)]))
            except UserError as error:
                failures.append(str(error))
                continue
            append(paths[job.device], records[-1])
            if job.draw:
                job.draw(records[-1], out / f'{job.name}.png')
    finally:                                        # also after an interruption
        if records:
            print_table(table(records))
    if failures:
        raise UserError('; '.join(failures))


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
