"""Allow one run at a time in a work folder."""
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ...common.cli import UserError
from ...common.paths import writable_folder

NAME = 'training.lock'
_held: set[int] = set()


def _let_go() -> None:
    """Release the lock in a forked process, such as a data loader's worker, which can outlive a killed training."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run; create the folder if it is missing.

    The lock belongs to the process and ends with it; a lock file that remains has no effect. A folder that was created
    here is removed if it is empty at the end.

    Raises:
        UserError: Another run holds the folder, or it cannot be written to.
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
        if descriptor in _held:                                  # not in a process that was forked in between
            (folder / NAME).unlink(missing_ok=True)              # while the lock is still held
            _held.remove(descriptor)
            os.close(descriptor)
        for path in made:
            with contextlib.suppress(OSError):                   # not empty
                path.rmdir()


def _acquire(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if the system has no file locks."""
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
                raise UserError(f'another run is writing to {path.parent} ({holder or "just started"}); wait '
                                'until it finishes, or use another --work-dir') from error
            path.unlink(missing_ok=True)
            return _without(path, error.strerror)
        if _is_at(descriptor, path):
            with contextlib.suppress(OSError):                   # on a full disk the owner's name is lost
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f'process {os.getpid()} on {socket.gethostname()}'.encode())
            return descriptor
        os.close(descriptor)                                     # its owner has just removed it: try again


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path still names the file that the descriptor has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _without(path: Path, why: str) -> None:
    print(f'warning: {path.parent} cannot be locked ({why}): nothing stops a second run in it', file=sys.stderr)
