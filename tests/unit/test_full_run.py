"""All tests in pieces: `pytest --results` keeps outcomes and goes on, scripts/full_run.py makes a page of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.full_run import page

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pathlib, pytest

def test_good(): pass

def test_bad(): assert pathlib.Path("mended").exists()

@pytest.mark.parametrize("name", ["a b"])
def test_absent(name): pytest.skip("no GPU")

@pytest.fixture
def broken(): raise OSError

def test_fixture(broken): pass
"""


def run(folder: Path, *options: str) -> tuple[list[dict], str]:
    """The lines of results, and the output."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.results", "-p", "no:cacheprovider", *options, "test_it.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    output = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, text=True).stdout
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], output


def test_a_run_in_pieces_becomes_a_page(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    first, _ = run(tmp_path, "--results=results.jsonl")
    outcomes = {record["test"]: record["outcome"] for record in first if "test" in record}
    names = [f"test_it.py::{name}" for name in ("test_good", "test_bad", "test_absent[a b]", "test_fixture")]
    assert outcomes == dict(zip(names, ("passed", "failed", "skipped", "failed"), strict=True))
    reasons = {record["test"]: record["reason"] for record in first if "reason" in record}
    assert [*reasons] == names[1:] and "mended" in reasons[names[1]] and "OSError" in reasons[names[3]]
    (tmp_path / "mended").touch()
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps(remark := {"test": names[3], "remark": "its fixture is broken"}) + "\n")
    first.append(remark)
    both, _ = run(tmp_path, "--results=results.jsonl")
    assert both[: len(first)] == first
    again = {record["test"]: record["outcome"] for record in both[len(first) :] if "test" in record}
    assert again == {names[1]: "passed", names[2]: "skipped", names[3]: "failed"}

    starts = [record for record in both if "commit" in record]
    starts[0]["commit"], starts[1]["commit"] = "abc12345", "def67890"
    text = page(both)
    assert "| 1 | 0 | 0 |" in text.replace("  ", " ") and "| 1 | 1 | 1 |" in text.replace("  ", " ")
    assert "- `test_it.py::test_bad` at abc12345; passes at def67890\n" in text
    assert "- `test_it.py::test_fixture` at def67890; its fixture is broken" in text
    assert "no GPU" in text


def test_a_run_says_how_much_is_left(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    _, output = run(tmp_path, "--results=results.jsonl", "-x")
    assert "results.jsonl: of 4 tests 1 failed, 1 passed, 2 without an outcome" in output
    (tmp_path / "mended").touch()
    _, output = run(tmp_path, "--results=results.jsonl")
    assert "results.jsonl: of 4 tests 1 failed, 2 passed, 1 skipped\n" in output
