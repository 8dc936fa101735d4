"""Reading of JSON files that may be damaged."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
from pydantic_core import from_json

from samecurve.errors import CheckpointError
from samecurve.storage import trusted_code
from samecurve.storage.records import COUNT, mismatch, parse, read_record

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = {"step": COUNT, "loss": (float, None), "names": [str], "inner?": {"on": bool}, "*": (str, list)}
SCHEMA |= {"shares?": ([float], None)}
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


@pytest.mark.parametrize("name", ["a\0b", "a" * 300, "\ud800", "ab/" * 2000])
def test_a_file_that_cannot_be_is_absent(name, tmp_path):
    assert read_record(Path(name, "run.json")).is_absent and read_record(tmp_path / name).is_absent
    assert mismatch({"file": name}, {"file": Path}).startswith("file: found ")
    assert mismatch({"file": name[:2].strip("\0\ud800")}, {"file": (Path, None)}) == ""
    assert trusted_code.allows(True, name) and not trusted_code.allows(False, name)


def test_the_quick_parser_takes_no_more_than_json_does():
    """Damaged lines: what the quick parser takes, json takes as the same value, to the bit of a number."""
    draw = random.Random(0)
    lines = [json.dumps(VALUE | {f"key {index}": draw.gauss(0, 1e3) for index in range(9)}) for _ in range(20)]
    lines += [
        '{"a": -0, "b": [1E-7, 2e400, "\\ud800"], "c": {"d": "\\n\u00e9"}}',
        f'[{10**400}, -1e308, 5e-324, "\x7f"]',
    ]
    num_taken = 0
    for _ in range(20_000):
        content = bytearray(draw.choice(lines).encode())
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(content))
            if draw.random() < 0.5:
                content[place] = draw.choice(b'"\\{}[],:0123456789eE+-. \t\n\x0bnull\x00\x1f\xff\xc3')
            else:
                content[place : place + draw.randint(0, 9)] = content[:: draw.choice((-1, 1))][: draw.randint(0, 3)]
            content = content or bytearray(b"{")
        try:
            quick = from_json(bytes(content), allow_inf_nan=False)
        except ValueError:
            continue
        num_taken += 1
        assert repr(json.loads(content.decode())) == repr(quick), bytes(content)
    assert num_taken > 1_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1e999", "loss: found Infinity, expected a number or null"),
        ("NaN", "loss: found NaN"),
        ("true", "loss: found true"),
        ("1" * 400, "loss: found 111"),
        ('"1"', 'loss: found "1"'),
        ("1e308", ""),
        ("null", ""),
    ],
)
def test_any_key_is_a_finite_number(text, problem):
    schema = {"*": (float, None)}
    content = f'{{"a": 1.7e308, "loss": {text}, "b": 1.7e308, "c": {10**30}}}'
    assert parse(content.encode(), schema)[1].startswith(problem)
    assert bool(parse(content.encode(), schema)[1]) == bool(problem)


# files of this package, and a process that imports none of it
READS_ITSELF = {"models/attention/choice.py", "planner/hardware.py", "export/reload.py"}
READS_ITSELF |= {"prove/plain_loop.py", "prove/twin.py"}  # what the same command has written


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
        ("shares", [0.5, None], "shares[1]: found null, expected a number"),
        ("inner", {}, "inner.on: missing"),
        ("inner", {"on": 1}, "inner.on: found 1, expected true or false"),
        ("more", 1.5, "more: found 1.5, expected text or a list"),
    ],
)
def test_a_schema_names_the_key(key, value, problem):
    assert mismatch(VALUE, SCHEMA) == ""
    assert mismatch(VALUE | {key: value}, SCHEMA) == problem
