"""Presets of benchmarks: what they measure, and how they run. No test asserts a time."""
import json
import math
import subprocess
import sys

import pytest
import torch
from pairwise import slow

from lab import benchmark, plots, presets, processes
from lab.attention_units import attention_units
from lab.growth import scan_against_mask, scan_growth
from subquad.tools.bench import metrics
from subquad.tools.common import cli
from subquad.tools.engine import records

PRESETS = presets.DEFAULTS
NAME = 'polyline_attention-14x14'


def _record(preset, threads=2):
    """A record like those of the presets, without measuring."""
    return {'preset': preset, 'description': 'w', 'repeats': 1, 'times_ms': {'x': {'p20': 1, 'p50': 2, 'p80': 3}},
            'peak_mb': {'x': None}, 'floor': {'ms': 1.0, 'macs': 10 ** 9, 'gemm_gflops': 5.0},
            'metrics': [metrics.metric('slow', 3.0, 'x', at_most=2), metrics.metric('quick', 3.0, 'x', at_least=2),
                        metrics.metric('blind', None, 'MB', at_most=2)],
            'other_cpus': 1.5, **records.environment(), 'threads': threads, 'cpus': 2}


@pytest.fixture
def without_measuring(monkeypatch):
    """Replace the measuring process; return the list of (preset, threads, repeats) that it was asked for."""
    asked = []

    def fake(job, threads, repeats):
        asked.append((job.name, threads, repeats))
        return _record(job.name, threads)

    monkeypatch.setattr(benchmark, 'measure_in_fresh_process', fake)
    return asked


MEASUREMENTS = {
    'scan': (lambda: scan_growth(2, sides=(2, 3, 4), heads=1, dim=2, max_exponent=1.1),
             {'2x2', '3x3', '4x4'}, ['at most', None]),
    'figure10': (lambda: scan_against_mask(1, sides=(2, 3, 4), dim=2, dense_until=3),
                 {'portable 2x2', 'dense 2x2', 'portable 3x3', 'dense 3x3', 'portable 4x4'}, [None] * 6),
    'figure1': (lambda: attention_units(1, tokens=(4, 8), profiled=4, dim=16, heads=2, projected=4),
                {f'{unit} 1x{n}' for unit in ('separable', 'mha', 'linformer') for n in (4, 8)}, [None] * 4),
}


@pytest.mark.parametrize('kind', ['scan', 'figure1', *slow('figure10')])
def test_measurement_gives_a_record(kind, tmp_path):
    make, names, bounds = MEASUREMENTS[kind]
    record = json.loads(json.dumps(make(), allow_nan=False))
    assert set(record) - {'operators'} == {'times_ms', 'peak_mb', 'floor', 'metrics'} and record['floor'] is None
    assert set(record['times_ms']) == names
    assert all(m['value'] is None or math.isfinite(m['value']) for m in record['metrics'])
    assert [m['bound'] for m in record['metrics']] == bounds
    if kind.startswith('figure'):
        plots.plot({**_record(kind), **record}, tmp_path / 'figure.png')
        assert (tmp_path / 'figure.png').read_bytes()[1:4] == b'PNG'
    if kind == 'figure1':
        assert all(len(rows) == 5 and sum(row['share'] for row in rows) <= 1 for rows in record['operators'].values())
        assert any(name == 'mha: slowest operators' for name, *_ in metrics.time_rows({**_record(kind), **record}))


def test_list_prints_presets(capsys):
    benchmark.main(['--list'])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(presets.PRESETS)
    assert set(PRESETS + presets.GPU_DEFAULTS) <= set(presets.PRESETS)
    assert all((presets.PRESETS[name].device == 'cuda') == name.startswith('gpu-') for name in presets.PRESETS)


def test_default_presets_run_and_lines_are_appended(without_measuring, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    benchmark.main([])
    measured = [(name, 2, None) for name in PRESETS for _ in range(presets.PRESETS[name].processes)]
    assert without_measuring == measured
    benchmark.main([NAME, NAME, '--threads', '1', '--repeats', '3'])
    assert without_measuring[len(measured):] == [(NAME, 1, 3)]
    lines = (tmp_path / 'benchmarks' / 'cpu.jsonl').read_text().splitlines()
    assert [json.loads(line)['preset'] for line in lines] == [*PRESETS, NAME]
    out = capsys.readouterr().out
    assert 'at most 2 x' in out and 'yes' in out and 'no' in out and 'not measured' in out
    assert 'other programs used 1.5 of 2 CPUs' in out


@pytest.mark.parametrize('argv, message', [
    (['polyline_atention-14x14'], 'did you mean polyline_attention-14x14'), (['zzz'], '--list'),
    pytest.param(['gpu-figure10'], 'torch finds no GPU here',
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU'))])
def test_wrong_arguments(argv, message, without_measuring, tmp_path):
    with pytest.raises(cli.UserError, match=message):
        benchmark.main([*argv, '--out', str(tmp_path / 'out')])
    assert not without_measuring and not (tmp_path / 'out').exists()


def test_other_presets_run_after_a_failure(tmp_path, capsys, monkeypatch):
    def fake(job, threads, repeats):
        if job.name == NAME:
            raise cli.UserError('no memory')
        return _record(job.name)

    monkeypatch.setattr(benchmark, 'measure_in_fresh_process', fake)
    with pytest.raises(cli.UserError, match='no memory'):
        benchmark.main(['--out', str(tmp_path)])
    assert len((tmp_path / 'cpu.jsonl').read_text().splitlines()) == len(PRESETS) - 1
    assert 'polyline_scan-growth' in capsys.readouterr().out


def test_failing_process_is_a_user_error(monkeypatch, capfd):
    script = 'import sys; sys.exit("out of paper")'
    run = subprocess.run
    monkeypatch.setattr(processes.subprocess, 'run', lambda command, **kw: run([sys.executable, '-c', script], **kw))
    with pytest.raises(cli.UserError, match=NAME):
        benchmark.measure_in_fresh_process(presets.PRESETS[NAME], 1, None)
    assert 'out of paper' in capfd.readouterr().err


def test_fresh_process_measures_a_preset(tmp_path):
    benchmark.main([NAME, '--threads', '1', '--repeats', '1', '--out', str(tmp_path)])
    record = json.loads((tmp_path / 'cpu.jsonl').read_text())
    assert record['preset'] == NAME and record['threads'] == 1 and record['repeats'] == 1
    assert [m['target'] for m in record['metrics']] == [1.0] + [None] * 6
