"""The benchmark tool: its meters on known work, its records, its command line. No timing is asserted."""
import json
import math
import subprocess
import sys

import pytest
import torch

from subquad import kernels
from subquad.tools import benchmark, cli, measure

PRESETS = ['polyline_attention-50x80', 'polyline_attention-14x14', 'polyline_scan-growth', 'ppma_tiny-800x1280',
           'ppma_tiny-224']
NAME = 'polyline_attention-14x14'
MB = 1_000_000


def _record(preset, threads=2, repeats=None):
    """A record as the tool makes it, without measuring."""
    return {'preset': preset, 'what': 'w', 'repeats': repeats or 1, 'times_ms': {'x': {'p20': 1, 'p50': 2, 'p80': 3}},
            'ratios': {}, 'peak_mb': {'x': None}, 'floor': {'ms': 1.0, 'macs': 10 ** 9, 'gemm_gflops': 5.0},
            'figures': [benchmark.figure('slow', 3.0, 'x', at_most=2), benchmark.figure('quick', 3.0, 'x', at_least=2),
                        benchmark.figure('blind', None, 'MB', at_most=2)],
            'other_cpus': 1.5, **measure.environment(), 'threads': threads, 'cpus': 2}


@pytest.fixture
def without_measuring(monkeypatch):
    """Replaces the measuring process; returns the list of what it was asked for."""
    asked = []

    def fake(preset, threads, repeats):
        asked.append((preset, threads, repeats))
        return _record(preset, threads, repeats)

    monkeypatch.setattr(benchmark, 'measure_in_fresh_process', fake)
    return asked


# --- meters

def test_percentiles():
    assert measure.percentiles([5, 1, 2, 4, 3, 6]) == pytest.approx({'p20': 2, 'p50': 3.5, 'p80': 5})


def test_calls_are_interleaved():
    order = []
    times = measure.time_interleaved({'a': lambda: order.append('a'), 'b': lambda: order.append('b')}, 2, {'b': 2})
    assert ''.join(order) == 'ab' + 'abb' + 'abb'              # the first round is not timed
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


def test_operations_and_floor():
    macs = measure.count_macs(measure.gemm())
    assert macs == 1024 ** 3
    assert measure.floor(3 * macs, gemm_ms=2.0) == pytest.approx(
        {'ms': 6.0, 'macs': 3 * macs, 'gemm_gflops': 1024 ** 3 / 1e6})


def test_commit_is_this_checkout_s_or_nothing(monkeypatch):
    found = measure.commit()
    assert found['commit'] is None or len(found['commit']) == 40
    monkeypatch.setattr(measure, '__file__', '/elsewhere/tools/measure.py')
    assert measure.commit() == {'commit': None, 'modified': None}


def test_load_by_others(monkeypatch):
    seconds = iter([100.0, 160.0])
    monkeypatch.setattr(measure.OtherLoad, '_busy', staticmethod(lambda: next(seconds)))
    monkeypatch.setattr(measure.time, 'monotonic', iter([10.0, 30.0]).__next__)
    monkeypatch.setattr(measure.time, 'process_time', iter([1.0, 31.0]).__next__)
    assert measure.OtherLoad().cpus() == pytest.approx((60 - 30) / 20)
    monkeypatch.undo()
    assert measure.OtherLoad._busy() is None or measure.OtherLoad._busy() > 0
    monkeypatch.setattr(measure.OtherLoad, '_busy', staticmethod(lambda: None))
    assert measure.OtherLoad().cpus() is None


@pytest.mark.parametrize('threads, cpus, others, expected', [
    (2, 2, 0.05, False), (2, 2, 0.5, True), (2, 8, 3.0, False), (2, 8, 6.5, True), (2, 2, None, False),
    (4, 2, 0.0, False)])                                        # more threads than CPUs is the user's own choice
def test_disturbed(threads, cpus, others, expected):
    assert benchmark.disturbed({'threads': threads, 'cpus': cpus, 'other_cpus': others}) is expected


# --- what is measured

def test_dense_formula_is_polyline_attention():
    inputs = [x.double() for x in benchmark.attention_inputs(2, 3, (4, 5), 8)]
    expected = kernels.polyline_attention(*inputs, backend='reference')
    torch.testing.assert_close(benchmark.dense_polyline_attention(*inputs), expected, rtol=1e-10, atol=1e-12)


MEASUREMENTS = {
    'attention': (lambda: benchmark.attention(2, grid=(3, 4), batch=1, heads=2, dim=4, speed_up=1e9, memory=1e9),
                  {'portable', 'dense', 'gemm'}, ['at least', None, 'at most', None]),
    'scan': (lambda: benchmark.scan_growth(2, sides=(2, 3, 4), heads=1, dim=2, exponent=1.1),
             {'2x2', '3x3', '4x4'}, ['at most', None]),
    'model': (lambda: benchmark.model(1, name='test_ppma', size=(64, 96), batch=2, over_floor=5),
              {'test_ppma', 'gemm'}, ['at most', None]),
}


@pytest.mark.parametrize('kind', MEASUREMENTS)
def test_measurement(kind):
    make, names, bounds = MEASUREMENTS[kind]
    with torch.no_grad():
        record = json.loads(json.dumps(make(), allow_nan=False))
    assert set(record) == {'times_ms', 'ratios', 'peak_mb', 'floor', 'figures'}
    assert set(record['times_ms']) == names
    assert all(0 < t['p20'] <= t['p50'] <= t['p80'] for t in record['times_ms'].values())
    assert all(math.isfinite(ratio) for ratio in record['ratios'].values())
    assert [f['bound'] for f in record['figures']] == bounds
    assert all((f['met'] is None) == (f['target'] is None or f['value'] is None) for f in record['figures'])
    if kind == 'scan':
        assert record['floor'] is None
    else:
        floor = record['floor']
        assert floor['ms'] == pytest.approx(2e-6 * floor['macs'] / floor['gemm_gflops'])
    if kind == 'attention':
        assert record['floor']['macs'] == 2 * 12 ** 2 * (4 + 4)        # q k' and the product with v
        assert record['figures'][0]['met'] is False


@pytest.mark.parametrize('value, bounds, met', [
    (2, dict(at_least=2), True), (1.9, dict(at_least=2), False), (2, dict(at_most=2), True),
    (2.1, dict(at_most=2), False), (None, dict(at_most=2), None), (2, dict(), None)])
def test_targets(value, bounds, met):
    assert benchmark.figure('f', value, 'x', **bounds)['met'] is met


# --- command line

def test_presets_and_list(capsys):
    assert list(benchmark.PRESETS) == PRESETS
    assert benchmark.main(['--list']) is None
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == PRESETS


def test_all_presets_by_default_and_lines_are_added(without_measuring, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not benchmark.main([])
    assert without_measuring == [(name, 2, None) for name in PRESETS]
    assert not benchmark.main([NAME, NAME, '--threads', '1', '--repeats', '3'])
    assert without_measuring[len(PRESETS):] == [(NAME, 1, 3)]
    lines = (tmp_path / 'benchmarks' / 'cpu.jsonl').read_text().splitlines()
    assert [json.loads(line)['preset'] for line in lines] == [*PRESETS, NAME]
    out = capsys.readouterr().out
    assert 'at most 2 x' in out and 'yes' in out and 'no' in out and 'not measured' in out
    assert 'others used 1.5 of 2 CPUs' in out


def test_no_save(without_measuring, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not benchmark.main([NAME, '--no-save'])
    assert NAME in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / 'cpu.jsonl'
    path.write_text('{"preset": "a"}\n{"pres')
    benchmark.append(path, {'preset': 'b'})
    benchmark.append(path, {'preset': 'c'})
    assert path.read_text() == '{"preset": "a"}\n{"pres\n{"preset": "b"}\n{"preset": "c"}\n'


@pytest.mark.parametrize('argv, message', [
    (['polyline_atention-14x14'], 'did you mean polyline_attention-14x14'),
    (['zzz'], '--list'),
    (['--threads', '0'], '--threads must be at least 1'),
    (['--repeats', '-1'], '--repeats must be at least 1'),
    (['--one'], 'exactly one'),
])
def test_wrong_arguments(argv, message, without_measuring, tmp_path):
    with pytest.raises(cli.UserError, match=message):
        benchmark.main([*argv, '--out', str(tmp_path / 'out')])
    assert not without_measuring and not (tmp_path / 'out').exists()


def test_a_folder_that_cannot_be_written_stops_before_measuring(without_measuring, tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'folder' / 'cpu.jsonl').mkdir(parents=True)
    for out in ('file', 'file/below', 'folder'):
        with pytest.raises(cli.UserError, match='--out'):
            benchmark.main([NAME, '--out', str(tmp_path / out)])
    assert not without_measuring


def test_one_failure_leaves_the_others(tmp_path, capsys, monkeypatch):
    def fake(preset, threads, repeats):
        if preset == NAME:
            raise cli.UserError('no memory')
        return _record(preset)

    monkeypatch.setattr(benchmark, 'measure_in_fresh_process', fake)
    with pytest.raises(cli.UserError, match='no memory'):
        benchmark.main(['--out', str(tmp_path)])
    assert len((tmp_path / 'cpu.jsonl').read_text().splitlines()) == len(PRESETS) - 1
    assert 'polyline_scan-growth' in capsys.readouterr().out


def test_a_process_that_fails_is_a_user_error(monkeypatch, capfd):
    script = 'import sys; sys.exit("out of paper")'
    run = subprocess.run
    monkeypatch.setattr(benchmark.subprocess, 'run', lambda command, **kw: run([sys.executable, '-c', script], **kw))
    with pytest.raises(cli.UserError, match=NAME):
        benchmark.measure_in_fresh_process(NAME, 1, None)
    assert 'out of paper' in capfd.readouterr().err


def test_fresh_process(tmp_path, monkeypatch):
    """The real thing, from a folder that holds decoys of what it imports."""
    monkeypatch.chdir(tmp_path)
    for decoy in ('torch.py', 'json.py', 'timm.py'):
        (tmp_path / decoy).write_text('raise RuntimeError("the wrong file")')
    monkeypatch.setattr(sys, 'path', [p for p in sys.path if p])
    if sys.version_info < (3, 11):                              # no PYTHONSAFEPATH
        monkeypatch.chdir('/')
    assert not benchmark.main([NAME, '--threads', '1', '--repeats', '1', '--out', str(tmp_path / 'out')])
    record = json.loads((tmp_path / 'out' / 'cpu.jsonl').read_text())
    assert record['preset'] == NAME and record['threads'] == 1 and record['repeats'] == 1
    assert record['torch'] == torch.__version__ and record['cpu'] and record['date'].endswith('+00:00')
    assert set(record) == {'preset', 'what', 'repeats', 'times_ms', 'ratios', 'peak_mb', 'floor', 'figures',
                           'other_cpus', 'cpu', 'cpus', 'threads', 'torch', 'timm', 'subquad', 'python',
                           'commit', 'modified', 'date'}
    assert [f['target'] for f in record['figures']] == [1.0, None, None, None]
