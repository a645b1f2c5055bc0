"""One training at a time in a work folder."""
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ..common.cli import UserError
from ..common.paths import writable_folder

NAME = 'training.lock'
_held: set[int] = set()


def _let_go() -> None:
    """A process that is forked, such as a data loader's worker, must not keep the lock when the training is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made where it is missing, against a second training.

    The lock belongs to the process: when that is killed the lock goes with it, and the file that is left means nothing.
    A folder that this has made and that is empty in the end is removed.

    Raises:
        UserError: another training holds the folder, or it cannot be written to.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    writable_folder(str(folder))
    descriptor = None
    try:
        descriptor = _acquire(folder / NAME)
        if descriptor is not None:
            _held.add(descriptor)
        yield
    finally:
        if descriptor in _held:                                  # not in a process that was forked meanwhile
            (folder / NAME).unlink(missing_ok=True)              # before the lock is given up: it is still ours
            _held.remove(descriptor)
            os.close(descriptor)
        for path in made:
            with contextlib.suppress(OSError):                   # not empty
                path.rmdir()


def _acquire(path: Path) -> int | None:
    """A descriptor that holds the lock, or None where the system has none."""
    try:
        import fcntl
    except ImportError:                                          # Windows
        return _without(path, 'this system has no file locks')
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f'cannot write {path} ({error.strerror})') from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors='replace')
            os.close(descriptor)
            if error.errno == errno.EWOULDBLOCK:
                raise UserError(f'another training is writing to {path.parent} ({holder or "just started"}); wait '
                                'for its end, or give another --work-dir') from error
            path.unlink(missing_ok=True)
            return _without(path, error.strerror)
        if _is_at(descriptor, path):
            with contextlib.suppress(OSError):                   # a full disk; who holds the lock is only for messages
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f'process {os.getpid()} on {socket.gethostname()}'.encode())
            return descriptor
        os.close(descriptor)                                     # its owner has just removed it: once more


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to the file that the descriptor has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _without(path: Path, why: str) -> None:
    print(f'warning: {path.parent} cannot be locked ({why}): nothing stops a second training in it', file=sys.stderr)
