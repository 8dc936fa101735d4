"""The loop appends lines while another thread, which saves, makes them durable."""

from __future__ import annotations

import threading

from samecurve.storage.jsonl import JsonlFile, read_lines

NUM_LINES = 2000


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
    assert [record["step"] for record in read_lines(lines.path)] == list(range(NUM_LINES))


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": null}\n{"loss": 2}\n[3]\n{"step": 2, "lo\n{"step": 4}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 4}]
