"""Reading of JSON files that may be damaged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from samecurve.errors import CheckpointError
from samecurve.storage.records import COUNT, mismatch, read_record

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = {"step": COUNT, "loss": (float, None), "names": [str], "inner?": {"on": bool}, "*": (str, list)}
VALUE = {"step": 3, "loss": 0.5, "names": ["a"], "inner": {"on": True}, "other": "text"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (json.dumps(VALUE).encode()[:43], "damaged: not JSON (Unterminated string"),
        (json.dumps(VALUE).encode().replace(b"text", b"te\xfft"), "damaged: byte 76 is not UTF-8 text"),
        (b"\0" * 50, "damaged: not JSON (Expecting value"),
        (b"[" * 100_000, "damaged: more than 100 levels of brackets"),
        (b'{"step": ' + b"[" * 101 + b"]" * 101 + b"}", "step: found a list, expected an integer"),
        (b'{"other": ' + b"[" * 100 + b"]" * 100 + b"}", "step: missing"),
        (b"7", "found 7, expected an object"),
    ],
)
def test_damage_has_a_reason(content, problem, tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    record = read_record(path, SCHEMA)
    assert record.value is None and not record.is_absent and record.problem.startswith(problem)
    with pytest.raises(CheckpointError) as raised:
        record.require(CheckpointError, "restore it")
    assert str(raised.value) == f"{path}: {record.problem}; restore it"


def test_a_whole_file_and_none_at_all(tmp_path):
    path = tmp_path / "run.json"
    assert read_record(path).is_absent and read_record(path / "below").is_absent
    path.write_text(json.dumps(VALUE))
    assert read_record(path, SCHEMA).require(CheckpointError, "") == VALUE
    assert read_record(path, SCHEMA, most_bytes=10).problem == "larger than 10 bytes"
    path.write_text("[" * 101 + "]" * 101)
    assert read_record(path, list).problem == "damaged: more than 100 levels of brackets"
    path.write_text('{"reason": "\\udcff"}')  # a path that is not UTF-8, as write_json writes it
    assert read_record(path).value == {"reason": "\udcff"}


# files of this package, and a process that imports none of it
READS_ITSELF = {"models/attention/measured.py", "planner/cards.py", "planner/profiles.py", "export/reload.py"}


def test_there_is_one_reader_of_json_files():
    reads = re.compile(r"json\.loads?\([^\n]*(read_text|read_bytes|open\()")
    files = sorted((ROOT / "samecurve").rglob("*.py"))
    assert len(files) > 150
    names = {path.relative_to(ROOT / "samecurve").as_posix() for path in files if reads.search(path.read_text())}
    assert names == READS_ITSELF


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    assert read_record(tmp_path / "run.json").problem == read_record(tmp_path).problem == "not a file"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("step", None, "step: found null, expected an integer from 0 to 9007199254740991"),
        ("step", True, "step: found true, expected an integer from 0 to 9007199254740991"),
        ("step", 2**70, "step: found 1180591620717411303424, expected an integer from 0 to 9007199254740991"),
        ("loss", "0.5", 'loss: found "0.5", expected a number or null'),
        ("loss", float("nan"), "loss: found NaN, expected a number or null"),
        ("names", {}, "names: found an object, expected a list"),
        ("names", ["a", 2], "names[1]: found 2, expected text"),
        ("inner", {}, "inner.on: missing"),
        ("inner", {"on": 1}, "inner.on: found 1, expected true or false"),
        ("more", 1.5, "more: found 1.5, expected text or a list"),
    ],
)
def test_a_schema_names_the_key(key, value, problem):
    assert mismatch(VALUE, SCHEMA) == ""
    assert mismatch(VALUE | {key: value}, SCHEMA) == problem
