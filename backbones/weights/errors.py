"""Errors of weight files, and short forms of paths and lists for their messages."""
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List, Union

PathLike = Union[str, Path]
MAX_PATH_LENGTH = 160


class WeightsError(ValueError):
    """A weight file is missing, damaged, unsafe or belongs to another model. The message is one sentence."""


class NonFiniteError(WeightsError):
    """The weights contain NaN or infinite values."""


def shorten_path(path: PathLike) -> str:
    """Return a path as text for a message; the middle of a long path is replaced by dots."""
    text = str(path)
    half = MAX_PATH_LENGTH // 2
    return text if len(text) <= MAX_PATH_LENGTH else f'{text[:half]}...{text[-half:]}'


@contextmanager
def reading(path: PathLike) -> Iterator[None]:
    """Raise `WeightsError` where a file cannot be read, or memory is too small for it."""
    try:
        yield
    except OSError as error:
        raise WeightsError(f'{shorten_path(path)} cannot be read: {error.strerror or error}') from error
    except MemoryError as error:
        raise WeightsError(f'{shorten_path(path)} needs more memory than is available') from error


def some(items: List[str], count: int = 3) -> str:
    """Join the first `count` items for a message; long items are cut."""
    return ', '.join(f'{item[:100]}...' if len(item) > 100 else item for item in items[:count]) + (
        ', ...' if len(items) > count else '')
