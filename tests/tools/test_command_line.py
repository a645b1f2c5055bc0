"""The command itself: fast help, pipes, completion, and what tables and JSON hold."""
import argparse
import io
import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT
from rich.table import Table

import subquad_cli
from subquad.tools import kernels, models, stats, test, train
from subquad.tools.bench import metrics
from subquad.tools.common import cli, output
from subquad.tools.engine import records
from subquad.tools.engine.classification import evaluation
from subquad.tools.engine.config import known_configs

COMMAND = [sys.executable, '-W', 'ignore', '-c', 'import subquad_cli; subquad_cli.main()']


def _environment(**more):
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    return {**os.environ, 'PYTHONPATH': path, **more}


def _subquad(*arguments, **environment):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=_environment(**environment))


@pytest.mark.parametrize('arguments', [['--help'], ['--version'], [], ['configs', 'mask'], ['modles']])
def test_light_commands_import_nothing_heavy(arguments):
    script = (f'import sys, subquad_cli\ntry:\n    subquad_cli.main({arguments!r})\nfinally:\n    print(sorted('
              '{"torch", "timm", "numpy", "subquad", "mmengine", "rich", "PIL"} & set(sys.modules)), file=sys.stderr)')
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, env=_environment())
    assert done.stderr.strip().splitlines()[-1] == '[]' and done.returncode == (2 if arguments == ['modles'] else 0)


def test_version():
    import subquad
    assert _subquad('--version').stdout.strip() == subquad.__version__ == subquad_cli.version()


def test_closed_pipe_and_full_disk():
    for arguments in ('--help', 'configs mask', 'configs --help'):
        command = ' '.join(f"'{word}'" for word in COMMAND) + f' {arguments} '
        done = subprocess.run(['bash', '-c', f'set -o pipefail; {command} | true'], capture_output=True, text=True,
                              env=_environment())
        assert not done.stderr and done.returncode == 0, arguments
        if os.path.exists('/dev/full') and 'configs -' not in arguments:       # argparse itself ignores errors
            done = subprocess.run(['bash', '-c', f'{command} > /dev/full'], capture_output=True, text=True,
                                  env=_environment())
            assert done.stderr == 'error: the output cannot be written (No space left on device)\n'
            assert done.returncode == 1


def test_configs(capsys):
    assert subquad_cli.configs([]) == 0
    assert capsys.readouterr().out.split() == known_configs()
    assert subquad_cli.configs(['mask-rcnn*1x*', '--json']) == 0
    names = json.loads(capsys.readouterr().out)
    assert 'mask-rcnn_ppma-t_fpn_1x_coco' in names and all(name.startswith('mask-rcnn') for name in names)
    assert subquad_cli.configs(['uppernet']) == 2
    assert capsys.readouterr().err.startswith("error: no config matches 'uppernet'; did you mean upernet")
    with pytest.raises(SystemExit):
        train.main(['--help'])
    text = capsys.readouterr().out
    assert 'subquad configs [PATTERN]' in text and 'retinanet' not in text


# ---- completion

@pytest.mark.parametrize('tool', subquad_cli.TOOLS)
def test_completion_knows_every_option(tool, monkeypatch):
    """Options are read from the source; the parser says what there is."""
    parsers = []

    def parse_args(parser, *arguments):
        parsers.append(parser)
        raise SystemExit(0)
    monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', parse_args)
    for words in ([], ['exported.onnx']):                    # `test` has other options for exported files
        with pytest.raises(SystemExit):
            cli.main([tool, *words])
    actions = [action for parser in parsers for action in parser._actions]
    for subcommands in [action for action in actions if isinstance(action, argparse._SubParsersAction)]:
        actions += [action for parser in subcommands.choices.values() for action in parser._actions]
    options = {option for action in actions if action.help != argparse.SUPPRESS
               for option in action.option_strings if option.startswith('--')}
    assert set(subquad_cli.options_of(tool)) == options and '--help' in options


@pytest.mark.parametrize('line, expected, other', [
    ('subquad pre', 'predict', 'models'),
    ('subquad train mask-rcnn_ppma-t_fpn_1', 'mask-rcnn_ppma-t_fpn_1x_coco', 'upernet'),
    ('subquad predict --to', '--topk', '--score'), ('subquad test --show', '--show-dir', '--tta')])
def test_completion(line, expected, other, tmp_path):
    pytest.importorskip('argcomplete')
    answer = tmp_path / 'answer'
    done = _subquad(_ARGCOMPLETE='1', COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_IFS='\n',
                    _ARGCOMPLETE_STDOUT_FILENAME=str(answer))
    words = answer.read_text().split() if answer.exists() else []
    assert expected in words and other not in words, done.stderr


# ---- tables

class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _table(cells):
    table = Table('name', 'what')
    for name in cells:
        output.add_row(table, name, 'x' * 150)
    return table


NAMES = ['photo [edited].png', '[red]x[/blue]', 'a\\', '[/]', 'long/' * 40 + 'name.png']


def test_tables_are_never_cut(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '40')
    output.print_table(_table(NAMES))
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES) and 'x' * 150 in text and '…' not in text
    assert len(text.splitlines()) == len(NAMES) + 4


def test_tables_fit_a_terminal(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('COLUMNS', '60')
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setenv('NO_COLOR', '1')
    monkeypatch.delenv('FORCE_COLOR', raising=False)
    output.print_table(_table(NAMES))
    text = terminal.getvalue()
    assert max(map(len, re.sub(r'\x1b\[[0-9;]*m', '', text).splitlines())) <= 60
    assert '…' not in text and text.count('x') >= 150 * len(NAMES)


# ---- JSON

def _strict(text):
    def refuse(word):
        raise AssertionError(word)
    return json.loads(text, parse_constant=refuse)


def test_json_has_no_nan(tmp_path, monkeypatch, capsys):
    value = dict(a=[1.5, float('nan'), (float('inf'), None)], b={'c': -float('inf')}, d='NaN', e=True, f=3)
    assert _strict(output.dumps(value)) == dict(a=[1.5, None, [None, None]], b={'c': None}, d='NaN', e=True, f=3)
    records.append(tmp_path / 'r.jsonl', dict(preset='x', value=float('nan')))
    assert _strict((tmp_path / 'r.jsonl').read_text()) == dict(preset='x', value=None)
    monkeypatch.setattr(evaluation, 'evaluate', lambda *a, **k: {'accuracy/top1': float('nan')})
    assert test.main(['test-ppma_digits', 'any', '--json']) == 0
    assert _strict(capsys.readouterr().out) == {'accuracy/top1': None}


def test_records_without_a_measured_value():
    """What NaN became in JSON is shown as not measured, and has no median."""
    one = dict(preset='p', times_ms={'a': dict(p20=1., p50=2., p80=3.)}, metrics=[metrics.metric('f', 1., 'x')],
               floor=None, other_cpus=0, threads=1, cpus=2, cpu='c', torch='t')
    none = {**one, 'times_ms': {'a': dict(p20=1., p50=None, p80=3.)}, 'metrics': [metrics.metric('f', None, 'x')]}
    middle = metrics.medians([one, none, one])
    assert middle['times_ms']['a'] == dict(p20=1., p50=None, p80=3.) and middle['metrics'][0]['value'] is None
    assert any('not measured' in cells[1] for cells in [*metrics.time_rows(middle), *metrics.metric_rows(middle)])


def test_kernels_json(capsys):
    kernels.main(['--json'])
    found = _strict(capsys.readouterr().out)
    from subquad.kernels import native, why_not
    from subquad.kernels.dispatch import OPERATORS
    built = native.why_not() is None
    assert found == {op: dict(triton=why_not(op) is None, why_not=why_not(op),
                              native=built and 'native' in OPERATORS[op].implementations) for op in OPERATORS}


@pytest.mark.parametrize('built', [False, True])
def test_kernels_says_what_runs_on_a_cpu(built, capsys, monkeypatch):
    from subquad.kernels import native
    monkeypatch.setattr(native, 'LIBRARY', built or None)
    monkeypatch.setattr(native, 'INSTRUCTION_SET', 'avx2')
    kernels.main([])
    last = capsys.readouterr().out.splitlines()[-1]
    assert ('native code for avx2 runs' in last and 'crisscross_attention' in last) == built
    assert ('not built from these sources (see docs/installation.md)' in last) != built


# ---- progress

def test_progress_without_a_terminal(capsys, monkeypatch):
    now = [0.]
    monkeypatch.setattr(output.time, 'monotonic', lambda: now[0])

    def work(item):
        now[0] += 4
        return item
    assert [work(item) for item in output.progress(list(range(10)), 'images')] == list(range(10))
    text = capsys.readouterr()
    assert text.err.splitlines() == ['3 of 10 images, about 28 s left', '6 of 10 images, about 16 s left',
                                     '9 of 10 images, about 4 s left'] and not text.out


def test_errors_take_one_line(capsys):
    from subquad.tools.common.images import UnreadableImage

    def fails(text, kind=cli.UserError):
        def main(argv):
            raise kind(text)
        with pytest.raises(SystemExit) as caught:
            cli.run(main, [])
        assert caught.value.code == 2
        return capsys.readouterr().err
    assert fails('a\nb') == 'error: a b\n'
    worker = 'Caught UnreadableImage in a worker.\nOriginal Traceback (most recent call last):\n  File "x"'
    assert fails(f'{worker}\nsubquad.tools.common.images.UnreadableImage: a.png: no\n', UnreadableImage) == (
        'error: a.png: no\n')


@pytest.mark.parametrize('main, arguments, message', [
    (stats.main, ['test_ppma', '--size', '9' * 30], '--size must be .* with sides from 1 to 100,000'),
    (stats.main, ['[red]x[/blue]'], r"no config file '\[red\]x\[/blue\]'.*subquad configs lists them"),
    (train.main, ['x' * 5000], 'File name too long'),
    (test.main, ['x' * 5000, 'y'], 'File name too long'),
    (models.main, ['[/red]'], r"no model matches '\[/red\]'")])
def test_wrong_arguments(main, arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(main, arguments)
    text = capsys.readouterr()
    assert caught.value.code == 2 and not text.out and re.match(f'error: .*{message}', text.err)
    assert text.err.count('\n') == 1 and len(text.err) < 3000
