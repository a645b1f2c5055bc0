"""Hide what converters print: progress bars, warnings about versions, messages of their C++ code."""
import contextlib
import logging
import os
import sys
import warnings
from typing import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard standard output, standard error and warnings of this process, including those of C++ code."""
    before = logging.root.manager.disable
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(stream) for stream in (1, 2)]
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, 'w') as nothing, warnings.catch_warnings(), \
                contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            warnings.simplefilter('ignore')
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)
            yield
    finally:
        for stream, copy in zip((1, 2), saved):
            os.dup2(copy, stream)
            os.close(copy)
        logging.disable(before)
