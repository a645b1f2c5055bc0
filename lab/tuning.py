"""Tune the launch table on a GPU: time candidates for each row by captured graphs and keep the fastest.

Candidates that spill or repeat work are left out by their machine code, those that fail or compute something else by a
run. A row changes only if a candidate is faster than it by more than the noise of a repetition.

The file gets the table, and FILE.trials.json all times; run with SUBQUAD_LAUNCH_TABLE=FILE to use the table.
"""
import argparse
import multiprocessing
import os
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from subquad.kernels.common import launch as launching
from subquad.kernels.common import launch_table
from subquad.kernels.common.launch_table import Key, Launch, Table
from subquad.tools.bench import operators as ops
from subquad.tools.bench.graphs import Rotating, copies, graph_ms
from subquad.tools.common.cli import UserError
from subquad.tools.common.output import dumps
from subquad.tools.engine.records import environment

from . import aot
from .candidates import Verdict, candidates, judge, rows_of

# A candidate must take less than this share of the row's time.
_GAIN = 0.98
# How far results of two candidates may be apart, relative to the largest value: sums have another order.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Problem:
    """A call whose launches are tuned: an operator with sizes as networks have them."""
    op: str
    grid: Tuple[int, int]
    batch: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    backward: bool = False

    @property
    def name(self) -> str:
        return '{}, {} x {}, batch {}, {} heads of {}, {}{}'.format(
            self.op, *self.grid, self.batch, self.heads, self.dim, str(self.dtype).removeprefix('torch.'),
            ', with gradients' if self.backward else '')

    def call(self, device: str = 'cuda') -> Rotating:
        """The operator on rotating inputs; it returns a tensor, or with gradients a tuple of them."""
        operator = ops.OPERATORS[self.op]
        function = ops.operator_call(self.op, 'triton')
        inputs = operator.inputs(self.batch, self.heads, self.grid, self.dim, self.dtype, device)
        return Rotating([ops.with_gradients(function, x) if self.backward else partial(function, *x)
                         for x in (copies(inputs) if device == 'cuda' else [inputs])])


def _both(*args: Any) -> List[Problem]:
    return [Problem(*args, backward=backward) for backward in (False, True)]


# Stages of PPMA-T at 224 and at 800 x 1280, of Myo-T, MobileViTv2-1.0 and LCSM-T; the most valuable first. The
# recurrences of LCSM go over rows, or with mode='raster' over all tokens as one line.
PROBLEMS: Sequence[Problem] = (
    *_both('polyline_attention', (14, 14), 128, 8, 32),
    *_both('decay_attention', (56, 56), 128, 4, 16),
    *_both('polyline_attention', (50, 80), 1, 8, 32),
    *_both('decay_attention', (28, 28), 128, 4, 32),
    *_both('polyline_scan', (56, 56), 64, 4, 16),
    *_both('separable_attention', (32, 32), 128, 1, 128),
    *_both('quadtree_solve', (56, 56), 64, 4, 16),
    *_both('eos_elementwise', (56, 56), 64, 2, 32),
    *_both('eos_matmul', (56, 56), 64, 2, 32),
    *_both('eos_elementwise', (28, 28), 64, 4, 32),
    *_both('eos_elementwise', (1, 3136), 64, 2, 32),
    *_both('decay_attention', (100, 160), 1, 4, 32),
    *_both('polyline_attention', (28, 30), 8, 4, 64),
    *_both('polyline_attention', (7, 7), 128, 16, 32),
)


@dataclass
class Tuning:
    """What a sweep found.

    Attributes:
        winners: launch options by row of the table.
        trials: what was tried: {'problem', 'row', 'launch', 'ms', 'why'}, `ms` None with a reason in `why`.
        left: names of problems for which no time was left.
    """
    winners: Dict[Key, Launch] = field(default_factory=dict)
    trials: List[Dict[str, Any]] = field(default_factory=list)
    left: List[str] = field(default_factory=list)

    def table(self, target: str) -> Table:
        """The shipped table with the winners in the section of a target such as 'cuda:90'."""
        found: Table = {}
        for key, launch in self.winners.items():
            found.setdefault(key.kernel, {}).setdefault(target, {})[key.size] = launch
        return launch_table.merged(launch_table.read(launch_table.SHIPPED), found)


def compilers(processes: int) -> Executor:
    """Processes that compile: a new process has no CUDA context, and a forked one would have a broken one."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context('spawn'))


def judge_all(keys: Sequence[Key], launches: Mapping[Key, Sequence[Launch]], target: str, pool: Executor
              ) -> Dict[Tuple[Key, Launch], Verdict]:
    """Compile all candidates in parallel, which also fills Triton's cache, and judge their machine code."""
    names = [name for name in aot.cases() if any(_case_of(name, key) for key in keys)]
    cases: Dict[Key, List[str]] = {}
    for found in pool.map(rows_of, [[name] for name in names], [target] * len(names)):
        for key, used in found.items():
            cases.setdefault(key, []).extend(used)
    # The first case of a row is its most common form.
    pairs = [(key, launch) for key in keys if key in cases for launch in launches[key]]
    jobs = [pool.submit(judge, key, launch, cases[key][:1], target) for key, launch in pairs]
    return {pair: job.result() for pair, job in zip(pairs, jobs)}


def _case_of(name: str, key: Key) -> bool:
    """Whether a case of `aot` has the operator, the type and the channels of a row."""
    op, dtype = name.split(',')[0], {2: 'bfloat16', 4: 'float32'}.get(key.size.bytes)
    return key.kernel.startswith(op) and f', {dtype}, {max(16, key.size.channels)} channels' in name


def _differ(result: Any, wanted: Any) -> Optional[str]:
    """Why two results are not the same up to rounding, or None."""
    pairs = zip(*([x] if isinstance(x, Tensor) else list(x) for x in (result, wanted)))
    for x, y in pairs:
        if x is None or y is None or not y.numel():
            continue
        scale, error = float(y.float().abs().max()), float((x.float() - y.float()).abs().max())
        if not error <= _TOLERANCE[y.dtype] * max(scale, 1e-6):
            return f'wrong result: error {error:.2g} of values up to {scale:.2g}'
    return None


def tune(problems: Sequence[Problem], seconds: float, device: str = 'cuda', most: int = 12,
         time_ms: Callable[[Callable], float] = graph_ms, verdicts: Callable[..., Mapping] = lambda *_: {},
         clock: Callable[[], float] = time.monotonic) -> Tuning:
    """Sweep launch options for the rows that the problems look up.

    Args:
        problems: What to time, the most valuable first.
        seconds: No candidate starts later than this.
        device: Where the inputs lie.
        most: Candidates for each row, at most: the row's own and those that rank best by machine code.
        time_ms: Function that times a call.
        verdicts: Function (rows, candidates by row) -> {(row, candidate): Verdict}; rows without one are not judged.
        clock: Seconds, for the limit.
    """
    result, end = Tuning(), clock() + seconds
    for problem in problems:
        if clock() >= end:
            result.left.append(problem.name)
            continue
        try:
            call = problem.call(device)
            with launch_table.looking_up() as rows, launch_table.trying(result.winners):
                wanted = call()
        except Exception as error:                      # a kernel that fails must not end the sweep
            result.trials.append(_trial(problem, None, None, why=_sentence(error)))
            continue
        new = {key: launch for key, launch in rows.items() if key not in result.winners}
        tried = {key: candidates(launch) for key, launch in new.items()}
        known = verdicts(list(new), tried)
        for key, launch in new.items():
            ordered = _ordered(key, launch, tried[key], known)
            left = _sweep(problem, key, ordered[:most], call, wanted, result, time_ms, lambda: clock() >= end)
            if left:
                result.left.append(f'{problem.name}: {key.kernel} {list(key.size)}')
    return result


def _ordered(key: Key, own: Launch, tried: Sequence[Launch], known: Mapping[Tuple[Key, Launch], Verdict]
             ) -> List[Launch]:
    """The row's own options, then the candidates that fit, best first by their machine code."""
    fit = [x for x in tried if x != own and known.get((key, x), Verdict()).fits]
    return [own, *sorted(fit, key=lambda x: known.get((key, x), Verdict()).rank())]


def _sweep(problem: Problem, key: Key, ordered: Sequence[Launch], call: Callable, wanted: Any, result: Tuning,
           time_ms: Callable, late: Callable[[], bool]) -> bool:
    """Time the candidates of one row and store the winner; return whether the time ended before."""
    times: Dict[Launch, float] = {}
    left = False
    for launch in ordered:
        left = late()
        if left:
            break
        try:
            with launch_table.trying({**result.winners, key: launch}):
                why = _differ(call(), wanted)
                ms = None if why else time_ms(call)
        except Exception as error:                       # out of shared memory, and anything else
            ms, why = None, _sentence(error)
        result.trials.append(_trial(problem, key, launch, ms, why))
        if ms is not None:
            times[launch] = ms
    if times:
        own, best = ordered[0], min(times, key=times.__getitem__)
        result.winners[key] = best if own not in times or times[best] < _GAIN * times[own] else own
    return left


def _trial(problem: Problem, key: Optional[Key], launch: Optional[Launch], ms: Optional[float] = None,
           why: Optional[str] = None) -> Dict[str, Any]:
    return {'problem': problem.name, 'kernel': key and key.kernel, 'size': key and list(key.size),
            'launch': launch and list(launch), 'ms': ms, 'why': why}


def _sentence(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser('python -m lab.tuning', description=__doc__)
    parser.add_argument('file', type=Path, help='the table to write')
    parser.add_argument('--only', nargs='+', default=[''], metavar='TEXT',
                        help='tune only the problems that contain one of these strings')
    parser.add_argument('--seconds', type=float, default=300., help='time limit (default: %(default)s)')
    args = parser.parse_args(argv)
    problems = [problem for problem in PROBLEMS if any(text in problem.name for text in args.only)]
    if not problems:
        raise UserError(f"no problem contains {' or '.join(map(repr, args.only))}; a problem is, for example, "
                        f'{PROBLEMS[0].name!r}')
    if not torch.cuda.is_available():
        raise UserError('tuning needs a GPU, and torch finds none here')
    target = ':'.join(launching.target())
    with compilers(max(1, min(16, len(os.sched_getaffinity(0))))) as pool:
        found = tune(problems, args.seconds, verdicts=lambda rows, tried: judge_all(rows, tried, target, pool))
    try:
        args.file.write_text(launch_table.formatted(found.table(target)))
        args.file.with_name(f'{args.file.name}.trials.json').write_text(dumps(
            {'target': target, **environment('cuda'), 'left': found.left, 'trials': found.trials}, indent=1) + '\n')
    except OSError as error:
        raise UserError(f'cannot write {args.file}: {error.strerror}') from error
    for key, options in found.winners.items():
        print(f'{key.kernel} {list(key.size)}: {list(options)}')
    for name in found.left:
        print(f'no time was left for {name}')
    return 0


if __name__ == '__main__':
    from subquad.tools.common.cli import run
    run(main)
