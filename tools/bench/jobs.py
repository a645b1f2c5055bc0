"""What a `subquad benchmark` command line asks for: presets, one operator, or some models."""
import argparse
from typing import Dict, List

import torch

from ..common.cli import UserError, nearest
from ..common.sizes import parse_size
from . import networks
from . import operators as ops
from .comparisons import compare_models, compare_operator
from .presets import DEFAULTS, GPU_DEFAULTS, PRESETS, Preset

# Options that only make sense with --operator, with --model, or with both of them.
_OPERATOR_OPTIONS, _MODEL_OPTIONS = ('implementations', 'heads', 'dim', 'backward'), ('train',)
_SHARED_OPTIONS = ('size', 'batch', 'dtype', 'device')


def jobs(args: argparse.Namespace, defaults: argparse.Namespace) -> Dict[str, Preset]:
    """Return what to measure, by name.

    Args:
        args: The parsed command line.
        defaults: The parsed empty command line.

    Raises:
        UserError: A name is unknown, a value is not allowed, or options contradict each other.
    """
    for option in ('threads', 'repeats', 'processes', 'batch', 'heads', 'dim'):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f'--{option} must be at least 1, got {value}')
    if (args.operator is not None) + bool(args.model) + bool(args.presets) > 1:
        raise UserError('presets, --operator and --model exclude each other: give one of the three')
    _check_options(args, defaults)
    if args.operator is not None:
        chosen = [_operator_job(args)]
    elif args.model:
        chosen = [_model_job(args)]
    else:
        chosen = _presets(args.presets or (GPU_DEFAULTS if torch.cuda.is_available() else DEFAULTS))
    for_gpu = [job.name for job in chosen if job.device == 'cuda']
    if for_gpu and not torch.cuda.is_available() and not args.list:
        raise UserError(f"{', '.join(for_gpu)}: torch finds no GPU here")
    return {job.name: job for job in chosen}


def _check_options(args: argparse.Namespace, defaults: argparse.Namespace) -> None:
    if args.operator is not None:
        what, allowed = '--operator', _OPERATOR_OPTIONS + _SHARED_OPTIONS
    elif args.model:
        what, allowed = '--model', _MODEL_OPTIONS + _SHARED_OPTIONS
    else:
        what, allowed = 'presets', ()
    for option in _OPERATOR_OPTIONS + _MODEL_OPTIONS + _SHARED_OPTIONS:
        if option not in allowed and getattr(args, option) != getattr(defaults, option):
            raise UserError(f'--{option} has no effect on {what}')


def _presets(names: List[str]) -> List[Preset]:
    for name in names:
        if name not in PRESETS:
            raise UserError(f'unknown preset {name!r}{nearest(name, list(PRESETS))} (--list shows all presets)')
    return [PRESETS[name] for name in names]


def _operator_job(args: argparse.Namespace) -> Preset:
    for name in args.implementations or ['portable']:
        ops.operator_call(args.operator, name)
    grid = size(args.size, tokens=True)
    shown = '{}x{}'.format(*grid)
    return Preset(
        name=f"{args.operator}-{shown}-{args.dtype}{'-backward' if args.backward else ''}",
        description=f'{args.operator}, {shown} tokens, batch {args.batch}, {args.heads} heads of {args.dim} channels',
        measure=compare_operator,
        options=dict(op=args.operator, grid=grid, batch=args.batch, heads=args.heads, dim=args.dim, dtype=args.dtype,
                     device=args.device, names=args.implementations, backward=args.backward),
        repeats=20, device=args.device)


def _model_job(args: argparse.Namespace) -> Preset:
    grid = size(args.size, tokens=False)
    shown = '{}x{}'.format(*grid)
    for text in args.model:
        networks.check_model(text, args.dtype)
    return Preset(
        name=f"{args.model[0]}-{shown}-{args.dtype}{'-train' if args.train else ''}",
        description=f"{', '.join(args.model)}, {args.batch} image(s) of {shown}",
        measure=compare_models,
        options=dict(names=args.model, size=grid, batch=args.batch, dtype=args.dtype, device=args.device,
                     train=args.train),
        repeats=10, device=args.device)


def size(text: str, tokens: bool) -> ops.Grid:
    """Read a named size, one number or HEIGHTxWIDTH.

    Args:
        text: Value of --size.
        tokens: Return tokens, for an operator. A name then stands for the token grid of its image at stride 16, and
            numbers are tokens.

    Raises:
        UserError: The text is none of these.
    """
    if text not in ops.SIZES:
        return parse_size(text, list(ops.SIZES))
    height, width = ops.SIZES[text]
    return (-(-height // ops.STRIDE), -(-width // ops.STRIDE)) if tokens else (height, width)
