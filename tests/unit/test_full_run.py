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


def run(folder: Path, *options: str) -> list[dict]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.results", "-p", "no:cacheprovider", *options, "test_it.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_in_pieces_becomes_a_page(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    first = run(tmp_path, "--results=results.jsonl")
    outcomes = {record["test"]: record["outcome"] for record in first if "test" in record}
    names = [f"test_it.py::{name}" for name in ("test_good", "test_bad", "test_absent[a b]", "test_fixture")]
    assert outcomes == dict(zip(names, ("passed", "failed", "skipped", "failed"), strict=True))
    reasons = {record["test"]: record["reason"] for record in first if "reason" in record}
    assert [*reasons] == names[1:] and "mended" in reasons[names[1]] and "OSError" in reasons[names[3]]
    (tmp_path / "mended").touch()
    both = run(tmp_path, "--results=results.jsonl")
    assert both[: len(first)] == first
    again = {record["test"]: record["outcome"] for record in both[len(first) :] if "test" in record}
    assert again == {names[1]: "passed", names[2]: "skipped", names[3]: "failed"}

    starts = [record for record in both if "commit" in record]
    starts[0]["commit"], starts[1]["commit"] = "abc12345", "def67890"
    text = page([*both, {"test": names[3], "remark": "its fixture is broken"}])
    assert "| 1 | 0 | 0 |" in text.replace("  ", " ") and "| 1 | 1 | 1 |" in text.replace("  ", " ")
    assert "- `test_it.py::test_bad` at abc12345; passes at def67890\n" in text
    assert "- `test_it.py::test_fixture` at def67890; its fixture is broken" in text
    assert "no GPU" in text
