"""Data sets by their name on the hub: a small hub on this machine, and none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from samecurve import hub, sources
from samecurve.errors import DataError

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "README.md": "about it",
    "LICENSE.txt": "free",
    "data/train.jsonl": '{"text": "one"}\n{"text": "two"}\n',
    "data/test.jsonl": '{"text": "three"}\n',
}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it downloads a data set."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/org/name/tree/"):
            sizes = {name: len(text) for name, text in FILES.items()}
            listed = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
            self._send(json.dumps(listed).encode())
        elif self.path.startswith("/api/datasets/org/name/"):
            files = [{"rfilename": name} for name in FILES]
            self._send(json.dumps({"id": "org/name", "sha": SHA, "siblings": files}).encode())
        elif self.path.startswith(f"/datasets/org/name/resolve/{SHA}/"):
            self._send(FILES[self.path.removeprefix(f"/datasets/org/name/resolve/{SHA}/")].encode())
        else:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        etag = hashlib.sha1(body).hexdigest()
        more = {"Content-Length": str(len(body)), "ETag": f'"{etag}"', "X-Repo-Commit": SHA, **(headers or {})}
        for name, value in more.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


READ = """
import sys
from samecurve import sources
from samecurve.errors import DataError
try:
    found = sources.find(sys.argv[1], sys.argv[2] or None)
    print([file.name for file in found.files], list(found.documents()))
except DataError as error:
    print(error)
"""


def read(tmp_path: Path, name: str, pattern: str = "", **environ: str) -> str:
    """In a process of its own: huggingface_hub reads the environment when it is imported."""
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "no_proxy": "*", **environ}
    done = subprocess.run([sys.executable, "-c", READ, name, pattern], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_data_set_is_downloaded_and_then_read_offline(endpoint, tmp_path):
    online = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    both = "['test.jsonl', 'train.jsonl'] ['three', 'one', 'two']"
    assert read(tmp_path, "org/name", **online) == both
    assert read(tmp_path, "org/name", HF_HUB_OFFLINE="1") == both
    assert read(tmp_path, "org/name", "**/train.jsonl", **online) == "['train.jsonl'] ['one', 'two']"
    assert "the hub has none of that name" in read(tmp_path, "org/other", **online)
    told = read(tmp_path, "org/other", HF_HUB_OFFLINE="1")
    assert told.startswith("org/other: there is no such file or folder here, and as a data set of the hub it cannot")
    assert told.endswith("it is not in the hub's cache, and HF_HUB_OFFLINE is set")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/name", True),
        ("org/name-v1.5", True),
        ("org/name.jsonl", False),
        ("name", False),
        ("./org/name", False),
        ("org/name/more", False),
        ("here/name", False),
        ("builtin:python-stdlib", False),
        ("hf://datasets/org/name", False),
    ],
)
def test_what_is_a_name_on_the_hub(path, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub.is_name(path) is expected
    if not expected and ":" not in path:
        with pytest.raises(DataError, match="does not exist"):
            sources.find(path)
