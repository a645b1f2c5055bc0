"""List the operators and, for each that does not run on a Triton kernel here, the reason; with --compile, compile the
kernels and report their machine code; with --tune, tune their launch options on a GPU."""
import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Optional

from .common.cli import UserError, one_line, quiet
from .common.output import add_row, dumps, print_table


def main(argv: Optional[List[str]] = None) -> Optional[int]:
    parser = argparse.ArgumentParser(
        'subquad kernels', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Example: subquad kernels --compile cuda:90 --only "polyline_attention, additive, 14" (needs no GPU)')
    parser.add_argument('--compile', metavar='TARGET',
                        help='compile all kernels for TARGET (cuda:80, cuda:90, hip:gfx942, ...) and show '
                             'registers, stack (which spilled registers use), shared memory, barriers, '
                             'thread-instructions per pair of tokens or per element of each loop, and the layouts of '
                             'products; this takes minutes; the exit code is 1 if a kernel uses the stack or if warps '
                             'repeat the work of others')
    parser.add_argument('--only', nargs='+', metavar='TEXT',
                        help='compile only the cases, or tune only the problems, that contain one of these strings')
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.add_argument('--tune', type=Path, metavar='FILE',
                        help='time launch options on the GPU by captured graphs, and write the launch table with the '
                             'fastest to FILE and all times to FILE.trials.json; run with SUBQUAD_LAUNCH_TABLE=FILE '
                             'to use it')
    parser.add_argument('--dry-run', action='store_true',
                        help='with --tune: run the problems on small grids on the CPU, say which kernels they tune, '
                             'and write nothing')
    parser.add_argument('--seconds', type=float, default=300., help='time limit of --tune (default: %(default)s)')
    args = parser.parse_args(argv)
    if args.only and args.compile is None and args.tune is None:
        raise UserError('--only needs --compile or --tune')
    if args.compile is not None and args.tune is not None:
        raise UserError('--compile and --tune exclude each other')
    if args.dry_run and args.tune is None:
        raise UserError('--dry-run needs --tune')
    if args.tune is not None:
        return _tune(args.tune, args.only or [''], args.seconds, args.dry_run)
    if args.compile is None:
        return _print_reasons(args.json)
    found = _compiled(args.compile, args.only or [''])
    if args.json:
        lines = (f'{dumps(name)}: {dumps([_record(x) for x in kernels])}' for name, kernels in found.items())
        print('{\n' + ',\n'.join(lines) + '\n}')               # one line per case
    else:
        _print_machine_code(args.compile, found)
    faults = _faults([kernel for kernels in found.values() for kernel in kernels])
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


def _tune(path: Path, texts: List[str], seconds: float, dry: bool) -> int:
    """Tune the launch table, write it and what was tried, and print the rows that changed."""
    import torch
    if not dry and not torch.cuda.is_available():
        raise UserError('--tune needs a GPU, and torch finds none here; --dry-run shows what it tunes')
    from ..kernels.common import launch, launch_table
    from .bench import gpu_plan, tuning
    from .engine.records import environment
    problems = [problem for problem in tuning.PROBLEMS if any(text in problem.name for text in texts)]
    if not problems:
        raise UserError(f"no problem contains {' or '.join(map(repr, texts))}; a problem is, for example, "
                        f'{tuning.PROBLEMS[0].name!r}')
    if dry and not launch.interpreted():
        return gpu_plan.run_interpreted('subquad.tools.kernels', '--tune', str(path), '--dry-run', '--only', *texts)
    if dry:
        wrong = tuning.dry_run(problems)
        print('\n'.join(f'not ok: {text}' for text in wrong) or 'all problems are ok')
        return int(bool(wrong))
    target = ':'.join(launch.target())
    processes = max(1, min(16, len(os.sched_getaffinity(0))))
    with tuning.compilers(processes) as pool:
        found = tuning.tune(problems, seconds,
                            verdicts=lambda rows, tried: tuning.judge_all(rows, tried, target, pool))
    try:
        path.write_text(launch_table.formatted(found.table(target)))
        path.with_name(f'{path.name}.trials.json').write_text(dumps(
            {'target': target, **environment('cuda'), 'left': found.left, 'trials': found.trials}, indent=1) + '\n')
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from error
    for key, options in found.winners.items():
        print(f'{key.kernel} {list(key.size)}: {list(options)}')
    for name in found.left:
        print(f'no time was left for {name}', file=sys.stderr)
    return 0


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


def _faults(kernels: List[Any]) -> List[str]:
    """One sentence for each kind of fault. A target whose tools report nothing is no fault, but it is said."""
    if any(kernel.registers is None for kernel in kernels):
        print('no tool here reports the registers and instructions of this target: spills were not checked',
              file=sys.stderr)
    spilled = [kernel.name for kernel in kernels if kernel.stack]
    twice = [kernel.name for kernel in kernels if kernel.duplicates() > 1]
    return [f"{len(names)} of {len(kernels)} kernels {what}: {', '.join(sorted(set(names)))}"
            for what, names in (('use the stack (registers spill)', spilled),
                                ('compute a product more than once (warps cover more than its tile)', twice)) if names]


def _record(code: Any) -> Dict[str, Any]:
    """The machine code of a kernel for JSON."""
    from ..kernels import aot
    per_item, item = aot.per_item(code)
    return {'kernel': code.name, 'constants': {name: x for name, x in code.constants.items() if _plain(x)},
            'warps': code.warps, 'registers': code.registers, 'stack': code.stack, 'shared': code.shared,
            'instructions': code.instructions, 'barriers': code.barriers, 'item': item,
            'thread_instructions_per_item': [round(x, 1) for x in per_item],
            'loops': None if code.loops is None else [
                {'instructions': x.instructions, 'barriers': x.barriers, 'innermost': x.innermost} for x in code.loops],
            'products': [asdict(product) for product in code.products], 'duplicates': code.duplicates()}


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _print_machine_code(target: str, found: Dict[str, List[Any]]) -> None:
    import torch
    import triton
    from rich.table import Table

    from ..kernels import aot
    table = Table('case', 'kernel', 'tile', 'warps', 'registers', 'stack, bytes', 'shared memory, bytes', 'barriers',
                  'thread-instructions', 'products: M x N x K, warps',
                  title=f'{target}, Triton {triton.__version__}, torch {torch.__version__}')
    for name, kernels in found.items():
        for n, code in enumerate(kernels):
            per_item, item = aot.per_item(code)
            tile = ', '.join(f'{key} {value}' for key, value in code.constants.items()
                             if key in ('BLOCK', 'BLOCK_D', 'BLOCK_V', 'ROWS', 'SIDE', 'LEVELS'))
            products = dict.fromkeys('{} x {} x {}, {}{}'.format(
                *p.shape, list(p.warps) or '?', f', {p.duplicates} times' if (p.duplicates or 1) > 1 else '')
                for p in code.products)
            rate = f"{' + '.join(f'{x:.1f}' for x in per_item)} per {item}" if per_item else ''
            add_row(table, '' if n else name, code.name, tile, code.warps,
                    *('?' if x is None else x for x in (code.registers, code.stack, code.shared, code.barriers)),
                    rate, '; '.join(products))
    print_table(table)


def _compiled(target: str, texts: List[str]) -> Dict[str, List[Any]]:
    """Compile the kernels of the cases that contain one of the texts.

    Returns:
        The machine code of each case's kernels.

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
