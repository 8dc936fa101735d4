"""`pytest --results FILE`: outcomes are kept as they come, for runs that are too long in one piece."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import pytest

from benchmarks.machine import commit, description


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "add the outcome of each test to FILE, and leave out the tests that passed there"
    parser.addoption("--results", metavar="FILE", type=Path, help=help)


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--results")) is not None:
        config.pluginmanager.register(Results(path))


class Results:
    """Lines of JSON: one for each start of pytest, and one for each test as soon as it has ended."""

    def __init__(self, path: Path):
        self._path, self._records = path, dict[str, dict]()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._newest = {record["test"]: record["outcome"] for record in map(json.loads, lines) if "outcome" in record}
        self._chosen: list[str] = []
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._run = f"{now} {os.getpid()}"  # two parts of scripts/test.sh write beside each other
        self._add({"commit": commit(os.path.relpath(path)), "machine": description()})

    def _add(self, record: dict) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": self._run, **record}) + "\n")

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._chosen = [item.nodeid for item in items]
        # what was skipped may run by now, with a GPU or a package that was not there
        done = {test for test, outcome in self._newest.items() if outcome == "passed"}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = self._records.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0})
        record["seconds"] = round(record["seconds"] + report.duration, 1)
        if report.skipped:
            _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
            record |= {"outcome": "skipped", "reason": reason.removeprefix("Skipped: ")}
        elif report.failed:
            record |= {"outcome": "failed", "reason": report.longreprtext[-2000:]}
        if report.when == "teardown":
            self._newest[report.nodeid] = record["outcome"]
            self._add(self._records.pop(report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = Counter(self._newest.get(test, "without an outcome") for test in self._chosen)
        parts = [f"{number:,} {outcome}" for outcome, number in sorted(counts.items())]
        terminalreporter.write_line(f"{self._path}: of {len(self._chosen):,} tests {', '.join(parts)}")
