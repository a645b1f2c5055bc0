"""Measuring in one process: interleaved times, peak memory, operations, floors and the load of other programs."""
import ctypes
import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..engine.records import environment

Call = Callable[[], Any]

# The floor takes its rates from a product of two square matrices of this side, and from a copy of this many bytes.
GEMM_SIZE = {'cpu': 1024, 'cuda': 8192}
COPY_BYTES = {'cpu': 1 << 26, 'cuda': 1 << 30}
# Some sandboxes accept the write that resets the peak, and ignore it. The peak counts as reset if it is less than this
# above the resident memory right after; page counters lag a little, so the two are never quite equal.
_RESET_SLACK = 16 * 2 ** 20


def percentiles(samples: Sequence[float]) -> Dict[str, float]:
    """Return p20, p50 (median) and p80 of the samples, in their unit."""
    levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    values = torch.tensor(samples, dtype=torch.float64).quantile(levels)
    return dict(zip(('p20', 'p50', 'p80'), values.tolist(), strict=True))


def time_interleaved(calls: Mapping[str, Call], repeats: int, per_round: Optional[Mapping[str, int]] = None
                     ) -> Dict[str, Dict[str, float]]:
    """Time several calls in turn on the CPU (on a GPU, `graphs.time_calls` does), after one untimed call of each.

    Each of `repeats` rounds times every call, so that a slow spell of the machine affects all of them alike: once, or
    as often as `per_round` says. The order changes from round to round, so that no call always finds the caches as the
    same other call (a large copy, say) has left them.

    Returns:
        {'p20', 'p50', 'p80'} in milliseconds, for each name.
    """
    samples: Dict[str, List[float]] = {name: [] for name in calls}
    for name, call in interleaved(calls, repeats, per_round):
        samples[name].append(_time_cpu(call))
    return {name: percentiles(times) for name, times in samples.items()}


def interleaved(calls: Mapping[str, Call], repeats: int, per_round: Optional[Mapping[str, int]] = None
                ) -> Iterator[Tuple[str, Call]]:
    """Run each call once, then give the calls to time with their names, in the order of `time_interleaved`."""
    for call in calls.values():
        call()
    orders = random.Random(0)
    for _ in range(repeats):
        for name, call in orders.sample(list(calls.items()), len(calls)):
            for _ in range((per_round or {}).get(name, 1)):
                yield name, call


def _time_cpu(call: Call) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    result = call()
    elapsed = (time.perf_counter() - start) * 1e3
    del result                                   # freed outside of any call's time
    return elapsed


def _status(field: str) -> Optional[int]:
    """Read a field of /proc/self/status in bytes; None without such a file or field."""
    try:
        lines = Path('/proc/self/status').read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{field}:')]
    return values[0] if values else None


def _resident() -> Optional[int]:
    """Resident memory of this process in bytes; None without /proc."""
    try:
        pages = int(Path('/proc/self/statm').read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf('SC_PAGE_SIZE')


def _reset_peak() -> bool:
    """Reset the peak memory of this process (VmHWM) to its current memory; return False where that is impossible."""
    try:
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        return False
    peak, now = _status('VmHWM'), _status('VmRSS')
    return peak is not None and now is not None and peak - now < _RESET_SLACK


class _Sampler(threading.Thread):
    """Sample the resident memory every millisecond.

    It misses peaks that are shorter than a millisecond or occur while the GIL is held.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.done = _resident() or 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.001):
            self.peak = max(self.peak, _resident() or 0)

    def stop(self) -> int:
        """Stop and return the peak in bytes."""
        self.done.set()
        self.join()
        return max(self.peak, _resident() or 0)


def peak_memory(call: Call, beyond_output: bool = False, device: str = 'cpu') -> Optional[float]:
    """Measure how far the memory of the process (or of a CUDA device) rises during one call, in MB (10^6 bytes).

    Call it before anything large has run, and after a tiny warm-up: then lazy initialization is not counted, and little
    freed memory is left that the call could use again. With `beyond_output`, the tensors that the call returns do not
    count. The result is None on systems without /proc.
    """
    if device == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, result = torch.cuda.memory_allocated(), call()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before - (_size(result) if beyond_output else 0)) / 1e6
    gc.collect()
    try:      # free memory goes back to the system, or the call would seem to need less
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):      # not glibc
        pass
    exact = _reset_peak()
    before = _status('VmRSS') if exact else _resident()
    if before is None:
        return None
    if exact:
        result = call()
        peak = _status('VmHWM')
    else:
        sampler = _Sampler()
        sampler.start()
        try:
            result = call()
        finally:
            peak = sampler.stop()
    return max(0, peak - before - (_size(result) if beyond_output else 0)) / 1e6


def _size(result: Any) -> int:
    """Bytes of the tensors that a call returned."""
    tensors = [result] if isinstance(result, torch.Tensor) else result if isinstance(result, (tuple, list)) else []
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def gemm(device: str = 'cpu', dtype: torch.dtype = torch.float32) -> Call:
    """A product of square matrices with `gemm_flops` operations; it gives the floor's rate of arithmetic."""
    x, y = (torch.randn(GEMM_SIZE[device], GEMM_SIZE[device], device=device).to(dtype) for _ in range(2))
    return lambda: x @ y


def gemm_flops(device: str = 'cpu') -> int:
    """Floating-point operations of `gemm`."""
    return 2 * GEMM_SIZE[device] ** 3


def copy(device: str = 'cpu') -> Call:
    """A copy that reads and writes COPY_BYTES each; it gives the floor's memory bandwidth."""
    source = torch.randint(0, 255, (COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def count_macs(call: Call) -> int:
    """Multiply-accumulate operations of one call: half of the operations that torch's flop counter sees."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2


def floor(macs: int, gemm_ms: float, device: str = 'cpu', moved: Optional[int] = None,
          copy_ms: Optional[float] = None) -> Dict[str, Any]:
    """Compute the least time that a machine needs for given arithmetic and memory traffic.

    The floor is the longer of two times: the operations at the rate of a large matrix product, `gemm()` with a median
    time of `gemm_ms`, and the bytes that must be read or written, if known, at the rate of a large copy, `copy()` with
    `copy_ms`.

    Returns:
        {'ms', 'macs', 'gemm_gflops'}: the floor, the operations and their rate (10^9 operations/s). With `moved` also
        {'bytes', 'copy_gbs', 'binds'}: the bytes, their rate (10^9 bytes/s), and the longer part, 'arithmetic' or
        'memory'.
    """
    rate = gemm_flops(device) / gemm_ms                                   # operations per millisecond
    result: Dict[str, Any] = {'ms': 2 * macs / rate, 'macs': macs, 'gemm_gflops': rate / 1e6}
    if moved is not None and copy_ms is not None:
        bandwidth = 2 * COPY_BYTES[device] / copy_ms                      # bytes per millisecond
        result.update(bytes=moved, copy_gbs=bandwidth / 1e6,
                      binds='memory' if moved / bandwidth > result['ms'] else 'arithmetic')
        result['ms'] = max(result['ms'], moved / bandwidth)
    return result


class OtherLoad:
    """Measure how many CPUs other programs keep busy between the creation of this object and `cpus()`.

    Threads that wait for each other slow down several times when they lose a CPU, and then no ratio holds.
    """

    def __init__(self) -> None:
        self.busy, self.own, self.clock = self._busy(), self._own(), time.monotonic()

    @staticmethod
    def _own() -> float:
        """CPU seconds of this process and of its children that have ended, such as a compiler."""
        return sum(os.times()[:4])

    @staticmethod
    def _busy() -> Optional[float]:
        """Busy seconds of all CPUs together, including time that a hypervisor took."""
        try:
            user, nice, system, _, _, irq, softirq, steal = Path('/proc/stat').read_text().split()[1:9]
        except (OSError, ValueError):
            return None
        return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf('SC_CLK_TCK')

    def cpus(self) -> Optional[float]:
        """Average number of CPUs that other programs used; None on systems without /proc."""
        busy, wall = self._busy(), time.monotonic() - self.clock
        if busy is None or self.busy is None or wall <= 0:
            return None
        return max(0.0, busy - self.busy - (self._own() - self.own)) / wall


def measured(name: str, description: str, measure: Callable[[int], Dict[str, Any]], repeats: int,
             threads: int, device: str = 'cpu') -> Dict[str, Any]:
    """Measure in this process, and return the record with its metadata.

    `name` and `description` say what is measured, and `measure` returns a record for a number of rounds.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if device == 'cpu':                         # workers that compile would be taken for other programs
        os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')
    others = OtherLoad()
    found = measure(repeats)
    return {'preset': name, 'description': description, 'repeats': repeats, **found, 'other_cpus': others.cpus(),
            **environment(device)}
