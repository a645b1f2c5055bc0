"""Errors in one line, printable names, and the function that runs the `main` of a command."""
import contextlib
import io
import os
import sys
import traceback
from typing import Callable, Iterator, List, NoReturn, Optional

from subquad_cli import TOOLS, leave, main, nearest

__all__ = ['TOOLS', 'UserError', 'leave', 'main', 'nearest', 'one_line', 'quiet', 'run', 'shown']

_LONGEST = 500                  # characters of a name in a sentence


class UserError(Exception):
    """An error that the user can correct; its message is one sentence that says how."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what other libraries print; the standard output is for results."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def one_line(error: BaseException) -> str:
    """Return the message of an exception in one line; without a message, the line of code that raised it."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    lines = traceback.extract_tb(error.__traceback__)
    place = f' ({lines[-1].line})' if lines and lines[-1].line else ''
    return ' '.join(text.split()) or f'{type(error).__name__}{place}'


def shown(name: object, longest: int = _LONGEST) -> str:
    """Return a name, such as a file's, in printable form.

    Characters that cannot be printed become escapes, and a text longer than `longest` loses its middle.
    """
    text = os.fsencode(str(name)).decode(errors='backslashreplace') if _encodable(str(name)) else repr(str(name))[1:-1]
    text = ''.join(letter if letter.isprintable() else letter.encode('unicode_escape').decode() for letter in text)
    return text if len(text) <= longest else f'{text[:longest // 2]}...{text[-(longest // 4):]}'


def _encodable(text: str) -> bool:
    """Whether a file system can hold a text; lone surrogates stand for bytes that are not UTF-8."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def run(main: Callable[[Optional[List[str]]], Optional[int]], argv: Optional[List[str]] = None) -> NoReturn:
    """Run the main function of a command and exit.

    The exit code is what main returns, 0 for None, 2 after a UserError (one line on stderr), and 130 after an
    interruption (143 if the signal was SIGTERM).
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='backslashreplace')    # names of files can hold any bytes
    try:
        code = main(argv) or 0
    except SystemExit as error:                               # raised by argparse, for example after --help
        code = error.code
    except UserError as error:
        print(f'error: {_sentence(error)}', file=sys.stderr)
        code = 2
    except KeyboardInterrupt as error:
        print('interrupted', file=sys.stderr)
        code = getattr(error, 'code', 130)                    # of another signal than SIGINT
    except BrokenPipeError:                                   # `subquad models | head`
        code = 0
    leave(code)


def _sentence(error: UserError) -> str:
    """Return the sentence of a UserError; from a worker of a data loader it arrives at the end of a traceback."""
    text = str(error).strip()
    if 'Traceback (most recent call last)' in text:
        kind, _, rest = text.splitlines()[-1].partition(': ')
        text = rest if kind.startswith(f'{__package__}.') else f'{kind}: {rest}'
    return shown(' '.join(text.split()), longest=2000)
