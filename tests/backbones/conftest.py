"""Fixtures that tests of downloads share."""
import pytest
from download_cases import hub, plain, serving


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with a hub file and a plain file, and empty caches."""
    with serving(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(params=['hub', 'plain'])
def weights(request, server):
    """The hub file, then the plain file."""
    return hub() if request.param == 'hub' else plain(server)
