"""A launcher and its workers as one thing that can be watched, hurt and removed from outside. Needs Linux's /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

MARK = "STOCK_RUN"
LEFT_BEHIND_SECONDS = 3.0  # after the launcher's end; samecurve's workers notice it within one


class Job:
    """`command` in a process group of its own. Its processes are found by a mark in their environment."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], folder: Path):
        self.mark = uuid.uuid4().hex
        self.log = log
        self._ranks: dict[int, int] = {}
        with open(log, "wb") as output:
            self.launcher = subprocess.Popen(
                command,
                cwd=folder,
                env=environment | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self.launcher.poll() is not None

    def processes(self) -> dict[int, dict[str, str]]:
        """The environments of all processes that are alive, by process id."""
        wanted, found = f"{MARK}={self.mark}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = (folder / "environ").read_bytes().split(b"\0")
                if wanted in fields:
                    pairs = (field.decode(errors="replace").partition("=") for field in fields)
                    found[int(folder.name)] = {key: value for key, _, value in pairs}
        return found

    def ranks(self) -> dict[int, int]:
        """Rank to process id. Remembered, as /proc is slow to search and some faults have to be quick."""
        if not self._ranks:
            workers = {pid: env["RANK"] for pid, env in self.processes().items() if "RANK" in env}
            self._ranks = {int(rank): pid for pid, rank in workers.items() if _parent(pid) == self.launcher.pid}
        return self._ranks

    def send(self, number: int, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks()[rank], number)

    def kill_all(self) -> None:
        """As the out-of-memory killer or a power cut does: workers first, at once, and nobody can react."""
        for pid in (*self.ranks().values(), self.launcher.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """The launcher's exit code, None when it is still there after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.launcher.wait(seconds)
        return None

    def left_behind(self) -> int:
        """How many processes outlive their launcher."""
        deadline = time.monotonic() + LEFT_BEHIND_SECONDS
        while (left := len(self.processes())) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def remove(self) -> None:
        """Kill what is left."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.launcher.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])
