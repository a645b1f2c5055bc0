"""Measure time and peak memory of operators and models.

Times of one machine say little about another. Therefore the results that count are ratios of times taken in turn within
one process: to another implementation, or to the floor, the least time that the arithmetic and the memory traffic take
at the rates of a large matrix product and a large copy.
"""
import argparse
import sys
from pathlib import Path
from typing import List, Optional

from .bench import gpu_plan, operators
from .bench.jobs import jobs
from .bench.presets import PRESETS
from .bench.processes import measure_all, measure_here
from .common.cli import UserError
from .common.output import dumps

_EXAMPLES = """examples:
  subquad benchmark                                     the default presets: minutes
  subquad benchmark polyline_attention-14x14 --threads 4
  subquad benchmark --operator polyline_attention --size coco --implementations portable sdpa compiled
  subquad benchmark --operator polyline_scan --size long --device cuda --dtype bfloat16 --backward
  subquad benchmark --model ppma_tiny@portable swin_tiny_patch4_window7_224 --size 224 --batch 8 --train"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='subquad benchmark', formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EXAMPLES,
        description='Measure time and peak memory of operators and models. Each preset runs in a process of its own.\n'
                    'Missed targets are reported, not raised.')
    parser.add_argument('presets', nargs='*', metavar='PRESET',
                        help='presets to measure (default: the CPU presets with a time or memory target, or all GPU '
                             'presets if there is a GPU)')
    parser.add_argument('--list', action='store_true', help='list the presets, operators and implementations, and exit')
    own = parser.add_argument_group('instead of presets')
    own.add_argument('--operator', metavar='NAME', help='compare implementations of this operator')
    own.add_argument('--implementations', nargs='+', default=[], metavar='NAME',
                     help='implementations to compare; the first one is compared with the others (default: all that '
                          'support the device)')
    own.add_argument('--model', nargs='+', metavar='NAME[@BACKEND][+compile][+autocast]',
                     help='timm models to compare; the first one is compared with the others')
    own.add_argument('--size', default='imagenet',
                     help=f"{', '.join(operators.SIZES)}, one number or HEIGHTxWIDTH; numbers are pixels for models "
                          'and tokens for operators; a name is an image size, which for operators means the token grid '
                          'of that image at stride 16 (default: %(default)s)')
    own.add_argument('--batch', type=int, default=1, help='number of images (default: %(default)s)')
    own.add_argument('--heads', type=int, default=8, help='heads of the operator (default: %(default)s)')
    own.add_argument('--dim', type=int, default=32, help='channels of a head (default: %(default)s)')
    own.add_argument('--dtype', choices=('float32', 'float16', 'bfloat16'), default='float32',
                     help='(default: %(default)s)')
    own.add_argument('--device', choices=('cpu', 'cuda'), default='cpu', help='(default: %(default)s)')
    own.add_argument('--backward', action='store_true', help='measure the operator with its gradients')
    own.add_argument('--train', action='store_true', help='measure training steps of the models')
    plan = parser.add_argument_group('plan of a rented GPU')
    plan.add_argument('--gpu-plan', nargs='?', const='all', choices=(*gpu_plan.PARTS, 'all'), metavar='PART',
                      help='run part 1 (correctness), 2 (tables and profile) or 3 (models) of half an hour on a GPU, '
                           f'each at most {gpu_plan.LIMIT / 60:.0f} minutes, or all; each step adds a line to '
                           f'{gpu_plan.FILE}')
    plan.add_argument('--dry-run', action='store_true',
                      help='only say what the steps would run, and run the checks on tiny grids on the CPU')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads of torch (default: %(default)s)')
    parser.add_argument('--repeats', type=int, metavar='N', help='rounds of timing (default: set by each preset)')
    parser.add_argument('--processes', type=int, metavar='N',
                        help='processes per preset; the median over the processes is reported (default: set by each '
                             'preset)')
    parser.add_argument('--out', type=Path, default=Path('benchmarks'), metavar='DIR',
                        help='folder for plots and for the results files cpu.jsonl and gpu.jsonl, to which each run '
                             'adds lines (default: ./%(default)s)')
    parser.add_argument('--no-save', action='store_true', help='only print the table')
    parser.add_argument('--one', metavar='PRESET', help=argparse.SUPPRESS)   # measure it here and print JSON
    return parser


def _print_list() -> None:
    print('\n'.join(f'{name:36s} {preset.description}' for name, preset in PRESETS.items()))
    print('\n--operator and its --implementations:')
    print('\n'.join(f"{op:36s} {', '.join(operators.implementations(op))}" for op in operators.OPERATORS))


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.gpu_plan is not None:
        parts = list(gpu_plan.PARTS) if args.gpu_plan == 'all' else [args.gpu_plan]
        return gpu_plan.run(parts, args.out, args.dry_run)
    if args.dry_run:
        raise UserError('--dry-run needs --gpu-plan')
    chosen = jobs(args, defaults=parser().parse_args([]))
    if args.list:
        _print_list()
    elif args.one:
        print(dumps(measure_here(chosen[args.one], args.threads, args.repeats)))
    else:
        measure_all(chosen, argv, args.threads, args.processes, None if args.no_save else args.out)
    return None


if __name__ == '__main__':
    from .common.cli import run
    run(main)
