"""List the operators and, for each that does not run on a Triton kernel here, the reason; with --compile, compile the
kernels."""
import argparse
from dataclasses import asdict
from typing import Any, Dict, List, Optional

from .common.cli import UserError, one_line, quiet
from .common.output import add_row, dumps, print_table


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser(
        'subquad kernels', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Example: subquad kernels --compile cuda:90 --only "polyline_attention, additive, 14" (needs no GPU)')
    parser.add_argument('--compile', metavar='TARGET',
                        help='compile all kernels for TARGET (cuda:80, cuda:90, hip:gfx942, ...) and show registers, '
                             'stack (which spilled registers use) and shared memory; this takes minutes; the exit code '
                             'is 1 if a kernel uses the stack')
    parser.add_argument('--only', nargs='+', metavar='TEXT',
                        help='compile only the cases that contain one of these strings')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    if args.only and args.compile is None:
        raise UserError('--only needs --compile')
    if args.compile is None:
        return _print_reasons(args.json)
    resources = _compiled(args.compile, args.only or [''])
    if args.json:
        lines = (f'{dumps(name)}: {dumps([asdict(x) for x in kernels])}' for name, kernels in resources.items())
        print('{\n' + ',\n'.join(lines) + '\n}')               # one line per case
    else:
        _print_resources(args.compile, resources)
    return int(any(k.stack for kernels in resources.values() for k in kernels))


def _print_reasons(as_json: bool) -> int:
    from ..kernels import why_not
    from ..kernels.dispatch import OPERATORS
    reasons = {op: why_not(op) for op in OPERATORS}
    if as_json:
        print(dumps({op: dict(triton=reason is None, why_not=reason) for op, reason in reasons.items()}, indent=2))
    else:
        for op, reason in reasons.items():
            print(f'{op:26s}' + (reason or f'{op} runs on Triton for CUDA tensors.'))
    return 0


def _print_resources(target: str, resources: Dict[str, List[Any]]) -> None:
    import torch
    import triton
    from rich.table import Table
    table = Table('case', 'kernel', 'tile', 'warps', 'registers', 'stack, bytes', 'shared memory, bytes',
                  title=f'{target}, Triton {triton.__version__}, torch {torch.__version__}')
    for name, kernels in resources.items():
        for n, k in enumerate(kernels):
            add_row(table, '' if n else name, k.kernel, k.constants, k.warps,
                    *('?' if x is None else x for x in (k.registers, k.stack, k.shared)))
    print_table(table)


def _compiled(target: str, texts: List[str]) -> Dict[str, List[Any]]:
    """Compile the kernels of the cases that contain one of the texts.

    Returns:
        The resources of each case's kernels.

    Raises:
        UserError: There is no such case or target, or Triton is missing or cannot compile.
    """
    try:
        from ..kernels import aot
        calls = {name: call for name, call in aot.cases().items() if any(text in name for text in texts)}
        if not calls:
            raise UserError(f"no case contains {' or '.join(map(repr, texts))}; a case is, for example, "
                            f'{next(iter(aot.cases()))!r}')
        with quiet():
            return aot.compile_all(calls, target)
    except ModuleNotFoundError as error:
        raise UserError(f'--compile needs Triton: pip install triton ({error})') from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f'{target}: {one_line(error)}') from error


if __name__ == '__main__':
    from .common.cli import run
    run(main)
