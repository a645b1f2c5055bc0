"""What the tools share: errors in one line, names on a screen, and how a tool's `main` is run."""
import contextlib
import io
import os
import sys
from typing import Callable, Iterator, List, NoReturn, Optional

from subquad_cli import TOOLS, leave, main, nearest

__all__ = ['TOOLS', 'UserError', 'leave', 'main', 'nearest', 'one_line', 'quiet', 'run', 'shown']

_LONGEST = 500                  # characters of a name in a sentence


class UserError(Exception):
    """Something the user can mend, in one sentence that says how."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What other people's code prints inside goes nowhere: the standard output is for results."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def one_line(error: BaseException) -> str:
    """An exception's message in one line."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return ' '.join(text.split()) or type(error).__name__


def shown(name: object, longest: int = _LONGEST) -> str:
    """A file's name, or another text of somebody else's, for the screen: what cannot be printed as an escape, and what
    is longer than `longest` without its middle."""
    text = os.fsencode(str(name)).decode(errors='backslashreplace') if _encodable(str(name)) else repr(str(name))[1:-1]
    text = ''.join(letter if letter.isprintable() else letter.encode('unicode_escape').decode() for letter in text)
    return text if len(text) <= longest else f'{text[:longest // 2]}...{text[-(longest // 4):]}'


def _encodable(text: str) -> bool:
    """Whether a text is one that a file system can hold: lone surrogates stand for bytes that are not UTF-8."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def run(main: Callable[[Optional[List[str]]], Optional[int]], argv: Optional[List[str]] = None) -> NoReturn:
    """Run a tool's main and exit: 0 when done, 2 with one line on stderr for a UserError, 130 when interrupted. A tool
    may return another code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='backslashreplace')    # names of files may be anything
    try:
        code = main(argv) or 0
    except SystemExit as error:                               # argparse's, after --help for one
        code = error.code
    except UserError as error:
        print(f'error: {_sentence(error)}', file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        code = 130
    except BrokenPipeError:                                   # `subquad models | head`
        code = 0
    leave(code)


def _sentence(error: UserError) -> str:
    """A UserError's sentence. Out of a data loader's worker it comes at the end of a traceback."""
    text = str(error).strip()
    if 'Traceback (most recent call last)' in text:
        kind, _, rest = text.splitlines()[-1].partition(': ')
        text = rest if kind.startswith(f'{__package__}.') else f'{kind}: {rest}'
    return shown(' '.join(text.split()), longest=2000)
