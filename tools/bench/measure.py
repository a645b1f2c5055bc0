"""Measuring in one process: interleaved timings, peak memory, operations, and what the figures were measured with."""
import ctypes
import gc
import os
import platform
import random
import subprocess
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from ... import __version__

Call = Callable[[], Any]

# Sides of the square product, and bytes of the copy, that the rates of the floor are measured with.
GEMM_SIZE = {'cpu': 1024, 'cuda': 8192}
COPY_BYTES = {'cpu': 1 << 26, 'cuda': 1 << 30}
# A peak mark this far above the resident set right after its reset was not reset: some sandboxes accept the write and
# ignore it. Both are kept by page counters that lag a little, so the two are never quite equal.
_RESET_SLACK = 16 * 2 ** 20


def percentiles(samples: Sequence[float]) -> Dict[str, float]:
    """p20, p50 (median) and p80 of the samples, in their unit."""
    levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    values = torch.tensor(samples, dtype=torch.float64).quantile(levels)
    return dict(zip(('p20', 'p50', 'p80'), values.tolist(), strict=True))


def time_interleaved(calls: Mapping[str, Call], repeats: int, per_round: Optional[Mapping[str, int]] = None,
                     device: str = 'cpu') -> Dict[str, Dict[str, float]]:
    """Time of each call, taken in turn so that a slow spell of the machine falls on all of them alike, and in another
    order each round: no call always finds the caches as the same other one, a large copy say, has left them.

    Args:
        calls: what to time, by name; each is called once beforehand, untimed.
        repeats: rounds.
        per_round: how many times a call is timed in each round, where not once.
        device: 'cpu', or 'cuda' to time by events on the device.

    Returns:
        For each name {'p20', 'p50', 'p80'}, in milliseconds.
    """
    samples: Dict[str, List[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    orders = random.Random(0)
    for _ in range(repeats):
        for name, call in orders.sample(list(calls.items()), len(calls)):
            for _ in range((per_round or {}).get(name, 1)):
                samples[name].append(_time_cuda(call) if device == 'cuda' else _time_cpu(call))
    return {name: percentiles(taken) for name, taken in samples.items()}


def _time_cpu(call: Call) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    result = call()
    elapsed = (time.perf_counter() - start) * 1e3
    del result                                   # freeing it is not the call's work, nor the next one's
    return elapsed


def _time_cuda(call: Call) -> float:
    """Milliseconds of a call on the device, with its queue empty before: launches that the CPU is late with count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _status(field: str) -> Optional[int]:
    """A field of /proc/self/status in bytes, or None where there is no such file or field."""
    try:
        lines = Path('/proc/self/status').read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{field}:')]
    return values[0] if values else None


def _resident() -> Optional[int]:
    """Resident memory of this process in bytes, or None where /proc does not tell."""
    try:
        pages = int(Path('/proc/self/statm').read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf('SC_PAGE_SIZE')


def _reset_peak() -> bool:
    """Set the kernel's mark of this process' peak memory (VmHWM) to what it holds now; False where that cannot be."""
    try:
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        return False
    peak, now = _status('VmHWM'), _status('VmRSS')
    return peak is not None and now is not None and peak - now < _RESET_SLACK


def _release_free_memory() -> None:
    """Give memory that the C allocator keeps for later back, or the next call would use it and seem to need less."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):      # not glibc
        pass


class _Sampler(threading.Thread):
    """Watches the resident memory every millisecond: a peak shorter than that, or while the GIL is held, is missed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.done = _resident() or 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.001):
            self.peak = max(self.peak, _resident() or 0)

    def stop(self) -> int:
        """The peak so far, in bytes."""
        self.done.set()
        self.join()
        return max(self.peak, _resident() or 0)


def peak_memory(call: Call, beyond_output: bool = False, device: str = 'cpu') -> Optional[float]:
    """How far the memory of the process (or of a CUDA device) rises during one call, in MB (10^6 bytes).

    Call it before anything large has run: warm up with a tiny problem, so that lazy initialisation is not counted and
    little freed memory is left to be used again.

    Args:
        call: what to run, once.
        beyond_output: do not count the tensor that the call returns.
        device: 'cpu' or 'cuda'.

    Returns:
        MB, or None on systems that do not tell (no /proc).
    """
    if device == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, result = torch.cuda.memory_allocated(), call()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before - _size(result, beyond_output)) / 1e6
    _release_free_memory()
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
    return max(0, peak - before - _size(result, beyond_output)) / 1e6


def _size(result: Any, counted: bool) -> int:
    """Bytes of the tensors that a call returned, if they are to be counted."""
    tensors = [result] if isinstance(result, torch.Tensor) else result if isinstance(result, (tuple, list)) else []
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor)) if counted else 0


def gemm(device: str = 'cpu', dtype: torch.dtype = torch.float32) -> Call:
    """A square matrix product of `gemm_flops` operations: what the floor's rate of arithmetic is measured with."""
    x, y = (torch.randn(GEMM_SIZE[device], GEMM_SIZE[device], device=device).to(dtype) for _ in range(2))
    return lambda: x @ y


def gemm_flops(device: str = 'cpu') -> int:
    return 2 * GEMM_SIZE[device] ** 3


def copy(device: str = 'cpu') -> Call:
    """A copy that reads and writes COPY_BYTES each: what the floor's rate of moving memory is measured with."""
    source = torch.randint(0, 255, (COPY_BYTES[device],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def count_macs(call: Call) -> int:
    """Multiply-accumulate operations of one call: half of what torch's flop counter sees."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2


def floor(macs: int, gemm_ms: float, device: str = 'cpu', moved: Optional[int] = None,
          copy_ms: Optional[float] = None) -> Dict[str, Any]:
    """The least time for the arithmetic and, where the bytes are known, for moving them; the longer one binds.

    Args:
        macs: multiply-accumulate operations.
        gemm_ms: median time of `gemm()`, in milliseconds.
        device: where both were measured.
        moved: bytes that must be read or written.
        copy_ms: median time of `copy()`, in milliseconds.

    Returns:
        {'ms', 'macs', 'gemm_gflops'} and, with `moved`, {'bytes', 'copy_gbs', 'binds'}: the floor in milliseconds and
        what it was computed from (10^9 operations/s, 10^9 bytes/s), and 'arithmetic' or 'memory'.
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
    """How many CPUs the rest of the machine keeps busy, from here to `cpus()`: it slows threads that wait for each
    other many times over, and no ratio survives that."""

    def __init__(self) -> None:
        self.busy, self.own, self.clock = self._busy(), time.process_time(), time.monotonic()

    @staticmethod
    def _busy() -> Optional[float]:
        """Seconds that all CPUs together have not been idle, those that a hypervisor took away included."""
        try:
            user, nice, system, _, _, irq, softirq, steal = Path('/proc/stat').read_text().split()[1:9]
        except (OSError, ValueError):
            return None
        return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf('SC_CLK_TCK')

    def cpus(self) -> Optional[float]:
        """CPUs that others used on average, or None on systems that do not tell (no /proc)."""
        busy, wall = self._busy(), time.monotonic() - self.clock
        if busy is None or self.busy is None or wall <= 0:
            return None
        return max(0.0, busy - self.busy - (time.process_time() - self.own)) / wall


def _cpu_model() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return (names or [platform.processor()])[0] or platform.machine()


def _git(*arguments: str) -> Optional[subprocess.CompletedProcess]:
    """git in the checkout, or None where there is none to run."""
    root = Path(__file__).resolve().parents[2]
    try:
        # Without optional locks it never writes to the index, so it cannot disturb another git at work.
        return subprocess.run(['git', '--no-optional-locks', '-C', str(root), *arguments], capture_output=True,
                              text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> Dict[str, Any]:
    """{'commit', 'modified'}: the checkout's commit and whether its Python files differ from it; both None without."""
    answer = _git('rev-parse', '--show-toplevel', 'HEAD')
    lines = answer.stdout.split('\n') if answer and answer.returncode == 0 else []
    # An installed package may lie inside somebody else's repository, whose commit would say nothing.
    if not lines or Path(lines[0]).resolve() != Path(__file__).resolve().parents[2]:
        return {'commit': None, 'modified': None}
    changes = _git('diff', '--quiet', 'HEAD', '--', '*.py')
    return {'commit': lines[1], 'modified': {0: False, 1: True}.get(changes.returncode if changes else -1)}


def _gpu(device: str) -> Dict[str, Any]:
    """Name of the GPU, its clocks as found and its driver's versions; nothing for a CPU."""
    if device != 'cuda':
        return {}
    query = ['nvidia-smi', '--query-gpu=clocks.sm,clocks.mem,driver_version', '--format=csv,noheader', '-i', '0']
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found = ''
    import triton
    return {'gpu': torch.cuda.get_device_name(), 'clocks': found or None,
            'cuda': torch.version.cuda or torch.version.hip, 'triton': triton.__version__}


def environment(device: str = 'cpu') -> Dict[str, Any]:
    """What a figure must be read with: processor, threads, versions, commit and date (UTC, ISO 8601)."""
    return {'device': device, **_gpu(device), 'cpu': _cpu_model(), 'cpus': os.cpu_count(),
            'threads': torch.get_num_threads(), 'torch': torch.__version__, 'timm': timm.__version__,
            'subquad': __version__, 'python': platform.python_version(), **commit(),
            'date': datetime.now(timezone.utc).isoformat(timespec='seconds')}
