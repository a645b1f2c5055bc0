"""Paths that a user gives on the command line."""
import tempfile
from pathlib import Path

from .cli import UserError


def expanded(name: str) -> Path:
    """Return the path with ~ expanded.

    Raises:
        UserError: There is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f'{name}: {error}') from error


def writable_folder(folder: str) -> Path:
    """Create a folder if it is missing, check that it can be written to, and return it.

    Raises:
        UserError: The folder cannot be created or written to.
    """
    path = expanded(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f'cannot write to the folder {path} ({error.strerror or error})') from error
    return path
