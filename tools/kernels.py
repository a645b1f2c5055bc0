"""Show the operators, whether they run on a Triton kernel here and why not, and what the kernels take of a GPU."""
import argparse
import json
from dataclasses import asdict
from typing import List, Optional

from .cli import UserError


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..kernels import why_not
    from ..kernels.dispatch import OPERATORS
    parser = argparse.ArgumentParser(
        'subquad kernels', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Example: subquad kernels --compile cuda:90 --only "polyline_attention, logit, 14" (no GPU is needed)')
    parser.add_argument('--compile', metavar='TARGET',
                        help='compile every kernel ahead of time for cuda:80, cuda:90, hip:gfx942, ... and show '
                             'registers, spilled bytes and shared memory; exit code 1 if registers spill (minutes)')
    parser.add_argument('--only', nargs='+', default=[''], metavar='TEXT',
                        help='with --compile: only the cases that contain one of the texts')
    parser.add_argument('--json', action='store_true', help='with --compile: print JSON')
    args = parser.parse_args(argv)
    console = Console(soft_wrap=True)
    if not args.compile:
        for op in OPERATORS:
            console.print(f'{op:26s}' + (why_not(op) or f'{op} runs on Triton for CUDA tensors.'), markup=False)
        return 0
    from ..kernels import ahead
    calls = {name: call for name, call in ahead.cases().items() if any(text in name for text in args.only)}
    if not calls:
        raise UserError(f"no case contains {' or '.join(map(repr, args.only))}; cases are like "
                        f'{next(iter(ahead.cases()))!r}')
    try:
        resources = ahead.compile_all(calls, args.compile)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{args.compile}: {' '.join(str(error).split())}") from error
    if args.json:
        lines = (f'{json.dumps(name)}: {json.dumps([asdict(x) for x in kernels])}'
                 for name, kernels in resources.items())
        print('{\n' + ',\n'.join(lines) + '\n}')               # a line a case
    else:
        table = Table('case', 'kernel', 'tile', 'warps', 'registers', 'stack, bytes', 'shared, bytes',
                      title=f'{args.compile}, Triton {_version()}, torch {torch.__version__}')
        for name, kernels in resources.items():
            for n, k in enumerate(kernels):
                table.add_row('' if n else name, k.kernel, k.constants, str(k.warps),
                              *('?' if x is None else str(x) for x in (k.registers, k.stack, k.shared)))
        Console(width=None if console.is_terminal else 160).print(table)
    return int(any(k.stack for kernels in resources.values() for k in kernels))


def _version() -> str:
    import triton
    return triton.__version__


if __name__ == '__main__':
    from .cli import run
    run(main)
