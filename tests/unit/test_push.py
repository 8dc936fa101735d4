"""Uploads, to a stand-in of the hub's API on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants
from test_model_card import facts, written

from samecurve.cli import commands

TOKEN = "hf_good"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does, for one user; files are in `server.files` after their commit."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def answer(self, value: object, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        if path.startswith("/store/"):  # the bucket, where the address is the permission
            hub.stored[path.removeprefix("/store/")] = body
            return self.answer({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        known = {"/api/whoami-v2": self.whoami, "/api/repos/create": self.create, "objects": self.batch}
        known |= {
            "/api/validate-yaml": self.whoami,
            "/preupload/": self.preupload,
            "/commit/": self.commit,
            "/models/me/": self.info,
        }
        call = next((call for part, call in known.items() if part in path), None)
        return call(body) if call else self.answer({"error": "Repository not found"}, 404)

    do_GET = do_POST = do_PUT = handle_any  # noqa: N815

    def whoami(self, body: bytes) -> None:
        self.answer({"name": "me"})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        self.server.created.append(asked)
        if asked["organization"] != "me":
            return self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        return self.answer({"url": f"{constants.ENDPOINT}/me/{asked['name']}"})

    def preupload(self, body: bytes) -> None:
        names = [file["path"] for file in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith((".safetensors", ".gguf")) else "regular" for name in names}
        files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
        self.answer({"files": files})

    def info(self, body: bytes) -> None:
        self.answer({"id": "me/x", "sha": f"{0:040x}", "siblings": []})

    def batch(self, body: bytes) -> None:
        objects = json.loads(body)["objects"]
        for one in objects:
            one["actions"] = {"upload": {"href": f"{constants.ENDPOINT}/store/{one['oid']}"}}
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
        self.answer({"commitUrl": f"{constants.ENDPOINT}/me/x/commit/1", "commitOid": f"{1:040x}"})


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests, server.created, server.files, server.stored = [], [], {}, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path):
    """A run whose model was exported before, and to whose folder a user has added files of the run."""
    written(tmp_path, facts())
    folder = tmp_path / "model-fp32"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "README.md", "run.json", "metrics.jsonl", "optimizer.pt"):
        (folder / name).write_text(name)
    (folder / "checkpoints" / "state.json").write_text("{}")
    (folder / ".netrc").write_text("secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


MODEL = {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("public", [False, True])
def test_the_models_files_arrive(hub, run, public, capsys):
    assert commands.main(["export", str(run), "--push", "me/x", *(["--public"] if public else [])]) == 0
    assert {name: content.decode() for name, content in hub.files.items()} == {name: name for name in MODEL}
    assert hub.created[0]["visibility"] == ("public" if public else "private")
    printed = capsys.readouterr().out
    assert "exists already, and is uploaded as it is" in printed and "optimizer.pt  not uploaded" in printed
    assert "3 files, 0.0 MB uploaded to me/x: http://127.0.0.1" in printed


def test_dry_run_asks_the_hub_nothing(hub, run, capsys):
    assert commands.main(["export", str(run), "--push", "me/x", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "  model.safetensors  0.0 MB\n" in printed and "would go to me/x (private if new)" in printed
    assert not hub.requests


@pytest.mark.parametrize(
    "token, name, code, message",
    [
        ("hf_bad", "me/x", 2, "the hub does not know the token"),
        (TOKEN, "org/x", 2, "the token may not write to org; make a token with write permission"),
    ],
)
def test_a_refusal_says_what_to_do(hub, run, monkeypatch, capsys, token, name, code, message):
    monkeypatch.setenv("HF_TOKEN", token)
    assert commands.main(["export", str(run), "--push", name]) == code
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and not hub.files


def test_offline_is_said(run, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert commands.main(["export", str(run), "--push", "me/x"]) == 2
    assert "HF_HUB_OFFLINE is set; unset it to upload" in capsys.readouterr().err


def test_a_changed_file_is_not_uploaded(hub, run, capsys):
    (run / "model-fp32" / "SHA256SUMS").write_text(f"{'0' * 64}  config.json\n")
    assert commands.main(["export", str(run), "--push", "me/x"]) == 4
    assert "config.json: differs from what was written" in capsys.readouterr().err and not hub.files


def test_a_linked_file_is_not_uploaded(hub, run, tmp_path, capsys):
    (tmp_path / "private").write_text("a secret")
    (run / "model-fp32" / "notes.txt").symlink_to(tmp_path / "private")
    for more in ([], ["--dry_run"]):
        assert commands.main(["export", str(run), "--push", "me/x", *more]) == 4
        assert "notes.txt: a link to" in capsys.readouterr().err and not hub.files
