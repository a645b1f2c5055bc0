"""Folders and files that the user names."""
import tempfile
from pathlib import Path

from .cli import UserError


def expanded(name: str) -> Path:
    """The path with ~ replaced.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f'{name}: {error}') from error


def writable_folder(folder: str) -> Path:
    """The folder, made where it is missing and tried by writing.

    Raises:
        UserError: it cannot be written to.
    """
    path = expanded(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f'cannot write to the folder {path} ({error.strerror or error})') from error
    return path
