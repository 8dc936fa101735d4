"""What status.json says of a start that was refused, and that every reader bears a damaged one."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from surrounded import ranks
from test_cli import finished
from test_run_directory import DAMAGED, finished_run

from samecurve.bench import jobs
from samecurve.cli import commands
from samecurve.errors import ConfigurationError, NothingToDo, TopologyError
from samecurve.reports.run_summary import Run
from samecurve.run import lifecycle
from samecurve.run.run_directory import RunDirectory
from samecurve.run.sessions import sessions
from samecurve.run.status import read_status, refusals

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def done(tmp_path) -> Path:
    """The status file of a run that is done."""
    return finished_run(tmp_path / "run").path / "status.json"


def refuse(directory: Path, kind: type = ConfigurationError, rank="0", local_rank="1", port="") -> None:
    error = kind("2 problems\n  a\n  b")
    error.output_dir = str(directory)
    with pytest.raises(kind), refusals({"RANK": rank, "LOCAL_RANK": local_rank, "MASTER_PORT": port}):
        raise error


@pytest.mark.parametrize(("kind", "code"), [(ConfigurationError, 2), (TopologyError, 6)])
def test_the_earlier_state_stays_and_the_refused_start_is_beside_it(kind, code, done):
    before = json.loads(done.read_text())
    for _ in range(2):
        refuse(done.parent, kind)
    told = json.loads(done.read_text())
    refused = told.pop("refused_start")
    assert told == before and refused.keys() == {"reason", "exit_code", "time"}
    assert (refused["reason"], refused["exit_code"]) == ("2 problems\n  a\n  b", code)


def test_the_other_ranks_of_a_host_write_nothing(done):
    before = sorted(done.parent.rglob("*")), done.read_bytes()
    refuse(done.parent, rank="1")
    assert (sorted(done.parent.rglob("*")), done.read_bytes()) == before


@pytest.mark.parametrize(("age", "port"), [(0, ""), (3600, ""), (0, "29501")], ids=["this start", "old", "another"])
def test_what_another_host_refuses_is_told_by_rank_0_when_it_is_ended(age, port, done, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    before = json.loads(done.read_text())
    with ranks(done.parent, "ready()\nwait()", launcher="torchrun") as (first,):
        first.wait_until("ready")
        refuse(done.parent, TopologyError, rank="8", local_rank="0", port=port)
        (note,) = (done.parent / "heartbeats").glob("refused*")
        os.utime(note, (time.time() - age,) * 2)  # of a start that nobody asked about
        first.process.terminate()
        first.ends()
    told = json.loads(done.read_text())
    refused = told.pop("refused_start")
    assert told == before and not note.exists()
    if age or port:
        assert refused["exit_code"] > 128 and "rank 8" not in first.said
    else:
        assert refused["exit_code"] == 6 and refused["reason"].startswith("rank 8 on ")
        assert "2 problems\n  a\n  b" in refused["reason"] and refused["reason"] in first.said


def test_no_directory_is_made_and_none_but_a_runs_is_touched(tmp_path):
    refuse(tmp_path / "new")
    (tmp_path / "other").mkdir()
    refuse(tmp_path / "other")
    assert [path.name for path in tmp_path.rglob("*")] == ["other"]


def test_the_status_of_a_live_run_is_its_own(tmp_path):
    run = RunDirectory(tmp_path)
    run.status("running")
    before = (tmp_path / "status.json").read_bytes()
    refuse(tmp_path)
    assert (tmp_path / "status.json").read_bytes() == before


def test_a_start_that_is_accepted_removes_it(done):
    refuse(done.parent)
    run = RunDirectory(done.parent)
    run.begin()
    assert json.loads(done.read_text())["state"] == "running" and "refused_start" not in json.loads(done.read_text())


def test_a_start_that_has_nothing_to_do_removes_it(done):
    before = done.read_bytes()
    refuse(done.parent)
    with pytest.raises(NothingToDo), lifecycle.supervised(RunDirectory(done.parent)):
        raise NothingToDo("already done")
    assert done.read_bytes() == before


def test_one_that_was_killed_while_it_started_is_over(done):
    """What counts how often a step failed is kept."""
    status = {"state": "running", "earlier": {"state": "preempted", "step": 4}, "failing_step": 5, "failures": 2}
    done.write_text(json.dumps(status))
    refuse(done.parent)
    told = json.loads(done.read_text())
    refused = told.pop("refused_start")
    assert told == {"state": "preempted", "step": 4}
    assert (refused["failing_step"], refused["failures"]) == (5, 2)


def test_summary_and_report_say_it(tmp_path, capsys):
    finished(tmp_path, "r.yaml")
    refuse(tmp_path)
    assert commands.main(["summary", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "state         done"
    assert re.fullmatch(r"refused start exit code 2, \d{4}-.*\+00:00: 2 problems", lines[1])
    assert lines[2:4] == ["                a", "                b"]
    assert commands.main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert re.search(r'<p class="bad">A later start was refused \(exit code 2, [^ ]+: 2 problems\n  a\n  b\)</p>', page)


@pytest.mark.parametrize("content", DAMAGED)
def test_every_reader_bears_a_damaged_one(content, tmp_path, capsys):
    finished(tmp_path, "r.yaml")
    (tmp_path / "status.json").write_bytes(content)
    assert commands.main(["summary", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "state         unknown"
    assert commands.main(["report", str(tmp_path)]) == 0
    assert Run.read(tmp_path).state == sessions(tmp_path)[-1].ended == "not known"
    log = tmp_path / "log"
    log.write_text("exitcode : 3")
    assert jobs.exit_code_of(tmp_path, log, 1) == 3
    assert jobs.reason_of(tmp_path, log, 3) == f"failed with exit code 3, see {log}"


def test_a_status_that_cannot_be_read_is_damaged(tmp_path):
    (tmp_path / "status.json").mkdir()
    assert "not a file" in read_status(tmp_path / "status.json")["damaged"]
    assert read_status(tmp_path / "none" / "status.json") == {}
