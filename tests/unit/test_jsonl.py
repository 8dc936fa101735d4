"""The loop appends lines while another thread, which saves, makes them durable."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections import Counter

import pytest

from samecurve.storage import jsonl
from samecurve.storage.jsonl import JsonlFile, last_record, scan
from samecurve.storage.records import COUNT, parse

NUM_LINES = 2000
LINE = {"step": COUNT, "*": (float, None)}


def test_each_line_is_there_once_whoever_writes_it(tmp_path):
    lines, done = JsonlFile(tmp_path / "metrics.jsonl"), threading.Event()

    def syncs():
        while not done.is_set():
            lines.sync()

    saving = threading.Thread(target=syncs)
    saving.start()
    for step in range(NUM_LINES):
        lines.append({"step": step})
    done.set()
    saving.join()
    assert [record["step"] for _, record in scan(lines.path)] == list(range(NUM_LINES))


DAMAGED = [b'{"step": null}', b'{"loss": 2}', b"[3]", b'{"step": 2, "lo', b"", b"\0" * 99, b"[" * 100_000]
DAMAGED += [b'{"step": 3, "loss": "text"}', b'{"step": 3, "l\xff": 1}', b'{"step": true}', b'{"step": %d}' % 2**70]


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda line: repr(line[:20]))
def test_a_damaged_line_costs_itself_only(damaged, tmp_path):
    path, target = tmp_path / "metrics.jsonl", tmp_path / "old"
    target.mkdir()
    lines = [b'{"step": 1, "loss": null}', damaged, b'{"step": 2, "loss": 0.5}', b'{"step": 3, "loss": 1}']
    path.write_bytes(b"\n".join(lines))
    assert [value for _, value in scan(path, LINE)] == [*map(json.loads, lines[:1]), None, *map(json.loads, lines[2:])]
    assert JsonlFile(path, LINE).truncate(2, target, {"step": 2}) == (1, 1)
    assert path.read_bytes() == b"%b\n%b\n" % (lines[0], lines[2])
    assert (target / path.name).read_bytes() == b"%b\n%b\n" % (damaged, lines[3])
    assert JsonlFile(path, LINE).truncate(3, target, {"step": 3}) == (0, 0)  # adds the line of the checkpoint
    assert [record["step"] for _, record in scan(path)] == [1, 2, 3]


def test_a_last_line_without_its_newline_stays_apart(tmp_path):
    lines = JsonlFile(tmp_path / "metrics.jsonl")
    lines.path.write_text('{"step": 1}')
    assert lines.truncate(1, tmp_path) == (0, 0)
    lines.append({"step": 2})
    assert [record for _, record in scan(lines.path)] == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("later", [0, 100, pytest.param(1_900, marks=pytest.mark.full)])
def test_a_resume_reads_once_and_keeps_nothing(later, tmp_path, monkeypatch):
    """One parse of each line and a second of those to move; the rest of the file stays where it is."""
    parsed, peaks, target = Counter(), [], tmp_path / "old"
    target.mkdir()
    monkeypatch.setattr(jsonl, "parse", lambda *given: parsed.update("a") or parse(*given))
    for total in (NUM_LINES, 10 * NUM_LINES):
        lines, step = JsonlFile(tmp_path / f"{total}.jsonl", LINE), total - later * total // NUM_LINES
        lines.path.write_bytes(b"".join(b'{"step": %d, "loss": 0.25}\n' % number for number in range(1, total + 1)))
        before = lines.path.stat()
        parsed.clear()
        tracemalloc.start()
        assert lines.truncate(step, target) == (total - step, 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert parsed.total() == total + (total - step) and lines.path.stat().st_ino == before.st_ino
        assert last_record(lines.path) == {"step": step, "loss": 0.25}
    assert peaks[1] < 2 * peaks[0]


@pytest.mark.parametrize("end", [b"", b'{"step": 9, "lo', b"\xff\n", b"\0" * 99, b"\n" * 70_000, b"x" * 200_000])
def test_the_last_good_line_is_found_from_the_end(end, tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(jsonl, "parse", lambda *given: parsed.append(given) or parse(*given))
    num_parsed = []
    for total in (5_000, 50_000):
        parsed.clear()
        path.write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(total)) + end)
        assert last_record(path, LINE) == {"step": total - 1}
        num_parsed.append(len(parsed))
    assert num_parsed[0] == num_parsed[1]


def test_without_a_good_line_there_is_no_last_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_record(path) is None
    path.write_bytes(b"x" * 200_000)
    assert last_record(path) is None
    path.write_bytes(b'{"step": 1}')
    assert last_record(path) == {"step": 1}
