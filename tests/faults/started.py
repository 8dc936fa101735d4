"""Process trees of train.py, seen and signalled from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
from harness import ROOT

MARKER = "SAMECURVE_TEST_ID"  # in the environment of a tree's processes, whoever their parents are by now
LIMIT_SECONDS = 240.0  # a run takes 10; machines that are busy with other things take longer
LEAVE_SECONDS = 30.0  # for the processes that a launcher leaves to end by themselves


class Started:
    """A running process tree."""

    def __init__(self, command: list[str], environment: dict[str, str], directory: Path):
        self.directory = directory
        self.id = uuid.uuid4().hex
        self._output = directory.with_name(f"{directory.name}.{self.id[:6]}.txt")
        self.began, self._wall_time = time.monotonic(), time.time()
        with open(self._output, "wb") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, MARKER: self.id},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def all(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _environment(process).get(MARKER) == self.id]

    def ranks(self) -> dict[int, psutil.Process]:
        """The training processes: each is the oldest one that has its rank."""
        found: dict[int, psutil.Process] = {}
        for process in sorted(self.all(), key=_age):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                launches = "-m torch.distributed.run" in command or "-m accelerate" in command or "bin/deep" in command
                if not launches and "deepspeed.launcher" not in command:
                    found.setdefault(int(_environment(process).get("RANK", "0")), process)
        return found

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited too long for {what}:\n{self.output}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Until this session has done this step."""
        metrics, facts = self.directory / "metrics.jsonl", self.directory / "run.json"
        needed = f'{{"step": {step},'

        def done() -> bool:
            # run.json is written after an earlier session's later steps are taken out of the metrics
            ours = facts.exists() and facts.stat().st_mtime > self._wall_time
            return ours and metrics.exists() and needed in metrics.read_text()

        self.wait_for(done, f"step {step}")

    def wait(self, limit: float = LIMIT_SECONDS) -> bool:
        """Whether it ended, with all its processes, within the limits in seconds. What did not is killed."""
        hung = False
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            hung = True
        self.seconds = time.monotonic() - self.began
        deadline = time.monotonic() + (0 if hung else LEAVE_SECONDS)
        while (left := self.all()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.left = len(left)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        return not hung


def send(who: str, number: int, after_step: int) -> Callable[[Started], None]:
    """A signal to "launcher", "all" (as a terminal does) or a rank ("rank 1"), once that step is done."""
    return partial(_send, who=who, number=number, after_step=after_step)


def _send(started: Started, who: str, number: int, after_step: int) -> None:
    started.wait_for_step(after_step)
    if who == "launcher":
        started.process.send_signal(number)
    elif who == "all":
        os.killpg(started.process.pid, number)
        # DeepSpeed's launcher starts its processes in sessions of their own
        for process in started.all():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) != started.process.pid:
                    process.send_signal(number)
    else:
        started.ranks()[int(who.removeprefix("rank "))].send_signal(number)


def _environment(process: psutil.Process) -> dict[str, str]:
    """{} when it is gone, or not ours to look at."""
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except (psutil.Error, OSError):
        return {}


def _age(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return process.create_time()
    return float("inf")
