"""A headless Chromium that tests drive by the WebDriver protocol, and a server for a folder of files."""
import base64
import functools
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator, Optional

FLAGS = ('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
         '--disable-background-networking', '--disable-component-update', '--disable-sync', '--window-size=1100,900',
         '--use-fake-device-for-media-stream', '--use-fake-ui-for-media-stream')      # a camera, and leave to use it
_ELEMENT = 'element-6066-11e4-a52e-4f735466cecf'        # the protocol's name of an element's key


def missing_programs(*names: str) -> str:
    """Return why the programs cannot be used, or '' if all are installed."""
    missing = [name for name in names if not shutil.which(name)]
    return f"not installed: {', '.join(missing)}" if missing else ''


class Browser:
    """A session of the browser.

    Args:
        address: Where chromedriver listens.
        profile: An empty folder.
        flags: More flags of the command line.
    """

    def __init__(self, address: str, profile: Path, *flags: str):
        self.address = address
        options = {'binary': shutil.which('chromium'), 'args': [*FLAGS, *flags, f'--user-data-dir={profile}']}
        capabilities = {'alwaysMatch': {'browserName': 'chrome', 'goog:chromeOptions': options,
                                        'goog:loggingPrefs': {'browser': 'ALL'}}}
        self.session = ''
        self.session = f"/session/{self._call('POST', '/session', capabilities=capabilities)['sessionId']}"

    def _call(self, method: str, path: str, **body: Any) -> Any:
        request = urllib.request.Request(self.address + self.session + path, method=method,
                                         data=json.dumps(body).encode() if method == 'POST' else None,
                                         headers={'Content-Type': 'application/json'})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)['value']
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)['value']['message'].splitlines()[0]) from error

    def open(self, address: str) -> None:
        """Open a page, and wait until it has been loaded."""
        self._call('POST', '/url', url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function in the page, and return what it returns."""
        return self._call('POST', '/execute/sync', script=script, args=list(arguments))

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Return the value of a JavaScript expression as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(f'return {script}'):
                return value
            time.sleep(0.05)
        raise TimeoutError(f'{script} was not true within {seconds} s; the page says: '
                           f'{self.run("return document.body.innerText")}')

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in the file input that the CSS selector finds."""
        element = self._call('POST', '/element', using='css selector', value=selector)[_ELEMENT]
        self._call('POST', f'/element/{element}/value', text=str(file))

    def log(self) -> list:
        """Return the messages of the console since the last call."""
        return self._call('POST', '/se/log', type='browser')

    def screenshot(self, file: Path) -> None:
        """Write a picture of the page as PNG."""
        file.write_bytes(base64.b64decode(self._call('GET', '/screenshot')))

    def close(self) -> None:
        self._call('DELETE', '')


@contextmanager
def browser(profile: Path, *flags: str) -> Iterator[Browser]:
    """Start chromedriver and a session of Chromium; both end with the block."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(['chromedriver', f'--port={port}'], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    session: Optional[Browser] = None
    try:
        _wait_for(port)
        session = Browser(f'http://127.0.0.1:{port}', profile, *flags)
        yield session
    finally:
        if session:
            session.close()
        driver.terminate()
        driver.wait(10)


def _wait_for(port: int, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(('127.0.0.1', port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class _Server(ThreadingHTTPServer):
    request_queue_size = 64              # a browser opens many connections at once


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder as `python -m http.server` does; gives its address."""
    server = _Server(('127.0.0.1', 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f'http://127.0.0.1:{server.server_port}'
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
