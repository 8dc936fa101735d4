"""A real S3 server on the loopback (moto's, a process of its own) and a proxy in front of it that breaks requests.

scripts/test.sh --full installs moto and s3fs into a folder of their own, which $SAMECURVE_S3 names.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from harness import ROOT

from samecurve.distributed.network import free_port

PACKAGES = os.environ.get("SAMECURVE_S3", "")
MISSING = "scripts/test.sh --full installs moto and s3fs and sets SAMECURVE_S3"
BUCKET = "bucket"
KEY_ID, SECRET = "AKIASAMECURVETEST001", "uV0rSecretThatNobodyMaySee/0123456789abc"
START_SECONDS = 120
ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>on purpose</Message></Error>"
WAYS = ("error", "late error", "throttled", "lost", "cut", "flipped", "killed", "killed after")
ASK = """
import sys, urllib.request as http
request = http.Request(sys.argv[1], method=sys.argv[2])
sys.stdout.buffer.write(http.urlopen(request, timeout=60).read())
"""
Choose = Callable[[str, str, int], str]


def settings(port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """The environment of a process that uses the server, or the proxy, at this port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "PYTHONPATH": f"{ROOT}:{PACKAGES}",
    }


class Server:
    """moto's server with one bucket. inside: a command that others are put behind, such as `ip netns exec NAME`."""

    def __init__(self, port: int, address: str, inside: tuple[str, ...]):
        self.port, self.address, self._inside = port, address, inside

    def ask(self, query: str = "", method: str = "GET") -> str:
        """Send a request of its own, without credentials, so that it can list but not read.

        Raises:
            CalledProcessError: it fails.
        """
        url = f"http://{self.address}:{self.port}/{BUCKET}{query}"
        done = subprocess.run([*self._inside, sys.executable, "-c", ASK, url, method], check=True, capture_output=True)
        return done.stdout.decode(errors="replace")

    def keys(self) -> list[str]:
        return re.findall("<Key>([^<]+)</Key>", self.ask("?list-type=2"))

    def newest_step(self) -> int:
        """The step of the newest checkpoint that is committed in the store, 0 if none is."""
        return max((int(step) for step in re.findall(r"step_(\d+)/COMMITTED\b", " ".join(self.keys()))), default=0)

    def unfinished_uploads(self) -> list[str]:
        return re.findall("<UploadId>([^<]+)</UploadId>", self.ask("?uploads"))


@contextmanager
def server(folder: Path, address: str = "127.0.0.1", inside: tuple[str, ...] = ()) -> Iterator[Server]:
    """Start a server with an empty bucket. It is gone afterwards."""
    made = Server(free_port(), address, inside)
    command = [*inside, sys.executable, "-m", "moto.server", "-H", address, "-p", str(made.port)]
    with open(folder / "moto.txt", "wb") as said:
        environment = {**os.environ, **settings(made.port)}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.CalledProcessError):
                made.ask(method="PUT")
                break
            time.sleep(0.2)
        else:
            raise AssertionError((folder / "moto.txt").read_text())
        yield made
    finally:
        process.kill()
        process.wait()


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, except those that `choose(method, path, body size)` wants broken.

    Attributes:
        choose: returns one of WAYS, or "" for a request that is passed on.
            error, throttled: the answer is 500 or 503, and nothing happens. late error, lost: it happens, and the
            answer is 500 or missing. cut: half of an upload arrives, or half of an answer. flipped: of an upload or
            an answer a bit. killed, killed after: the process dies before or after it happens.
        victim: the process that "killed" kills.
        broken: counts the requests by way.
    """

    daemon_threads = True

    def __init__(self, server: Server):
        super().__init__(("127.0.0.1", 0), Relay)
        self.port, self.target = self.server_address[1], server.port
        self.choose: Choose = lambda method, path, size: ""
        self.victim: subprocess.Popen | None = None
        self.broken: Counter[str] = Counter()
        self._one = threading.Lock()

    def way(self, method: str, path: str, size: int) -> str:
        with self._one:  # one at a time, so that a seed decides
            way = self.choose(method, path, size)
            self.broken[way] += 1
            return way

    def kill(self) -> None:
        assert self.victim is not None
        self.victim.send_signal(signal.SIGKILL)

    def handle_error(self, request, client_address) -> None:
        """A client that is gone is what the tests make."""


class Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def __getattr__(self, name: str):
        if name.startswith("do_"):  # do_GET and its like
            return self._relay
        raise AttributeError(name)

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        way = self.server.way(self.command, self.path, len(body))
        if way in ("error", "throttled"):
            self._refuse(*((500, "InternalError") if way == "error" else (503, "SlowDown")))
        elif way == "killed":
            self.server.kill()
            self._cut()
        elif way == "cut" and body:
            self._send(body[: len(body) // 2], len(body))
            self._cut()
        else:
            self._answer(way, *self._send(_flipped(body) if way == "flipped" else body, len(body)))

    def _answer(self, way: str, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        """Pass the server's answer on, or not."""
        if way == "killed after":
            self.server.kill()
        if way in ("lost", "killed after"):
            return self._cut()
        if way == "late error":
            return self._refuse(500, "InternalError")
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if way == "flipped" and self.command == "GET":
            content = _flipped(content)
        self.wfile.write(content[: len(content) // 2] if way == "cut" else content)
        if way == "cut":
            self._cut()

    def _send(self, body: bytes, size: int) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send a body that is to have `size` bytes. If it is shorter, the connection ends there, without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("content-length", "expect", "connection"):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(size))
            connection.endheaders(body)
            if len(body) < size:
                return 0, [], b""
            answer = connection.getresponse()
            content = answer.read()
        size_of = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        kept = [pair for pair in answer.getheaders() if pair[0].lower() not in _REPLACED]
        return answer.status, [*kept, ("Content-Length", size_of)], content

    def _refuse(self, status: int, code: str) -> None:
        content = b"" if self.command == "HEAD" else ERROR.format(code).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)

    def log_message(self, format, *arguments) -> None:
        """Nobody reads it."""


_REPLACED = ("content-length", "transfer-encoding", "connection", "date", "server")


def _flipped(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1]) if body else body


@contextmanager
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
