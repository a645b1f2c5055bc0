"""The source archive and the wheel contain what README, docs and commands need."""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT


@pytest.fixture(scope='module')
def setup_file():
    """setup.py as a module. It calls `setup` only when it is run."""
    spec = importlib.util.spec_from_file_location('subquad_setup', ROOT / 'setup.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def unpacked(tmp_path_factory):
    """The source archive of this tree, unpacked."""
    folder = tmp_path_factory.mktemp('sdist')
    tree = folder / 'tree'
    hidden = ('.git', '.venv', 'runs', 'demo', 'benchmarks', 'build', 'dist', 'site', '*.egg-info', '__pycache__',
              '.*_cache')
    shutil.copytree(ROOT, tree, ignore=lambda at, names: [] if Path(at).name == 'model_cards' else
                    shutil.ignore_patterns(*hidden)(at, names))
    _build('build_sdist', tree, folder)
    archive, = folder.glob('*.tar.gz')
    with tarfile.open(archive) as tar:
        tar.extractall(folder / 'out', filter='data')
    return next((folder / 'out').iterdir())


def _build(kind: str, tree: Path, to: Path) -> str:
    """Build an archive without a compiler, and return what is printed."""
    done = subprocess.run([sys.executable, '-c', f'import setuptools.build_meta as b; b.{kind}({str(to)!r})'], cwd=tree,
                          capture_output=True, text=True, env=dict(os.environ, CC='/missing/cc', CXX='/missing/c++'))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def _links(text: str):
    return [target.split('#')[0] for target in re.findall(r'\]\(([^)\s]+)\)', text)
            if not re.match('https?://|#|mailto:', target)]


def test_source_archive_has_what_the_documents_link_to(unpacked):
    documents = [*unpacked.glob('*.md'), *unpacked.glob('docs/**/*.md'), *unpacked.glob('examples/*.md'),
                 *unpacked.glob('model_cards/*.md'), *unpacked.glob('configs/*/README.md')]
    assert len(documents) > 5
    missing = [f'{file.relative_to(unpacked)} -> {target}' for file in documents for target in _links(file.read_text())
               if not (file.parent / target).exists()]
    assert not missing


def test_source_archive_runs_the_makefile(unpacked):
    """The targets need these files, and `make -n` finds every rule and prerequisite."""
    for name in ('.ci/setup', '.ci/run', '.ci/timm-suite', 'CITATION.cff', 'LICENSE', 'constraints.txt',
                 'docs/hooks.py', 'hubconf.py', 'mkdocs.yml', 'tests/conftest.py'):
        assert (unpacked / name).is_file(), name
    done = subprocess.run(['make', '-n', 'demo', 'test', 'docs', 'dev'], cwd=unpacked, capture_output=True, text=True)
    assert done.returncode == 0 and 'pytest' in done.stdout, done.stderr


def test_wheel_has_every_module_config_card_and_weight(unpacked, tmp_path):
    printed = _build('build_wheel', unpacked, tmp_path)
    assert printed.count('subquad: the native operators for CPUs are not built') == 1
    wheel, = tmp_path.glob('*.whl')
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    entry_points, = (archive.read(name).decode() for name in names if name.endswith('entry_points.txt'))
    assert 'subquad = subquad_cli:main' in entry_points
    wanted = {'subquad/__init__.py', 'subquad_cli.py', 'subquad/configs/detection/README.md',
              'subquad/configs/detection/metafile.yml'}
    wanted |= {f'subquad/{path.relative_to(ROOT)}' for path in (ROOT / 'model_cards').rglob('*.md')}
    wanted |= {f'subquad/{path.relative_to(ROOT)}' for path in (ROOT / 'backbones' / 'weights' / 'shipped').iterdir()}
    for folder in ('backbones', 'kernels', 'configs', 'tools'):
        wanted |= {f'subquad/{path.relative_to(ROOT)}' for path in (ROOT / folder).rglob('*.py')}
    assert not wanted - names


@pytest.mark.skipif(sys.platform != 'linux' or shutil.which('gcc') is None, reason='needs GCC on Linux')
def test_native_operators_are_built_where_there_is_a_compiler():
    from subquad.kernels import native
    assert native.LIBRARY is not None, 'install subquad again'


def test_index_page_has_no_relative_links(setup_file):
    readme = (ROOT / 'README.md').read_text()
    assert _links(readme)
    assert not _links(setup_file.long_description(readme, 'https://example.org/subquad/', 'v1'))
    plain = setup_file.long_description(readme, '', 'v1')
    assert not _links(plain) and '![' not in plain and '](#' not in plain


def test_index_page_links_to_the_project(setup_file):
    assert setup_file.project_urls('', 'v1') == {}
    urls = setup_file.project_urls('https://example.org/subquad/', 'v1')
    assert urls['Source'] == 'https://example.org/subquad'
    assert urls['Changelog'] == 'https://example.org/subquad/blob/v1/CHANGELOG.md'


def test_every_extra_is_pinned_for_development(setup_file):
    """`make dev` and `make docs` install the versions of constraints.txt."""
    pins = {line.split('=')[0].split('>')[0] for line in (ROOT / 'constraints.txt').read_text().splitlines()}
    wanted = {re.split(r'[>\[]', name)[0] for name in setup_file.docs + ['pre-commit']}
    assert wanted <= pins


def test_index_page_points_to_pages_and_raw_pictures(setup_file):
    text = '[a page](docs/a.md) ![a picture](cards/b.png) [a heading](#usage) [elsewhere](https://example.org)'
    assert setup_file.long_description(text, 'https://example.org/subquad/', 'v1') == (
        '[a page](https://example.org/subquad/blob/v1/docs/a.md) '
        '![a picture](https://example.org/subquad/raw/v1/cards/b.png) '
        '[a heading](https://example.org/subquad/blob/v1/README.md#usage) [elsewhere](https://example.org)')
    assert setup_file.long_description(text, '', 'v1').startswith('a page  a heading [elsewhere](https://example.org)\n')
