"""Measure time and peak memory of operators and models, and where the time of a model goes.

Times of one machine say little about another. The results that count are ratios of times taken in
turn within one process: to another implementation, or to the floor, the least time that the
arithmetic and the memory traffic take at the rates of a large matrix product and a large copy.
"""
import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .bench import networks
from .bench import operators as ops
from .bench.comparisons import compare_models, compare_operator
from .bench.measure import measured
from .bench.metrics import prepare, table
from .bench.parts import profile_parts, rows
from .common.cli import UserError, parse_size
from .common.output import print_rows, print_table
from .engine.records import append

_EXAMPLES = """examples:
  subquad benchmark --operator polyline_attention --size coco --implementations portable sdpa compiled
  subquad benchmark --operator polyline_scan --size long --device cuda --dtype bfloat16 --backward
  subquad benchmark --model ppma_tiny@portable swin_tiny_patch4_window7_224 --size 224 --batch 8 --train
  subquad benchmark --profile ppma_tiny --size 224 --threads 1"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='subquad benchmark', formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EXAMPLES,
        description='Measure time and peak memory of operators and models, or profile a model.')
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument('--operator', metavar='NAME', help='compare implementations of this operator')
    what.add_argument('--model', nargs='+', metavar='NAME[@BACKEND][+compile][+autocast]',
                      help='timm models to compare; the first one is compared with the others')
    what.add_argument('--profile', metavar='NAME[@BACKEND][+autocast]',
                      help='show where the time of a forward pass of a timm model goes: stem, products (linear layers '
                           'and 1 x 1 convolutions), attention (or what mixes tokens in its place), convolutions, '
                           'norms, activations, copies, overhead of calls')
    what.add_argument('--list', action='store_true', help='list operators and implementations, and exit')
    parser.add_argument('--size', default='imagenet',
                        help=f"{', '.join(ops.SIZES)}, one number or HEIGHTxWIDTH; numbers are pixels for models "
                             'and tokens for operators; a name is an image size, which for operators means the '
                             'token grid of that image at stride 16 (default: %(default)s)')
    parser.add_argument('--batch', type=int, default=1, help='number of images (default: %(default)s)')
    parser.add_argument('--dtype', choices=('float32', 'float16', 'bfloat16'), default='float32',
                        help='(default: %(default)s)')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu', help='(default: %(default)s)')
    operator = parser.add_argument_group('options of --operator')
    operator.add_argument('--implementations', nargs='+', default=[], metavar='NAME',
                          help='implementations to compare; the first one is compared with the others (default: '
                               'all that support the device)')
    operator.add_argument('--heads', type=int, default=8, help='number of heads (default: %(default)s)')
    operator.add_argument('--dim', type=int, default=32, help='channels of a head (default: %(default)s)')
    operator.add_argument('--backward', action='store_true', help='measure the operator with its gradients')
    parser.add_argument('--train', action='store_true', help='measure training steps of the models')
    parser.add_argument('--threads', type=int, default=2, help='CPU threads of torch (default: %(default)s)')
    parser.add_argument('--repeats', type=int, default=15, metavar='N', help='rounds of timing (default: %(default)s)')
    parser.add_argument('--out', type=Path, metavar='FOLDER',
                        help='add the record to cpu.jsonl or gpu.jsonl in this folder')
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    args = parser().parse_args(sys.argv[1:] if argv is None else argv)
    for option in ('threads', 'repeats', 'batch', 'heads', 'dim'):
        if getattr(args, option) < 1:
            raise UserError(f'--{option} must be at least 1, got {getattr(args, option)}')
    if args.list:
        print('\n'.join(f"{op:26s} {', '.join(ops.implementations(op))}" for op in ops.OPERATORS))
        return
    if args.profile is not None:
        return _profile(args)
    name, description, measure = _operator(args) if args.operator is not None else _models(args)
    if args.device == 'cuda' and not torch.cuda.is_available():
        raise UserError('--device cuda: torch finds no GPU here')
    path = prepare(args.out, args.device) if args.out else None
    record = measured(name, description, measure, args.repeats, args.threads, args.device)
    if path:
        append(path, record)
    print_table(table([record]))


def _operator(args: argparse.Namespace) -> Tuple[str, str, Callable[[int], Dict[str, Any]]]:
    """Return a name, a description and the measurement of an operator."""
    for name in args.implementations or ['portable']:
        ops.operator_call(args.operator, name)
    grid = size(args.size, tokens=True)
    shown = '{}x{}'.format(*grid)
    return (f"{args.operator}-{shown}-{args.dtype}{'-backward' if args.backward else ''}",
            f'{args.operator}, {shown} tokens, batch {args.batch}, {args.heads} heads of {args.dim} channels',
            partial(compare_operator, op=args.operator, grid=grid, batch=args.batch, heads=args.heads, dim=args.dim,
                    dtype=args.dtype, device=args.device, names=args.implementations, backward=args.backward))


def _models(args: argparse.Namespace) -> Tuple[str, str, Callable[[int], Dict[str, Any]]]:
    """Return a name, a description and the measurement of models."""
    for text in args.model:
        networks.check_model(text, args.dtype)
    grid = size(args.size, tokens=False)
    shown = '{}x{}'.format(*grid)
    return (f"{args.model[0]}-{shown}-{args.dtype}{'-train' if args.train else ''}",
            f"{', '.join(args.model)}, {args.batch} image(s) of {shown}",
            partial(compare_models, names=args.model, size=grid, batch=args.batch, dtype=args.dtype,
                    device=args.device, train=args.train))


def _profile(args: argparse.Namespace) -> None:
    """Print where the time of a model goes."""
    networks.check_model(args.profile, args.dtype)
    if networks.parse_model(args.profile).compile or args.train or args.out:
        raise UserError('--profile shows a forward pass of a model without +compile, --train and --out: the loops of a '
                        'compiled graph have no names')
    if args.device == 'cuda' and not torch.cuda.is_available():
        raise UserError('--device cuda: torch finds no GPU here')
    torch.set_num_threads(args.threads)
    images = torch.randn(args.batch, 3, *size(args.size, tokens=False), device=args.device)
    call, _ = networks.model_call(args.profile, images.to(getattr(torch, args.dtype)), train=False)
    parts, plain = profile_parts(call, args.repeats, args.device)
    print_rows(('part', 'ms', 'share', 'calls', 'slowest operators, ms'), rows(parts))
    whole = sum(part.ms for part in parts.values())
    print(f'A pass takes {whole:.1f} ms in the profiler, and {plain:.1f} ms without it.')


def size(text: str, tokens: bool) -> ops.Grid:
    """Read a named size, one number or HEIGHTxWIDTH, in tokens for an operator.

    A name then stands for the token grid of its image at stride 16, and numbers are tokens.
    """
    if text not in ops.SIZES:
        return parse_size(text, list(ops.SIZES))
    height, width = ops.SIZES[text]
    return (-(-height // ops.STRIDE), -(-width // ops.STRIDE)) if tokens else (height, width)
