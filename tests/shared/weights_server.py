"""A real HTTP server on loopback with a tree like the Hugging Face Hub's, plain files, and faults on demand."""
import hashlib
import io
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.file_download
import torch

CHUNK = 1 << 14


def weights_file(seed):
    """Return the bytes of a small weight file, which are the same in every call."""
    weights = {'weight': torch.rand(20 * CHUNK // 4, generator=torch.Generator().manual_seed(seed))}
    torch.save({'model': weights}, buffer := io.BytesIO())
    return buffer.getvalue()


@dataclass
class Request:
    """A request that the server has got, and what it answered."""
    method: str
    path: str
    headers: dict
    status: int = 0
    sent: int = 0


@dataclass
class File:
    content: bytes
    etag: str = ''
    modified: str = formatdate(1.7e9, usegmt=True)


@dataclass(frozen=True)
class Fault:
    """A fault of one answer.

    Attributes:
        kind: 'status' answers with the code `at`; 'close' closes the connection after `at` bytes; 'stall' sends nothing
            more after `at` bytes; 'flip' changes the byte `at`; 'truncate' serves a file of `at` bytes; 'page' answers
            with a web page; 'gzip' claims a content encoding; 'endless' sends `at` bytes in chunks, without a length.
        at: see above.
        headers: further headers of the answer.
    """
    kind: str
    at: int = 0
    headers: dict = field(default_factory=dict)


class WeightsServer:
    """Serves until the end of its `with` block.

    Attributes:
        url: address of the hub and of the plain files.
        cdn: the same server under another host name; the hub redirects to it.
        requests: all requests, in order.
        ranges: whether the server answers ranges; otherwise it sends whole files.
        conditions: whether it heeds If-Range; otherwise it sends ranges of a file that has changed, too.
        validators: whether it sends ETag and Last-Modified.
        token: the token that hub requests must carry, or None.
        pause: seconds to wait after each `CHUNK` bytes.
    """

    def __init__(self):
        self.files, self.models, self.redirects, self.faults = {}, {}, {}, {}
        self.requests = []
        self.ranges, self.conditions, self.validators, self.token, self.pause = True, True, True, None, 0.
        self.ending = threading.Event()

    def __enter__(self):
        self._server = ThreadingHTTPServer(('127.0.0.1', 0), type('Handler', (_Handler,), {'site': self}))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.cdn = f'http://127.0.0.1:{port}', f'http://localhost:{port}'
        threading.Thread(target=self._server.serve_forever, args=(.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()

    def add_file(self, path, content):
        """Serve bytes under a path, and return the address."""
        self.files[path] = File(content, f'"{hashlib.md5(content).hexdigest()}"')
        return self.url + path

    def add_model(self, repo, files, small=()):
        """Add a commit to a hub repository, and return its hash. Files that are not `small` are on the other host."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        model = self.models.setdefault(repo, {})
        model[commit] = model['main'] = dict(commit=commit, files=files, small=set(small))
        for content in files.values():
            self.files[self.blob(content)] = File(content, f'"{hashlib.md5(content).hexdigest()}"')
        return commit

    @staticmethod
    def blob(content):
        """Return the path of a large hub file's bytes."""
        return f'/cdn/{hashlib.sha256(content).hexdigest()}'

    def redirect(self, path, target, status=302):
        """Answer a path with a redirect, and return its address."""
        self.redirects[path] = (status, target)
        return self.url + path

    def fail(self, path, *faults, method='GET'):
        """Answer the next requests for a path with these faults, one each; None is no fault."""
        self.faults.setdefault((method, path), deque()).extend(faults)

    def got(self, path, method='GET'):
        """Return the requests for a path."""
        return [request for request in self.requests if (request.method, request.path) == (method, path)]


def use_hub(monkeypatch, server, folder):
    """Let huggingface_hub and the downloads of this process use the server, with empty caches below a folder."""
    for name, value in (
            ('ENDPOINT', server.url),
            ('HUGGINGFACE_CO_URL_TEMPLATE', server.url + '/{repo_id}/resolve/{revision}/{filename}'),
            ('HF_HUB_CACHE', str(folder / 'hf' / 'hub')),
            ('HF_HUB_OFFLINE', False),
            ('HF_TOKEN_PATH', str(folder / 'no token')),
    ):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
        if hasattr(huggingface_hub.file_download, name):       # older versions import the values of the constants
            monkeypatch.setattr(huggingface_hub.file_download, name, value)
    monkeypatch.setenv('SUBQUAD_CACHE', str(folder / 'subquad'))
    monkeypatch.setenv('NO_PROXY', '127.0.0.1,localhost')
    for name in ('HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'HTTP_PROXY', 'http_proxy', 'ALL_PROXY', 'all_proxy'):
        monkeypatch.delenv(name, raising=False)


def hub_environment(server, folder):
    """Return the environment variables that do the same for another process."""
    return dict(HF_ENDPOINT=server.url, HF_HOME=str(folder / 'hf'), SUBQUAD_CACHE=str(folder / 'subquad'), HF_TOKEN='',
                HF_HUB_OFFLINE='0', HF_HUB_DISABLE_PROGRESS_BARS='1', NO_PROXY='127.0.0.1,localhost', HTTP_PROXY='',
                http_proxy='', ALL_PROXY='', all_proxy='')


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    site: WeightsServer

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:                # the client has gone
            self.close_connection = True

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        self.request_record = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()})
        self.site.requests.append(self.request_record)
        faults = self.site.faults.get((self.command, path))
        fault = faults.popleft() if faults else None
        if fault and fault.kind == 'status':
            self._send(fault.at, b'', fault.headers)
        elif path in self.site.redirects:
            status, target = self.site.redirects[path]
            self._send(status, b'', {'Location': target})
        elif path in self.site.files:
            self._send_file(self.site.files[path], fault)
        elif path.startswith('/api/models/'):
            self._describe(path.removeprefix('/api/models/'))
        elif '/resolve/' in path:
            self._resolve(*path[1:].partition('/resolve/')[::2])
        else:
            self._send(404, b'not found')

    def _send(self, status, body, headers=None):
        self.request_record.status = status
        self.send_response(status)
        for name, value in {'Content-Length': str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def _send_file(self, file, fault):
        content, headers = file.content, {}
        if self.site.validators:
            headers = {'ETag': file.etag, 'Last-Modified': file.modified}
        if fault and fault.kind == 'truncate':
            content = content[:fault.at]
        if fault and fault.kind == 'flip':
            content = content[:fault.at] + bytes([content[fault.at] ^ 1]) + content[fault.at + 1:]
        if fault and fault.kind == 'page':
            return self._send(200, b'<html>log in</html>', {'Content-Type': 'text/html; charset=utf-8'})
        if fault and fault.kind == 'gzip':
            headers['Content-Encoding'] = 'gzip'
        if fault and fault.kind == 'endless':
            return self._send_chunks(fault.at)
        start, status = self._start(file, len(content)), 200
        if start is not None:
            if start >= len(content):
                return self._send(416, b'', {'Content-Range': f'bytes */{len(content)}'})
            status = 206
            headers['Content-Range'] = f'bytes {start}-{len(content) - 1}/{len(content)}'
        if fault:
            headers.update(fault.headers)
        self._send_head(status, {'Content-Length': str(len(content) - (start or 0)), 'Accept-Ranges': 'bytes',
                                 'Content-Type': 'application/octet-stream', **headers})
        self._send_body(content, start or 0, fault)

    def _start(self, file, size):
        """Return the first byte that is asked for, or None for the whole file."""
        wanted = self.headers.get('Range')
        if not wanted or not self.site.ranges:
            return None
        if self.site.conditions and self.headers.get('If-Range') not in (None, file.etag, file.modified):
            return None
        return int(wanted.removeprefix('bytes=').partition('-')[0])

    def _send_head(self, status, headers):
        self.request_record.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_body(self, content, start, fault):
        if self.command == 'HEAD':
            return
        end = min(fault.at, len(content)) if fault and fault.kind in ('close', 'stall') else len(content)
        while start < end:
            chunk = content[start:min(start + CHUNK, end)]
            self.wfile.write(chunk)
            start += len(chunk)
            self.request_record.sent += len(chunk)
            if self.site.pause:
                self.site.ending.wait(self.site.pause)
        if fault and fault.kind == 'stall':
            self.site.ending.wait(60)
        self.close_connection = bool(fault)

    def _send_chunks(self, size):
        self._send_head(200, {'Transfer-Encoding': 'chunked'})
        for _ in range(0, size, CHUNK):
            self.wfile.write(b'%x\r\n%s\r\n' % (CHUNK, bytes(CHUNK)))
        self.wfile.write(b'0\r\n\r\n')

    def _commit(self, repo, revision):
        """Return the commit of a hub repository, or None after an error has been sent."""
        if self.site.token and self.headers.get('Authorization') != f'Bearer {self.site.token}':
            return self._send(401, b'', {'X-Error-Code': 'GatedRepo', 'X-Error-Message': 'log in'})
        if repo not in self.site.models:
            return self._send(401, b'', {'X-Error-Code': 'RepoNotFound', 'X-Error-Message': 'Repository not found'})
        if revision not in self.site.models[repo]:
            return self._send(404, b'', {'X-Error-Code': 'RevisionNotFound', 'X-Error-Message': 'Invalid rev id'})
        return self.site.models[repo][revision]

    def _resolve(self, repo, rest):
        revision, _, name = rest.partition('/')
        commit = self._commit(repo, revision)
        if commit is None:
            return
        headers = {'X-Repo-Commit': commit['commit']}
        if name not in commit['files']:
            return self._send(404, b'', {'X-Error-Code': 'EntryNotFound', 'X-Error-Message': 'no file', **headers})
        content = commit['files'][name]
        git = hashlib.sha1(content).hexdigest()
        if name in commit['small']:
            self._send_head(200, {**headers, 'ETag': f'"{git}"', 'Content-Length': str(len(content))})
            return self._send_body(content, 0, None)
        sha256 = hashlib.sha256(content).hexdigest()
        self._send(302, b'', {**headers, 'ETag': f'"{git}"', 'X-Linked-Etag': f'"{sha256}"',
                              'X-Linked-Size': str(len(content)), 'Location': f'{self.site.cdn}/cdn/{sha256}'})

    def _describe(self, rest):
        repo, _, revision = rest.partition('/revision/')
        commit = self._commit(repo, revision or 'main')
        if commit is not None:
            files = [dict(rfilename=name, size=len(content), lfs=dict(sha256=hashlib.sha256(content).hexdigest(),
                                                                      size=len(content), pointerSize=128))
                     for name, content in commit['files'].items()]
            body = dict(id=repo, modelId=repo, sha=commit['commit'], private=False, gated=False, disabled=False,
                        downloads=0, likes=0, tags=[], siblings=files)
            self._send(200, json.dumps(body).encode(), {'Content-Type': 'application/json'})
