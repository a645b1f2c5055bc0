"""Downloads from a real HTTP server: resume, retries, redirects, and files that are refused."""
import hashlib
import json
import warnings
from types import SimpleNamespace

import huggingface_hub
import pytest
from download_cases import BLOB, CONTENT, FILE, OTHER, PATH, REPO, gets, hub, no_file_is_left, plain, refused
from weights_server import CHUNK, Fault

from subquad.backbones.weights import WeightsError, download, resumable
from subquad.backbones.weights.cache import LOCK_FILE, LockEntry, cache_folder, lock, locked_entry
from subquad.backbones.weights.download import cached_file, check, fetch, forget, renew

SHA256 = hashlib.sha256(CONTENT).hexdigest()

pytestmark = pytest.mark.filterwarnings('ignore:.*is not known beforehand:UserWarning')


# ---- what arrives

def test_download_and_cache(server, weights):
    assert cached_file(weights) is None
    path = fetch(weights)
    assert path.read_bytes() == CONTENT and path.name == (weights.filename or PATH).rpartition('/')[2]
    count = len(server.requests)
    assert fetch(weights) == path == cached_file(weights)
    assert len(server.requests) == count, 'a recorded file needs no network'
    assert len(gets(server)) == 1


def test_lock_file(server, weights, tmp_path):
    fetch(weights)
    entry = json.loads((tmp_path / 'subquad' / LOCK_FILE).read_text())[weights.name]
    commit = server.models[REPO]['main']['commit'] if weights.repo else None
    assert entry.pop('date').endswith('+00:00')
    assert entry == dict(source=weights.source, sha256=SHA256, size=len(CONTENT), revision=commit)


def test_unknown_hashes_are_said_once(server):
    with pytest.warns(UserWarning, match='is not known beforehand.*is recorded in .*weights.lock.json'):
        fetch(plain(server))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fetch(plain(server))
        fetch(hub())                                  # the hub records its sha256
        forget(plain(server))
        fetch(plain(server, sha256=SHA256))


# ---- interruptions

@pytest.mark.parametrize('fault', [Fault('close', 7 * CHUNK), Fault('stall', 7 * CHUNK)], ids=lambda fault: fault.kind)
def test_interrupted_transfer_continues(server, weights, fault, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, 'DOWNLOAD_CHUNK_SIZE', CHUNK)       # bytes that it writes at once
    if fault.kind == 'stall':
        monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_DOWNLOAD_TIMEOUT', 2)
        monkeypatch.setattr(resumable, 'STALL_SECONDS', 2.)
    server.fail(BLOB if weights.repo else PATH, fault)
    assert fetch(weights).read_bytes() == CONTENT
    first, second = gets(server)
    assert 'range' not in first.headers and second.headers['range'] == f'bytes={7 * CHUNK}-'
    assert second.status == 206 and second.sent == len(CONTENT) - 7 * CHUNK
    assert weights.repo or second.headers['if-range'] == server.files[PATH].etag


def test_next_process_continues(server):
    """After the last attempt the partial file stays, and another call asks for the rest only."""
    server.fail(PATH, Fault('close', 9 * CHUNK), *[Fault('status', 503)] * 6)
    message = refused(plain(server), 'the server answers HTTP 503, 6 times in a row; try again later, then run '
                      '`subquad weights download test_ppma.plain`')
    assert message.startswith('test_ppma.plain cannot be downloaded: http://')
    part = cache_folder() / 'test_ppma.plain' / 'net.part.pt'
    assert part.stat().st_size == 9 * CHUNK and cached_file(plain(server)) is None
    server.requests.clear()
    path = fetch(plain(server))
    assert path.read_bytes() == CONTENT and [request.sent for request in gets(server)] == [len(CONTENT) - 9 * CHUNK]
    assert sorted(file.name for file in path.parent.iterdir() if not file.name.endswith('.lock')) == ['net.pt']


def test_complete_part_is_not_sent_again(server):
    """A process that is killed between the last byte and the renaming leaves a complete partial file."""
    part = cache_folder() / 'test_ppma.plain' / 'net.part.pt'
    part.parent.mkdir(parents=True)
    resumable.transfer(server.url + PATH, part, 1 << 30)
    assert fetch(plain(server)).read_bytes() == CONTENT
    assert [(request.status, request.sent) for request in gets(server)] == [(200, len(CONTENT)), (416, 0)]


@pytest.mark.parametrize('change', ['other file', 'no conditions', 'other address', 'no validators', 'no ranges',
                                    'longer part'])
def test_versions_are_not_mixed(server, change):
    """A transfer stops in the middle, and something changes before the next one."""
    server.fail(PATH, Fault('close', 9 * CHUNK), *[Fault('status', 500)] * 6)
    server.validators = change != 'no validators'
    refused(plain(server))
    part = cache_folder() / 'test_ppma.plain' / 'net.part.pt'
    path, expected = PATH, CONTENT
    if change in ('other file', 'no conditions'):
        expected, server.conditions = OTHER, change == 'other file'
        server.add_file(path, expected)
    elif change == 'other address':
        path, expected = '/elsewhere/net.pt', OTHER
        server.add_file(path, expected)
        server.files[path].etag = server.files[PATH].etag
    elif change == 'no ranges':
        server.ranges = False
    elif change == 'longer part':
        part.write_bytes(CONTENT + b'more')
    assert fetch(plain(server, path)).read_bytes() == expected


def test_wrong_range_is_not_written(server):
    server.fail(PATH, Fault('close', 9 * CHUNK), Fault('range', 0, {'Content-Range': 'bytes 1-2/3'}))
    assert fetch(plain(server)).read_bytes() == CONTENT
    assert [request.status for request in gets(server)] == [200, 206, 200]


@pytest.mark.parametrize('status', [500, 503, 429])
def test_server_errors_are_tried_again(server, weights, status):
    server.fail(BLOB if weights.repo else PATH, *[Fault('status', status, {'Retry-After': '0'})] * 2)
    assert fetch(weights).read_bytes() == CONTENT
    assert len(gets(server)) == 3


def test_redirects(server):
    server.redirect('/one', '/two')
    server.redirect('/two', server.cdn + PATH, 308)
    server.fail(PATH, Fault('close', 5 * CHUNK))
    assert fetch(plain(server, '/one')).read_bytes() == CONTENT
    assert [request.headers.get('range') for request in server.got(PATH)] == [None, f'bytes={5 * CHUNK}-']
    server.redirect('/circle', '/circle')
    refused(plain(server, '/circle'), 'HTTP 302')


def test_no_redirect_from_https_to_http():
    request = resumable.urllib.request.Request('https://host/file')
    with pytest.raises(resumable.TransferError, match='redirects to http://host/file, which is not encrypted'):
        resumable._Redirects().redirect_request(request, None, 302, '', {}, 'http://host/file')


# ---- wrong files

def test_wrong_byte_is_refused_and_removed(server, weights, tmp_path):
    if weights.url:
        weights = plain(server, sha256=SHA256)
    server.fail(BLOB if weights.repo else PATH, Fault('flip', 3 * CHUNK))
    refused(weights, f'instead of {SHA256[:16]}... ' + ('that the hub records' if weights.repo else 'of the published'),
            'it was removed, run `subquad weights download test_ppma.')
    assert cached_file(weights) is None and no_file_is_left(tmp_path)
    assert locked_entry(weights.name, weights.source) is None
    assert fetch(weights).read_bytes() == CONTENT, 'the next call downloads a good file'


def test_damaged_archive_is_not_recorded(server, tmp_path):
    """No hash of a plain file is known beforehand, and torch reads an archive with a wrong byte without a word."""
    server.fail(PATH, Fault('flip', 3 * CHUNK))
    refused(plain(server), 'data/0 differs from its checksum); it was removed, run `subquad weights download')
    assert no_file_is_left(tmp_path) and locked_entry('test_ppma.plain', plain(server).source) is None
    assert fetch(plain(server)).read_bytes() == CONTENT


def test_hash_of_a_damaged_archive_is_told_from_a_right_one(server):
    """Earlier versions recorded it."""
    weights = plain(server)
    path = fetch(weights)
    for kept in (True, False):
        forget(weights)
        damaged = CONTENT[:3 * CHUNK] + b'\0' + CONTENT[3 * CHUNK + 1:]
        path.write_bytes(damaged)
        lock(weights.name, LockEntry(weights.source, hashlib.sha256(damaged).hexdigest(), len(damaged), None, 'then'))
        if kept:                                        # the damaged file shows that its hash is wrong
            with pytest.raises(WeightsError, match='differs from its checksum'):
                check(weights, path)
            assert refused(weights, 'differs from its checksum').endswith('to download it again')
            assert fetch(weights).read_bytes() == CONTENT
        else:
            path.unlink()
            refused(weights, 'with --update if its author has replaced it or the recorded one was damaged')
            assert renew(weights).read_bytes() == CONTENT
        assert locked_entry(weights.name, weights.source).sha256 == SHA256 and check(weights, path)


def test_truncated_file_is_refused(server, weights, tmp_path):
    """The server says that the file is shorter. The hub knows its size, and half a plain file cannot be read."""
    server.fail(BLOB if weights.repo else PATH, *[Fault('truncate', 12 * CHUNK)] * 4)
    refused(weights, 'cannot be downloaded' if weights.repo else 'it was removed, run `subquad weights')
    assert no_file_is_left(tmp_path) and locked_entry(weights.name, weights.source) is None
    server.faults.clear()
    assert fetch(weights).read_bytes() == CONTENT


def test_damaged_cache_is_refused_and_removed(server, weights, tmp_path):
    path = fetch(weights)
    content = bytearray(CONTENT)
    content[-1] ^= 1
    path.resolve().write_bytes(content)
    refused(weights, f'instead of {SHA256[:16]}... ', 'it was removed')
    assert no_file_is_left(tmp_path) and cached_file(weights) is None
    assert fetch(weights).read_bytes() == CONTENT


@pytest.mark.parametrize('linked', [True, False])
def test_hub_records_the_hash_without_links(server, monkeypatch, linked, tmp_path):
    """Where the file system has no links, the cache does not tell the hub's sha256, so the hub is asked."""
    monkeypatch.setattr(huggingface_hub.file_download, 'are_symlinks_supported', lambda *_: linked)
    server.fail(BLOB, Fault('flip', 0))
    refused(hub(), 'that the hub records', 'it was removed')
    assert no_file_is_left(tmp_path)
    path = fetch(hub())
    assert path.is_symlink() == linked and locked_entry('test_ppma.served', hub().source).sha256 == SHA256


def test_small_hub_files_have_no_recorded_sha256(server):
    server.add_model(REPO, {FILE: CONTENT}, small=[FILE])
    with pytest.warns(UserWarning, match='is not known beforehand'):
        assert fetch(hub()).read_bytes() == CONTENT


def test_size_of_the_registry(server):
    for size in (len(CONTENT) - 1, len(CONTENT) + 1):
        refused(plain(server, size=size), f'{len(CONTENT):,}', f'{size:,}')
    fetch(plain(server, size=len(CONTENT)))


def test_limits(server, monkeypatch, tmp_path):
    monkeypatch.setattr(download, 'LARGEST', 4 * CHUNK)
    refused(hub(), f'has {len(CONTENT):,} bytes, more than the {4 * CHUNK:,} allowed')
    assert not server.got(BLOB)
    refused(plain(server), f'has {len(CONTENT):,} bytes, more than the {4 * CHUNK:,} allowed')
    server.fail(PATH, Fault('endless', 100 * CHUNK))
    refused(plain(server), 'sends more bytes than are allowed')
    assert sum(path.stat().st_size for path in tmp_path.rglob('*') if path.is_file()) < CHUNK
    monkeypatch.setattr(download, 'LARGEST', 1 << 30)
    monkeypatch.setattr(resumable.shutil, 'disk_usage', lambda _: SimpleNamespace(free=9))
    refused(plain(server), f'{len(CONTENT):,} bytes are needed and 9 are free', 'set SUBQUAD_CACHE to another folder')


@pytest.mark.parametrize('fault, words', [
    (Fault('page'), 'answers with a web page instead of a file; check whether the network wants a login'),
    (Fault('gzip'), 'is sent as gzip; check the proxy'),
    (Fault('status', 404), 'does not exist (HTTP 404); update subquad'),
    (Fault('status', 403), 'may not be read (HTTP 403)'),
    (Fault('status', 418), 'the server answers HTTP 418'),
], ids=lambda value: f'{value.kind}{value.at}' if isinstance(value, Fault) else '')
def test_useless_answers(server, fault, words, tmp_path):
    server.fail(PATH, fault)
    refused(plain(server), words, 'then run `subquad weights download test_ppma.plain`')
    assert no_file_is_left(tmp_path) and len(gets(server)) == 1
