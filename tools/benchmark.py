"""`subquad benchmark`: time and memory of operators and models beside each other and beside their floor.

Times of one machine say little about another, so what counts are ratios of times taken in turn within one process: to
another way to compute the same, or to the floor that arithmetic and memory alone would take at the rates of a large
matrix product and a large copy.
"""
import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from .bench import baselines, networks
from .bench.measure import OtherLoad, environment
from .bench.presets import DEFAULTS, GPU_DEFAULTS, PRESETS, Preset, model, operator
from .bench.records import append, medians, prepare, table
from .common.cli import UserError, nearest
from .common.output import dumps, print_table

DTYPES = ('float32', 'float16', 'bfloat16')
# Options of what one names oneself.
OPERATOR_ONLY, MODEL_ONLY = ('contestants', 'heads', 'dim', 'backward'), ('train',)
SHARED = ('size', 'batch', 'dtype', 'device')


# --- what is asked for

def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='subquad benchmark', formatter_class=argparse.RawDescriptionHelpFormatter,
        description='Measure time and peak memory of operators and models: presets, each in a process of its own and '
                    'beside\nits targets, or what you name. A target that is missed is shown as such and is no error.',
        epilog="""examples:
  subquad benchmark                                     the CPU presets with targets (on a GPU, its own): minutes
  subquad benchmark polyline_attention-14x14 --threads 4
  subquad benchmark --operator polyline_attention --size 800x1280 --contestants portable sdpa compiled
  subquad benchmark --operator polyline_scan --size long --device cuda --dtype bfloat16 --backward
  subquad benchmark --model ppma_tiny@portable swin_tiny_patch4_window7_224 --size 224 --batch 8 --train""")
    parser.add_argument('presets', nargs='*', metavar='PRESET',
                        help='what to measure (--list shows them); default those with targets for this machine')
    parser.add_argument('--list', action='store_true', help='list presets, operators and contestants and stop')
    own = parser.add_argument_group('instead of presets')
    own.add_argument('--operator', metavar='NAME', help='an operator, against other ways to compute the same')
    own.add_argument('--contestants', nargs='+', default=[], metavar='NAME',
                     help='which, the first one against the others (default: all that make sense on the device)')
    own.add_argument('--model', nargs='+', metavar='NAME[@BACKEND][+compile]',
                     help='timm names, the first one against the others')
    own.add_argument('--size', default='224',
                     help=f"{', '.join(baselines.SIZES)} or HEIGHTxWIDTH; for an operator the names stand for the "
                          'grid at stride 16, and HEIGHTxWIDTH for tokens (default: %(default)s)')
    own.add_argument('--batch', type=int, default=1, help='images (default: %(default)s)')
    own.add_argument('--heads', type=int, default=8, help='heads of an operator (default: %(default)s)')
    own.add_argument('--dim', type=int, default=32, help='channels of a head (default: %(default)s)')
    own.add_argument('--dtype', choices=DTYPES, default='float32', help='(default: %(default)s)')
    own.add_argument('--device', choices=('cpu', 'cuda'), default='cpu', help='(default: %(default)s)')
    own.add_argument('--backward', action='store_true', help='an operator with its gradients')
    own.add_argument('--train', action='store_true', help='training steps of models, not forward passes')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads for torch (default: %(default)s)')
    parser.add_argument('--repeats', type=int, metavar='N',
                        help='rounds of timing: more are steadier and take longer (default: set for each preset)')
    parser.add_argument('--processes', type=int, metavar='N',
                        help='processes, one after the other, whose medians count (default: set for each preset)')
    parser.add_argument('--out', type=Path, default=Path('benchmarks'), metavar='DIR',
                        help='folder of the results files cpu.jsonl and gpu.jsonl, to which each run adds lines, and '
                             'of plots (default: ./%(default)s)')
    parser.add_argument('--no-save', action='store_true', help='only print the table')
    parser.add_argument('--one', metavar='PRESET', help=argparse.SUPPRESS)   # this process measures it, prints JSON
    return parser


def parse(argv: List[str]) -> argparse.Namespace:
    """Arguments, with `jobs`: name -> Preset.

    Raises:
        UserError: something unknown, or that does not go together.
    """
    args = parser().parse_args(argv)
    for option in ('threads', 'repeats', 'processes', 'batch', 'heads', 'dim'):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f'--{option} must be at least 1, got {value}')
    if (args.operator is not None) + bool(args.model) + bool(args.presets) > 1:
        raise UserError('name presets, or --operator, or --model: one of the three')
    what, fitting = (('--operator', OPERATOR_ONLY + SHARED) if args.operator else
                     ('--model', MODEL_ONLY + SHARED) if args.model else ('presets', ()))
    for option in OPERATOR_ONLY + MODEL_ONLY + SHARED:
        if option not in fitting and getattr(args, option) != parser().get_default(option):
            raise UserError(f'--{option} has no meaning for {what}')
    if args.operator or args.model:
        args.jobs = dict([_own_job(args)])
    else:
        args.jobs = {}
        for name in args.presets or (GPU_DEFAULTS if torch.cuda.is_available() else DEFAULTS):
            if name not in PRESETS:
                raise UserError(f'unknown preset {name!r}{nearest(name, list(PRESETS))} (--list shows them all)')
            args.jobs[name] = PRESETS[name]
    wanting = [name for name, job in args.jobs.items() if job.device == 'cuda' and not torch.cuda.is_available()]
    if wanting and not args.list:
        raise UserError(f"{', '.join(wanting)}: torch finds no GPU here")
    return args


def _own_job(args: argparse.Namespace) -> Tuple[str, Preset]:
    """The job that --operator or --model describes."""
    grid = _size(args.size, tokens=args.operator is not None)
    shown = '{}x{}'.format(*grid)
    if args.operator is not None:
        for name in args.contestants or ['portable']:
            baselines.operator_call(args.operator, name)
        job = partial(operator, op=args.operator, grid=grid, batch=args.batch, heads=args.heads, dim=args.dim,
                      dtype=args.dtype, device=args.device, names=args.contestants, backward=args.backward)
        name = f"{args.operator}-{shown}-{args.dtype}{'-backward' if args.backward else ''}"
        return name, Preset(f'{args.operator}, {shown} tokens, batch {args.batch}, {args.heads} heads of {args.dim}',
                            20, job, args.device)
    for text in args.model:
        networks.check_model(text)
    job = partial(model, names=args.model, size=grid, batch=args.batch, dtype=args.dtype, device=args.device,
                  train=args.train)
    return (f"{args.model[0]}-{shown}-{args.dtype}{'-train' if args.train else ''}",
            Preset(f'{", ".join(args.model)} on {args.batch} image(s) of {shown}', 10, job, args.device))


def _size(text: str, tokens: bool) -> baselines.Grid:
    """Pixels or tokens of a size by name or as HEIGHTxWIDTH.

    Raises:
        UserError: neither.
    """
    if text in baselines.SIZES:
        height, width = baselines.SIZES[text]
        return (-(-height // baselines.STRIDE), -(-width // baselines.STRIDE)) if tokens else (height, width)
    parts = text.lower().split('x')
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--size takes {', '.join(baselines.SIZES)} or HEIGHTxWIDTH, got {text!r}")
    return int(parts[0]), int(parts[1])


# --- one process a job

def measure_here(name: str, job: Preset, threads: int, repeats: Optional[int]) -> Dict[str, Any]:
    """Measure a job in this process. Returns its record, ready for JSON."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    repeats, others = repeats or job.repeats, OtherLoad()
    measured = job.measure(repeats)
    return {'preset': name, 'what': job.what, 'repeats': repeats, **measured, 'other_cpus': others.cpus(),
            **environment(job.device)}


def measure_in_fresh_process(name: str, argv: List[str], threads: int) -> Dict[str, Any]:
    """The same in a process of its own, whose allocator and peaks no other job has touched.

    Raises:
        UserError: the process failed; what it wrote stands on stderr.
    """
    command = [sys.executable, '-m', 'subquad.tools.benchmark', *argv, '--one', name]
    # It must find what this process found, an uninstalled checkout too, and nothing else that the working directory
    # happens to hold.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    counts = dict.fromkeys(('OMP_NUM_THREADS', 'MKL_NUM_THREADS'), str(threads))
    done = subprocess.run(command, env={**os.environ, **counts, 'PYTHONPATH': path, 'PYTHONSAFEPATH': '1'},
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        *messages, record = done.stdout.splitlines()
        print('\n'.join(messages), end='\n' if messages else '')
        return json.loads(record)
    last = (done.stderr.strip().splitlines() or [''])[-1]
    if done.returncode == 2 and last.startswith('error: '):                      # a UserError, behind what others wrote
        raise UserError(f'{name}: {last.removeprefix("error: ")}')
    sys.stderr.write(done.stderr)
    why = 'killed, perhaps for lack of memory' if done.returncode < 0 else 'its message stands above'
    raise UserError(f'{name} could not be measured ({why})')


def _list() -> None:
    print('\n'.join(f'{name:36s} {preset.what}' for name, preset in PRESETS.items()))
    print('\n--operator and its --contestants:')
    print('\n'.join(f"{op:36s} {', '.join(baselines.contestants(op))}" for op in baselines.OPERATORS))


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.list:
        return _list()
    if args.one:
        print(dumps(measure_here(args.one, args.jobs[args.one], args.threads, args.repeats)))
        return None
    paths = {} if args.no_save else {job.device: prepare(args.out, job.device) for job in args.jobs.values()}
    records, failures = [], []
    try:
        for name, job in args.jobs.items():
            print(f'measuring {name}: {job.what}', file=sys.stderr, flush=True)
            try:
                records.append(medians([measure_in_fresh_process(name, argv, args.threads)
                                        for _ in range(args.processes or job.processes)]))
            except UserError as error:                           # the others can still be measured
                failures.append(str(error))
                continue
            if paths:
                append(paths[job.device], records[-1])
                if job.draw:
                    job.draw(records[-1], args.out / f'{name}.png')
                    print(f"drew {args.out / f'{name}.png'}")
    finally:                                                     # what was measured is shown, come what may
        if records:
            print_table(table(records))
    if paths and records:
        print(f"added {len(records)} line(s) to {', '.join(map(str, paths.values()))}")
    if failures:
        raise UserError('; '.join(failures))
    return None


if __name__ == '__main__':
    from .common.cli import run
    run(main)
