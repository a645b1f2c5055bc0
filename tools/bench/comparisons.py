"""Comparisons of operators and of models: the measurements behind most presets."""
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch
from torch import Tensor

from ..common.cli import UserError
from ..engine import zoo
from . import networks
from . import operators as ops
from .graphs import Rotating, Times, copies, time_calls
from .measure import copy, count_macs, floor, gemm, peak_memory
from .metrics import metric, peak_memory_metrics, ratio

Call = Callable[[], Any]
_RATE_SAMPLES = 5          # matrix products and copies in each round
# These implementations are compiled for the sizes of their first call, so a tiny warm-up does not help them.
_COMPILED = ('compiled', 'flex')


def working(calls: Mapping[str, Call], first: str) -> Dict[str, Call]:
    """Run each call once and keep those that succeed; print why the others are left out."""
    kept = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:                   # compilers and other libraries raise anything
            message = f'{name}: {type(error).__name__}: {" ".join(str(error).split())[:200]}'
            if name == first:
                raise UserError(message) from error
            print(f'left out: {message}')
            continue
        kept[name] = call
    return kept


def _speedups(names: Sequence[str], times: Times, least: Mapping[str, float]) -> List[Dict[str, Any]]:
    """How much faster the first implementation is than each other one."""
    first = names[0]
    return [metric(f'speed-up of {first} over {name}', times.speedup(first, name) if name in times.ms else None, 'x',
                   at_least=least.get(name))
            for name in dict.fromkeys([*names[1:], *least]) if name != first]


def compare_operator(repeats: int, *, op: str, grid: ops.Grid, batch: int = 1, heads: int = 8, dim: int = 32,
                     dtype: str = 'float32', device: str = 'cpu', names: Sequence[str] = (), backward: bool = False,
                     min_speedup: Optional[Mapping[str, float]] = None, max_memory_mb: Optional[float] = None,
                     min_memory_saving: Optional[Mapping[str, float]] = None,
                     min_bandwidth_share: Optional[float] = None) -> Dict[str, Any]:
    """Compare implementations of an operator on a grid of tokens, without its gradients or with them (`backward`).

    `names` are the implementations (default: all that make sense on the device). `dtype` is that of q, k and v; step
    logs are float32. All targets are for the first implementation: its speed-up over others and its saving of peak
    memory by their names, its peak memory in MB beyond inputs and output, and its share of the copy's bandwidth for the
    bytes that must be moved.

    Returns:
        A record without its metadata: {'times_ms', 'peak_mb', 'floor', 'metrics'}; on a GPU also 'eager_ms' and
        'graphs' (see `graphs.Times`).
    """
    kind = getattr(torch, dtype)
    inputs = ops.OPERATORS[op].inputs(batch, heads, grid, dim, kind, device)
    tiny = ops.OPERATORS[op].inputs(1, 1, (2, 2), dim, kind, device)
    names = list(names) or ops.available(op, inputs)
    with torch.enable_grad() if backward else torch.no_grad():
        calls, peaks = _calls_and_peaks(op, names, inputs, tiny, backward, device)
        macs = ops.multiply_adds(op, inputs, backward)
        rates = {'gemm': gemm(device, kind), 'copy': copy(device)}
        times = time_calls({**calls, **rates}, repeats, dict.fromkeys(rates, _RATE_SAMPLES), device)
    first, moved = names[0], ops.bytes_moved(op, inputs, backward)
    low = floor(macs, times.ms['gemm']['p50'], device, moved, times.ms['copy']['p50'])
    ms = times.ms[first]['p50']
    return {**times.record(), 'peak_mb': peaks, 'floor': low, 'metrics': [
        *_speedups(names, times, min_speedup or {}),
        metric(f'{first}: time / floor', ms / low['ms'], 'x'),
        metric(f'{first}: arithmetic rate', 2e-6 * macs / ms, 'GFLOP/s'),
        metric(f'{first}: memory traffic', 1e-6 * moved / ms, 'GB/s'),
        metric(f'{first}: share of copy bandwidth', 1e-6 * moved / ms / low['copy_gbs'], '',
               at_least=min_bandwidth_share),
        *peak_memory_metrics(peaks, {first: max_memory_mb}),
        *(metric(f'memory saving of {first} over {name}', ratio(peaks.get(name), peaks[first]), 'x', at_least=least)
          for name, least in (min_memory_saving or {}).items())]}


def _calls_and_peaks(op: str, names: Sequence[str], inputs: Sequence[Tensor], tiny: Sequence[Tensor], backward: bool,
                     device: str) -> Any:
    """The implementations that run, as calls by name, and their peak memory.

    A tiny call comes before, so that the memory of lazy initialization does not count.
    """
    functions = {name: ops.operator_call(op, name) for name in names}
    with torch.no_grad():
        warm = working({name: partial(functions[name], *tiny) for name in names if name not in _COMPILED}, names[0])
    functions = {name: function for name, function in functions.items() if name in warm or name in _COMPILED}
    rotated = copies(inputs) if device == 'cuda' else [inputs]
    calls = {name: Rotating([ops.with_gradients(function, x) if backward else partial(function, *x) for x in rotated])
             for name, function in functions.items()}
    peaks = {name: peak_memory(call, True, device) for name, call in calls.items() if name in warm}
    calls = working(calls, names[0])
    peaks.update({name: peak_memory(call, True, device) for name, call in calls.items() if name not in peaks})
    return calls, peaks


def compare_models(repeats: int, *, names: Sequence[str], size: ops.Grid, batch: int, dtype: str = 'float32',
                   device: str = 'cpu', train: bool = False, max_over_floor: Optional[float] = None,
                   max_memory_mb: Optional[float] = None, min_speedup: Optional[Mapping[str, float]] = None
                   ) -> Dict[str, Any]:
    """Compare forward passes or training steps of models on the same images of `size` pixels.

    `names` are timm names, each optionally with @BACKEND, +compile or +autocast. A training step on images of a half
    type runs under autocast. All targets are for the first model: its time over the floor, its peak memory in MB beyond
    the models and their input, and its speed-up over others by their names. The record is like that of
    `compare_operator`.
    """
    images = torch.randn(batch, 3, *size, device=device).to(getattr(torch, dtype))
    calls, weights = {}, None
    for name in names:                                 # models of the same architecture get the same weights
        calls[name], own = networks.model_call(name, images, train, weights)
        weights = weights or own
    first = names[0]
    subject = networks.parse_model(first)
    architecture = subject.name
    small = images[:1] if zoo.size_options(architecture, size) else images[:1, :, :64, :64]
    # So that the memory of lazy initialization and of a compiler does not count:
    networks.model_call(first.replace('+compile', ''), small, False)[0]()
    if subject.compile:
        calls[first]()
    counted, _ = networks.model_call(f'{architecture}@portable', images, False)
    peaks = {first: peak_memory(calls[first], device=device)}
    calls = working(calls, first)
    peaks.update({name: peak_memory(call, device=device) for name, call in calls.items() if name != first})
    # Each product of the forward pass has two in the backward pass. (torch's counter would take the gradient of a
    # depthwise convolution for that of a dense one, so the backward pass is not counted.)
    macs = count_macs(counted) * (3 if train else 1)
    product = gemm(device, torch.bfloat16 if subject.autocast else images.dtype)
    times = time_calls({**calls, 'gemm': product}, repeats, {'gemm': _RATE_SAMPLES}, device)
    low = floor(macs, times.ms['gemm']['p50'], device)
    return {**times.record(), 'peak_mb': peaks, 'floor': low, 'metrics': [
        *_speedups(names, times, min_speedup or {}),
        metric(f'{first}: time / floor', times.ms[first]['p50'] / low['ms'], 'x', at_most=max_over_floor),
        *(metric(f'{name}: throughput', 1e3 * batch / times.ms[name]['p50'], 'images/s') for name in calls),
        *peak_memory_metrics(peaks, {first: max_memory_mb})]}
