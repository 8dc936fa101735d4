from __future__ import annotations

import signal
import time

import pytest
from surrounded import ranks, status

from samecurve.errors import (
    ConfigurationError,
    DataError,
    HangError,
    NumericError,
    PeerError,
    Preempted,
    StorageError,
    TopologyError,
)
from samecurve.run import lifecycle
from samecurve.run.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def first_process(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")


def raising(error: BaseException):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigurationError, 2), (DataError, 3), (NumericError, 5), (TopologyError, 6), (StorageError, 7)],
)
def test_known_errors_end_with_their_code_and_message_only(error, code, capsys):
    assert lifecycle.exit_code(raising(error("what to do"))) == code
    assert capsys.readouterr().err == f"\n{error.__name__} (exit code {code})\nwhat to do\n"


def test_unknown_errors_keep_their_traceback(capsys):
    assert lifecycle.exit_code(raising(ValueError("a bug"))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_success_is_zero():
    assert lifecycle.exit_code(lambda: None) == 0


def test_other_processes_wait_so_that_the_first_one_can_speak(monkeypatch, capsys):
    """The launcher ends the job at the first exit; one that outlives the wait has an error of its own."""
    waited = []
    monkeypatch.setattr(lifecycle.time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert lifecycle.exit_code(raising(DataError("only here"))) == 3
    assert waited == [lifecycle.WAIT_SECONDS] and "only here" in capsys.readouterr().err


@pytest.mark.parametrize(("is_reported", "local_rank", "shown"), [(True, "1", 0), (True, "0", 1), (False, "1", 1)])
def test_a_death_that_another_rank_reports_is_not_told_twice(is_reported, local_rank, shown, monkeypatch, capsys):
    """Each machine's first rank tells it, because a reader may have that machine's output only."""
    error = PeerError("rank 0 died")
    error.is_reported = is_reported
    monkeypatch.setattr(lifecycle, "WAIT_SECONDS", 0)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert lifecycle.exit_code(raising(error)) == 1
    assert capsys.readouterr().err.count("rank 0 died") == shown


def test_the_status_file_follows_the_run(tmp_path):
    run = RunDirectory(tmp_path)
    with lifecycle.supervised(run):
        assert status(tmp_path) == {"state": "running", "reason": "", "step": 0, "exit_code": None}
        run.append_metrics({"step": 7})
    assert status(tmp_path) == {"state": "done", "reason": "", "step": 7, "exit_code": 0}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NumericError("the loss is nan"), 5),
        (ValueError("a bug"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_failure_leaves_its_reason_and_code(error, code, tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(type(error)), lifecycle.supervised(run):
        run.append_metrics({"step": 3})
        raise error
    reason = str(error) or "KeyboardInterrupt"
    assert status(tmp_path) == {"state": "failed", "reason": reason, "step": 3, "exit_code": code}


def test_preempted_is_no_failure(tmp_path, capsys):
    def main():
        with lifecycle.supervised(RunDirectory(tmp_path)):
            raise Preempted("SIGTERM: saved at step 3")

    assert lifecycle.exit_code(main) == 75
    assert capsys.readouterr().err == "\npreempted (exit code 75): SIGTERM: saved at step 3\n"
    assert status(tmp_path) == {"state": "preempted", "reason": "SIGTERM: saved at step 3", "step": 0, "exit_code": 75}


def test_a_reader_that_is_gone_changes_nothing(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(lifecycle.sys, "stderr", Closed())
    assert lifecycle.exit_code(raising(DataError("what to do"))) == 3


def test_the_sentence_of_another_rank_becomes_the_reason(tmp_path):
    """Rank 1 has a mistake of its own; rank 0 waits for it in what is like a collective."""
    with ranks(tmp_path / "run", "meet(watch)\nwait()", 'meet(watch)\nraise DataError("no rows")') as (first, second):
        assert first.ends() == 3
        assert second.ends() == 3
    assert status(first.folder) == {"state": "failed", "reason": "rank 1: no rows", "step": 0, "exit_code": 3}
    assert first.said == "\nPeerError (exit code 3)\nrank 1: no rows\n"
    assert second.said == "\nDataError (exit code 3)\nno rows\n"


GLOO = 'raise RuntimeError("Connection closed by peer [127.0.0.1]:1\\nmore")'


def test_an_error_that_another_ranks_mistake_explains(tmp_path):
    body = f"meet(watch)\ntime.sleep(1)\n{GLOO}"
    with ranks(tmp_path / "run", body, 'meet(watch)\nraise DataError("no rows")') as (first, _):
        assert first.ends() == 3
    told = "rank 1: no rows\n(this rank then failed: RuntimeError: Connection closed by peer [127.0.0.1]:1)"
    assert status(first.folder)["reason"] == told
    assert first.said == f"\nPeerError (exit code 3)\n{told}\n"


def test_an_error_that_a_killed_rank_explains(tmp_path):
    bodies = f"meet(watch)\nwait()\n{GLOO}", "meet(watch)\nready()\nwait()"
    with ranks(tmp_path / "run", *bodies) as (first, second):
        second.wait_until("ready")
        second.process.kill()
        first.go_on()
        assert first.ends() == 1
        pid = second.process.pid
    assert first.said.startswith(
        f"\nPeerError (exit code 1)\nrank 1 (pid {pid}) died, while rank 0 was in phase build;"
    )
    assert "(this rank then failed: RuntimeError: Connection closed" in first.said and "Traceback" not in first.said


def test_a_killed_rank_may_end_seconds_after_its_connections(tmp_path):
    """As on a machine with more to do than cores: a kill in 132 was not named."""
    with ranks(tmp_path / "run", f"meet(watch)\nwait()\n{GLOO}", "meet(watch)\nready()\nwait()") as (first, second):
        second.wait_until("ready")
        first.go_on()
        time.sleep(2.5)
        second.process.kill()
        assert first.ends() == 1
    assert f"rank 1 (pid {second.process.pid}) died" in first.said and "Traceback" not in first.said


def test_rank_0_that_was_killed_has_its_end_written_by_another(tmp_path):
    bodies = "meet(watch)\nready()\nwait()", f"meet(watch)\nwait()\n{GLOO}"
    with ranks(tmp_path / "run", *bodies) as (first, second):
        first.wait_until("ready")
        first.process.kill()
        second.go_on()
        assert second.ends(5) == 1  # without waiting for a first process to speak
    found = status(first.folder)
    assert (found["state"], found["exit_code"]) == ("failed", 1) and found["reason"].startswith("rank 0 (pid ")


def test_the_same_mistake_everywhere_is_told_as_such(tmp_path):
    body = 'meet(watch)\nraise ValueError("a bug")'
    with ranks(tmp_path / "run", body, body) as (first, _):
        assert first.ends() == 1
    assert status(first.folder)["reason"] == "a bug" and "Traceback" in first.said


def test_before_all_ranks_are_there_only_rank_0_writes(tmp_path):
    """The directory may be another run's, which rank 0 is just about to find out."""
    with ranks(tmp_path / "run", "ready()\nwait()", "ready()\nwait()\ntime.sleep(60)") as (first, second):
        for rank in (first, second):
            rank.wait_until("ready")
        second.process.terminate()
        assert second.ends() == 143
        assert status(first.folder)["state"] == "running" and not (first.folder / "heartbeats").exists()


def test_sigterm_is_left_alone_after_the_run(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with lifecycle.supervised(RunDirectory(tmp_path)):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_cannot_come_before_the_message(tmp_path, monkeypatch, capsys):
    """A launcher sends it milliseconds after a rank has died: seen once under pipeline_zbv, whose message was lost."""
    before, meanwhile = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(
        lifecycle, "message", lambda error: meanwhile.append(signal.getsignal(signal.SIGTERM)) or "said"
    )

    def main():
        with lifecycle.supervised(RunDirectory(tmp_path)):
            raise DataError("a row")

    assert lifecycle.exit_code(main) == 3
    assert meanwhile and before not in meanwhile
    assert capsys.readouterr().err.count("said") == 1


SILENT = """
from samecurve.run import watchdog
watchdog.LAST_RESORT_SECONDS = 1
run.status = lambda *_, **__: time.sleep(60)
meet(watch)
ready()
"""


SIGNS = """
from samecurve.storage import ending
ending.at_end(lambda: print("signed off", flush=True))
ending.at_end(lambda: [][0])
DEAD
ready()
"""
ENDS = {"raise DataError('no rows')": 3, "raise ValueError('x')": 1, "raise Preempted('saved')": 75, "pass": 0}
ENDS |= {"wait()": 143, "watch.phase('step')\nwait()": HangError.exit_code}


@pytest.mark.parametrize("dead", ["", "ending.at_end(lambda: time.sleep(60))"], ids=["network", "dead network"])
@pytest.mark.parametrize("body", ENDS)
def test_every_end_signs_off_and_waits_for_no_dead_network(body, dead, tmp_path):
    """By an error, by a signal, and from the watchdog's thread."""
    timeout = 1.0 if ENDS[body] == HangError.exit_code else 0.0
    with ranks(tmp_path / "run", SIGNS.replace("DEAD", dead) + body, timeout_seconds=timeout) as [rank]:
        rank.wait_until("ready")
        began = time.monotonic()
        if ENDS[body] == 143:
            rank.process.send_signal(signal.SIGTERM)
        assert rank.ends() == ENDS[body]
        assert time.monotonic() - began < (12 if dead else 8)
        assert rank.said.count("signed off") == 1


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("raise DataError('no rows')", 3, "DataError (exit code 3)\nno rows"),
        ("watch.watchdog.heartbeats.look = run.status\nraise RuntimeError('x')", 1, "RuntimeError: x"),
        ("raise Preempted('saved')", 75, "Preempted (exit code 75)\nsaved"),
        ("pass", 7, "StorageError (exit code 7)\n"),
        ("time.sleep(60)", 143, "ended by SIGTERM"),
    ],
)
def test_a_process_ends_though_the_storage_does_not_answer(ending, code, told, tmp_path):
    """An orphan on a host whose storage is gone would keep its GPUs."""
    with ranks(tmp_path / "run", f"{SILENT}{ending}") as [rank]:
        rank.wait_until("ready")
        if code == 143:
            rank.process.send_signal(signal.SIGTERM)
        assert rank.ends() == code
        assert rank.said.count(told) == 1
