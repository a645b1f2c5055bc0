"""Check all Triton kernels for faults of memory, in Triton's interpreter: `make sanitize` or `python -m lab.sanitize`.

No GPU is needed. Each operator runs forward and backward on small tensors of odd sizes, and fails if
  - a kernel accesses memory outside of the tensor that it computed the address from,
  - a result is not the reference's, while memory that no kernel wrote holds NaN,
  - two programs of a launch store to the same address, or one loads what another one stores,
  - a result changes by a bit when the programs of a launch run in another order,
  - a 32-bit integer overflows, also with strides that span more than 2^31 elements (not with --short).
The interpreter runs one program after the other, so faults between the threads of a program do not show.
"""
import argparse
import dataclasses
import re
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from subquad import kernels
from subquad.kernels.common.launch import interpreted
from subquad.tools.common.cli import one_line

from . import large_strides
from .gpu_checks import GRIDS, Case, fault_of, poisoned, random_case, results
from .gpu_plan import run_interpreted

Order = Callable[[int], Sequence[int]]       # from the number of programs to the order in which they run
# The reverse and three random ones.
ORDERS: Dict[str, Order] = {
    'reverse': lambda count: range(count)[::-1],
    **{f'random {seed}': lambda count, seed=seed: np.random.default_rng(seed).permutation(count) for seed in range(3)}}
# Calls that launch each kernel once, for --short.
SHORT = ('polyline', 'decay', 'crisscross', 'crisscross-long', 'scan', 'separable', 'separable-chunks',
         'quadtree-tiles', 'rotary', 'conv-weight', 'eos-chunks', 'eos-full', 'matmul', 'selective', 'layer-norm',
         'group-norm', 'bias-act', 'path-sums', 'quadtree-attention')
_GRID = (3, 5)                               # of the calls in bfloat16
# Addresses have 47 bits. The bits above hold the number of the tensor that a pointer was computed from.
_TAG = 48


class Watch:
    """What kernels do to memory: the state of `watching`.

    Attributes:
        findings: faults, one sentence each.
        launched: names of the kernels.
    """

    def __init__(self, order: Order = range):
        self.findings: Dict[str, None] = {}
        self.launched: Set[str] = set()
        self._order = order

    def begin(self, kernel: str) -> None:
        """Begin a launch, before its arguments are converted."""
        self._kernel = kernel
        self.patched: Set[str] = set()                        # modules that the interpreter has patched for it
        self._tensors: List[Any] = [None]
        self._bounds = [(0, 0)]                               # addresses, the end exclusive
        self._accesses: Dict[str, List[np.ndarray]] = {'loads': [], 'stores': []}
        self.launched.add(kernel)

    def add(self, tensor: Tensor) -> int:
        """Add an argument of the launch and return what to add to its address."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        start = tensor.data_ptr()
        self._tensors.append(tensor)
        self._bounds.append((start, start + (span * tensor.element_size() if tensor.numel() else 0)))
        return len(self._bounds) - 1 << _TAG

    def program(self, n: int, count: int) -> int:
        """Begin the n-th program of the launch and return which one it is."""
        if n == 0:
            self._sequence = self._order(count)
            self._starts, self._ends = np.array([*self._bounds, (0, 0)], np.uint64).T
        self._program = int(self._sequence[n])
        return self._program

    def access(self, what: str, pointers: np.ndarray, mask: np.ndarray, size: int) -> Any:
        """Record an access of `size` bytes at each pointer, and return addresses and the mask of those inside."""
        addresses, tags = pointers & np.uint64(2 ** _TAG - 1), pointers >> np.uint64(_TAG)
        starts, ends = (bounds.take(tags.astype(np.int64), mode='clip') for bounds in (self._starts, self._ends))
        outside = mask & ((addresses < starts) | (addresses + np.uint64(size) > ends))
        if outside.any():
            tag = min(int(tags[outside][0]), len(self._tensors) - 1)
            shape = tuple(self._tensors[tag].shape) if tag else 'none'
            places = (addresses[outside].astype(np.int64) - starts[outside].astype(np.int64)) // size
            self.find(f'{what} outside of a tensor of shape {shape}, first at element {places[0]}')
        mask = mask & ~outside
        if what in self._accesses:
            used = np.unique(addresses[mask])
            self._accesses[what].append(np.stack([used, np.full_like(used, self._program)]))
        return addresses, mask

    def find(self, what: str) -> None:
        """Record a finding about the kernel of this launch."""
        self.findings[f'{self._kernel} {what}'] = None

    def end(self) -> None:
        """End the launch: compare what its programs did."""
        loads, stores = (np.concatenate([np.empty((2, 0), np.uint64), *parts], 1) for parts in self._accesses.values())
        addresses, first, index = np.unique(stores[0], return_index=True, return_inverse=True)
        owners = stores[1, first]                             # one of the programs that store to each address
        if (owners[index] != stores[1]).any():
            self.find('stores from several programs to one address')
        if len(addresses):
            at = np.searchsorted(addresses, loads[0]).clip(max=len(addresses) - 1)
            if ((addresses[at] == loads[0]) & (owners[at] != loads[1])).any():
                self.find('loads what another program of the same launch stores')


@contextmanager
def watching(order: Order = range) -> Iterator[Watch]:
    """Watch the kernels that run in Triton's interpreter inside the block, and run their programs in this order.

    With the builder's option `debug`, Triton asserts that no sum or product of 32-bit integers overflows.
    """
    from triton.runtime import interpreter
    builder, watch = interpreter.interpreter_builder, Watch(order)
    launch, convert = interpreter.GridExecutor.__call__, interpreter._implicit_cvt
    patch_modules = interpreter._patch_lang
    load, store, cas, rmw, set_program = (getattr(builder, name) for name in (
        'create_masked_load', 'create_masked_store', 'create_atomic_cas', 'create_atomic_rmw', 'set_grid_idx'))

    def watched(what: str, pointers: Any, mask: Any) -> Any:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses, inside = watch.access(what, pointers.data, mask.data.astype(bool), size)
        return dataclasses.replace(pointers, data=addresses), dataclasses.replace(mask, data=inside)

    def watched_launch(executor, *args, **kwargs):
        watch.begin(executor.fn.__name__)
        launch(executor, *args, **kwargs)
        watch.end()

    def tagged(argument):
        converted = convert(argument)
        if hasattr(argument, 'data_ptr'):
            converted.handle.data = converted.handle.data + np.uint64(watch.add(argument))
        return converted

    def ordered(*place):
        dims = builder.grid_dim
        program = watch.program(int(np.ravel_multi_index(place, dims)), int(np.prod(dims)))
        set_program(*map(int, np.unravel_index(program, dims)))

    def watched_load(pointers, mask, *others):
        return load(*watched('loads', pointers, mask), *others)

    def watched_store(pointers, value, mask, *others):
        pointers, mask = watched('stores', pointers, mask)
        return store(pointers, value, mask, *others)

    def watched_cas(pointers, *others):
        everywhere = interpreter.TensorHandle(np.ones_like(pointers.data, bool), interpreter.tl.int1)
        return cas(watched('swaps', pointers, everywhere)[0], *others)

    def watched_rmw(operation, pointers, value, mask, *others):
        pointers, mask = watched('adds', pointers, mask)
        return rmw(operation, pointers, value, mask, *others)

    def patched_once(function):
        # The interpreter patches the modules of a function at each call, which takes a third of its time.
        if function.__module__ not in watch.patched:
            watch.patched.add(function.__module__)
            return patch_modules(function)

    def watched_assert(condition, message):
        if not condition:
            watch.find(f'fails: {message}')

    with mock.patch.object(interpreter.GridExecutor, '__call__', watched_launch), \
            mock.patch.multiple(interpreter, _implicit_cvt=tagged, _patch_lang=patched_once), \
            mock.patch.multiple(
                builder, set_grid_idx=ordered, create_masked_load=watched_load, create_masked_store=watched_store,
                create_atomic_cas=watched_cas, create_atomic_rmw=watched_rmw,
                create_assert=watched_assert, options=dataclasses.replace(builder.options, debug=True)):
        yield watch


def check(case: Case, orders: Sequence[str] = tuple(ORDERS)) -> Watch:
    """Run a case in the ordinary order of programs and in others, and compare it with the reference in float64."""
    expected = results(case, 'reference', torch.float64)
    with poisoned(), watching() as watch:
        first = results(case, 'triton')
    fault, _ = fault_of(first, expected, case.inputs[0].dtype)
    if fault:
        watch.findings[fault] = None
    for name in orders:
        with poisoned(), watching(ORDERS[name]) as other:
            again = results(case, 'triton')
        watch.findings.update(other.findings)
        if not all(x is y or torch.equal(x, y) for x, y in zip(first, again)):
            watch.findings[f'results change with the order of programs ({name})'] = None
    return watch


def check_large_strides(call: large_strides.Call, memory: Tensor) -> Watch:
    """Run a call on tensors that span more than 2^31 elements."""
    with poisoned(), watching() as watch:
        try:
            large_strides.check(call, memory)
        except AssertionError as error:
            watch.findings[one_line(error)] = None
    return watch


def checks(short: bool) -> Iterator[Tuple[str, Callable[[], Watch]]]:
    """Yield the name of each case and a function that checks it."""
    for name, call in large_strides.CALLS.items():
        if name in SHORT or not short:
            case = Case(name, call.operator, call.arguments())
            yield f'{name}, float32', partial(check, case, ('reverse',) if short else tuple(ORDERS))
    if short:
        return
    for op in GRIDS:
        case = random_case(op, op, 3, 3, _GRID, 8, torch.bfloat16, 'cpu')
        yield f'{op}, bfloat16', partial(check, case)
    memory = large_strides.sparse_memory()
    for name, call in large_strides.CALLS.items():
        yield f'{name}, large strides', partial(check_large_strides, call, memory)


def kernel_names() -> Set[str]:
    """Return the names of all kernels, by their sources."""
    folder = Path(kernels.__file__).parent
    return {name for path in folder.glob('*/*.py')
            for name in re.findall(r'^def (_\w+_kernel)\(', path.read_text(), re.MULTILINE)}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print a line for each case; return 1 if there are findings or if a kernel was not launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--short', action='store_true', help='a call for each kernel, in float32 and two orders')
    short = parser.parse_args(argv).short
    if not interpreted():
        return run_interpreted('lab.sanitize', *(['--short'] if short else []))
    torch.manual_seed(0)
    left, failed = kernel_names(), 0
    for name, run in checks(short):
        watch = run()
        left -= watch.launched
        failed += bool(watch.findings)
        print(f"{name}: {'; '.join(watch.findings) or 'ok'} ({', '.join(sorted(watch.launched))})", flush=True)
    if left:
        print(f"not launched: {', '.join(sorted(left))}")
    print(f'{failed} cases with findings')
    return int(bool(failed or left))


if __name__ == '__main__':
    sys.exit(main())
