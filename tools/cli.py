"""`subquad NAME ...`: one line a tool, and one clear line for an error that the user can mend."""
import contextlib
import difflib
import importlib
import io
import sys
from typing import Callable, Iterator, List, NoReturn, Optional

# In the order in which a newcomer meets them.
TOOLS = {
    'models': 'list the models: names, parameters, what they are',
    'stats': 'parameters and MACs of any model at any size, beside the authors\' figures',
    'make-dataset': 'make a small data set for detection and segmentation, without network',
    'train': 'train a classifier, detector or segmenter from a config file',
    'test': 'evaluate a checkpoint on a config\'s test data',
    'predict': 'classify, detect or segment in image files with a checkpoint',
    'visualize': 'draw what a model looks at over images',
    'demo': 'train a small PPMA on real images in minutes, and show what it sees',
    'benchmark': 'time and memory of operators and models, beside the floor',
    'kernels': 'which operators run on Triton kernels here, and what the kernels take',
    'tables': 'write the tables of README and model cards (for developers)',
}


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


def usage() -> str:
    lines = [f'  {name:12s} {what}' for name, what in TOOLS.items()]
    return '\n'.join(['usage: subquad NAME [options]', '', 'Sub-quadratic vision backbones.', '', 'tools:', *lines, '',
                      'subquad NAME --help   what a tool takes', 'subquad --version     the version'])


def run(main: Callable[[Optional[List[str]]], Optional[int]], argv: Optional[List[str]] = None) -> NoReturn:
    """Run a tool's main and exit: 0 when done, 2 with one line on stderr for a UserError, 130 when interrupted."""
    try:
        sys.exit(main(argv) or 0)
    except UserError as error:
        # Out of a data loader's worker an error comes as a traceback that ends with it.
        print(f"error: {str(error).strip().splitlines()[-1].removeprefix(f'{UserError.__module__}.UserError: ')}",
              file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:       # `subquad models | head`
        sys.stderr.close()
        sys.exit(0)


def nearest(word: str, known: List[str], count: int = 3) -> str:
    """'; did you mean a, b?' or nothing."""
    close = difflib.get_close_matches(word, known, n=count, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ''


def main(argv: Optional[List[str]] = None) -> NoReturn:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ('-h', '--help', 'help'):
        print(usage())
        sys.exit(0)
    name, *rest = argv
    if name == '--version':
        import subquad
        print(subquad.__version__)
        sys.exit(0)
    if name not in TOOLS:
        print(f"error: unknown tool {name!r}{nearest(name, list(TOOLS))} (subquad --help lists them)", file=sys.stderr)
        sys.exit(2)
    run(importlib.import_module(f"subquad.tools.{name.replace('-', '_')}").main, rest)
