"""Show the operators, whether they run on a Triton kernel here and why not, and what the kernels take of a GPU."""
import argparse
from dataclasses import asdict
from typing import Any, Dict, List, Optional

from .common.cli import UserError, one_line, quiet
from .common.output import add_row, dumps, print_table


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import torch
    from rich.table import Table

    from ..kernels import why_not
    from ..kernels.dispatch import OPERATORS
    parser = argparse.ArgumentParser(
        'subquad kernels', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Example: subquad kernels --compile cuda:90 --only "polyline_attention, logit, 14" (no GPU is needed)')
    parser.add_argument('--compile', metavar='TARGET',
                        help='compile every kernel ahead of time for cuda:80, cuda:90, hip:gfx942, ... and show '
                             'registers, spilled bytes and shared memory; exit code 1 if registers spill (minutes)')
    parser.add_argument('--only', nargs='+', metavar='TEXT',
                        help='with --compile: only the cases that contain one of the texts')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    if args.only and args.compile is None:
        raise UserError('--only chooses what --compile compiles: give both')
    if args.compile is None:
        reasons = {op: why_not(op) for op in OPERATORS}
        if args.json:
            print(dumps({op: dict(triton=reason is None, why_not=reason) for op, reason in reasons.items()}, indent=2))
        else:
            for op, reason in reasons.items():
                print(f'{op:26s}' + (reason or f'{op} runs on Triton for CUDA tensors.'))
        return 0
    resources = _compiled(args)
    if args.json:
        lines = (f'{dumps(name)}: {dumps([asdict(x) for x in kernels])}' for name, kernels in resources.items())
        print('{\n' + ',\n'.join(lines) + '\n}')               # a line a case
    else:
        table = Table('case', 'kernel', 'tile', 'warps', 'registers', 'stack, bytes', 'shared, bytes',
                      title=f'{args.compile}, Triton {_version()}, torch {torch.__version__}')
        for name, kernels in resources.items():
            for n, k in enumerate(kernels):
                add_row(table, '' if n else name, k.kernel, k.constants, k.warps,
                        *('?' if x is None else x for x in (k.registers, k.stack, k.shared)))
        print_table(table)
    return int(any(k.stack for kernels in resources.values() for k in kernels))


def _compiled(args: argparse.Namespace) -> Dict[str, List[Any]]:
    """What the kernels of the cases that are asked for take, by case.

    Raises:
        UserError: no such case or target, or Triton is missing or cannot compile.
    """
    try:
        from ..kernels import aot
        calls = {name: call for name, call in aot.cases().items() if any(text in name for text in args.only or [''])}
        if not calls:
            raise UserError(f"no case contains {' or '.join(map(repr, args.only))}; cases are like "
                            f'{next(iter(aot.cases()))!r}')
        with quiet():
            return aot.compile_all(calls, args.compile)
    except ModuleNotFoundError as error:
        raise UserError(f'--compile needs Triton: pip install triton ({error})') from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f'{args.compile}: {one_line(error)}') from error


def _version() -> str:
    import triton
    return triton.__version__


if __name__ == '__main__':
    from .common.cli import run
    run(main)
