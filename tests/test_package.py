"""Imports of the installed package and of a bare checkout, names of models, and a torchvision of another build."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from pairwise import slow

from subquad.tools.engine.zoo import our_models


def _python(code: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-c', code], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, **env})


def test_bare_checkout(tmp_path):
    """A checkout that is not installed can be imported: the finder of an editable installation is removed."""
    code = ('import sys; sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]; '
            'import subquad, subquad.tools.common.cli, subquad.configs, timm; print(timm.is_model("ppma_tiny"))')
    done = _python(code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.strip() == 'True', done.stderr


def test_bare_names_are_refused():
    code = ('for name in ("kernels", "backbones", "tools"):\n'
            '    try: __import__(name)\n    except ImportError as error: print(error)')
    errors = _python(code, PYTHONPATH=str(ROOT)).stdout.splitlines()
    assert all(f'import subquad.{name} instead of' in error
               for name, error in zip(('kernels', 'backbones', 'tools'), errors, strict=True))


def test_no_model_of_timm_changes():
    # Importing subquad registers its models: fix torchvision alone first, to list what timm has by itself.
    code = ('import torch, sys, types; pkg = types.ModuleType("subquad"); pkg.__path__ = [sys.argv[1]]; '
            'sys.modules["subquad"] = pkg; from subquad._torchvision import repair_torchvision; repair_torchvision(); '
            'import timm; from timm.models import _registry as r; before = dict(r._model_entrypoints); '
            'del sys.modules["subquad"]; import subquad; '
            'assert all(r._model_entrypoints[k] is v for k, v in before.items()); '
            'print(*sorted(set(r._model_entrypoints) - set(before)))')
    done = subprocess.run([sys.executable, '-c', code, str(ROOT / 'subquad')], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == sorted(our_models()), done.stderr


def _fake_torchvision(folder: Path, body: str) -> None:
    (folder / 'torchvision').mkdir()
    (folder / 'torchvision' / '__init__.py').write_text(body)


_BROKEN = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    raise RuntimeError("operator torchvision::nms does not exist")
"""

_REPAIR = ('import importlib.util, warnings\n'
           f'spec = importlib.util.spec_from_file_location("module", {str(ROOT / "subquad" / "_torchvision.py")!r})\n'
           'module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n'
           'with warnings.catch_warnings(record=True) as seen:\n'
           '    warnings.simplefilter("always"); module.repair_torchvision(); module.repair_torchvision()\n'
           'print(len(seen), module._library is not None)\n')


@pytest.fixture
def repaired(python, tmp_path):
    """Runs a script, by default the repair twice, in a process that finds this torchvision: repaired(body, script)."""
    def run(body, script=_REPAIR):
        _fake_torchvision(tmp_path, body)
        return python(f'import sys; sys.path.insert(0, {str(tmp_path)!r})\n{script}')
    return run


@pytest.mark.parametrize('body, expected', [
    ('', '0 False'),                                      # a matching pair: nothing happens, no warning
    (_BROKEN, '1 True'),
    ('raise ModuleNotFoundError("No module named torchvision")', '0 False')])
def test_torchvision_of_another_build(repaired, body, expected):
    done = repaired(body)
    assert done.stdout.strip() == expected, done.stderr


def test_subquad_repairs_torchvision_after_its_import_has_failed(repaired):
    """As in a notebook in which `import timm` came first."""
    done = repaired(_BROKEN, 'try:\n    import torchvision\nexcept RuntimeError as error:\n    print(error)\n'
                             f'{_REPAIR}import torchvision\n')
    assert done.stdout.splitlines() == ['operator torchvision::nms does not exist', '1 True'], done.stderr
    assert done.returncode == 0


def test_torchvision_warning_names_the_importing_line(tmp_path):
    _fake_torchvision(tmp_path, _BROKEN)
    package = tmp_path / 'subquad'
    package.mkdir()
    (package / '__init__.py').write_text('from ._torchvision import repair_torchvision\nrepair_torchvision()\n')
    (package / '_torchvision.py').write_text((ROOT / 'subquad' / '_torchvision.py').read_text())
    for line in ('import subquad', 'import importlib; importlib.import_module("subquad")'):
        (tmp_path / 'script.py').write_text(f'import os\n{line}\n')
        done = subprocess.run([sys.executable, 'script.py'], cwd=tmp_path, capture_output=True, text=True)
        assert 'script.py:2: UserWarning: torchvision was built' in done.stderr


@pytest.mark.parametrize('command', [['-m', 'subquad'], *slow([str(ROOT / 'subquad_cli.py')])])
def test_commands_print_no_warning(command):
    done = subprocess.run([sys.executable, *command, 'models', 'test_ppma'], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert 'test_ppma' in done.stdout and done.stderr == ''


def test_other_torchvision_errors_are_not_swallowed(repaired):
    assert 'something else' in repaired('raise RuntimeError("something else")').stderr
