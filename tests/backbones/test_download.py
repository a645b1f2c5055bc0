"""Downloads from a real HTTP server: resume, retries, hashes, locks, offline mode, one sentence for each failure."""
import errno
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import signal
import time
import warnings
from types import SimpleNamespace

import huggingface_hub
import pytest
import timm
import torch
from cvnets_files import authors_file, encoder_entries
from weights_server import CHUNK, Fault, WeightsServer, use_hub, weights_file

from subquad.backbones.weights import WeightsError, cache, download, load_weights, resumable
from subquad.backbones.weights.cache import LOCK_FILE, cache_folder, locked_entry, sha256_of
from subquad.backbones.weights.download import cached_file, fetch, forget
from subquad.backbones.weights.registry import PublishedWeights

CONTENT = weights_file(seed=0)
OTHER = weights_file(seed=1)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
REPO, FILE = 'someone/nets', 'checkpoints/one/best.pth'
BLOB = WeightsServer.blob(CONTENT)
PATH = '/models/net.pt'

pytestmark = pytest.mark.filterwarnings('ignore:.*use of fork:DeprecationWarning',
                                        'ignore:.*is not known beforehand:UserWarning')


@pytest.fixture
def server(tmp_path, monkeypatch):
    with WeightsServer() as server:
        use_hub(monkeypatch, server, tmp_path)
        # Pauses between attempts are cut short; the server waits in another way.
        sleep = time.sleep
        monkeypatch.setattr(time, 'sleep', lambda seconds: sleep(min(seconds, .01)))
        server.add_file(PATH, CONTENT)
        server.add_model(REPO, {FILE: CONTENT})
        yield server


def hub(**fields):
    return PublishedWeights('test_ppma', 'served', 'classification', 'ppma', repo=REPO, filename=FILE, **fields)


def plain(server, path=PATH, **fields):
    return PublishedWeights('test_ppma', 'plain', 'classification', 'cvnets', url=server.url + path, **fields)


@pytest.fixture(params=['hub', 'plain'])
def weights(request, server):
    return hub() if request.param == 'hub' else plain(server)


def gets(server):
    """The requests for the content, from the hub's other host or of the plain file."""
    return server.got(BLOB) + server.got(PATH)


def refused(weights, *words):
    """Return the message of the WeightsError of a download: one sentence with the command to try."""
    with pytest.raises(WeightsError) as caught:
        fetch(weights)
    message = str(caught.value)
    assert '\n' not in message and all(word in message for word in words), message
    return message


def no_file_is_left(tmp_path):
    """Whether nothing but partial files is larger than a lock."""
    large = [path.name for path in tmp_path.rglob('*') if path.is_file() and path.stat().st_size > CHUNK]
    return all('.part.' in name or name.endswith('.incomplete') for name in large)


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


def test_published_file_loads_after_download(server):
    state = authors_file(encoder_entries(.5), (('encoder.classifier.1.weight', (1000, 256)),
                                               ('encoder.classifier.1.bias', (1000,))))
    state = {key.removeprefix('encoder.'): value for key, value in state.items()}
    torch.save(state, buffer := io.BytesIO())
    server.add_file('/cvnets/mobilevitv2-0.5.pt', buffer.getvalue())
    model = timm.create_model('subquad_mobilevitv2_050')
    load_weights(model, fetch(plain(server, '/cvnets/mobilevitv2-0.5.pt')))
    assert torch.equal(model.head.fc.weight, state['classifier.1.weight'])


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


# ---- the lock file

def test_locked_commit_is_used_after_the_hub_has_changed(server):
    commit = server.models[REPO]['main']['commit']
    path = fetch(hub())
    server.add_model(REPO, {FILE: OTHER})
    assert fetch(hub()) == path
    path.unlink()                                     # as on a new machine that has the lock file
    path.resolve().unlink(missing_ok=True)
    assert fetch(hub()).read_bytes() == CONTENT and server.got(f'/{REPO}/resolve/{commit}/{FILE}', 'HEAD')
    forget(hub())
    assert fetch(hub()).read_bytes() == OTHER
    assert locked_entry('test_ppma.served', hub().source).sha256 == hashlib.sha256(OTHER).hexdigest()


def test_changed_plain_file_is_refused(server):
    path = fetch(plain(server))
    path.unlink()
    server.add_file(PATH, OTHER)
    refused(plain(server), f'instead of {SHA256[:16]}... in weights.lock.json')
    assert not path.exists()
    forget(plain(server))
    assert fetch(plain(server)).read_bytes() == OTHER


def test_hub_file_that_differs_from_the_registry_stays_in_the_shared_cache(server):
    """Another program may want the file, which is the one that the hub records."""
    wanted = hub(sha256=hashlib.sha256(OTHER).hexdigest())
    refused(wanted, 'of the published file', 'download test_ppma.served --update`')
    assert cached_file(wanted).read_bytes() == CONTENT


def test_deleted_commit(server):
    fetch(hub()).resolve().unlink()
    cached_file(hub())
    server.models[REPO] = {'main': dict(commit='f' * 40, files={}, small=set())}
    refused(hub(), 'does not exist (HTTP 404); remove its entry from weights.lock.json')


@pytest.mark.parametrize('text', ['{', '[]', '{"test_ppma.plain": {}}', '{"test_ppma.plain": 3}',
                                  json.dumps({'test_ppma.plain': dict(source=1, sha256='', size=1, revision=None,
                                                                      date='')})])
def test_damaged_lock_file(server, text, tmp_path):
    (tmp_path / 'subquad').mkdir()
    (tmp_path / 'subquad' / LOCK_FILE).write_text(text)
    refused(plain(server), 'weights.lock.json', 'remove')
    assert not gets(server)


def test_moved_source_is_a_new_file(server):
    fetch(plain(server))
    server.add_file('/elsewhere/other.pt', OTHER)
    assert fetch(plain(server, '/elsewhere/other.pt')).read_bytes() == OTHER


# ---- no network, no access, no folder

def test_offline_from_the_cache(server, weights, monkeypatch):
    path = fetch(weights)
    count = len(server.requests)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    assert fetch(weights) == path and len(server.requests) == count


def test_offline_hub_cache_of_another_program(server, monkeypatch):
    """timm or huggingface_hub has downloaded the file; the lock file knows nothing yet."""
    path = huggingface_hub.hf_hub_download(REPO, FILE)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    assert str(fetch(hub())) == path and locked_entry('test_ppma.served', hub().source).sha256 == SHA256


def test_offline_without_a_cache(server, weights, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    assert refused(weights) == (
        f'{weights.name} cannot be downloaded: it is not in the cache, and HF_HUB_OFFLINE forbids downloads; unset '
        f'HF_HUB_OFFLINE, then run `subquad weights download {weights.name}`')
    assert not server.requests


def test_no_network(server, weights, capfd):
    server.__exit__()
    refused(weights, f'{weights.name} cannot be downloaded: {server.url}', 'cannot be reached (',
            f'; check the network and the proxy, then run `subquad weights download {weights.name}`')
    assert capfd.readouterr().err == '', 'the sentence is all'


def test_no_network_uses_the_cache(server, weights):
    path = fetch(weights)
    server.__exit__()
    assert fetch(weights) == path


def test_hub_errors(server, monkeypatch):
    server.fail(f'/{REPO}/resolve/main/{FILE}', *[Fault('status', 503)] * 20, method='HEAD')
    refused(hub(), 'answers HTTP 503; try again later')
    unknown = PublishedWeights('test_ppma', 'gone', 'classification', 'ppma', repo='no/one', filename='a.pth')
    refused(unknown, '/no/one (a.pth, main) may not be read (HTTP 401); log in with `hf auth login` or set HF_TOKEN')
    missing = PublishedWeights('test_ppma', 'gone', 'classification', 'ppma', repo=REPO, filename='b.pth')
    refused(missing, f'/{REPO} (b.pth, main) does not exist (HTTP 404); update subquad')


def test_token_reaches_the_hub_only(server, monkeypatch):
    server.token = 'hf_secret'
    refused(hub(), 'may not be read (HTTP 401)')
    monkeypatch.setenv('HF_TOKEN', 'hf_secret')
    server.requests.clear()
    fetch(hub())
    fetch(plain(server))
    assert {request.path for request in server.requests if 'authorization' in request.headers} == {
        f'/{REPO}/resolve/main/{FILE}'}


def test_read_only_cache(server, monkeypatch):
    """A plain file has no place. A hub file that could be checked is used, although it cannot be recorded."""
    def acquire(*_, **__):
        raise OSError(errno.EROFS, 'Read-only file system')
    monkeypatch.setattr(cache, 'FileLock', lambda _: SimpleNamespace(acquire=acquire))
    refused(plain(server), 'cannot be used as cache (Read-only file system); set SUBQUAD_CACHE to a folder')
    with pytest.warns(UserWarning, match='the download of test_ppma.served is not recorded: .*Read-only file system'):
        assert fetch(hub()).read_bytes() == CONTENT
    server.add_model(REPO, {FILE: OTHER}, small=[FILE])
    refused(hub(), 'cannot be used as cache')          # nothing is known of this one


def test_cache_that_is_a_file(server, tmp_path):
    (tmp_path / 'subquad').write_text('')
    refused(plain(server), 'cannot be read: Not a directory')


@pytest.mark.parametrize('error, words', [
    (OSError(errno.ENOSPC, 'No space left on device'), 'cannot take the file (No space left on device); set HF_HOME'),
    (PermissionError(errno.EACCES, 'Permission denied'), 'cannot take the file (Permission denied); set HF_HOME'),
    (OSError('Consistency check failed'), ' failed (Consistency check failed)'),
    (RuntimeError('Data processing error'), ' failed (Data processing error)')], ids=str)
def test_errors_of_huggingface_hub(server, monkeypatch, error, words):
    def fail(*_, **__):
        raise error
    monkeypatch.setattr(download, 'hf_hub_download', fail)
    refused(hub(), words, 'then run `subquad weights download test_ppma.served`')


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv('SUBQUAD_CACHE', str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv('SUBQUAD_CACHE')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    assert cache_folder() == tmp_path / 'xdg' / 'subquad'
    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert cache_folder() == tmp_path / '.cache' / 'subquad'


def test_shipped_files_are_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(download, 'SHIPPED', tmp_path)
    shipped = PublishedWeights('test_ppma', 'digits', 'classification', 'subquad', file='a.safetensors', sha256=SHA256)
    refused(shipped, 'cannot be read', 'reinstall subquad')
    (tmp_path / 'a.safetensors').write_bytes(CONTENT)
    assert fetch(shipped) == tmp_path / 'a.safetensors' == cached_file(shipped)
    (tmp_path / 'a.safetensors').write_bytes(OTHER)
    refused(shipped, f'instead of {SHA256[:16]}', 'reinstall subquad')
    assert (tmp_path / 'a.safetensors').exists()


# ---- several processes

def _fork(*arguments):
    """Start `fetch` in a process that shares the settings of this one. It leaves without running pytest's exit."""
    def run(weights):
        os.close(2)
        os.open(os.devnull, os.O_WRONLY)
        try:
            fetch(weights)
        except BaseException:
            os._exit(1)
        os._exit(0)
    process = multiprocessing.get_context('fork').Process(target=run, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize('count', [2, 8])
def test_processes_download_once(server, weights, count):
    server.pause = .01
    processes = [_fork(weights) for _ in range(count)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count
    assert len(gets(server)) == 1 and fetch(weights).read_bytes() == CONTENT


def _clear(weights):
    """Remove the file from the cache."""
    path = cached_file(weights)
    if path is not None:
        forget(weights)
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return path is not None


def _kill(server, weights, times):
    """Kill downloads at random moments, and return how many had finished. A file with its final name is whole."""
    chance = random.Random(times)
    server.pause = .005
    start = time.monotonic()
    _fork(weights).join()
    whole = time.monotonic() - start
    finished = 0
    for _ in range(times):
        _clear(weights)
        process = _fork(weights)
        process.join(chance.uniform(0, 1.2 * whole))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        path = cached_file(weights)
        assert path is None or path.read_bytes() == CONTENT
        finished += path is not None
    server.pause = 0.
    assert fetch(weights).read_bytes() == CONTENT
    return finished


def test_killed_downloads(server, weights):
    _kill(server, weights, 5)


@pytest.mark.slow
def test_killed_downloads_50_times(server, weights):
    finished = _kill(server, weights, 50)
    assert 0 < finished < 50, 'the moments are spread over the download and its end'
    if weights.url:                                   # transfers have continued: fewer bytes than 50 whole files
        assert [request for request in gets(server) if re.match('bytes=[1-9]', request.headers.get('range', ''))]


def test_killed_plain_download_continues(server):
    server.pause = .02
    process = _fork(plain(server))
    part = cache_folder() / 'test_ppma.plain' / 'net.part.pt'
    deadline = time.monotonic() + 30
    while not part.exists() or part.stat().st_size < 5 * CHUNK:
        assert time.monotonic() < deadline
        time.sleep(.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    size = part.stat().st_size
    server.pause = 0.
    assert size < len(CONTENT) and sha256_of(fetch(plain(server))) == SHA256
    assert gets(server)[-1].headers['range'] == f'bytes={size}-'
