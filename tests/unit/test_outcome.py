from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from samecurve import outcome
from samecurve.errors import ConfigurationError, DataError, NumericError, StorageError, TopologyError
from samecurve.rundir import RunDirectory


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
    assert outcome.exit_code(raising(error("what to do"))) == code
    assert capsys.readouterr().err == f"\n{error.__name__} (exit code {code})\nwhat to do\n"


def test_unknown_errors_keep_their_traceback(capsys):
    assert outcome.exit_code(raising(ValueError("a bug"))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_success_is_zero():
    assert outcome.exit_code(lambda: None) == 0


def test_other_processes_wait_so_that_the_first_one_can_speak(monkeypatch, capsys):
    """The launcher ends the job at the first exit; one that outlives the wait has an error of its own."""
    waited = []
    monkeypatch.setattr(outcome.time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert outcome.exit_code(raising(DataError("only here"))) == 3
    assert waited == [outcome.WAIT_SECONDS] and "only here" in capsys.readouterr().err


def status(path) -> dict:
    found = json.loads((path / "status.json").read_text())
    return {key: found[key] for key in ("state", "reason", "step", "exit_code")}


def test_the_status_file_follows_the_run(tmp_path):
    run = RunDirectory(tmp_path)
    with outcome.recorded(run):
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
    with pytest.raises(type(error)), outcome.recorded(run):
        run.append_metrics({"step": 3})
        raise error
    reason = str(error) or "KeyboardInterrupt"
    assert status(tmp_path) == {"state": "failed", "reason": reason, "step": 3, "exit_code": code}


WAITING = """
import sys
from samecurve import outcome
from samecurve.rundir import RunDirectory
run = RunDirectory(sys.argv[1])
with outcome.recorded(run):
    run.append_metrics({"step": 4})
    print("ready", flush=True)
    sys.stdin.buffer.read()  # like a collective: not Python code
"""


def test_sigterm_is_written_down_even_while_the_main_thread_waits(tmp_path):
    """The main thread sits in a read system call that the interpreter restarts after a signal."""
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    assert status(tmp_path) == {"state": "failed", "reason": "ended by SIGTERM", "step": 4, "exit_code": 143}


def test_sigterm_is_left_alone_after_the_run(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with outcome.recorded(RunDirectory(tmp_path)):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
