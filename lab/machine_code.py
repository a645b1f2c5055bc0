"""Compile all Triton kernels for a target and show their machine code: loops, instructions, barriers, registers and
layouts of products. No GPU is needed. The exit code is 1 if registers spill or if warps repeat the work of others.

Example: python -m lab.machine_code cuda:90 --only "polyline_attention, additive, 14"
"""
import argparse
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from subquad.tools.common.cli import UserError, one_line, quiet
from subquad.tools.common.output import add_row, dumps, print_table

from . import aot


@dataclass(frozen=True)
class Loop:
    """One loop of a kernel. Its instructions are those between its first and its last address.

    Attributes:
        instructions: instructions of one pass over its code, including those of the loops inside and of branches that
            not every pass takes. The compiler may have put several iterations of the source into one pass.
        barriers: of them, barriers among the warps of a program.
        counts: instructions by operation, without suffixes ('HMMA', 'MUFU', 'v_exp_f32').
        innermost: whether it contains no other loop.
    """
    instructions: int
    barriers: int
    counts: Dict[str, int]
    innermost: bool


@dataclass(frozen=True)
class Product:
    """One matrix product (`tl.dot`) of a kernel.

    Attributes:
        shape: (M, N, K) of a program's tile.
        layout: the compiler's layout: 'nvidia_mma', 'amd_mfma', 'blocked' (no tensor cores), or another name.
        warps: how many warps lie along M and along N; empty if the layout is unknown.
        duplicates: how many times each value of the result is computed. More than 1 means that the warps cover more
            than the tile, and the compiler gives the surplus the same values again. None if the layout is unknown.
    """
    shape: Tuple[int, int, int]
    layout: str
    warps: Tuple[int, ...]
    duplicates: Optional[int]


@dataclass(frozen=True)
class MachineCode:
    """Machine code of one compiled kernel.

    Attributes:
        name: of the kernel, without leading underscores and without '_kernel'.
        constants: its compile-time constants by name.
        warps, threads: warps per program, and threads per warp.
        registers: per thread; None if the target's tools do not report them.
        stack: bytes per thread, which spilled registers use; None as above.
        shared: bytes of shared memory per program.
        instructions, barriers: of the whole code, each counted once; None as above.
        loops: in the order of their first instructions; None as above.
        products: in the order of the compiler's intermediate code.
    """
    name: str
    constants: Dict[str, Any]
    warps: int
    threads: int
    registers: Optional[int]
    stack: Optional[int]
    shared: int
    instructions: Optional[int]
    barriers: Optional[int]
    loops: Optional[List[Loop]]
    products: List[Product]

    def duplicates(self) -> int:
        """Return how many times the worst product is computed: 1 if no warp repeats the work of another."""
        return max((product.duplicates or 1 for product in self.products), default=1)

    def inner_loops(self) -> List[Loop]:
        """Return the loops that contain no other loop."""
        return [loop for loop in self.loops or [] if loop.innermost]

    def per_item(self, items: int) -> List[float]:
        """Return thread-instructions per item, of each innermost loop or, without loops, of the whole kernel.

        Args:
            items: pairs or elements that a program takes in one pass of a loop that multiplies or takes exponentials
                (of any loop if none does), or in all, without loops.
        """
        loops = self.inner_loops()
        loops = [loop for loop in loops if _MATH & set(loop.counts)] or loops
        counts = [loop.instructions for loop in loops] or [self.instructions]
        return [count * self.warps * self.threads / items for count in counts]


class _Instruction(NamedTuple):
    address: int
    operation: str
    target: Optional[int]                      # of a branch


# Operations of tensor cores and of exponentials, without suffixes.
_MATH = {'HMMA', 'HGMMA', 'MUFU', 'v_mfma', 'v_exp_f32_e32', 'v_exp_f32'}
_SASS = re.compile(r'^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);', re.MULTILINE)
_TENSOR = re.compile(r'(?:tensor|memdesc)<([\dx]+)x\w+, #(\w+)')
_FIRST_OPERAND = re.compile(r' : !?(?:ttg\.)?(?:tensor|memdesc)<([\dx]+)x')
_PRODUCT = re.compile(r'= (?:tt\.dot|tt\.dot_scaled|ttng\.warp_group_dot) .*')
_LAYOUT = re.compile(r'^#(\w+) = #ttg\.(\w+)<\{(.*)\}>$', re.MULTILINE)


def _tool(name: str) -> Optional[str]:
    """Path of one of CUDA's tools, some of which come with Triton."""
    import triton
    path = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / name
    return str(path) if path.exists() else shutil.which(name)


def _disassemble(cubin: bytes) -> Optional[str]:
    """Resource usage and instructions of a CUDA binary; None without cuobjdump."""
    tool = _tool('cuobjdump')
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, '-res-usage', '-sass', file.name], capture_output=True, text=True,
                              check=True).stdout


def _cuda_instructions(text: str) -> List[_Instruction]:
    """Instructions of cuobjdump's listing, without the padding and the endless loop behind the end."""
    found = []
    for address, operation, operands in _SASS.findall(text):
        to = re.search(r'0x([0-9a-f]+)', operands) if operation.split('.')[0] == 'BRA' else None
        instruction = _Instruction(int(address, 16), operation.split('.')[0], int(to[1], 16) if to else None)
        if operation != 'NOP' and instruction.target != instruction.address:
            found.append(instruction)
    return found


def _amd_instructions(text: str) -> List[_Instruction]:
    """Instructions of an AMD assembly listing; an address is an instruction's index."""
    labels: Dict[str, int] = {}
    lines: List[List[str]] = []
    for line in text.split('.amdhsa_kernel')[0].splitlines():
        line = line.split(';')[0].rstrip()
        if re.match(r'\.LBB\w+:', line):
            labels[line.split(':')[0]] = len(lines)
        elif re.match(r'\t[a-z]', line):
            lines.append(line.split())
    return [_Instruction(n, re.sub(r'^v_mfma\w+', 'v_mfma', words[0]),
                         labels.get(words[1]) if words[0].startswith(('s_branch', 's_cbranch')) else None)
            for n, words in enumerate(lines)]


def _loops(code: Sequence[_Instruction]) -> List[Loop]:
    """Find loops by their backward branches. Branches to the same instruction belong to one loop."""
    ends: Dict[int, int] = {}
    for instruction in code:
        if instruction.target is not None and instruction.target <= instruction.address:
            ends[instruction.target] = max(instruction.address, ends.get(instruction.target, 0))
    loops = []
    for start, end in sorted(ends.items()):
        counts = Counter(x.operation for x in code if start <= x.address <= end)
        innermost = not any(start < other and last <= end for other, last in ends.items())
        loops.append(Loop(sum(counts.values()), _barriers(counts), dict(counts), innermost))
    return loops


def _barriers(counts: Dict[str, int]) -> int:
    return counts.get('BAR', 0) + counts.get('s_barrier', 0)


def _numbers(attributes: str, name: str) -> Tuple[int, ...]:
    """Read a list such as `warpsPerCTA = [4, 1]` of a layout."""
    found = re.search(rf'\b{name} = \[([\d, ]+)\]', attributes)
    return tuple(map(int, found[1].split(','))) if found else ()


def _covered(kind: str, attributes: str) -> Tuple[int, ...]:
    """Rows and columns that the warps of a layout cover at once; empty for layouts that this module does not know."""
    warps = _numbers(attributes, 'warpsPerCTA')
    if kind == 'blocked':
        return tuple(map(math.prod, zip(_numbers(attributes, 'sizePerThread'), _numbers(attributes, 'threadsPerWarp'),
                                        warps)))
    if kind in ('nvidia_mma', 'amd_mfma'):
        tiles = _numbers(attributes, 'tilesPerWarp') or (1, 1)
        return tuple(map(math.prod, zip(_numbers(attributes, 'instrShape'), warps, tiles)))
    return ()


def products(ttgir: str) -> List[Product]:
    """Return the products of Triton's intermediate code for GPUs."""
    layouts = {name: (kind, attributes) for name, kind, attributes in _LAYOUT.findall(ttgir)}
    result = []
    for line in _PRODUCT.findall(ttgir):
        shape, layout = _TENSOR.findall(line.split(' -> ')[-1])[0]
        depth = int(_FIRST_OPERAND.findall(line)[0].split('x')[-1])
        rows, columns = map(int, shape.split('x')[-2:])
        kind, attributes = layouts.get(layout, (layout, ''))
        covered = _covered(kind, attributes)[-2:]
        duplicates = math.prod(max(1, -(-c // s)) for c, s in zip(covered, (rows, columns))) if covered else None
        result.append(Product((rows, columns, depth), kind, _numbers(attributes, 'warpsPerCTA') if covered else (),
                              duplicates))
    return result


def analyze(kernel: Any) -> MachineCode:
    """Analyze a kernel that Triton compiled.

    Args:
        kernel: one of the kernels in the list of `aot.compiling_for`, or what a launch returns.
    """
    code, usage = None, {}
    if 'cubin' in kernel.asm:
        text = _disassemble(kernel.asm['cubin'])
        if text is not None:
            code = _cuda_instructions(text)
            usage = {name: int(value) for name, value in re.findall(r'\b(REG|STACK):(\d+)', text)}
    elif 'amdgcn' in kernel.asm:
        text = kernel.asm['amdgcn']
        code = _amd_instructions(text)
        fields = {name: int(value) for name, value in re.findall(r'\.(\w+):\s+(\d+)$', text, re.MULTILINE)}
        usage = {'REG': fields.get('vgpr_count'), 'STACK': fields.get('private_segment_fixed_size')}
    counts = Counter(x.operation for x in code or ())
    return MachineCode(
        kernel.metadata.name.strip('_').removesuffix('_kernel'), constants(kernel), kernel.metadata.num_warps,
        kernel.metadata.warp_size, usage.get('REG'), usage.get('STACK'), kernel.metadata.shared,
        None if code is None else len(code), None if code is None else _barriers(counts),
        None if code is None else _loops(code), products(kernel.asm['ttgir']))


def constants(kernel: Any) -> Dict[str, Any]:
    """Return the compile-time constants of a kernel by name; empty for a kernel that a cache loaded without them."""
    found = getattr(kernel.src, 'constants', {})
    return {kernel.src.fn.arg_names[key[0]]: value for key, value in found.items() if len(key) == 1}


def compile_all(calls: Mapping[str, Callable[[], Any]], target: str) -> Dict[str, List[MachineCode]]:
    """Compile every kernel that the calls launch on meta tensors, and return their machine code by name of the call."""
    result: Dict[str, List[MachineCode]] = {}
    for name, call in calls.items():
        with aot.compiling_for(target) as kernels:
            call()
        result[name] = [analyze(kernel) for kernel in kernels]
    return result


def per_item(code: MachineCode) -> Tuple[List[float], str]:
    """Return thread-instructions per item of a kernel, one number per loop, and the item's name.

    Both are empty for kernels without an entry in `aot.ITEMS`, and for targets whose tools do not report instructions.
    """
    beginnings = [name for name in aot.ITEMS if code.name.startswith(name)]
    if not beginnings or code.instructions is None:
        return [], ''
    item, count = aot.ITEMS[max(beginnings, key=len)]
    return code.per_item(count(code.constants)), item


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser('python -m lab.machine_code', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('target', help='such as cuda:80, cuda:90 or hip:gfx942')
    parser.add_argument('--only', nargs='+', default=[''], metavar='TEXT',
                        help='compile only the cases that contain one of these strings')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    found = _compiled(args.target, args.only)
    if args.json:
        lines = (f'{dumps(name)}: {dumps([_record(x) for x in kernels])}' for name, kernels in found.items())
        print('{\n' + ',\n'.join(lines) + '\n}')               # one line per case
    else:
        _print_machine_code(args.target, found)
    faults = _faults([kernel for kernels in found.values() for kernel in kernels])
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


def _compiled(target: str, texts: List[str]) -> Dict[str, List[MachineCode]]:
    """Compile the kernels of the cases that contain one of the texts.

    Returns:
        The machine code of each case's kernels.
    """
    try:
        calls = {name: call for name, call in aot.cases().items() if any(text in name for text in texts)}
        if not calls:
            raise UserError(f"no case contains {' or '.join(map(repr, texts))}; a case is, for example, "
                            f'{next(iter(aot.cases()))!r}')
        with quiet():
            return compile_all(calls, target)
    except (ValueError, RuntimeError) as error:
        raise UserError(f'{target}: {one_line(error)}') from error


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
    rates, item = per_item(code)
    return {'kernel': code.name, 'constants': {name: x for name, x in code.constants.items() if _plain(x)},
            'warps': code.warps, 'registers': code.registers, 'stack': code.stack, 'shared': code.shared,
            'instructions': code.instructions, 'barriers': code.barriers, 'item': item,
            'thread_instructions_per_item': [round(x, 1) for x in rates],
            'loops': None if code.loops is None else [
                {'instructions': x.instructions, 'barriers': x.barriers, 'innermost': x.innermost} for x in code.loops],
            'products': [asdict(product) for product in code.products], 'duplicates': code.duplicates()}


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _print_machine_code(target: str, found: Dict[str, List[MachineCode]]) -> None:
    import torch
    import triton
    from rich.table import Table
    table = Table('case', 'kernel', 'tile', 'warps', 'registers', 'stack, bytes', 'shared memory, bytes', 'barriers',
                  'thread-instructions', 'products: M x N x K, warps',
                  title=f'{target}, Triton {triton.__version__}, torch {torch.__version__}')
    for name, kernels in found.items():
        for n, code in enumerate(kernels):
            rates, item = per_item(code)
            tile = ', '.join(f'{key} {value}' for key, value in code.constants.items()
                             if key in ('BLOCK', 'BLOCK_D', 'BLOCK_V', 'ROWS', 'SIDE', 'LEVELS'))
            products = dict.fromkeys('{} x {} x {}, {}'.format(*p.shape, list(p.warps) or '?') for p in code.products)
            add_row(table, '' if n else name, code.name, tile, code.warps, code.registers, code.stack, code.shared,
                    code.barriers, ' + '.join(f'{x:.1f}' for x in rates) + f' per {item}' * bool(item),
                    '; '.join(products))
    print_table(table)


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
