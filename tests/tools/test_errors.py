"""Errors of libraries, of the user's own code and of missing packages in one sentence, for every command."""
import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT
from user_errors import user_error

from subquad.tools import train
from subquad.tools.common import cli
from subquad.tools.engine.classification.evaluation import _take_options
from subquad.tools.engine.config import load

HINT = '; --traceback shows where\n'


def _error(main, capsys, *arguments):
    """Return what a command that fails prints."""
    with pytest.raises(SystemExit) as caught:
        cli.run(main, list(arguments))
    text = capsys.readouterr()
    assert caught.value.code == 2 and not text.out
    return text.err


def _raises(error):
    def main(argv):
        assert not argv                            # the option --traceback is taken by `run`
        raise error
    return main


@pytest.mark.parametrize('error, message', [
    (ValueError('batch_size is 0'), 'batch_size is 0'), (RuntimeError('a\n b'), 'a b'), (KeyError((1, 2)), 'no (1, 2)'),
    (OSError(errno.ENOSPC, 'No space left on device'), 'No space left on device'),
    (MemoryError(), 'MemoryError in `raise error`')])
def test_errors_of_libraries(error, message, capsys):
    text = _error(_raises(error), capsys)
    assert text.startswith('error: ') and text.endswith(f'{message}{HINT}') and text.count('\n') == 1
    assert 'test_errors.py, line ' in text
    whole = _error(_raises(error), capsys, '--traceback')
    assert whole.startswith('Traceback') and whole.endswith(text)


def test_errors_of_the_users_own_code(tmp_path, capsys):
    """The sentence names file, line and code of the user, not those of the library that the code calls."""
    text = 'import json\n\ndef main(argv):\n    return {}["a"] if argv else json.loads("[")\n'
    (tmp_path / 'own.py').write_text(text)
    names = {}
    exec(compile(text, str(tmp_path / 'own.py'), 'exec'), names)
    assert _error(names['main'], capsys, 'x') == (
        f"error: {tmp_path}/own.py, line 4: no 'a' in `return {{}}[\"a\"] if argv else json.loads(\"[\")`{HINT}")
    assert _error(names['main'], capsys).startswith(f'error: {tmp_path}/own.py, line 4: Expecting value')


@pytest.mark.parametrize('options, message', [
    (['train_cfg=None'], 'config.train_cfg'), (['visualizer=3'], "config.get('visualizer')"),
    (['randomness.seed=abc'], 'np.random.seed(seed)'), (['train_dataloader=None'], 'no train_dataloader'),
    (['train_dataloader.batch_size=0'], 'batch_size should be a positive integer'),
    (['train_dataloader.dataset.transform.interpolation=cubic'], "train_dataloader.dataset: no 'cubic' in `")])
def test_wrong_values_in_a_config(options, message, capsys, tmp_path):
    pytest.importorskip('sklearn')
    text = _error(train.main, capsys, 'test-ppma_digits', '--work-dir', str(tmp_path / 'w'), '--epochs', '1',
                  '--cfg-options', *options)
    assert message in text and text.count('\n') == 1 and 'tools/' not in text


@pytest.mark.parametrize('text, message', [
    ('a = 1\nb = a / 0\n', 'a.py, line 2: division by zero in `b = a / 0`'),
    ('_base_ = "b.py"\n', r'b.py, line 1: name .x. is not defined in `a = x`'),
    ('_base_ = "c.py"\n', 'invalid syntax'),
    ('custom_imports = dict(imports=["no_such_module"], allow_failed_imports=False)', 'a.py: .*no_such_module')])
def test_configs_with_an_error(text, message, tmp_path):
    for name, content in dict(a=text, b='a = x\n', c='a = 1\na = = 2\n').items():
        (tmp_path / f'{name}.py').write_text(content)
    user_error(lambda: load(str(tmp_path / 'a.py')), match=message)


def test_a_record_of_a_config_whose_data_give_the_classes():
    config = load('ppma-tiny_folder')
    _take_options(config, 'f', dict(model='ppma_tiny', options=dict(num_classes=2)), as_configured=True)
    assert config.model.num_classes == 2
    user_error(lambda: _take_options(config, 'f', dict(model='ppma_tiny', options=dict(num_classes=3)), True),
               '--record: f has num_classes=3, the config has 2')


WITHOUT_EXTRAS = '''
import contextlib, io, json, shlex, sys
HIDDEN = {'mmengine', 'mmcv', 'mmdet', 'mmseg', 'sklearn', 'matplotlib', 'mlxtend', 'cv2', 'pycocotools'}

class Finder:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition('.')[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Finder, sys.meta_path)
import subquad_cli
found = {}
for line in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        try:
            subquad_cli.main(shlex.split(line))
        except SystemExit as error:
            found[line] = [error.code, err.getvalue()]
print(json.dumps(found))
'''


def test_commands_without_extras():
    """--help works, and other calls name the extra that is missing."""
    missing = {'train ppma-tiny_folder --cfg-options a=1': ('mmengine', 'train'),
               'test test-ppma_digits x.pth': ('mmengine', 'train'),
               'train ssdlite_test-mobilevitv2_shapes': ('mmcv', 'mm'),
               'predict mask-rcnn_test-ppma_shapes x.pth x.png': ('mmcv', 'mm'),
               'export ssdlite_test-mobilevitv2_shapes --format onnx': ('mmcv', 'mm'),
               'visualize test_ppma.digits x.png': ('matplotlib', 'demo'), 'demo': ('mmengine', 'train')}
    helps = [f'{name} --help' for name in ('train', 'test', 'predict', 'demo', 'visualize', 'reproduce')]
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', WITHOUT_EXTRAS, *helps, *missing],
                          capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    found = json.loads(done.stdout)
    assert all(found[line] == [0, ''] for line in helps)
    for line, (module, extra) in missing.items():
        code, text = found[line]
        assert code == 2 and text.count('\n') == 1 and 'make' not in text
        assert text.startswith(f"error: {module} is not installed: pip install 'subquad[{extra}]'"), line


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='Windows has other signals')
def test_an_interruption_during_an_import_ends_the_process(tmp_path):
    """A module that catches everything, as numpy's and torch's do, cannot swallow it."""
    (tmp_path / 'slow.py').write_text('import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n'
                                      'except BaseException:\n    print("swallowed")\n')
    script = ('import signal, subquad_cli\nsignal.signal(signal.SIGINT, subquad_cli._interrupt)\n'
              'try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n'
              '    print("raised", flush=True)\nimport slow')
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(tmp_path)])})
    assert (done.returncode, done.stdout, done.stderr) == (130, 'raised\n', 'interrupted\n')
