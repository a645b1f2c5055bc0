# PYTHON_ARGCOMPLETE_OK
"""The command `subquad`.

The module lies outside the package, because importing the package takes seconds. `subquad --help`, `subquad configs`
and shell completion work without it.
"""
import ast
import difflib
import errno
import fnmatch
import importlib
import importlib.util
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator, List, NoReturn, Optional, Union

# The table of contents: headings, commands and what they do.
_CONTENTS = {
    'models and weights': {
        'models': 'list models with parameters and descriptions',
        'weights': 'list, download, check, convert and publish weights',
        'stats': 'count parameters and MACs of a timm model, or of a detection or segmentation config',
    },
    'training and evaluation': {
        'configs': 'list the configs that the package contains',
        'make-dataset': 'generate a small dataset for detection and segmentation',
        'train': 'train a classifier, detector or segmenter from a config',
        'test': 'evaluate a checkpoint on the test data of a config',
        'logs': 'draw the curves of training runs',
        'reproduce': 'compare a published classifier with its reported accuracy',
        'demo': 'train a small model on real images in minutes, without a GPU',
    },
    'use': {
        'predict': 'run a classifier, detector or segmenter on images',
        'visualize': 'draw attention, decays, influences or class activations of images',
        'export': 'export a model to ONNX, OpenVINO, PyTorch archives, ExecuTorch, LiteRT, ncnn or Core ML',
    },
    'this machine': {
        'kernels': 'show which operators run on Triton kernels here',
        'benchmark': 'measure time and memory of operators and models',
    },
}
TOOLS = {name: what for commands in _CONTENTS.values() for name, what in commands.items()}


def usage() -> str:
    commands = []
    for heading, group in _CONTENTS.items():
        commands += ['', f'{heading}:', *(f'  {name:12s} {what}' for name, what in group.items())]
    return '\n'.join(['usage: subquad COMMAND [options]', '',
                      'Sub-quadratic vision backbones for timm, MMDetection and MMSegmentation.', *commands, '',
                      'subquad COMMAND --help        show the options of a command',
                      'subquad COMMAND --traceback   show where an error was raised',
                      'subquad --version             show the version', '',
                      'To enable completion in bash and zsh, run `pip install argcomplete`, then',
                      '  eval "$(register-python-argcomplete subquad)"'])


def nearest(word: str, known: List[str], count: int = 3) -> str:
    """Return '; did you mean a, b?' for the nearest known words, or an empty text."""
    close = difflib.get_close_matches(word, known, n=count, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ''


def package_folder(name: str) -> Path:
    """Return the folder of `subquad.NAME` without importing the package.

    It lies beside subquad/__init__.py, or one folder above in a checkout.

    Raises:
        FileNotFoundError: The package or the folder is missing.
    """
    spec = importlib.util.find_spec('subquad')
    if spec is None or spec.origin is None:
        raise FileNotFoundError('the package subquad cannot be found')
    own = Path(spec.origin).parent
    for folder in (own / name, own.parent / name):
        if (folder / '__init__.py').is_file():
            return folder
    raise FileNotFoundError(f'the package subquad has no folder {name}')


def config_names(pattern: str = '*') -> List[str]:
    """Return the names of the package's configs that match a pattern or contain a text, without folder and suffix."""
    pattern = pattern if any(letter in pattern for letter in '*?[') else f'*{pattern}*'
    names = sorted(path.stem for path in package_folder('configs').glob('*/*.py'))
    return fnmatch.filter(names, pattern)


def configs(argv: Optional[List[str]] = None) -> int:
    """Run the command `configs`."""
    import argparse
    import json
    parser = argparse.ArgumentParser('subquad configs', description='List the configs that the package contains. '
                                     'train and test accept all of these names but those of mmpretrain; '
                                     'predict and stats accept those of detectors and segmenters.')
    parser.add_argument('pattern', nargs='?', default='*', help='a pattern such as "mask-rcnn*", or a part of a name')
    parser.add_argument('--json', action='store_true', help='print JSON')
    args = parser.parse_args(argv)
    names = config_names(args.pattern)
    if not names:
        kinds = sorted({name.partition('_')[0] for name in config_names()})
        print(f'error: no config matches {args.pattern!r}{nearest(args.pattern, kinds)}', file=sys.stderr)
        return 2
    print(json.dumps(names, indent=2) if args.json else '\n'.join(names))
    return 0


def options_of(tool: str) -> List[str]:
    """Return the options of a command, read from its source: completion cannot wait for imports."""
    if tool == 'configs':
        return ['--help', '--json']
    folder = package_folder('tools')
    tree = ast.parse((folder / f"{tool.replace('-', '_')}.py").read_text(encoding='utf-8'))
    found = {'--help', *_options_in(tree)}
    for node in ast.walk(tree):                   # the options that an imported function adds
        if not isinstance(node, ast.ImportFrom) or node.level != 1 or not node.module:
            continue
        path = folder.joinpath(*node.module.split('.')).with_suffix('.py')
        names = {alias.name for alias in node.names} - {'main'}
        for function in ast.parse(path.read_text(encoding='utf-8')).body if path.is_file() else ():
            if getattr(function, 'name', '') in names:
                found.update(_options_in(function))
    return sorted(found)


def _options_in(tree: ast.AST) -> Iterator[str]:
    """Yield the options that calls of `add_argument` name, except those that --help hides."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, 'attr', '') == 'add_argument':
            if any(word.arg == 'help' and getattr(word.value, 'attr', '') == 'SUPPRESS' for word in node.keywords):
                continue
            values = [getattr(argument, 'value', None) for argument in node.args]
            yield from (value for value in values if isinstance(value, str) and value.startswith('--'))


def complete() -> None:
    """Answer a shell that asks for completions and exit; return if no shell asks or argcomplete is not installed."""
    if '_ARGCOMPLETE' not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    import argparse
    parser = argparse.ArgumentParser('subquad')
    parser.add_argument('--version', action='store_true')
    tools = parser.add_subparsers()
    for name, what in TOOLS.items():
        tool = tools.add_parser(name, help=what, add_help=False)
        if f' {name} ' in os.environ.get('COMP_LINE', '') + ' ':
            for option in options_of(name):
                tool.add_argument(option, nargs='*')
            words = tool.add_argument('words', nargs='*')
            if name in ('train', 'test', 'predict', 'stats', 'export', 'configs'):
                words.completer = _configs_or_files
    argcomplete.autocomplete(parser, always_complete_options=False)


def _configs_or_files(prefix: str, **kwargs: Any) -> List[str]:
    from argcomplete.completers import FilesCompleter
    return [name for name in config_names() if name.startswith(prefix)] + list(FilesCompleter()(prefix, **kwargs))


def leave(code: Union[int, str, None]) -> NoReturn:
    """Flush the output and exit, without an error if the reader has gone (`subquad models | head`)."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Otherwise Python would flush once more at exit and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.exit(f'error: the output cannot be written ({error.strerror})')
    sys.exit(code)


def _interrupt(number: int, frame: Any) -> None:
    """Handle SIGINT: exit at once during an import, which would swallow the exception or leave a module incomplete."""
    while frame is not None:
        if frame.f_code.co_filename.startswith('<frozen importlib'):
            os.write(2, b'interrupted\n')
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def main(argv: Optional[List[str]] = None) -> NoReturn:
    complete()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
    except SystemExit as error:                   # raised by argparse, for example after --help
        code = error.code
    except BrokenPipeError:
        code = 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        code = f'error: the output cannot be written ({error.strerror})'
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        code = 130
    leave(code)


def _dispatch(argv: List[str]) -> int:
    """Run the command that the arguments name, and return the exit code."""
    if not argv or argv[0] in ('-h', '--help', 'help'):
        print(usage())
        return 0
    name, *rest = argv
    if name == '--version':
        print(version())
        return 0
    if name not in TOOLS:
        near = nearest(name, list(TOOLS))
        print(f'error: unknown command {name!r}{near} (subquad --help lists them)', file=sys.stderr)
        return 2
    if name == 'configs':
        return configs(rest)
    # This warning is for users' scripts; no command needs torchvision's compiled operators.
    warnings.filterwarnings('ignore', 'torchvision was built for another torch')
    try:
        run: Callable[..., NoReturn] = importlib.import_module('subquad.tools.common.cli').run
    except ValueError as error:                   # of a variable in the environment, which is read on import
        if not str(error).startswith('SUBQUAD_'):
            raise
        print(f'error: {error}', file=sys.stderr)
        return 2
    run(lambda argv: importlib.import_module(f"subquad.tools.{name.replace('-', '_')}").main(argv), rest)


def version() -> str:
    """Return subquad.__version__ without importing the package."""
    spec = importlib.util.find_spec('subquad')
    tree = ast.parse(Path(spec.origin).read_text(encoding='utf-8'))
    return next(node.value.value for node in tree.body
                if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == '__version__')


if __name__ == '__main__':
    main()
