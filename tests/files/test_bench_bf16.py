"""scripts/bench_bf16.py: the page of bytes and copies is that of the code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pages import ROOT

pytestmark = pytest.mark.full


def test_the_page_is_current(tmp_path):
    command = [sys.executable, "scripts/bench_bf16.py", "--output", str(tmp_path / "page.md")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    made, shown = (
        page.read_text().partition("\n| ")[2] for page in (tmp_path / "page.md", ROOT / "benchmarks" / "bf16.md")
    )
    assert made == shown and made.count("| B") == 4
