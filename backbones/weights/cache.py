"""The cache folder of downloads, locks between processes, and the record of downloaded files' hashes.

Files of the Hugging Face Hub are in huggingface_hub's cache. Files of other servers and `weights.lock.json` are in the
folder that the environment variable SUBQUAD_CACHE names, by default $XDG_CACHE_HOME/subquad or ~/.cache/subquad.
"""
import hashlib
import json
import logging
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, Iterator, Optional

from filelock import FileLock, Timeout

from .errors import PathLike, WeightsError, shorten_path
from .files import write_atomically

LOCK_FILE = 'weights.lock.json'
_CHUNK = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LockEntry:
    """What was downloaded under a name for the first time. Later downloads must match.

    Attributes:
        source: `PublishedWeights.source`; an entry of another source does not count.
        sha256: the file's hash in hexadecimal.
        size: bytes of the file.
        revision: the commit in the hub repository, or None for files of other servers.
        date: when the entry was made (UTC, ISO 8601).
    """
    source: str
    sha256: str
    size: int
    revision: Optional[str]
    date: str


def cache_folder() -> Path:
    """Return the folder of downloads and of the lock file. It need not exist."""
    named = os.environ.get('SUBQUAD_CACHE')
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'subquad'


def sha256_of(path: PathLike) -> str:
    """Return the sha256 of a file in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Let one process at a time run the block for a file. The folder of the file is created if it is missing.

    The operating system ends the lock with the process, so a killed process blocks nobody.

    Raises:
        WeightsError: the folder is not writable or its file system has no locks.
    """
    lock = FileLock(path.with_name(f'{path.name}.lock'))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.warning('another process uses %s; waiting for its end', path)
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise WeightsError(f'{shorten_path(path.parent)} cannot be used as cache ({reason}); set SUBQUAD_CACHE to a '
                           'folder that can be written to and locked') from error
    try:
        yield
    finally:
        lock.release()


def locked_entry(name: str, source: str) -> Optional[LockEntry]:
    """Return the entry of a name in the lock file, or None if there is none of this source.

    Raises:
        WeightsError: the lock file is damaged.
    """
    entry = _read(cache_folder() / LOCK_FILE).get(name)
    return entry if entry is not None and entry.source == source else None


def lock(name: str, entry: LockEntry) -> LockEntry:
    """Write an entry into the lock file, unless there is one of the same source.

    Returns:
        The entry that is now in the file.

    Raises:
        WeightsError: the lock file is damaged or cannot be written.
    """
    with _entries() as entries:
        present = entries.get(name)
        if present is None or present.source != entry.source:
            entries[name] = entry
        return entries[name]


def unlock(name: str) -> None:
    """Remove the entry of a name from the lock file, so that another file may be downloaded.

    Raises:
        WeightsError: the lock file is damaged or cannot be written.
    """
    with _entries() as entries:
        entries.pop(name, None)


@contextmanager
def _entries() -> Iterator[Dict[str, LockEntry]]:
    """Let the block change the entries of the lock file, which is written at the end if they differ."""
    path = cache_folder() / LOCK_FILE
    with exclusive(path):
        entries = _read(path)
        before = dict(entries)
        yield entries
        if entries == before:
            return
        content = {name: asdict(entry) for name, entry in sorted(entries.items())}
        try:
            with write_atomically(path) as temporary:
                Path(temporary).write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
        except OSError as error:
            reason = error.strerror or error
            raise WeightsError(f'{shorten_path(path)} cannot be written: {reason}') from error


def _read(path: Path) -> Dict[str, LockEntry]:
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        return {name: LockEntry(**entry) for name, entry in content.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise WeightsError(f'{shorten_path(path)} cannot be read ({error.strerror or error}); set SUBQUAD_CACHE to a '
                           'folder that can be read') from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f'{shorten_path(path)} is damaged; remove it, and the next download writes a new one'
                           ) from error
