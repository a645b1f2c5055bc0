"""Paths that a user gives on the command line."""
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from ...backbones.weights import write_atomically
from .cli import UserError, shown


def writable_folder(folder: str) -> Path:
    """Create a folder if it is missing, check that it can be written to, and return it."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f'cannot write to the folder {path} ({error.strerror or error})') from error
    return path


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    try:
        with write_atomically(path) as temporary:
            Path(temporary).write_text(text, encoding='utf-8', newline='')
    except OSError as error:
        raise UserError(f'cannot write {shown(path)}: {error.strerror or error}') from error


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Write a folder as a whole or not at all.

    The block gets an empty folder beside `folder` and fills it. At the end of the block that folder replaces `folder`;
    after an error nothing has changed.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f'.{folder.name}.'))
    try:
        new = temporary / 'new'         # made by mkdir, because only the owner can read the folders of mkdtemp
        new.mkdir()
        yield new
        old = temporary / 'old'
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
