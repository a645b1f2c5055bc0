"""Timing by captured graphs, without a GPU: capturing and the clock are replaced. No test asserts a time."""
from unittest.mock import MagicMock

import pytest
import torch

from subquad.tools.bench import graphs, metrics
from subquad.tools.bench.comparisons import compare_operator


class Gpu:
    """Captures calls, refuses those named in `refused`, and counts milliseconds: 1 a launch in a graph, 10 eager."""

    def __init__(self, *refused):
        self.refused, self.log = refused, []

    def capture(self, calls):
        results = [call() for call in calls]
        if set(results) & set(self.refused):
            raise RuntimeError('operation not permitted\nwhen stream is capturing')

        def replay():
            self.log.append(results)
            return float(len(results))
        replay.captured = True
        return replay

    def clock(self, call):
        result = call()
        return result if getattr(call, 'captured', False) else 10.0


def _times(gpu, calls, repeats=3):
    return graphs.time_graphs(calls, repeats, {'b': 2}, capture=gpu.capture, clock=gpu.clock)


def test_captured_and_eager_times_stand_beside_each_other():
    gpu = Gpu()
    times = _times(gpu, {'a': lambda: 'a', 'b': graphs.Rotating([lambda: 'b0', lambda: 'b1', lambda: 'b2'])})
    assert times.ms['a']['p50'] == times.ms['b']['p50'] == 1            # per call, not per replay of three
    assert times.eager_ms['a']['p50'] == times.eager_ms['b']['p50'] == 10
    assert gpu.log.count(['a']) == 3 and gpu.log.count(['b0', 'b1', 'b2']) == 6
    assert times.graphs == {'a': 'captured, 1 call(s) on 1 set(s) of inputs',
                            'b': 'captured, 3 call(s) on 3 set(s) of inputs'}
    assert times.speedup('a', 'b') == 1


def test_what_cannot_be_captured_is_said_and_compared_eagerly():
    times = _times(Gpu('b'), {'a': lambda: 'a', 'b': lambda: 'b', 'c': lambda: 'c'})
    assert times.graphs['b'] == 'not captured: RuntimeError: operation not permitted when stream is capturing'
    assert times.ms['b'] == times.eager_ms['b'] and times.ms['a']['p50'] == 1
    assert times.speedup('a', 'b') == 1 and times.speedup('a', 'c') == 1
    record = {**times.record(), 'floor': None}
    rows = {name: value for name, value, _, _ in metrics.time_rows(record)}
    assert rows['a: time'] == '1 ms (1 to 1)' and rows['a: eager time'] == '10 ms (10 to 10)'
    assert rows['b: graph'].startswith('not captured: RuntimeError') and 'a: graph' not in rows


def test_one_graph_time():
    gpu = Gpu()
    call = graphs.Rotating([lambda: 1, lambda: 2])
    assert graphs.graph_ms(call, capture=gpu.capture, clock=gpu.clock) == 1
    with pytest.raises(RuntimeError, match='capturing'):
        graphs.graph_ms(call, capture=Gpu(2).capture, clock=gpu.clock)


@pytest.mark.parametrize('elements, count', [(10 ** 5, 32), (10 ** 7, 6), (10 ** 9, 1)])
def test_copies_exceed_the_cache(elements, count, monkeypatch):
    """Inputs of 40 MB take six sets; copies keep strides and values."""
    monkeypatch.setattr(graphs, '_copy', lambda x: x)
    assert len(graphs.copies([torch.empty(elements, device='meta')])) == count


def test_copies_keep_values_and_strides():
    x = torch.randn(2, 3, 4).permute(2, 0, 1)
    first, second, *_ = graphs.copies([x])
    assert first[0] is x and second[0].data_ptr() != x.data_ptr()
    assert second[0].stride() == x.stride() and torch.equal(second[0], x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_an_operator_is_captured_on_a_gpu():
    record = compare_operator(3, op='polyline_attention', grid=(14, 14), batch=2, dtype='bfloat16', device='cuda',
                              names=('triton', 'portable'))
    assert record['graphs']['triton'].startswith('captured')
    assert record['times_ms']['triton']['p50'] <= record['eager_ms']['triton']['p50']


@pytest.mark.parametrize('count', [1, 3])
def test_a_graph_holds_every_call(count, monkeypatch):
    """Two calls before the capture compile and allocate; the third is the graph's."""
    cuda, inside, captured = MagicMock(), [], []
    cuda.graph.return_value.__enter__.side_effect = lambda *_: inside.append(True)
    cuda.graph.return_value.__exit__.side_effect = lambda *_: inside.clear()
    monkeypatch.setattr(graphs.torch, 'cuda', cuda)
    graphs.capture([lambda n=n: captured.append(n) if inside else None for n in range(count)])
    assert captured == list(range(count))
