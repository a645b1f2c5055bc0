"""A hub file and a plain file on a real server, for tests of downloads."""
import contextlib
import time

import pytest
from weights_server import CHUNK, WeightsServer, use_hub, weights_file

from subquad.backbones.weights import WeightsError
from subquad.backbones.weights.download import fetch
from subquad.backbones.weights.registry import PublishedWeights

CONTENT, OTHER = weights_file(seed=0), weights_file(seed=1)
REPO, FILE = 'someone/nets', 'checkpoints/one/best.pth'
PATH = '/models/net.pt'
BLOB = WeightsServer.blob(CONTENT)


@contextlib.contextmanager
def serving(folder, monkeypatch):
    """Serve CONTENT as a hub file and as a plain file, with empty caches below a folder."""
    with WeightsServer() as server:
        use_hub(monkeypatch, server, folder)
        # Pauses between attempts are cut short; the server waits in another way.
        sleep = time.sleep
        monkeypatch.setattr(time, 'sleep', lambda seconds: sleep(min(seconds, .01)))
        server.add_file(PATH, CONTENT)
        server.add_model(REPO, {FILE: CONTENT})
        yield server


def hub(**fields):
    """The hub file."""
    return PublishedWeights('test_ppma', 'served', 'classification', 'ppma', repo=REPO, filename=FILE, **fields)


def plain(server, path=PATH, **fields):
    """The plain file, or another one."""
    return PublishedWeights('test_ppma', 'plain', 'classification', 'cvnets', url=server.url + path, **fields)


def gets(server):
    """The requests for CONTENT, from the hub's other host or of the plain file."""
    return server.got(BLOB) + server.got(PATH)


def refused(weights, *words):
    """Return the message of the WeightsError of a download. It is one sentence with all of the words."""
    with pytest.raises(WeightsError) as caught:
        fetch(weights)
    message = str(caught.value)
    assert '\n' not in message and all(word in message for word in words), message
    return message


def no_file_is_left(folder):
    """Whether nothing but partial files is larger than a lock."""
    large = [path.name for path in folder.rglob('*') if path.is_file() and path.stat().st_size > CHUNK]
    return all('.part.' in name or name.endswith('.incomplete') for name in large)
