"""scripts/full_run.py reads what scripts/test.sh prints."""

from __future__ import annotations

import pytest

from benchmarks.full_run.log import parse
from benchmarks.full_run.page import page

LOG = """
SKIPPED [2] tests/gpu/conftest.py:12: no GPU
SKIPPED [1] tests/unit/test_x.py:3: Skipped: no such package
FAILED tests/distributed/test_y.py::test_z[a b] - AssertionError: F
ERROR tests/distributed/test_v.py::test_u
===== 1 failed, 350 passed, 3 skipped, 9 deselected, 4 warnings, 1 error in 2400.20s (0:40:00) =====
== pytest tests/unit tests/files tests/faults
SKIPPED [4] tests/unit/test_w.py:3: no GPU
===== 1200 passed, 4 skipped in 1234.00s (0:20:34) =====
"""


def test_a_log_becomes_a_row():
    found = parse(LOG)
    assert (found["passed"], found["failed"], found["skipped"], found["minutes"]) == (1550, 1, 7, 40)
    assert found["errors"] == 1
    assert found["failures"] == ["tests/distributed/test_v.py::test_u", "tests/distributed/test_y.py::test_z[a b]"]
    assert found["reasons"] == {"no GPU": 6, "no such package": 1}
    more = {"commit": "abc1234", "date": "2026-11-25", "machine": "2 cores"}
    text = page({"2/4": found | more})
    assert "| 2/4 | 1,550 | 1 | 1 | 7 | 40 | 2026-11-25 | abc1234 |" in text
    assert "Not run yet: 1/4, 3/4, 4/4." in text and "test_z[a b]` in part 2/4\n" in text
    again = {"mended": {"tests/distributed/test_y.py::test_z[a b]": "def5678"}}
    assert "test_z[a b]` in part 2/4; passes since def5678\n" in page({"2/4": found | more | again})


def test_a_run_that_was_cut_off_is_no_result():
    with pytest.raises(SystemExit, match="1 of the two parts"):
        parse(LOG.split("== pytest")[0])
