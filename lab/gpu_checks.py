"""Check an operator's kernels on a GPU (or in the interpreter): `python -m lab.gpu_checks OPERATOR SECONDS`.

Values and gradients are compared with the reference in float64 at sizes of real networks. Memory that a kernel does not
write holds NaN, and two runs must agree to the bit. A case that fails is run again with one warp and one stage for each
kernel, which tells a fault of the launch options from one of the kernel. The last line of the output is JSON.
"""
import math
import sys
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from subquad import kernels
from subquad.kernels.common import launch_table
from subquad.kernels.common.launch_table import Launch
from subquad.kernels.rotary_embedding.angles import rotary_table
from subquad.kernels.trees import quadtree_levels
from subquad.tools.bench import operators as ops
from subquad.tools.common.output import dumps

# Relative to the largest value; a GPU multiplies half types in half precision.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Grids by operator, the scan first: its recurrence is what compilers are known to get wrong. The last grids are checked
# in bfloat16 only, because their reference is large.
GRIDS: Dict[str, Sequence[Tuple[int, int]]] = {
    'polyline_scan': ((7, 7), (14, 14), (28, 30), (4, 200), (2, 600)),
    'polyline_attention': ((7, 7), (14, 14), (28, 30), (50, 80)),
    'decay_attention': ((7, 7), (4, 56), (2, 200), (2, 600)),
    'crisscross_attention': ((7, 7), (14, 14), (28, 30), (56, 56)),
    'separable_attention': ((1, 200), (16, 16), (31, 33), (64, 64)),
    'quadtree_solve': ((7, 7), (14, 14), (27, 31), (56, 56)),
    'depthwise_conv': ((7, 7), (14, 14), (28, 30), (50, 80)),
    'rotary_embedding': ((7, 7), (14, 14), (28, 30), (50, 80)),
    # Recurrences run over the rows.
    'eos_elementwise': ((7, 7), (14, 14), (4, 56), (2, 200)),
    'eos_matmul': ((7, 7), (14, 14), (4, 56), (2, 200)),
    'selective_scan': ((7, 7), (14, 14), (28, 30), (50, 80)),
}
SMALL: Tuple[int, int] = (2, 3)


class Case(NamedTuple):
    """A call to check: call(*inputs, backend=...) -> Tensor."""
    name: str
    call: Callable[..., Tensor]
    inputs: List[Tensor]


def _shifted(*tensors: Tensor, backend: str) -> Tensor:
    count = (len(tensors) + 1) // 2
    return kernels.quadtree_solve(tensors[:count], tensors[count:], parametrization='skew', shift=(1, 1),
                                  backend=backend)[0]


def _shifted_inputs(grid: Tuple[int, int], dtype: torch.dtype, device: str) -> List[Tensor]:
    levels = quadtree_levels(*grid, shift=(1, 1))
    values = [torch.randn(2, 2, x.height, x.width, 16, device=device, dtype=dtype) for x in levels]
    return values + [torch.rand(2, 2, x.height, x.width, device=device, dtype=dtype) for x in levels[:-1]]


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor, add: Tensor, backend: str) -> Tensor:
    return kernels.depthwise_conv(x, weight, bias, add, gelu=True, residual=True, backend=backend)


def _rotary(q: Tensor, k: Tensor, backend: str) -> Tensor:
    # Of float32 in the reference, too: its rounding is not the kernel's.
    table = rotary_table(q.shape[2], q.shape[3], q.device, torch.float32)
    table = table.double() if q.dtype == torch.float64 else table
    return torch.stack(kernels.rotary_embedding(q, k, table, 0.5, backend=backend))


def _selective(u: Tensor, delta: Tensor, a: Tensor, *others: Tensor, backend: str) -> Tensor:
    return kernels.selective_scan(u, delta, -a.abs(), *others, paths=('right', 'down', 'left', 'up'), backend=backend)


def random_case(op: str, name: str, batch: int, heads: int, grid: Tuple[int, int], dim: int, dtype: torch.dtype,
          device: str) -> Case:
    """A case with random inputs. Operators that are not attentions or solves are not among those of the benchmarks."""
    shapes = {'depthwise_conv': ((batch, *grid, heads * dim), (heads * dim, 1, 5, 5), (heads * dim,),
                                 (batch, *grid, heads * dim)),
              'rotary_embedding': ((batch, heads, math.prod(grid), dim),) * 2,
              'selective_scan': ((batch, *grid, dim), (batch, *grid, 4, dim), (4, dim, 8),
                                 *((batch, *grid, 4, 8),) * 2, (4, dim), (4, dim))}
    if op in shapes:
        # Rates (the third input) stay in float32, as in networks: their gradients are sums over all tokens.
        dtypes = [torch.float32 if op == 'selective_scan' and n == 2 else dtype for n in range(len(shapes[op]))]
        return Case(name, {'depthwise_conv': _depthwise, 'rotary_embedding': _rotary, 'selective_scan': _selective}[op],
                    [torch.randn(shape, device=device, dtype=each) for shape, each in zip(shapes[op], dtypes)])
    return Case(name, ops.OPERATORS[op].call, ops.OPERATORS[op].inputs(batch, heads, grid, dim, dtype, device))


def cases(op: str, device: str, small: bool = False) -> Iterator[Case]:
    """The cases of an operator; with `small`, one that the interpreter runs in seconds."""
    grids = [SMALL] if small else GRIDS[op]
    for n, grid in enumerate(grids):
        types = [torch.bfloat16] if n and n == len(grids) - 1 else list(TOLERANCE)
        for dtype in types[:1] if small else types:
            for dim in (16,) if small else (16, 32):
                name = '{}, {} x {}, {} channels, {}'.format(op, *grid, dim, str(dtype).removeprefix('torch.'))
                yield random_case(op, name, 1 if small else 2, 1 if small else 2, grid, dim, dtype, device)
            if op == 'quadtree_solve' and not small:
                name = '{}, {} x {}, shifted, skew, {}'.format(op, *grid, str(dtype).removeprefix('torch.'))
                yield Case(name, _shifted, _shifted_inputs(grid, dtype, device))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new, uninitialized memory with NaN inside the block."""
    before, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def results(case: Case, backend: str, dtype: Optional[torch.dtype] = None) -> List[Optional[Tensor]]:
    """The output and, if it has them, the gradients of its weighted sum."""
    inputs = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in case.inputs]
    y = case.call(*inputs, backend=backend)
    if not y.requires_grad:
        return [y]
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y.double() * weights).sum(), inputs, allow_unused=True)]


def fault_of(actual: Sequence[Optional[Tensor]], expected: Sequence[Optional[Tensor]], dtype: torch.dtype
           ) -> Tuple[str, float]:
    """What is wrong with a result, '' for nothing, and its largest error relative to the tolerance."""
    largest = max(float(y.abs().max()) for y in expected if y is not None)
    worst = 0.
    for n, (x, y) in enumerate(zip(actual, expected)):
        what = 'the output' if n == 0 else f'gradient {n}'
        if (x is None) != (y is None):
            return f'{what} is missing', float('inf')
        if x is None:
            continue
        if not x.isfinite().all():
            return f'{what} is not finite', float('inf')
        # Gradients that cancel are held to the scale of the others, and pass through rounded outputs.
        scale = max(float(y.abs().max()), 0.05 * largest) * (2 if n and dtype != torch.float32 else 1)
        worst = max(worst, float((x.double() - y).abs().max()) / (scale * TOLERANCE[dtype]))
    return ('' if worst <= 1 else f'{worst:.3g} times the tolerance'), worst


def check(case: Case) -> Dict[str, Any]:
    """Check one case: {'case', 'fault', 'error', 'repeats', 'with_one_warp', 'rows'}.

    `fault` is '' if all is well; `error` is relative to the tolerance; `repeats` says whether two runs are equal;
    `with_one_warp` is the fault with one warp and one stage, None if that was not tried.
    """
    result: Dict[str, Any] = {'case': case.name, 'fault': '', 'error': None, 'repeats': None, 'with_one_warp': None}
    expected = results(case, 'reference', torch.float64)

    def attempt() -> str:
        try:
            with poisoned():
                first, second = results(case, 'triton'), results(case, 'triton')
        except Exception as error:                       # compilers and CUDA raise anything
            return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'
        result['repeats'] = all(x is y or torch.equal(x, y) for x, y in zip(first, second))
        fault, result['error'] = fault_of(first, expected, case.inputs[0].dtype)
        return fault or ('' if result['repeats'] else 'two runs differ')
    with launch_table.looking_up() as rows:
        result['fault'] = attempt()
    result['rows'] = [[key.kernel, *key.size, *launch] for key, launch in rows.items()]
    if result['fault']:
        measured = result['error'], result['repeats']
        with launch_table.trying(dict.fromkeys(rows, Launch(1, 1, None))):
            result['with_one_warp'] = attempt()
        result['error'], result['repeats'] = measured
    return result


def check_operator(op: str, device: str, small: bool = False, seconds: float = float('inf')) -> Dict[str, Any]:
    """Check all cases of an operator: {'op', 'checked', 'failed', 'left', 'worst'}; `failed` has the reports."""
    torch.manual_seed(0)
    reports, left, end = [], [], time.monotonic() + seconds
    for case in cases(op, device, small):
        if time.monotonic() > end:
            left.append(case.name)
            continue
        reports.append(check(case))
    failed = [report for report in reports if report['fault']]
    return {'op': op, 'checked': len(reports), 'failed': failed, 'left': left,
            'worst': max((report['error'] or 0 for report in reports), default=None)}


def main() -> int:
    """Check the operator that the command line names, with its limit in seconds."""
    op, seconds = sys.argv[1], float(sys.argv[2])
    found = check_operator(op, 'cuda', seconds=seconds)
    print(dumps(found))
    return int(bool(found['failed']))


if __name__ == '__main__':
    sys.exit(main())
