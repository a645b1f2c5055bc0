"""Get published weight files: from the package, from the Hugging Face Hub, or from another server.

Hub files are downloaded by huggingface_hub, whose cache, endpoint, token and offline mode (HF_HOME, HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE) apply. Files of other servers are downloaded by `resumable.transfer` to `cache_folder()`; the
offline mode applies to them, too.

Every file is hashed on every call. It must have the sha256 of the registry, if that has one, and the sha256 that the
hub records for large files. What was downloaded first is written to the lock file, with the commit in the hub
repository, and later calls get and accept only that file.
"""
import errno
import os
import re
import time
import warnings
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Callable, NamedTuple, Optional, Tuple
from urllib.parse import urlsplit

from huggingface_hub import (
    HfFileMetadata,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.utils import HfHubHTTPError, LocalEntryNotFoundError

from .cache import LOCK_FILE, LockEntry, cache_folder, exclusive, lock, locked_entry, sha256_of, unlock
from .errors import PathLike, WeightsError, reading, shorten_path
from .files import read_checkpoint
from .pickles import check_archive
from .registry import PublishedWeights
from .resumable import TEMPORARY_STATUS, TransferError, discard, transfer

SHIPPED = Path(__file__).parent / 'shipped'
LARGEST = 4 << 30           # bytes of a file whose size is not known beforehand
HUB_ATTEMPTS = 4
_PAUSE = 1.                 # seconds before the second attempt; doubled for each further one
# huggingface_hub has changed its HTTP library twice. The base classes of its error are that library's, and errors of
# its download accelerator are RuntimeErrors.
_HUB_ERRORS = (OSError, RuntimeError, *HfHubHTTPError.__bases__)


class _Download(NamedTuple):
    """A file that has been downloaded or was in the cache.

    Attributes:
        path: the file.
        recorded: the sha256 that the hub records for the file, or None.
        revision: the commit in the hub repository, or None.
        remove: removes the file from its cache.
    """
    path: Path
    recorded: Optional[str]
    revision: Optional[str]
    remove: Callable[[], None]


def fetch(weights: PublishedWeights, cache_dir: Optional[PathLike] = None) -> Path:
    """Return the file of published weights, which is downloaded if it is not in the cache.

    Args:
        weights: an entry of the registry.
        cache_dir: the folder of the cache; by default huggingface_hub's for files of the hub, else `cache_folder()`.
            The lock file is always in `cache_folder()`.

    Raises:
        WeightsError: the file cannot be had, or it is not the published or the recorded one. A damaged file is removed.
    """
    if weights.file:
        return _shipped(weights)
    if weights.page:
        raise WeightsError(why_by_hand(weights))
    if weights.terms != weights.license and cached_file(weights, cache_dir) is None:
        warnings.warn(f'{weights.name}: the license of the weights is {weights.terms}', stacklevel=2)
    locked = locked_entry(weights.name, weights.source)
    return (_from_hub if weights.repo else _from_url)(weights, locked, cache_dir)


def why_by_hand(weights: PublishedWeights) -> str:
    """Say that a file cannot be downloaded by a program, and where it is."""
    return (f'{weights.name} has no direct address: download its file from {weights.page} and give its path (license '
            f'of the weights: {weights.terms})')


def cached_file(weights: PublishedWeights, cache_dir: Optional[PathLike] = None) -> Optional[Path]:
    """Return the file if `fetch` would find it without a network, else None. The file is not checked."""
    if weights.page:
        return None
    if weights.repo:
        locked = locked_entry(weights.name, weights.source)
        path = try_to_load_from_cache(weights.repo, weights.filename,
                                      revision=locked.revision if locked else weights.revision, cache_dir=cache_dir)
        return Path(path) if isinstance(path, str) else None
    path = SHIPPED / weights.file if weights.file else _destination(weights, cache_dir)
    return path if path.is_file() else None


def forget(weights: PublishedWeights) -> None:
    """Forget which file was downloaded first, so that the next call of `fetch` gets and records the present one.

    Raises:
        WeightsError: the lock file is damaged or cannot be written.
    """
    if weights.url:
        with exclusive(_destination(weights)):
            _destination(weights).unlink(missing_ok=True)
    unlock(weights.name)


def renew(weights: PublishedWeights) -> Path:
    """Return the file that is published now, even if it differs from the recorded one, which it replaces.

    If the download fails, the present file and its record stay.

    Raises:
        WeightsError: see `fetch`; or downloads are forbidden.
    """
    if weights.file or weights.page:
        return fetch(weights)
    if constants.HF_HUB_OFFLINE:
        raise _failure(weights, 'HF_HUB_OFFLINE forbids downloads', 'unset HF_HUB_OFFLINE')
    if weights.repo and _ask_hub(weights, weights.revision) is None:     # hf_hub_download would take the cached file
        raise _failure(weights, f'{constants.ENDPOINT} does not answer', 'try again later')
    entry, path = locked_entry(weights.name, weights.source), _destination(weights)
    kept = path.with_name(f'{path.name}.previous')
    if weights.url and path.is_file():
        os.replace(path, kept)
    forget(weights)
    try:
        return fetch(weights)
    except BaseException:
        if kept.is_file():
            os.replace(kept, path)
        if entry:
            lock(weights.name, entry)
        raise
    finally:
        kept.unlink(missing_ok=True)


def check(weights: PublishedWeights, path: Path) -> bool:
    """Check a file against the registry, the lock file and, in the hub's cache, the hub's records.

    Returns:
        Whether any of these has a sha256 for the file.

    Raises:
        WeightsError: the file differs, or cannot be read.
    """
    recorded = _recorded(path)
    known = _compare(weights, path, recorded, locked_entry(weights.name, weights.source))[1]
    if not (recorded or weights.sha256):
        check_archive(path)
    return known


def _shipped(weights: PublishedWeights) -> Path:
    path = SHIPPED / weights.file
    try:
        _compare(weights, path, None, None)
    except WeightsError as error:
        raise WeightsError(f'{error}; reinstall subquad') from error
    return path


def _accept(weights: PublishedWeights, download: _Download, locked: Optional[LockEntry]) -> None:
    """Check a download and write it to the lock file; remove it if it is damaged."""
    try:
        sha256, known = _compare(weights, download.path, download.recorded, locked)
        if not (download.recorded or weights.sha256):
            _check_intact(weights, download.path, locked)
    except _Mismatch as error:
        if error.intact:            # other programs that use the hub's cache may want this file
            raise WeightsError(f'{error}; if you trust this file, run `subquad weights download {weights.name} '
                               '--update`') from error
        try:
            download.remove()
        except OSError as unremovable:
            raise WeightsError(f'{error}; remove it ({unremovable.strerror})') from error
        replaced = (', with --update if its author has replaced it or the recorded one was damaged'
                    if not download.recorded and locked_entry(weights.name, weights.source) else '')
        raise WeightsError(f'{error}; it was removed, run `subquad weights download {weights.name}` to download it '
                           f'again{replaced}') from error
    if locked is None:
        _record(weights, download, sha256, known)


class _Mismatch(WeightsError):
    """A file is not the expected one.

    Attributes:
        intact: whether it is the one that the hub records.
    """

    def __init__(self, message: str, intact: bool):
        super().__init__(message)
        self.intact = intact


def _compare(weights: PublishedWeights, path: Path, recorded: Optional[str],
             locked: Optional[LockEntry]) -> Tuple[str, bool]:
    """Return the sha256 of a file and whether it could be compared with a known one."""
    with reading(path):
        size, sha256 = path.stat().st_size, sha256_of(path)
    expected = [(value, what) for value, what in ((recorded, 'that the hub records'),
                                                  (weights.sha256, 'of the published file'),
                                                  (locked and locked.sha256, f'in {LOCK_FILE}')) if value]
    for value, what in expected:
        if value != sha256:
            raise _Mismatch(f'{weights.name}: {shorten_path(path)} has the sha256 {sha256[:16]}... instead of '
                            f'{value[:16]}... {what}', intact=sha256 == recorded)
    if weights.size not in (None, size):
        raise _Mismatch(f'{weights.name}: {shorten_path(path)} has {size:,} bytes instead of {weights.size:,}',
                        intact=sha256 == recorded)
    return sha256, bool(expected)


def _check_intact(weights: PublishedWeights, path: Path, locked: Optional[LockEntry]) -> None:
    """Check the checksums inside a download whose own hash is not published.

    A damaged file is not recorded in the lock file; if it was recorded before, its entry is removed.
    """
    try:
        (check_archive if locked else read_checkpoint)(path)
    except WeightsError as error:
        if locked:
            unlock(weights.name)
        raise _Mismatch(f'{weights.name}: {error}', intact=False) from error


def _record(weights: PublishedWeights, download: _Download, sha256: str, known: bool) -> None:
    """Write a download to the lock file, and compare it with what another process has written meanwhile."""
    now = datetime.now(timezone.utc).isoformat(timespec='seconds')
    entry = LockEntry(weights.source, sha256, download.path.stat().st_size, download.revision, now)
    try:
        entry = lock(weights.name, entry)
    except WeightsError as error:
        if not known:
            raise
        warnings.warn(f'the download of {weights.name} is not recorded: {error}', stacklevel=2)
        return
    if entry.sha256 != sha256:
        raise WeightsError(f'{weights.name}: another process has downloaded another file; run `subquad weights '
                           f'download {weights.name} --update` to get the present one')
    if not known:
        warnings.warn(f'{weights.name}: the sha256 of {weights.source} is not known beforehand; {sha256[:16]}... is '
                      f'recorded in {cache_folder() / LOCK_FILE}, and later downloads must match it', stacklevel=2)


# ---- Hugging Face Hub

def _from_hub(weights: PublishedWeights, locked: Optional[LockEntry], cache_dir: Optional[PathLike]) -> Path:
    with ExitStack() as stack:
        if not locked or cached_file(weights, cache_dir) is None:
            # A cache that cannot be written to can hold no lock. huggingface_hub has its own, but its old versions
            # remove and write the link to the file again while another process reads it.
            with suppress(WeightsError):
                stack.enter_context(exclusive(_destination(weights)))
        download = _hub_download(weights, locked, cache_dir)
        _accept(weights, download, locked)
        return download.path


def _hub_download(weights: PublishedWeights, locked: Optional[LockEntry], cache_dir: Optional[PathLike]) -> _Download:
    revision = locked.revision if locked and locked.revision else weights.revision
    known = None if constants.HF_HUB_OFFLINE or cached_file(weights, cache_dir) else _ask_hub(weights, revision)
    for attempt in range(HUB_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * 2 ** (attempt - 1))
        try:
            path = Path(hf_hub_download(weights.repo, weights.filename, revision=revision, cache_dir=cache_dir))
            break
        except _HUB_ERRORS as error:
            reason, advice, again = _explain(error, weights, revision)
            if not again or attempt == HUB_ATTEMPTS - 1:
                raise _failure(weights, reason, advice) from error
    commit = path.parents[weights.filename.count('/')].name          # .../snapshots/COMMIT/FOLDER/FILE
    recorded = _recorded(path)
    if not path.is_symlink() and known is not None and known.commit_hash == commit:
        recorded = _as_sha256(known.etag)

    def remove() -> None:
        for file in (path.resolve(), _blob(path), path):
            file.unlink(missing_ok=True)
    return _Download(path, recorded, commit, remove)


def _ask_hub(weights: PublishedWeights, revision: str) -> Optional[HfFileMetadata]:
    """Ask the hub for the size and the ETag of a file before it is downloaded; None if the hub has a passing problem.

    Without a network this fails at once, while `hf_hub_download` would try for half a minute.
    """
    try:
        metadata = get_hf_file_metadata(hf_hub_url(weights.repo, weights.filename, revision=revision))
    except _HUB_ERRORS as error:
        if _status(error) in TEMPORARY_STATUS:
            return None
        reason, advice, _ = _explain(error, weights, revision, reached=False)
        raise _failure(weights, reason, advice) from error
    limit = weights.size or LARGEST
    if metadata.size is not None and metadata.size > limit:
        raise _failure(weights, f'it has {metadata.size:,} bytes, more than the {limit:,} allowed', 'update subquad')
    return metadata


def _blob(path: Path) -> Path:
    """Return the file that a link in the hub's cache names, .../blobs/ETAG, which may itself be a link."""
    return path.parent / os.readlink(path) if path.is_symlink() else path


def _recorded(path: Path) -> Optional[str]:
    """Return the sha256 that the hub records for a file in its cache, if the cache tells it by the name of the blob."""
    return _as_sha256(_blob(path).name) if path.is_symlink() else None


def _as_sha256(etag: Optional[str]) -> Optional[str]:
    """Return the ETag if it is a sha256, as for large files; small files have a sha1 of git."""
    return etag if etag and re.fullmatch('[0-9a-f]{64}', etag) else None


def _explain(error: Exception, weights: PublishedWeights, revision: str,
             reached: bool = True) -> Tuple[str, str, bool]:
    """Say what failed and what to do, and whether another attempt may help."""
    if isinstance(error, LocalEntryNotFoundError):       # the hub did not answer, and the file is not in the cache
        error, reached = error.__cause__ or error, False
    status = _status(error)
    what = f'{constants.ENDPOINT}/{weights.repo} ({weights.filename}, {revision})'
    if constants.HF_HUB_OFFLINE and not reached:
        return ('it is not in the cache, and HF_HUB_OFFLINE forbids downloads', 'unset HF_HUB_OFFLINE', False)
    if status in (401, 403):
        return (f'{what} may not be read (HTTP {status})', 'log in with `hf auth login` or set HF_TOKEN', False)
    if status == 404:
        advice = 'update subquad' if revision == weights.revision else f'remove its entry from {LOCK_FILE}'
        return (f'{what} does not exist (HTTP 404)', advice, False)
    if status:
        return (f'{constants.ENDPOINT} answers HTTP {status}', 'try again later',
                status in TEMPORARY_STATUS and reached)
    if getattr(error, 'errno', None) in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EPERM):
        return (f'{shorten_path(constants.HF_HUB_CACHE)} cannot take the file ({error.strerror})',
                'set HF_HOME to a folder with space that can be written to', False)
    text = ' '.join(str(error).split())[:200]
    problem = f'the transfer from {constants.ENDPOINT} failed' if reached else f'{constants.ENDPOINT} cannot be reached'
    return (f'{problem} ({text})', 'check the network and the proxy', reached)


def _status(error: Exception) -> Optional[int]:
    """Return the HTTP status of an error of huggingface_hub, or None if there was no answer."""
    return getattr(getattr(error, 'response', None), 'status_code', None)


# ---- other servers

def _destination(weights: PublishedWeights, cache_dir: Optional[PathLike] = None) -> Path:
    """Return the file in this package's cache. For a hub file, which is in another cache, only its lock is there."""
    filename = PurePosixPath(weights.filename or urlsplit(weights.url).path).name
    return Path(cache_dir or cache_folder()) / weights.name / filename


def _from_url(weights: PublishedWeights, locked: Optional[LockEntry], cache_dir: Optional[PathLike]) -> Path:
    path = _destination(weights, cache_dir)
    if path.is_file():
        _accept(weights, _Download(path, None, None, lambda: path.unlink(missing_ok=True)), locked)
        return path
    if constants.HF_HUB_OFFLINE:
        raise _failure(weights, 'it is not in the cache, and HF_HUB_OFFLINE forbids downloads', 'unset HF_HUB_OFFLINE')
    with exclusive(path):
        if path.is_file():                             # another process has downloaded it meanwhile
            return path
        part = path.with_name(f'{path.stem}.part{path.suffix}')
        try:
            transfer(weights.url, part, weights.size or LARGEST)
        except TransferError as error:
            raise _failure(weights, error.reason, error.advice) from error
        _accept(weights, _Download(part, None, None, lambda: discard(part)),
                locked_entry(weights.name, weights.source))
        os.replace(part, path)
        discard(part)
    return path


def _failure(weights: PublishedWeights, reason: str, advice: str) -> WeightsError:
    return WeightsError(f'{weights.name} cannot be downloaded: {reason}; {advice}, then run `subquad weights download '
                        f'{weights.name}`')
