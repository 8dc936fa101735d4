from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from harness import Workspace

REHEARSE = "SAMECURVE_REHEARSE_GPU_TESTS"
RESULTS = "SAMECURVE_GPU_TEST_RESULTS"
"""A file that gets a line of JSON for each test as it ends, so that a machine that goes away takes one test along."""


def pytest_runtest_logreport(report) -> None:
    if RESULTS not in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
    line |= {"reason": report.longreprtext[-2000:]} if report.failed else {}
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(items) -> None:
    if torch.cuda.is_available() or REHEARSE in os.environ:
        return
    for item in items:
        # one of them runs everywhere, so that the tests themselves are not broken unseen
        if item.path.parent.name == "gpu" and item.name != "test_a_gpu_follows_a_cpu":
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("gpu"))
