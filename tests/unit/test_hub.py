"""Data sets by their name on the hub: a small hub on this machine, what `datasets` reads of it, and none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
import transformers
from report_cases import check_message
from task_columns import unread

from samecurve.cli import evaluate
from samecurve.config import loader
from samecurve.data import hub, sources
from samecurve.data.schemas.classification import ExampleSource, class_names
from samecurve.data.selection import Selection
from samecurve.errors import ConfigurationError, DataError
from samecurve.interfaces.task import identity
from samecurve.specs.data_names import is_hub_name
from samecurve.tasks import registry

OLD, NEW = f"{1:040x}", f"{2:040x}"
COMMITS = {"main": NEW, "v1": OLD}
CONFIGS = """\
---
configs:
- config_name: a
  data_files: a.jsonl
- config_name: b
  data_files:
  - {split: train, path: b.jsonl}
  - {split: test, path: held.jsonl}
---
"""


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def split_files(*training: str) -> dict[str, str]:
    held_out = {"data/test.jsonl": lines("three"), "data/validation.jsonl": lines("four", "five")}
    return {"README.md": "about it", "LICENSE.txt": "free", "data/train.jsonl": lines(*training), **held_out}


REPOSITORIES = {
    "org/name": {OLD: split_files("one", "two"), NEW: split_files("one", "two", "new")},
    "org/several": {
        NEW: {"README.md": CONFIGS, "a.jsonl": lines("a"), "b.jsonl": lines("b"), "held.jsonl": lines("c")}
    },
    "org/csv": {NEW: {"train.csv": "text\nx\n"}},
}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub and datasets ask for when they download a data set."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(
            json.loads(body)["paths"] if body.startswith(b"{") else urllib.parse.parse_qs(body.decode())["paths"]
        )

    def do_GET(self) -> None:
        self._answer([])

    def _answer(self, asked: list[str]) -> None:
        path, _, query = urllib.parse.unquote(self.path).partition("?")
        parts = path.strip("/").split("/")
        is_api, parts = parts[0] == "api", parts[parts[0] == "api" :]
        repository, (verb, revision), inside = "/".join(parts[1:3]), (*parts[3:5], "", "")[:2], "/".join(parts[5:])
        versions = REPOSITORIES.get(repository) if parts[0] == "datasets" else None
        commit = COMMITS.get(revision or "main", revision)
        if versions is None or commit not in versions:
            self._send(b"{}", 404, "RepoNotFound" if versions is None else "RevisionNotFound")
        elif not is_api:
            text = versions[commit].get(inside)
            self._send((text or "").encode(), 404 if text is None else 200, "EntryNotFound", commit)
        elif verb == "tree":
            self._send(json.dumps(_tree(versions[commit], inside, "recursive=true" in query.lower())).encode())
        elif verb == "paths-info":
            every = _tree(versions[commit], "", True)
            self._send(json.dumps([entry for entry in every if entry["path"] in asked]).encode())
        else:
            files = [{"rfilename": name} for name in versions[commit]]
            self._send(json.dumps({"id": repository, "sha": commit, "siblings": files}).encode())

    def _send(self, body: bytes, status: int = 200, error: str = "", commit: str = "") -> None:
        self.send_response(status)
        headers = {"Content-Length": len(body), "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit}
        for name, value in (headers | ({"X-Error-Code": error} if status >= 400 else {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def _tree(files: dict[str, str], inside: str, recursive: bool) -> list[dict]:
    found = {}
    for name, text in files.items():
        below = Path(name).relative_to(inside) if Path(name).is_relative_to(inside) else None
        if below is not None and (recursive or len(below.parts) == 1):
            oid = hashlib.sha1(text.encode()).hexdigest()
            found[name] = {"type": "file", "path": name, "size": len(text.encode()), "oid": oid}
        if below is not None and len(below.parts) > 1:
            folder = str(Path(inside, below.parts[0]))
            found[folder] = {"type": "directory", "path": folder, "size": 0, "oid": folder}
    return list(found.values())


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


READ = """
import json, os, sys
from pathlib import Path
from samecurve.data import sources
from samecurve.data import stream_pieces as streaming
from samecurve.data import stream_pieces
from samecurve.errors import DataError

def texts(name, pattern=None, stream=False, **selection):
    chosen = sources.Selection(**selection)
    if stream:
        files = stream_pieces.find_stream_files(name, pattern, "text", chosen)
        source = streaming.ChunkSource(name, (), "text", tuple(streaming.cut_into_chunks(files, 1e6)))
        return list(source.documents()), streaming.fingerprint(files)
    source = sources.find_source(name, pattern, "text", chosen)
    source.check()
    return list(source.documents()), sources.fingerprint(source, Path(os.environ["HF_HOME"], "ours"))

def by_datasets(name, split="train", config=None, revision=None):
    import datasets
    return datasets.load_dataset(name, config, split=split, revision=revision)["text"][:]

found = []
for case in json.loads(sys.argv[1]):
    reference = case.pop("reference", False)
    try:
        documents, fingerprint = texts(**case)
        found.append([documents, fingerprint, by_datasets(**case) if reference else None])
    except DataError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def read(folder: Path, cases: list[dict], **environ: str) -> list:
    """In a process of its own: huggingface_hub reads the environment when it is imported."""
    usual = {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "no_proxy": "*", "HF_HUB_OFFLINE": "0"}
    env = {**os.environ, **usual, "HF_UPDATE_DOWNLOAD_COUNTS": "0", **environ}
    command = [sys.executable, "-c", READ, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WHOLE = {"name": "org/name"}
# the old version is downloaded last, so that what is newest in the cache is not what main is
PARTS = [
    (WHOLE, ["one", "two", "new"]),
    (WHOLE | {"split": "test"}, ["three"]),
    ({"name": "org/several", "config": "a"}, ["a"]),
    ({"name": "org/several", "config": "b"}, ["b"]),
    ({"name": "org/several", "config": "b", "split": "test"}, ["c"]),
    (WHOLE | {"revision": "v1"}, ["one", "two"]),
    (WHOLE | {"revision": OLD, "split": "validation"}, ["four", "five"]),
]
FILES = {"name": "org/name", "pattern": "**/t*.jsonl"}  # of whatever split
PARTS += [(FILES, ["three", "one", "two", "new"]), (FILES | {"revision": "v1"}, ["three", "one", "two"])]
ELSEWHERE = "no such local file or folder"
REFUSED = [
    (
        WHOLE | {"split": "dev"},
        ("org/name", "'default'", "'dev'", "train, validation, test", "data.split", "evaluate.split"),
    ),
    (
        WHOLE | {"split": "train[:9]"},
        ("org/name", "'train[:9]'", "not the name of a split", "data.validation_fraction"),
    ),
    ({"name": "org/several"}, ("org/several", "data.config", "2 configurations", "a, b")),
    (
        {"name": "org/several", "config": "c"},
        ("org/several", "'c'", "a, b", "data.config"),
    ),
    (WHOLE | {"revision": "v9"}, ("org/name", ELSEWHERE, "no such revision", "data.revision")),
    ({"name": "org/other"}, ("org/other", ELSEWHERE, "no data set of that name", "data.path", "hf auth login")),
    (
        {"name": "org/csv", "stream": True},
        (f"hf://datasets/org/csv@{NEW}/train.csv", "jsonl", "parquet", "data.streaming=false", "data.pattern"),
    ),
]
STREAMED = [
    ({"name": "org/name", "stream": True}, ["one", "two", "new"]),
    ({"name": "hf://datasets/org/name", "stream": True}, ["one", "two", "new"]),
    ({"name": "hf://datasets/org/name@v1", "stream": True}, ["one", "two"]),
    ({"name": "hf://datasets/org/name/data", "split": "test", "stream": True}, ["three"]),
    ({"name": "hf://datasets/org/name/data/test.jsonl", "stream": True}, ["three"]),
    ({"name": "org/several", "config": "b", "split": "test", "stream": True}, ["c"]),
    ({"name": "org/name", "pattern": "data/t*.jsonl", "stream": True}, ["three", "one", "two", "new"]),
]


def test_one_split_is_read_as_datasets_reads_it_and_then_offline(endpoint, tmp_path):
    cases = [case | {"reference": "pattern" not in case} for case, _ in PARTS]
    online = read(tmp_path, cases + [case for case, _ in REFUSED + STREAMED], HF_ENDPOINT=endpoint)
    parts, refused, streamed = online[: len(PARTS)], online[len(PARTS) : -len(STREAMED)], online[-len(STREAMED) :]
    for (case, expected), found in zip(PARTS + STREAMED, parts + streamed, strict=True):
        assert found[0] == expected == (found[2] or expected), case
    assert len({fingerprint for _, fingerprint, _ in parts}) == len(PARTS)
    assert len({fingerprint for _, fingerprint, _ in streamed}) == len(STREAMED) - 1  # a name and its URL are the same
    for (_, row), found in zip(REFUSED, refused, strict=True):
        check_message(str(found), *row)

    known = ({"name": "org/name", "revision": "v9"}, {"name": "org/other"}, {"name": "org/name", "stream": True})
    offline = read(tmp_path, [case for case, _ in PARTS] + list(known), HF_HUB_OFFLINE="1")
    for found, before in zip(offline[: len(PARTS)], parts, strict=True):
        assert found[:2] == before[:2]
    check_message(offline[-3], "org/name", "cannot be reached", "revision v9", "data.revision", f"{OLD}, {NEW}")
    check_message(offline[-2], "org/other", ELSEWHERE, "hub's cache", "HF_HUB_OFFLINE is set", "unset it")
    check_message(offline[-1], "org/name", "cannot be reached", "data.streaming=false")


ROW = {
    "text": "{n} some text", "label": "c{m}", "prompt": "question {n}", "completion": "answer {n}",
    "chosen": "good {n}", "rejected": "bad {n}", "anchor": "anchor {n}", "positive": "positive {n}",
}  # fmt: skip
COUNTED = {"train": 9, "validation": 4, "test": 3}


def made_split(name: str, selection: Selection) -> hub.Split:
    rows = [
        {key: text.format(n=f"{selection.split}{n}", m=n % 2) for key, text in ROW.items()}
        for n in range(COUNTED[selection.split])
    ]
    table = datasets.Dataset.from_list(rows)
    return hub.Split(name, selection.config or "default", selection.split, selection.revision or NEW, table)


def test_classes_have_the_names_that_the_data_set_gives_their_numbers(tmp_path):
    """In its order, and also one without a row; of word labels, too."""
    classes, kinds = datasets.ClassLabel(names=["neg", "pos", "any"]), datasets.ClassLabel(names=["O", "B-PER"])
    features = datasets.Features({"text": datasets.Value("string"), "label": classes, "ner_tags": datasets.List(kinds)})
    rows = [{"text": "a", "label": 1, "ner_tags": [1, 0]}, {"text": "b", "label": 0, "ner_tags": [0]}]
    split = hub.Split("own/name", "default", "train", NEW, datasets.Dataset.from_list(rows, features=features))
    assert split.class_names("ner_tags") == ("O", "B-PER") and split.class_names("text") == ()
    source = ExampleSource("own/name", (split,))
    names = class_names(source, tmp_path)
    assert names == ("neg", "pos", "any")
    assert [example.label for example in replace(source, names=names).documents()] == ["pos", "neg"]
    stars = replace(source, names=("1", "2", "3"))  # a ClassLabel's numbers are places, also of names that are numbers
    assert [example.label for example in stars.documents()] == ["2", "1"]


CONTENT = {
    "output_dir": "run",
    "steps": 2,
    "model": {"config": {"model_type": "llama"}},
    "tokenizer": {"vocabulary_size": 300},
    "data": {"path": "org/name", "cache_dir": "cache", "packing": False, "revision": "v1"},
    "batch": {"global_batch_size": 2, "sequence_length": 256},
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"warmup_steps": 1},
    "evaluate": {"split": "validation", "every_steps": 1},
}


@pytest.mark.parametrize("task", ["pretrain", "sft", "dpo", "reward", "classify", "mlm", "embed"])
def test_every_task_trains_on_one_split_and_measures_on_the_other(task, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "read_hub_split", lambda name, chosen: asked.append(chosen) or made_split(name, chosen))
    monkeypatch.chdir(tmp_path)
    data = CONTENT["data"] | {"ignore_columns": unread(task, ROW)}
    Path("r.json").write_text(json.dumps(CONTENT | {"task": task, "data": data}))
    task = registry.load_task(loader.load_recipe("r.json"))
    assert len(task.train) == 9 and len(task.validation) == 4
    assert {chosen.split for chosen in asked} == {"train", "validation"}
    assert {chosen.revision for chosen in asked} == {"v1"}
    assert task.origin == "org/name, config default, split train, commit v1"
    assert identity(transformers.LlamaConfig(), task)["data"]["hub"] == task.origin == task.describe()["hub"]
    others = ["data.split=test", "data.config=b", "data.revision=v2"]
    prints = {registry.load_task(loader.load_recipe("r.json", [other])).train.fingerprint for other in others}
    assert len(prints | {task.train.fingerprint}) == 4


def test_a_data_set_is_measured_by_its_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text(json.dumps(CONTENT))
    trained = loader.load_recipe("r.json")
    with pytest.raises(ConfigurationError, match="org/name: no split given for a data set of the hub"):
        evaluate.with_columns(trained, "org/name", [])
    with pytest.raises(ConfigurationError, match="data.split: not a key of DATA for task pretrain"):
        evaluate.with_columns(trained, "mine.jsonl", ["data.split=test"])
    keys = ["data.pattern=*.txt", "data.max_samples=3", "data.bad_rows=drop"]
    some = evaluate.with_columns(trained, "mine", keys).data
    assert (some.pattern, some.max_samples, some.bad_rows) == ("*.txt", 3, "drop")
    chosen = evaluate.with_columns(trained, "org/name", ["data.split=test", "data.config=b", "data.max_samples=3"])
    found = evaluate.with_evaluation_data(chosen, tmp_path, "org/name")
    assert found.evaluation.model_dump() == found.data.model_dump()
    assert (found.data.split, found.data.config, found.data.revision) == ("test", "b", None)
    assert found.evaluation.max_samples == 3
    unnamed = evaluate.with_evaluation_data(trained, tmp_path, None).evaluation
    assert (unnamed.path, unnamed.split, unnamed.revision) == ("org/name", "validation", "v1")


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
    assert is_hub_name(path) is expected
    if not expected and ":" not in path:
        with pytest.raises(DataError, match="does not exist"):
            sources.find_source(path)
