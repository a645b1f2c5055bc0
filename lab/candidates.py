"""Launch options that `lab.tuning` tries, and what their machine code says about them without a GPU."""
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence

from subquad.kernels.common import launch_table
from subquad.kernels.common.launch_table import Key, Launch

from . import aot
from .machine_code import compile_all, per_item

WARPS, STAGES, REGISTERS = (1, 2, 4, 8), (1, 2, 3), (None, 255, 128)


def candidates(launch: Launch) -> List[Launch]:
    """All launch options to try for a row of the table, the row's own first, then those most like it."""
    def distance(other: Launch) -> int:
        return sum(x != y for x, y in zip(launch, other))
    every = [Launch(warps, stages, registers) for warps in WARPS for stages in STAGES for registers in REGISTERS]
    return sorted(dict.fromkeys([launch, *every]), key=distance)


@dataclass(frozen=True)
class Verdict:
    """What the machine code of a kernel says about launch options, the worst over all compiled cases.

    Attributes:
        error: why it does not compile, or ''. Then the other values mean nothing.
        stack: bytes of stack per thread; None if the target's tools do not report it.
        duplicates: how many times the worst product is computed.
        instructions: thread-instructions per pair or element, summed over the loops; infinite if not reported.
        barriers: of the whole code.
        registers: per thread.
    """
    error: str = ''
    stack: Optional[int] = None
    duplicates: int = 1
    instructions: float = float('inf')
    barriers: int = 0
    registers: int = 0

    @property
    def fits(self) -> bool:
        """Whether it compiles, no register spills and no warp repeats the work of another."""
        return not self.error and not self.stack and self.duplicates == 1

    def rank(self) -> tuple:
        """Sort key: first what fits, then by instructions, barriers and registers."""
        return (bool(self.error), bool(self.stack), self.duplicates > 1, self.instructions, self.barriers,
                self.registers)


def rows_of(names: Iterable[str], target: str) -> Dict[Key, List[str]]:
    """Map the rows of the launch table that the cases of `aot` look up for a target to the names of these cases."""
    calls, rows = aot.cases(), {}
    for name in names:
        with launch_table.looking_up() as found, aot.compiling_for(target):
            calls[name]()
        for key in found:
            rows.setdefault(key, []).append(name)
    return rows


def judge(key: Key, launch: Launch, names: Sequence[str], target: str) -> Verdict:
    """Compile the cases with these launch options for the row `key`, and judge the machine code."""
    calls = aot.cases()
    try:
        with launch_table.trying({key: launch}):
            codes = [code for found in compile_all({name: calls[name] for name in names}, target).values()
                     for code in found if code.name.startswith(key.kernel)]
    except Exception as error:                       # compilers raise anything
        return Verdict(error=f'{type(error).__name__}: {" ".join(str(error).split())[:200]}')
    rates = [per_item(code)[0] or [(code.instructions or float('inf')) * code.warps] for code in codes]
    return Verdict('', None if any(code.stack is None for code in codes) else max(code.stack for code in codes),
                   max(code.duplicates() for code in codes), max(map(sum, rates)),
                   max(code.barriers or 0 for code in codes), max(code.registers or 0 for code in codes))
