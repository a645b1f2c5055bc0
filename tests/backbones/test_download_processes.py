"""Downloads in several processes at once, and in processes that are killed."""
import hashlib
import multiprocessing
import os
import random
import re
import signal
import time

import pytest
from download_cases import CONTENT, gets, plain
from weights_server import CHUNK

from subquad.backbones.weights.cache import cache_folder, sha256_of
from subquad.backbones.weights.download import cached_file, fetch, forget

SHA256 = hashlib.sha256(CONTENT).hexdigest()

pytestmark = pytest.mark.filterwarnings('ignore:.*use of fork:DeprecationWarning',
                                        'ignore:.*is not known beforehand:UserWarning')


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


@pytest.mark.long
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
