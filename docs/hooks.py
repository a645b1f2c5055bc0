"""Hooks of `mkdocs build`: pages outside of docs/, links that leave docs/, and the package for the API reference.

On GitHub every link of a Markdown file leads to a file of the repository. The site has the pages of docs/, the model
cards, CONTRIBUTING.md and CHANGELOG.md. A link to any other file leads to the repository where its address is known
(`SUBQUAD_URL`), and becomes plain text where it is not.
"""
import logging
import posixpath
import re
import shutil
from pathlib import Path
from typing import List

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ('backbones', 'kernels', 'configs', 'tools')       # as in setup.py: subfolders of the package `subquad`
log = logging.getLogger('mkdocs.hooks')


def on_startup(command: str, dirty: bool) -> None:
    """Copy the checkout's folders below build/docs as the one package that an installation has."""
    package = ROOT / 'build' / 'docs' / 'subquad'
    shutil.rmtree(package, ignore_errors=True)
    for source, target in [(ROOT / 'subquad', package), *((ROOT / name, package / name) for name in FOLDERS)]:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns('__pycache__'))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that the repository keeps outside of docs/, each at its own path."""
    for path in _outside_pages():
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite relative links from paths in the repository to paths on the site."""
    path = Path(page.file.abs_src_path).resolve().relative_to(ROOT).as_posix()
    site_paths = {file.src_uri for file in files}

    def rewrite(match: 're.Match[str]') -> str:
        image, text, target = match.groups()
        if re.match(r'[a-z]+:|#', target):
            return match[0]
        target, _, anchor = target.partition('#')
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        site_path = file.removeprefix('docs/')
        if site_path in site_paths:
            relative = posixpath.relpath(site_path, posixpath.dirname(page.file.src_uri) or '.')
            return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"
        if not (ROOT / file).exists():
            log.warning('%s links to %s, which does not exist', path, file)
        if config.repo_url and not image:
            return f'[{text}]({config.repo_url.rstrip("/")}/blob/main/{file})'
        return text
    parts = re.split(r'(^```.*?^```)', markdown, flags=re.MULTILINE | re.DOTALL)
    return ''.join(part if part.startswith('```') else re.sub(r'(!?)\[([^\]]*)\]\(([^)\s]+)\)', rewrite, part)
                   for part in parts)


def _outside_pages() -> List[Path]:
    pages = [ROOT / 'CONTRIBUTING.md', ROOT / 'CHANGELOG.md', *(ROOT / 'model_cards').glob('*.md')]
    pictures = (ROOT / 'model_cards').rglob('*.png')
    return sorted([*pages, *pictures])
