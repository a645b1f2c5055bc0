"""The benchmark tool: meters, implementations, records and the command line. No test asserts a time."""
import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad import kernels
from subquad.tools import benchmark
from subquad.tools.bench import baselines, comparisons, measure, metrics, networks, operators, parts
from subquad.tools.bench.comparisons import compare_models, compare_operator
from subquad.tools.bench.networks import Subject
from subquad.tools.common import cli
from subquad.tools.engine import records

MB = 1_000_000


def _record(preset, threads=2, repeats=None):
    """A record like those of the tool, without measuring."""
    return {'preset': preset, 'description': 'w', 'repeats': repeats or 1,
            'times_ms': {'x': {'p20': 1, 'p50': 2, 'p80': 3}},
            'peak_mb': {'x': None}, 'floor': {'ms': 1.0, 'macs': 10 ** 9, 'gemm_gflops': 5.0},
            'metrics': [metrics.metric('slow', 3.0, 'x', at_most=2), metrics.metric('quick', 3.0, 'x', at_least=2),
                        metrics.metric('blind', None, 'MB', at_most=2)],
            'other_cpus': 1.5, **records.environment(), 'threads': threads, 'cpus': 2}


# --- meters

def test_percentiles_of_samples():
    assert measure.percentiles([5, 1, 2, 4, 3, 6]) == pytest.approx({'p20': 2, 'p50': 3.5, 'p80': 5})


def test_calls_are_timed_in_turn():
    order = []
    times = measure.time_interleaved({'a': lambda: order.append('a'), 'b': lambda: order.append('b')}, 9, {'b': 2})
    rounds = ''.join(order)[2:]                                 # the first calls are not timed
    rounds = [rounds[n:n + 3] for n in range(0, 27, 3)]
    assert order[:2] == ['a', 'b'] and set(rounds) == {'abb', 'bba'}
    assert set(times) == {'a', 'b'} and set(times['a']) == {'p20', 'p50', 'p80'}


def _rise():
    """60 MB, of which 20 MB are returned."""
    block = torch.ones(10 * MB)
    kept = torch.ones(5 * MB)
    measure.time.sleep(0.02)                                    # for the sampler, which looks every millisecond
    del block
    return kept


def test_peak_memory_of_a_known_allocation():
    if measure._resident() is None:
        pytest.skip('this system does not tell')
    assert measure.peak_memory(_rise) == pytest.approx(60, abs=8)
    assert measure.peak_memory(_rise, beyond_output=True) == pytest.approx(40, abs=8)
    assert measure.peak_memory(lambda: None) < 8                # the marks of the calls before are gone


def test_peak_memory_by_sampling_and_without_proc(monkeypatch):
    monkeypatch.setattr(measure, '_reset_peak', lambda: False)
    if measure._resident() is not None:
        assert measure.peak_memory(_rise, beyond_output=True) == pytest.approx(40, abs=8)
    monkeypatch.setattr(measure, '_resident', lambda: None)
    assert measure.peak_memory(_rise) is None


def test_commit_is_of_this_checkout_or_none(monkeypatch):
    found = records.commit()
    assert found['commit'] is None or len(found['commit']) == 40
    monkeypatch.setattr(records, '__file__', '/elsewhere/tools/engine/records.py')
    assert records.commit() == {'commit': None, 'modified': None}


@pytest.mark.parametrize('threads, cpus, others, expected', [
    (2, 2, 0.05, False), (2, 2, 0.5, True), (2, 8, 3.0, False), (2, 8, 6.5, True), (2, 2, None, False),
    (4, 2, 0.0, False)])                                        # more threads than CPUs is the user's own choice
def test_records_with_too_few_free_cpus_are_disturbed(threads, cpus, others, expected):
    assert metrics.disturbed({'threads': threads, 'cpus': cpus, 'other_cpus': others}) is expected


# --- profiles

@pytest.mark.parametrize('name, shapes, part', [
    ('aten::conv2d', [[1, 8, 5, 5], [8, 1, 3, 3], []], 'depthwise convolutions'),
    ('aten::conv2d', [[1, 8, 5, 5], [16, 8, 1, 1], []], 'products'),
    ('mkldnn::_convolution_pointwise', [[1, 8, 5, 5], [16, 8, 3, 3], []], 'dense convolutions'),
    ('aten::addmm', [], 'products'), ('aten::bmm', [], 'attention'), ('subquad::quadtree_solve', [], 'attention'),
    ('subquad::depthwise_conv_native_fwd', [], 'depthwise convolutions'), ('aten::native_layer_norm', [], 'norms'),
    ('aten::silu_', [], 'activations'), ('aten::copy_', [], 'copies'), ('aten::add_', [], 'elementwise'),
    ('aten::unflatten', [], 'overhead of calls'), ('aten::grid_sampler', [], None)])
def test_part_of_an_operator(name, shapes, part):
    assert parts.part_of(name, shapes) == part


@pytest.mark.parametrize('name, attention', [
    ('test_ppma', 'subquad::polyline_attention'), ('test_ppma@portable', 'subquad::polyline_attention'),
    ('test_myo', 'subquad::quadtree_attention'), ('test_lcsm', 'subquad::eos_'),
    ('test_mobilevitv2', 'subquad::separable_attention'), ('test_vit', 'aten::scaled_dot_product_attention'),
    ('test_resnet', None)])
def test_parts_of_a_model(name, attention):
    size = 160 if name == 'test_vit' else 64
    call, _ = networks.model_call(name, torch.randn(1, 3, size, size), False)
    with torch.no_grad():
        expected = call()
    found, _ = parts.profile_parts(call, 2)
    torch.testing.assert_close(call(), expected)
    assert 'forward' not in vars(call.network) and all(part.ms > 0 for part in found.values())
    reductions = {f'aten::{x}' for x in ('mean', 'amax', 'max_pool2d', 'avg_pool2d', 'adaptive_avg_pool2d')}
    assert set(found.get('other', parts.Part(0, 0, {})).operators) <= reductions
    assert {'products', 'overhead of calls'} <= set(found) and ('attention' in found) == (attention is not None)
    assert attention is None or any(x.startswith(attention) for x in found['attention'].operators)
    assert ('stem' in found) == (name != 'test_resnet')


def test_the_time_of_a_part_holds_what_it_calls():
    class Net(torch.nn.Module):
        def forward(self, x):
            return (x @ x).T.contiguous().angle()

    net = Net()
    call = partial(net, torch.ones(300, 300))
    call.network = net
    found, plain = parts.profile_parts(call, 3)
    assert set(found) == {'attention', 'copies', 'other', 'overhead of calls'} and plain > 0
    assert list(found['other'].operators) == ['aten::angle'] and found['other'].calls == 1
    table = parts.rows(found)
    assert sum(float(row[1]) for row in table) == pytest.approx(sum(part.ms for part in found.values()), abs=0.03)
    assert sum(float(row[2][:-1]) for row in table) == pytest.approx(100, abs=0.3)


# --- what is measured

def test_dense_baseline_computes_polyline_attention():
    inputs = [x.double() for x in operators.attention_inputs(2, 3, (4, 5), 8)]
    expected = kernels.polyline_attention(*inputs, backend='reference')
    torch.testing.assert_close(baselines.dense_polyline_attention(*inputs), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('op', operators.OPERATORS)
def test_implementations_agree(op):
    """All implementations that need neither a C++ compiler nor a GPU agree, and give the same inputs a gradient."""
    inputs = [x.double() for x in operators.OPERATORS[op].inputs(2, 2, (4, 6), 6)]
    expected = operators.operator_call(op, 'reference')(*inputs)
    gradients = operators.with_gradients(operators.operator_call(op, 'reference'), inputs)
    for name in operators.implementations(op):
        if name in ('portable', *operators.OPERATORS[op].baselines) and name not in ('flex', 'fla'):
            call = operators.operator_call(op, name)
            torch.testing.assert_close(call(*inputs), expected, rtol=1e-10, atol=1e-12)
            assert [x is None for x in operators.with_gradients(call, inputs)()] == [x is None for x in gradients()]


@pytest.mark.slow
@pytest.mark.parametrize('op', ['polyline_attention', 'decay_attention'])
def test_flex_attention_agrees(op):
    inputs = operators.attention_inputs(1, 2, (8, 16), 16)
    with torch.no_grad():
        expected = operators.operator_call(op, 'portable')(*inputs)
        torch.testing.assert_close(operators.operator_call(op, 'flex')(*inputs), expected, rtol=1e-4, atol=1e-4)


def test_bytes_moved_and_multiply_adds():
    inputs = operators.attention_inputs(1, 2, (3, 4), 8, torch.bfloat16)
    tokens = 2 * 12
    logs, data = 2 * 4 * tokens, 2 * 8 * tokens
    assert operators.bytes_moved('polyline_attention', inputs, False) == 3 * data + logs + data
    assert operators.bytes_moved('polyline_scan', inputs, False) == logs + 4 * data     # two passes
    assert operators.bytes_moved('polyline_scan', inputs, True) == 3 * logs + 2 * 5 * data
    assert operators.bytes_moved('decay_attention', inputs, False) == 3 * data + logs // 2 + data
    assert operators.multiply_adds('polyline_scan', inputs, False) == 2 * 3 * 8 * tokens
    assert operators.multiply_adds('polyline_attention', inputs, False) == 2 * 12 ** 2 * (8 + 8)
    inputs = operators.separable_inputs(1, 2, (2, 4), 8, torch.bfloat16)
    assert operators.bytes_moved('separable_attention', inputs, False) == 2 * 8 * (1 + 3 * 16)
    assert operators.multiply_adds('separable_attention', inputs, True) == 6 * 8 * 16


def test_floor_names_the_longer_part(monkeypatch):
    macs = measure.gemm_flops() // 2
    assert measure.floor(macs, 2.0, 'cpu', moved=measure.COPY_BYTES['cpu'], copy_ms=1.0)['binds'] == 'arithmetic'
    bound = measure.floor(macs, 2.0, 'cpu', moved=20 * measure.COPY_BYTES['cpu'], copy_ms=1.0)
    assert bound['binds'] == 'memory' and bound['ms'] == pytest.approx(10.0)


MEASUREMENTS = {
    'operator': (lambda: compare_operator(2, op='polyline_attention', grid=(3, 4), heads=2, dim=4,
                                          names=('portable', 'dense'), min_speedup={'dense': 1e9}, max_memory_mb=1e9),
                 {'portable', 'dense', 'gemm', 'copy'}, ['at least', None, None, None, None, 'at most', None]),
    'backward': (lambda: compare_operator(1, op='polyline_scan', grid=(3, 4), heads=1, dim=2, backward=True,
                                          names=('portable', 'reference')),
                 {'portable', 'reference', 'gemm', 'copy'}, [None] * 7),
    'separable': (lambda: compare_operator(2, op='separable_attention', grid=(4, 2), heads=1, dim=4,
                                           names=('portable', 'eager', 'matmul'), min_speedup={'eager': 1}),
                  {'portable', 'eager', 'matmul', 'gemm', 'copy'}, ['at least'] + [None] * 8),
    'model': (lambda: compare_models(1, names=('test_ppma', 'test_ppma@reference'), size=(64, 96), batch=2,
                                    max_over_floor=5),
              {'test_ppma', 'test_ppma@reference', 'gemm'}, [None, 'at most', None, None, None, None]),
    'train': (lambda: compare_models(1, names=('test_ppma@portable',), size=(64, 64), batch=2, train=True),
              {'test_ppma@portable', 'gemm'}, [None, None, None]),
}


@pytest.mark.parametrize('kind', MEASUREMENTS)
def test_measurement_gives_a_record(kind):
    make, names, bounds = MEASUREMENTS[kind]
    record = json.loads(json.dumps(make(), allow_nan=False))
    assert set(record) == {'times_ms', 'peak_mb', 'floor', 'metrics'}
    assert set(record['times_ms']) == names
    assert all(0 < t['p20'] <= t['p50'] <= t['p80'] for t in record['times_ms'].values())
    assert all(m['value'] is None or math.isfinite(m['value']) for m in record['metrics'])
    assert [m['bound'] for m in record['metrics']] == bounds
    assert all((m['met'] is None) == (m['target'] is None or m['value'] is None) for m in record['metrics'])
    floor = record['floor']
    if floor.get('binds') != 'memory':
        assert floor['ms'] == pytest.approx(2e-6 * floor['macs'] / floor['gemm_gflops'])
    if kind == 'operator':
        assert floor['macs'] == 2 * 12 ** 2 * (4 + 4)                  # q k' and the product with v
        assert record['metrics'][0]['met'] is False


def test_equal_architectures_get_equal_weights():
    from subquad.tools.bench.networks import model_call
    images = torch.rand(1, 3, 64, 64)
    first, weights = model_call('test_mobilevitv2', images, False)
    second, _ = model_call('test_mobilevitv2@reference', images, False, weights)
    other, _ = model_call('test_ppma', images, False, weights)
    torch.testing.assert_close(second(), first(), rtol=1e-4, atol=1e-5)
    assert other().shape == first().shape


def test_medians_over_processes():
    parts = [_record('p') for _ in range(3)]
    for n, part in enumerate(parts):
        part['metrics'][0]['value'], part['times_ms']['x']['p50'], part['other_cpus'] = n, n, n
    whole = metrics.medians(parts)
    assert whole['metrics'][0]['values'] == [0, 1, 2] and whole['metrics'][0]['value'] == 1
    assert whole['metrics'][0]['met'] is True and whole['metrics'][2]['value'] is None
    assert whole['times_ms']['x']['p50'] == 1 and whole['other_cpus'] == 2 and whole['processes'] == 3
    assert metrics.medians(parts[:1]) is parts[0]


def test_failing_implementation_is_left_out_unless_first(capsys):
    def fails():
        raise RuntimeError('no\nsuch thing')
    assert list(comparisons.working({'a': list, 'b': fails, 'c': list}, 'a')) == ['a', 'c']
    assert 'left out: b: RuntimeError: no such thing' in capsys.readouterr().out
    with pytest.raises(cli.UserError, match='b: RuntimeError: no such thing'):
        comparisons.working({'a': list, 'b': fails}, 'b')


@pytest.mark.parametrize('value, bounds, met', [
    (2, dict(at_least=2), True), (1.9, dict(at_least=2), False), (2, dict(at_most=2), True),
    (2.1, dict(at_most=2), False), (None, dict(at_most=2), None), (2, dict(), None)])
def test_metric_meets_its_target(value, bounds, met):
    assert metrics.metric('f', value, 'x', **bounds)['met'] is met


# --- models as the command names them: backend, compilation, autocast

def test_names_of_models_are_read():
    assert networks.parse_model('ppma_tiny') == Subject('ppma_tiny')
    assert networks.parse_model('ppma_tiny@portable+compile') == Subject('ppma_tiny', 'portable', compile=True)
    assert networks.parse_model('swin+autocast+compile') == Subject('swin', None, compile=True, autocast=True)
    for wrong in ('a@gpu', 'a+fast', 'a+compile+compile', 'a+'):
        with pytest.raises(cli.UserError, match='a model is NAME'):
            networks.parse_model(wrong)


@pytest.mark.parametrize('train', [False, True])
def test_autocast_is_on_for_the_model_that_asks_for_it(train, monkeypatch):
    seen = []
    monkeypatch.setattr(F, 'layer_norm', lambda x, *args, own=F.layer_norm: seen.append(x.dtype) or own(x, *args))
    for name in ('test_ppma', 'test_ppma+autocast'):
        networks.model_call(name, torch.zeros(1, 3, 64, 64), train)[0]()
    layers = len(seen) // 2
    assert seen == layers * [torch.float32] + layers * [torch.bfloat16] and layers == 10


@pytest.mark.slow
def test_models_under_autocast_are_compared_with_float32():
    record = compare_models(1, names=('test_ppma+autocast', 'test_ppma'), size=(64, 96), batch=2,
                            min_speedup={'test_ppma': 2})
    assert set(record['times_ms']) == {'test_ppma+autocast', 'test_ppma', 'gemm'}
    assert record['metrics'][0]['target'] == 2 and record['metrics'][0]['bound'] == 'at least'


# --- command line


def test_append_after_a_truncated_line(tmp_path):
    path = tmp_path / 'cpu.jsonl'
    path.write_text('{"preset": "a"}\n{"pres')
    records.append(path, {'preset': 'b'})
    records.append(path, {'preset': 'c'})
    assert path.read_text() == '{"preset": "a"}\n{"pres\n{"preset": "b"}\n{"preset": "c"}\n'


@pytest.mark.parametrize('argv, message', [
    (['--threads', '0'], '--threads must be at least 1'),
    (['--repeats', '-1'], '--repeats must be at least 1'),
    (['--batch', '0'], '--batch must be at least 1'),
    (['--size', '14x'], "--size must be imagenet, coco, .* got '14x'"),
    (['--implementations', 'portabel'], 'did you mean portable'),
    (['--operator', 'polyline_scn'], 'did you mean polyline_scan'),
])
def test_wrong_arguments(argv, message):
    with pytest.raises(cli.UserError, match=message):
        benchmark.main(['--operator', 'polyline_scan', *argv])


@pytest.mark.parametrize('argv, message', [
    (['ppma_tinny'], 'did you mean ppma_tiny'),
    (['ppma_tiny@cuda'], 'a model is NAME, NAME@BACKEND'),
    (['ppma_tiny+autocast', '--dtype', 'bfloat16'], 'starts from float32 images, and these are bfloat16'),
    pytest.param(['ppma_tiny', '--device', 'cuda'], 'torch finds no GPU here',
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')),
])
def test_wrong_models(argv, message):
    with pytest.raises(cli.UserError, match=message):
        benchmark.main(['--model', *argv])


@pytest.mark.parametrize('argv, message', [
    (['ppma_tinny'], 'did you mean ppma_tiny'), (['test_ppma+compile'], 'without [+]compile'),
    (['test_ppma', '--train'], 'without .* --train'), (['test_ppma+autocast', '--dtype', 'float16'], 'starts from')])
def test_wrong_profiles(argv, message):
    with pytest.raises(cli.UserError, match=message):
        benchmark.main(['--profile', *argv])


def test_a_profile_is_printed(capsys):
    before = torch.get_num_threads()
    try:
        benchmark.main(['--profile', 'test_myo+autocast', '--size', '64x96', '--threads', '1', '--repeats', '1'])
    finally:
        torch.set_num_threads(before)
    out = capsys.readouterr().out
    assert 'subquad::quadtree_attention' in out and 'overhead of calls' in out and 'without it' in out


def test_unwritable_folder_fails_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, 'measured', None)
    (tmp_path / 'file').touch()
    (tmp_path / 'folder' / 'cpu.jsonl').mkdir(parents=True)
    for out in ('file', 'file/below', 'folder'):
        with pytest.raises(cli.UserError, match='--out'):
            benchmark.main(['--operator', 'polyline_scan', '--out', str(tmp_path / out)])


def test_an_operator_and_models_are_measured(tmp_path, capsys):
    out = ['--threads', '1', '--repeats', '1', '--out', str(tmp_path / 'out')]
    before = torch.get_num_threads()
    try:
        benchmark.main(['--operator', 'polyline_scan', '--size', '3x4', '--heads', '1', '--dim', '2', '--backward',
                        '--implementations', 'portable', 'dense', *out])
        benchmark.main(['--model', 'test_ppma@portable', 'test_mobilevitv2', '--size', '64x96', '--train', *out])
        benchmark.main(['--model', 'test_ppma', '--size', '64', '--threads', '1', '--repeats', '1'])
    finally:
        torch.set_num_threads(before)
    first, second = map(json.loads, (tmp_path / 'out' / 'cpu.jsonl').read_text().splitlines())
    assert first['preset'] == 'polyline_scan-3x4-float32-backward'
    assert second['preset'] == 'test_ppma@portable-64x96-float32-train'
    assert set(first['times_ms']) == {'portable', 'dense', 'gemm', 'copy'} and first['threads'] == 1
    assert set(first) == {'preset', 'description', 'repeats', 'times_ms', 'peak_mb', 'floor', 'metrics', 'other_cpus',
                          'device', 'cpu', 'cpus', 'threads', 'torch', 'timm', 'subquad', 'python', 'commit',
                          'modified', 'date'}
    assert capsys.readouterr().out.count('throughput') == 3


@pytest.mark.parametrize('text, tokens, expected', [
    ('coco', False, (800, 1280)), ('coco', True, (50, 80)), ('imagenet', True, (14, 14)), ('long', True, (256, 256)),
    ('800x1280', False, (800, 1280)), ('800x1280', True, (800, 1280)), ('64', True, (64, 64))])
def test_named_sizes_are_images_and_numbers_are_tokens_for_operators(text, tokens, expected):
    assert benchmark.size(text, tokens) == expected
