"""Blocks of README, docs and CONTRIBUTING run as printed, links lead to files and headings, the README stays short."""
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest
import run_page
from helpers import ROOT

# tests/backbones/test_model_cards.py runs the blocks of the model cards.
RUN = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').rglob('*.md'))]
# What a newcomer runs first; `make test-slow` runs the other pages, and the slow blocks of these.
FIRST = [ROOT / 'README.md', ROOT / 'docs' / 'quickstart.md']
LINKED = [*RUN, ROOT / 'CHANGELOG.md', ROOT / 'kernels' / 'README.md', ROOT / 'examples' / 'README.md',
          *sorted((ROOT / 'model_cards').glob('*.md')), *sorted((ROOT / 'configs').glob('*/README.md'))]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _environment() -> Dict[str, str]:
    """This process's environment as a reader's shell has it: without the interpreter of the kernels' tests."""
    environment = {**os.environ, 'MPLBACKEND': 'Agg', 'PYTHONPATH': os.pathsep.join(map(str, (ROOT, *sys.path)))}
    environment.pop('TRITON_INTERPRET', None)
    return environment


def _run(page: Path, folder: Path, *options: str) -> None:
    script = ROOT / 'tests' / 'shared' / 'run_page.py'
    done = subprocess.run([sys.executable, '-W', 'ignore', script, page, *options], cwd=folder, env=_environment(),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.parametrize('page', FIRST, ids=_name)
def test_blocks_run_as_printed(page, tmp_path):
    _run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('page', [page for page in RUN if page not in FIRST
                                  or any(block.slow for block in run_page.blocks(page))], ids=_name)
def test_slow_blocks_run_as_printed(page, tmp_path):
    _run(page, tmp_path, '--slow')


def test_example_of_features_and_attention(tmp_path):
    """The other example, new_mixer.py, runs with docs/adding-a-mixer.md."""
    done = subprocess.run([sys.executable, '-W', 'ignore', ROOT / 'examples' / 'features_and_attention.py'],
                          cwd=tmp_path, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {'mobilevitv2_context.png', 'myo_influence.png'}


def _anchors(page: Path) -> set:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).strip().replace(' ', '-') for title in titles}


@pytest.mark.parametrize('page', LINKED, ids=_name)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        if re.match('(https?|mailto):', target):
            continue
        file, _, anchor = target.partition('#')
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or anchor and anchor not in _anchors(path):
            dead.append(target)
    assert not dead


def test_readme_stays_short():
    text = (ROOT / 'README.md').read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / 'mkdocs.yml').read_text()
    pages = [path.relative_to(ROOT / 'docs').as_posix() for path in (ROOT / 'docs').rglob('*.md')]
    assert not [page for page in pages if f': {page}\n' not in navigation]
