"""Runs of small processes without torch, for test_outcome, test_stop and test_watchdog. What a rank does is a text."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
from samecurve.errors import DataError, Preempted
from samecurve.run import lifecycle as outcome
from samecurve.run.run_directory import RunDirectory

outcome.WAIT_SECONDS = 6
RANK = int(os.environ["RANK"])

def ready():
    print("ready", flush=True)

def wait_for_all(pattern):
    while not all(os.path.exists(pattern.format(rank)) for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.02)

def meet(watch):
    "As when the process group is made: nobody goes on before all are there, and all see each other."
    open(f"{sys.argv[1]}_{RANK}_is_there", "w").close()
    wait_for_all(sys.argv[1] + "_{}_is_there")
    watch.phase("build")
    wait_for_all(sys.argv[1] + "/heartbeats/rank_{:05d}.json")

def wait():
    "Like a collective: a system call, no Python."
    sys.stdout.flush()
    os.read(sys.stdin.fileno(), 1)

def main():
    run = RunDirectory(sys.argv[1], is_main=RANK == 0)
    with outcome.supervised(run, launcher=sys.argv[2], timeout_seconds=float(sys.argv[3]), interval=0.1) as watch:
        body(run, watch)

"""
END = """
outcome.end_with(main)
"""


class Rank:
    """A started process, with its output in a file and its standard input open."""

    def __init__(self, folder: Path, rank: int, world_size: int, body: str, launcher: str, timeout_seconds: float):
        self.folder, self.log = folder, folder.with_name(f"rank_{rank}.log")
        code = START + "def body(run, watch):\n" + "".join(f"    {line}\n" for line in body.strip().splitlines()) + END
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "PYTHONPATH": str(ROOT),
        }
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(folder), launcher, str(timeout_seconds)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until(self, text: str, seconds: float = 20) -> None:
        wait_until(lambda: text in self.log.read_text(), f"{text!r} in {self.log.read_text()}", seconds)

    def go_on(self) -> None:
        """Give the process in `wait` what it waits for."""
        self.process.stdin.write(b"x")
        self.process.stdin.flush()

    def ends(self, seconds: float = 20) -> int:
        return self.process.wait(timeout=seconds)

    @property
    def said(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def ranks(folder: Path, *bodies: str, launcher: str = "python", timeout_seconds: float = 0) -> Iterator[list[Rank]]:
    """One process per body; all are gone afterwards."""
    found = [Rank(folder, rank, len(bodies), body, launcher, timeout_seconds) for rank, body in enumerate(bodies)]
    try:
        yield found
    finally:
        for rank in found:
            rank.process.kill()
            rank.process.wait()
            rank.process.stdin.close()


def wait_until(done: Callable[[], object], what: str = "", seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def status(path: Path) -> dict:
    found = json.loads((path / "status.json").read_text())
    return {key: found[key] for key in ("state", "reason", "step", "exit_code")}
