"""Errors in one line, printable names, and the function that runs the `main` of a command."""
import argparse
import contextlib
import io
import os
import re
import sys
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Callable, Iterator, List, NoReturn, Optional, Sequence, Tuple

from subquad_cli import TOOLS, leave, main, nearest

from ...backbones.weights import NonFiniteError, WeightsError

__all__ = ['TOOLS', 'UserError', 'add_weight_choice', 'install', 'leave', 'main', 'nearest', 'need', 'one_line',
           'parse_size', 'place', 'quiet', 'run', 'shown', 'weight_errors']

_LONGEST = 500                  # characters of a name in a sentence
# Module -> the extra of setup.py that installs it.
_EXTRAS = {'mmengine': 'train', 'cv2': 'train', 'matplotlib': 'demo', 'mlxtend': 'demo', 'sklearn': 'demo',
           'mmcv': 'mm', 'mmdet': 'mm', 'mmseg': 'mm', 'pycocotools': 'mm', 'skimage': 'mm'}
# Errors that Python itself raises, whose messages depend on the line of code.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
_PACKAGE = Path(__file__).resolve().parents[2]
_HINT = '; --traceback shows where'


class UserError(Exception):
    """An error that the user can correct; its message is one sentence that says how.

    Functions of `tools` raise it for what a user gives. Their docstrings name other errors, and not this one, except in
    what the documentation lists.
    """


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what other libraries print; the standard output is for results."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def weight_errors(allow: str = '') -> Iterator[None]:
    """Turn errors of weight files into UserErrors; `allow` says what permits weights that are not finite."""
    try:
        yield
    except WeightsError as error:
        raise UserError(f'{error}{allow if isinstance(error, NonFiniteError) else ""}') from error


def one_line(error: BaseException) -> str:
    """Return the message of an exception in one line.

    The line of code follows if Python raised the error there, or if there is no message.
    """
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    text = str(error) if key is None else key if isinstance(key, str) and ' ' in key else f'no {key!r}'
    code = _code(error)
    return (' '.join(text.split()) or type(error).__name__) + (f' in `{code}`' if code else '')


def _code(error: BaseException) -> str:
    """Return the line of code in which Python raised an error itself; '' if a statement raised it with a message."""
    lines = [line.line.partition('  #')[0] for line in traceback.extract_tb(error.__traceback__) if line.line]
    told = str(error) and (not isinstance(error, _OF_CODE) or lines and lines[-1].startswith(('raise', 'assert')))
    return lines[-1] if lines and not told else ''


def place(error: BaseException) -> str:
    """Return 'FILE, line N: ' for the last line of the user's own code, such as a config, that raised an error."""
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(line.filename)
        if path.suffix == '.py' and path.is_file() and not _of_library(path):
            return f'{shown(path)}, line {line.lineno}: '
    return ''


def _of_library(path: Path) -> bool:
    """Whether a file belongs to Python, an installed package or this package."""
    own = [_PACKAGE / name for name in ('backbones', 'kernels', 'subquad', 'tools')]
    return (not {'site-packages', 'dist-packages'}.isdisjoint(path.parts)
            or path.name == 'subquad_cli.py'
            or any(folder in path.resolve().parents for folder in (Path(sysconfig.get_path('stdlib')), *own)))


def add_weight_choice(parser: argparse.ArgumentParser) -> None:
    """Add --ema and --raw, which choose among the weights of a file that has both: `choice` is 'averaged' or 'raw'."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument('--ema', dest='choice', action='store_const', const='averaged',
                       help='take the averaged weights of a file that has both (default)')
    group.add_argument('--raw', dest='choice', action='store_const', const='raw',
                       help='take the raw weights of a file that has both')


def install(module: str) -> str:
    """Return the command that installs a module of one of the extras."""
    extra = _EXTRAS[module]
    return f"pip install 'subquad[{extra}]'{' (mmcv is compiled: docs/installation.md)' if extra == 'mm' else ''}"


def need(module: str) -> None:
    """Check that a module of one of the extras is installed.

    Raises:
        ModuleNotFoundError: It is missing; `run` prints which extra installs it.
    """
    if find_spec(module) is None:
        raise ModuleNotFoundError(f'No module named {module!r}', name=module)


def shown(name: object, longest: int = _LONGEST) -> str:
    """Return a name, such as a file's, in printable form.

    Characters that cannot be printed become escapes, and a text longer than `longest` loses its middle.
    """
    try:                                           # lone surrogates stand for bytes that are not UTF-8
        text = os.fsencode(str(name)).decode(errors='backslashreplace')
    except UnicodeEncodeError:
        text = repr(str(name))[1:-1]
    text = ''.join(letter if letter.isprintable() else letter.encode('unicode_escape').decode() for letter in text)
    return text if len(text) <= longest else f'{text[:longest // 2]}...{text[-(longest // 4):]}'


def parse_size(text: str, names: Sequence[str] = (), smallest: int = 1,
               largest: int = 100_000) -> Tuple[int, int]:
    """Convert '256' or '96x128' (height x width) to (height, width), with sides from `smallest` to `largest`.

    `names` are other values that --size takes, for the message.
    """
    match = re.fullmatch(r'(\d{1,9})(?:x(\d{1,9}))?', text.lower(), re.ASCII)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not all(smallest <= side <= largest for side in (height, width)):
        allowed = ', '.join([*names, 'one number'])
        raise UserError(f'--size must be {allowed} or HEIGHTxWIDTH, with sides from {smallest} to {largest:,}, '
                        f'got {text!r}')
    return height, width


def run(main: Callable[[Optional[List[str]]], Optional[int]], argv: Optional[List[str]] = None) -> NoReturn:
    """Run the main function of a command and exit.

    The exit code is what main returns, 0 for None, 2 after an error (one line on stderr, and with the option
    --traceback its traceback before it), and 130 after an interruption (143 if the signal was SIGTERM).
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='backslashreplace')    # names of files can hold any bytes
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = main([word for word in words if word != '--traceback']) or 0
    except SystemExit as error:                               # raised by argparse, for example after --help
        code = error.code
    except KeyboardInterrupt as error:
        print('interrupted', file=sys.stderr)
        code = getattr(error, 'code', 130)                    # of another signal than SIGINT
    except BrokenPipeError:                                   # `subquad models | head`
        code = 0
    except Exception as error:                                # of any library, or of the user's own code
        if '--traceback' in words:
            traceback.print_exc()
        print(f'error: {_sentence(error)}', file=sys.stderr)
        code = 2
    leave(code)


def _sentence(error: BaseException) -> str:
    """Return an error in one sentence; from a worker of a data loader it arrives at the end of a traceback."""
    missing = _missing(error)
    if missing:
        return f'{missing} is not installed: {install(missing)}'
    text, hint = str(error).strip(), ''
    if 'Traceback (most recent call last)' in text:
        kind, _, rest = text.splitlines()[-1].partition(': ')
        own = kind.startswith(f'{__package__}.')
        text, hint = (rest, '') if own else (f'{kind}: {rest}', _HINT)
    elif not isinstance(error, UserError):
        text, hint = place(error) + one_line(error), _HINT
    elif error.__cause__ is not None and _code(error.__cause__):
        hint = _HINT
    return shown(' '.join(text.split()), longest=2000) + hint


def _missing(error: Optional[BaseException]) -> str:
    """Return the module of an extra whose absence caused an error, else an empty text."""
    while error is not None:
        name = (error.name or '').partition('.')[0] if isinstance(error, ModuleNotFoundError) else ''
        if name in _EXTRAS:
            return name
        error = error.__cause__
    return ''
