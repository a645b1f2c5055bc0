"""Times on a GPU: replays of captured CUDA graphs on rotating inputs, and eager calls beside them.

An eager call of a small kernel takes as long as Python needs to launch it. A captured graph launches without Python, so
its time is that of the kernels. Its calls take turns with copies of the inputs, so that they do not find them in the
GPU's cache, as a network's layers would not.
"""
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .measure import Call, interleaved, percentiles, time_interleaved

# Copies of the inputs together exceed the second-level cache of an H100 (50 MB) or H200 several times.
_ROTATED_BYTES, _MOST_COPIES = 2.5e8, 32


class Rotating:
    """One call for each copy of its inputs. As a plain call, it runs the first."""

    def __init__(self, calls: Sequence[Call]):
        self.calls = list(calls)

    def __call__(self) -> Any:
        return self.calls[0]()


def _parts(call: Call) -> List[Call]:
    return call.calls if isinstance(call, Rotating) else [call]


class Times(NamedTuple):
    """Times of calls by name."""
    # {'p20', 'p50', 'p80'} in milliseconds: on a CPU of a call, on a GPU of a call within a captured graph, or
    # of an eager call if it was not captured
    ms: Dict[str, Dict[str, float]]
    # on a GPU, of a call from an empty queue. It contains the time that Python needs to launch the kernels.
    eager_ms: Dict[str, Dict[str, float]]
    graphs: Dict[str, str]    # on a GPU, how each call was captured, or why not

    def speedup(self, fast: str, slow: str) -> float:
        """Ratio of two median times, both of captured calls or both of eager ones."""
        captured = all(self.graphs.get(name, '').startswith('captured') for name in (fast, slow))
        times = self.ms if captured or not self.graphs else self.eager_ms
        return times[slow]['p50'] / times[fast]['p50']

    def record(self) -> Dict[str, Any]:
        """The fields of a benchmark record."""
        return {'times_ms': self.ms, **({'eager_ms': self.eager_ms, 'graphs': self.graphs} if self.graphs else {})}


def copies(inputs: Sequence[Tensor]) -> List[List[Tensor]]:
    """Return the inputs and as many copies of them as rotation needs: at least one, unless they exceed the cache."""
    size = max(1, sum(x.numel() * x.element_size() for x in inputs))
    count = min(_MOST_COPIES, max(1, round(_ROTATED_BYTES / size)))
    return [list(inputs), *([_copy(x) for x in inputs] for _ in range(count - 1))]


def _copy(x: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def capture(calls: Sequence[Call]) -> Call:
    """Capture calls in one CUDA graph, after two calls of each that compile and allocate.

    Returns:
        A function that replays the graph.

    Raises:
        Exception: A call fails, or does what a graph cannot hold (such as waiting for the GPU).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            result = call()
            # Without rotation a network's output may be large, and its memory is free for the next call.
            results.append(result if len(calls) > 1 else None)
            del result
    graph.replay()
    torch.cuda.synchronize()

    def replay() -> None:
        graph.replay()
    replay.held = results                                        # the memory that the graph writes to
    return replay


def event_ms(call: Call) -> float:
    """Milliseconds of a call on the GPU, from an empty queue: the time of late launches counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_calls(calls: Mapping[str, Call], repeats: int, per_round: Optional[Mapping[str, int]] = None,
               device: str = 'cpu') -> Times:
    """Time several calls in turn: as `time_interleaved` does on a CPU, and by captured graphs on a GPU."""
    if device != 'cuda':
        return Times(time_interleaved(calls, repeats, per_round), {}, {})
    return time_graphs(calls, repeats, per_round)


def time_graphs(calls: Mapping[str, Call], repeats: int, per_round: Optional[Mapping[str, int]] = None,
                capture: Callable[[Sequence[Call]], Call] = capture, clock: Callable[[Call], float] = event_ms
                ) -> Times:
    """Time several calls in turn on a GPU, captured and eager; a `Rotating` one is captured for each copy of its
    inputs.

    The order changes from round to round. A call is timed once in each, or as often as `per_round` says. One that
    cannot be captured has its eager time in `ms`, and `graphs` says why. `capture` captures calls and returns their
    replay, and `clock` measures a call in milliseconds.
    """
    replays: Dict[str, Call] = {}
    graphs: Dict[str, str] = {}
    for name, call in calls.items():
        parts = _parts(call)
        try:
            replays[name] = capture(parts)
            graphs[name] = f'captured, {len(parts)} call(s) on {len(parts)} set(s) of inputs'
        except Exception as error:                               # compilers and CUDA raise anything
            graphs[name] = f'not captured: {type(error).__name__}: {" ".join(str(error).split())[:200]}'
    samples: Dict[str, List[float]] = {name: [] for name in calls}
    eager: Dict[str, List[float]] = {name: [] for name in calls}
    for name, call in interleaved(calls, repeats, per_round):
        eager[name].append(clock(call))
        if name in replays:
            samples[name].append(clock(replays[name]) / len(_parts(call)))
    eager_ms = {name: percentiles(times) for name, times in eager.items()}
    return Times({name: percentiles(times) if times else eager_ms[name] for name, times in samples.items()}, eager_ms,
                 graphs)


def graph_ms(call: Call, repeats: int = 5, capture: Callable[[Sequence[Call]], Call] = capture,
             clock: Callable[[Call], float] = event_ms) -> float:
    """Median milliseconds of a call within a captured graph.

    Raises:
        Exception: The call fails or cannot be captured.
    """
    parts = _parts(call)
    replay = capture(parts)
    return percentiles([clock(replay) for _ in range(repeats)])['p50'] / len(parts)
