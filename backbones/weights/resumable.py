"""Download a file over HTTP. A transfer that was interrupted continues where it stopped.

The bytes go to a partial file. Beside it, a small JSON file holds the address and the server's validator, an ETag or a
date. The next transfer asks for the rest under the condition that the validator still holds (RFC 9110, section 13.1.5),
so parts of two versions are never joined.
"""
import email.utils
import errno
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Dict, Optional
from urllib.parse import urlsplit

from huggingface_hub.utils import tqdm

from .files import write_atomically

STALL_SECONDS = 30.         # a connection that sends nothing for so long is given up
RETRIES = 5                 # attempts in a row that bring no new byte
LONGEST_PAUSE = 60.         # seconds before an attempt, also if the server asks for more
TEMPORARY_STATUS = (408, 425, 429, 500, 502, 503, 504)      # of HTTP; another attempt may succeed
_CHUNK = 1 << 18
_AGENT = 'subquad (+urllib)'


class TransferError(Exception):
    """A transfer failed for good.

    Attributes:
        reason: a clause that says what failed.
        advice: a clause in the imperative that says what to do, without the command to run then.
    """

    def __init__(self, reason: str, advice: str):
        super().__init__(f'{reason}; {advice}')
        self.reason, self.advice = reason, advice


class _TemporaryError(Exception):
    """A transfer failed, and another attempt may succeed."""

    def __init__(self, reason: str, pause: float = 0.):
        super().__init__(reason)
        self.pause = pause


def transfer(url: str, part: Path, limit: int) -> None:
    """Download a file to a partial file, or the rest of it if the partial file has a beginning.

    Server errors, closed and stalled connections are tried again.

    Args:
        url: an http or https address. Redirects are followed, but not from https to http.
        part: the partial file, which is complete when the function returns.
        limit: the largest size in bytes.

    Raises:
        TransferError: the file cannot be had. What has arrived stays for the next call.
    """
    failures = 0
    with tqdm(desc=urlsplit(url).path.rpartition('/')[2], unit='B', unit_scale=True, unit_divisor=1024,
              disable=None) as bar:
        while True:
            before = _size(part)
            try:
                return _attempt(url, part, limit, bar)
            except _TemporaryError as error:
                failures = 0 if _size(part) > before else failures + 1
                if failures > RETRIES:
                    raise TransferError(f'{url}: {error}, {failures} times in a row', 'try again later') from error
                # 0.25 s after an attempt with new bytes, then 0.5, 1, 2, 4, 8.
                time.sleep(min(max(2. ** (failures - 2), error.pause), LONGEST_PAUSE))
            except OSError as error:
                full = error.errno == errno.ENOSPC
                advice = ('free some space, or set SUBQUAD_CACHE to another folder' if full else
                          'set SUBQUAD_CACHE to a folder that can be written to')
                raise TransferError(f'{part.parent} cannot take the file ({error.strerror or error})',
                                    advice) from error


def discard(part: Path) -> None:
    """Remove a partial file and what lies beside it."""
    for path in part.parent.glob(f'{part.name}*'):
        path.unlink(missing_ok=True)


def _attempt(url: str, part: Path, limit: int, bar: Any) -> None:
    """Make one request and write what it brings."""
    validator = _read_validator(part, url)
    offset = _size(part) if validator else 0
    headers = {'User-Agent': _AGENT, 'Accept-Encoding': 'identity'}
    if offset:
        headers.update({'Range': f'bytes={offset}-', 'If-Range': validator})
    try:
        response = _open(url, headers)
    except urllib.error.HTTPError as error:
        with closing(error):
            if error.code == 416 and validator:
                if _range_total(error.headers) == offset:
                    return                             # everything had arrived before the last process ended
                discard(part)
                raise _TemporaryError('the partial file did not fit the file on the server') from error
            raise _status_error(url, error) from error
    with closing(response):
        _refuse_unusable(url, response)
        if response.status == 206:
            # A server may leave the validator out of a partial answer.
            current = _validator(response.headers) or validator
            start = re.match(r'bytes (\d+)-', response.headers.get('Content-Range', ''))
            if not (validator == current and validator and start and int(start[1]) == offset):
                discard(part)
                raise _TemporaryError('the server sent another part than it was asked for')
            total = _range_total(response.headers) or (offset + response.length if response.length else None)
        else:
            offset, total = 0, response.length
        if max(total or 0, offset) > limit:
            raise TransferError(f'{url} has {total or offset:,} bytes, more than the {limit:,} allowed',
                                'update subquad')
        needed, free = (total or 0) - offset, shutil.disk_usage(part.parent).free
        if needed > free:
            raise OSError(errno.ENOSPC, f'{needed:,} bytes are needed and {free:,} are free')
        with open(part, 'ab' if offset else 'wb', buffering=0) as file:
            if not offset:
                with write_atomically(_state_file(part)) as temporary:
                    state = dict(url=url, validator=_validator(response.headers))
                    Path(temporary).write_text(json.dumps(state), encoding='utf-8')
            bar.total, bar.n = total, offset
            bar.refresh()
            _copy(response, file, limit - offset, bar)
            os.fsync(file.fileno())
    size = _size(part)
    if total is not None and size < total:
        raise _TemporaryError(f'the connection closed after {size:,} of {total:,} bytes')


def _copy(response: http.client.HTTPResponse, file: BinaryIO, limit: int, bar: Any) -> None:
    """Write the body of a response to a file."""
    while True:
        try:
            chunk = response.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _connection_error(error) from error
        if not chunk:
            return
        limit -= len(chunk)
        if limit < 0:
            file.truncate(0)
            raise TransferError('the server sends more bytes than are allowed', 'update subquad')
        file.write(chunk)
        bar.update(len(chunk))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects, 308 as well (urllib does since Python 3.11), but never from https to http."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if req.type == 'https' and not newurl.startswith('https:'):
            raise TransferError(f'{req.full_url} redirects to {newurl}, which is not encrypted', 'update subquad')
        return super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


def _open(url: str, headers: Dict[str, str]) -> http.client.HTTPResponse:
    """Open an address; the proxies of the environment are used."""
    try:
        return urllib.request.build_opener(_Redirects).open(urllib.request.Request(url, headers=headers),
                                                            timeout=STALL_SECONDS)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        reason = error.reason
        if isinstance(reason, (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)):
            raise _connection_error(reason) from error
        if isinstance(reason, ssl.SSLError):
            raise TransferError(f'{url} cannot be trusted ({reason})', 'check the certificates of this system '
                                '(SSL_CERT_FILE)') from error
        text = getattr(reason, 'strerror', None) or reason
        raise TransferError(f'{url} cannot be reached ({text})', 'check the network and the proxy') from error
    except (OSError, http.client.HTTPException) as error:
        raise _connection_error(error) from error


def _connection_error(error: Exception) -> _TemporaryError:
    if isinstance(error, TimeoutError):
        return _TemporaryError(f'the server sent nothing for {STALL_SECONDS:g} s')
    return _TemporaryError(f'the connection broke ({str(error) or type(error).__name__})')


def _status_error(url: str, error: urllib.error.HTTPError) -> Exception:
    if error.code in TEMPORARY_STATUS:
        pause = error.headers.get('Retry-After', '')         # seconds, or a date
        return _TemporaryError(f'the server answers HTTP {error.code}',
                               float(pause) if pause.isdigit() else 0.)
    if error.code in (404, 410):
        return TransferError(f'{url} does not exist (HTTP {error.code})', 'update subquad')
    if error.code in (401, 403):
        return TransferError(f'{url} may not be read (HTTP {error.code})', 'check the network and the proxy')
    return TransferError(f'{url}: the server answers HTTP {error.code}', 'try again later')


def _refuse_unusable(url: str, response: http.client.HTTPResponse) -> None:
    """Refuse what cannot be a weight file, such as the login page of a wireless network, or cannot be checked."""
    if response.headers.get_content_type() == 'text/html':
        raise TransferError(f'{url} answers with a web page instead of a file', 'check whether the network wants a '
                            'login')
    if response.headers.get('Content-Encoding', 'identity') != 'identity':
        raise TransferError(f"{url} is sent as {response.headers['Content-Encoding']}", 'check the proxy')
    if response.length is None and not response.chunked:
        raise TransferError(f'{url} is sent without its size', 'check the proxy')


def _range_total(headers: http.client.HTTPMessage) -> Optional[int]:
    match = re.search(r'/(\d+)$', headers.get('Content-Range', ''))
    return int(match[1]) if match else None


def _validator(headers: http.client.HTTPMessage) -> str:
    """Return a strong ETag or the date of the last change, or '' if there is neither: If-Range allows no weak ETag."""
    etag = headers.get('ETag', '')
    if etag.startswith('"'):
        return etag
    date = headers.get('Last-Modified', '')
    return date if email.utils.parsedate(date) else ''


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _state_file(part: Path) -> Path:
    return part.with_name(f'{part.name}.json')


def _read_validator(part: Path, url: str) -> str:
    """Return the validator of a partial file, or '' if it cannot be continued."""
    try:
        state = json.loads(_state_file(part).read_text(encoding='utf-8'))
        known = state['url'] == url and isinstance(state['validator'], str)
        return state['validator'] if known else ''
    except (OSError, ValueError, TypeError, KeyError):
        return ''
