"""Run the Python and bash blocks of a Markdown page as they are printed, in one process and in order.

    python run_page.py PAGE [--slow]

Python blocks share one namespace. `subquad` commands run in this process; `python` and `torchrun` run as programs.
Commands that install something are not run: `check_installation` compares what they name with the repository. Any other
command is an error. A block behind the line `<!-- test: slow -->` runs with --slow only. The current folder is the
reader's: `make_photos` puts images of two classes into it, and examples/ and tests/ of the checkout are linked there.
"""
import linecache
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Languages of blocks that are shown and not run.
SHOWN = ('text', 'bibtex', 'kotlin', 'swift')
_FENCE = re.compile(r'(<!-- test: slow -->\n)?^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str
    slow: bool
    line: int


def blocks(page: Path) -> List[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding='utf-8')
    return [Block(match[2], match[3], bool(match[1]), text.count('\n', 0, match.start(2)) + 1)
            for match in _FENCE.finditer(text)]


def commands(block: Block) -> List[List[str]]:
    """Return the commands of a bash block as lists of words, without comments."""
    lines = block.text.replace('\\\n', ' ').splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def check_installation(words: List[str]) -> None:
    """Check what a command that is not run names.

    Raises:
        ValueError: the command is not one that installs something, or what it names does not exist.
    """
    checks: Dict[str, Callable[[List[str]], Any]] = {'make': _check_make, 'pip': _check_pip}
    if words in (['source', '.venv/bin/activate'], ['eval', '$(register-python-argcomplete subquad)']):
        return
    if words[0] == 'export' and len(words) == 2 and words[1].startswith('TORCH_INDEX=https://'):
        return
    if words[0] not in checks:
        raise ValueError(f'an unknown kind of command: {shlex.join(words)}')
    checks[words[0]](words[1:])


def _check_make(targets: List[str]) -> None:
    makefile = (ROOT / 'Makefile').read_text()
    missing = [target for target in targets if '=' not in target and not re.search(f'^{target}:', makefile, re.M)]
    if missing:
        raise ValueError(f'the Makefile has no target {", ".join(missing)}')


def _check_pip(words: List[str]) -> None:
    setup, pins = (ROOT / 'setup.py').read_text(), (ROOT / 'constraints.txt').read_text().split()
    for word in words:
        for extra in re.findall(r'^\.\[(.*)\]$', word):
            if f"'{extra}': " not in setup:
                raise ValueError(f'setup.py has no extra {extra}')
        if '==' in word and word not in pins:
            raise ValueError(f'constraints.txt does not pin {word}')
        if word.endswith('.txt') and not (ROOT / word).is_file():
            raise ValueError(f'there is no file {word}')


def run_command(words: List[str]) -> None:
    """Run one command, or check it if it installs something.

    Raises:
        ValueError: the command failed.
    """
    environment = {}
    while re.match(r'[A-Z_]+=', words[0]):
        name, _, value = words[0].partition('=')
        environment[name], words = value, words[1:]
    if words[0] == 'subquad':
        code = _run_subquad(words[1:])
    elif words[0] in ('python', 'torchrun'):
        module = {'python': [], 'torchrun': ['-m', 'torch.distributed.run']}[words[0]]
        path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
        folder = ROOT if 'pytest' in words else Path.cwd()      # pytest reads pyproject.toml there
        code = subprocess.run([sys.executable, *module, *words[1:]], cwd=folder,
                              env={**os.environ, **environment, 'PYTHONPATH': path}).returncode
    else:
        code = check_installation(words)
    if code:
        raise ValueError(f'{shlex.join(words)} exits with {code}')


def _run_subquad(arguments: List[str]) -> Any:
    import subquad_cli
    try:
        subquad_cli.main(arguments)
    except SystemExit as stop:
        return stop.code


def make_photos(folder: Path) -> None:
    """Write an image folder of two classes with random images."""
    import numpy as np
    from PIL import Image
    random = np.random.default_rng(0)
    for part, count in (('train', 4), ('val', 2)):
        for name, base in (('cat', 0), ('dog', 120)):
            (folder / part / name).mkdir(parents=True)
            for n in range(count):
                pixels = random.integers(base, base + 120, (64, 80, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f'{n}.png')


def run_python(block: Block, name: str, namespace: Dict[str, Any]) -> None:
    """Run a Python block. Its source can be looked up, as in Jupyter: Triton compiles functions from their source."""
    linecache.cache[name] = (len(block.text), None, block.text.splitlines(keepends=True), name)
    exec(compile(block.text, name, 'exec'), namespace)


def run_page(page: Path, slow: bool) -> None:
    """Run the blocks of a page.

    Raises:
        Exception: whatever a block raises, after a line on stderr that says which block it was.
    """
    namespace: Dict[str, Any] = {'__name__': '__main__'}
    for block in blocks(page):
        if block.slow and not slow or block.language in SHOWN:
            continue
        start = time.time()
        try:
            if block.language == 'python':
                run_python(block, f'{page.name}:{block.line}', namespace)
            elif block.language == 'bash':
                for words in commands(block):
                    run_command(words)
            else:
                raise ValueError(f'a block in an unknown language, {block.language!r}')
        except BaseException:
            print(f'{page}:{block.line}: the block fails', file=sys.stderr)
            raise
        print(f'{page.name}:{block.line}: {time.time() - start:.1f} s', file=sys.stderr)


if __name__ == '__main__':
    sys.path.insert(0, str(ROOT))
    make_photos(Path('photos'))
    for name in ('examples', 'tests'):
        Path(name).symlink_to(ROOT / name)
    run_page(Path(sys.argv[1]), '--slow' in sys.argv[2:])
