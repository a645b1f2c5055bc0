"""The cache of downloads: its lock file, offline mode, and one sentence for each failure."""
import errno
import hashlib
from types import SimpleNamespace

import huggingface_hub
import pytest
from download_cases import CONTENT, FILE, OTHER, PATH, REPO, gets, hub, plain, refused
from weights_server import Fault

from subquad.backbones.weights import WeightsError, cache, download
from subquad.backbones.weights.cache import LOCK_FILE, cache_folder, locked_entry
from subquad.backbones.weights.download import cached_file, fetch, forget
from subquad.backbones.weights.registry import PublishedWeights, find

SHA256 = hashlib.sha256(CONTENT).hexdigest()

pytestmark = pytest.mark.filterwarnings('ignore:.*is not known beforehand:UserWarning')


# ---- the lock file

def test_locked_commit_is_used_after_the_hub_has_changed(server):
    commit = server.models[REPO]['main']['commit']
    path = fetch(hub())
    server.add_model(REPO, {FILE: OTHER})
    assert fetch(hub()) == path
    path.resolve().unlink()                           # as on a new machine that has the lock file
    path.unlink()
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


@pytest.mark.parametrize('text', ['{', '[]', '{"test_ppma.plain": {}}', '{"test_ppma.plain": 3}'])
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


def test_cache_folder_of_the_caller(server, weights, tmp_path, monkeypatch):
    """As `cache_dir` of timm.create_model. The lock file stays where it is for all folders."""
    path = fetch(weights, tmp_path / 'mine')
    assert path.is_relative_to(tmp_path / 'mine') and path.read_bytes() == fetch(weights).read_bytes()
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    assert cached_file(weights, tmp_path / 'mine') == path == fetch(weights, str(tmp_path / 'mine'))
    assert cached_file(weights, tmp_path / 'other') is None
    with pytest.raises(WeightsError, match='it is not in the cache'):
        fetch(weights, tmp_path / 'other')


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
    refused(plain(server), 'cannot be read (Not a directory); set SUBQUAD_CACHE')


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


@pytest.mark.parametrize('offline', [False, True])
def test_failed_update_keeps_file_and_record(server, weights, offline, monkeypatch):
    path, entry = fetch(weights), locked_entry(weights.name, weights.source)
    content = path.read_bytes()
    if offline:
        monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
        words = ['HF_HUB_OFFLINE forbids downloads']
    else:
        server.files.clear()
        server.models.clear()
        words = ['cannot be downloaded', 'HTTP 40']
    with pytest.raises(WeightsError) as caught:
        download.renew(weights)
    assert all(word in str(caught.value) for word in words)
    assert locked_entry(weights.name, weights.source) == entry
    if weights.url:
        assert path.read_bytes() == content and [*path.parent.glob('*.previous')] == []


def test_damaged_lock_file_does_not_stop_weights_of_the_package(server):
    cache_folder().mkdir(parents=True, exist_ok=True)
    (cache_folder() / LOCK_FILE).write_text('{')
    assert fetch(find('test_ppma.digits')).is_file()


def test_replaced_file_names_update(server):
    fetch(plain(server))
    cached_file(plain(server)).unlink()
    server.add_file(PATH, OTHER)
    refused(plain(server), LOCK_FILE, 'with --update if its author has replaced it')
