"""The `ninja` that builds DeepSpeed's operators: the real one, which ends with the process that asked for it.

torch runs the first `ninja` on PATH in the operator's build folder. A rank that is killed leaves that process to the
system's first one: its compilers go on for minutes and write into the folder in which the next start builds (seen).
So ninja and its compilers get a session of their own, which this small process ends when its parent is gone; and of two
builds in one folder the second waits for the first, and ends what a killed one has left there.

Run by supervised/ninja, with ninja's arguments.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

SUPERVISED = Path(__file__).with_name("supervised")
# in the build folder: locked while somebody builds there, with the session of the builder
BUILDER = ".builder"
RANK = "SAMECURVE_BUILDS_FOR"  # the process that asks for builds
POLL_SECONDS = 0.1
END_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """ninja's exit code; 1 where the process that asked is gone."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    search = [folder for folder in folders if Path(folder or ".").resolve() != SUPERVISED.resolve()]
    ninja = shutil.which("ninja", path=os.pathsep.join(search))
    if ninja is None:
        print("ninja: not found on PATH; pip install ninja", file=sys.stderr)
        return 127
    if "--version" in arguments:  # torch asks for it before it builds
        os.execv(ninja, [ninja, *arguments])
    parent = os.getppid()
    try:
        os.setsid()
    except PermissionError:  # it leads a process group: typed into a shell, whose session is not to be ended
        os.execv(ninja, [ninja, *arguments])
    if not _runs(int(os.environ.get(RANK, parent))):  # killed before it could be watched
        return 1
    with open(BUILDER, "a+") as builder:
        if not _lock(builder, parent):
            return 1
        builder.seek(0)
        left = builder.read()
        # a build that ends clears this, so that builder was killed
        if left.isdecimal():
            end(int(left), Path.cwd())
        _write(builder, str(os.getpid()))
        code = _build([ninja, *arguments], parent)
        _write(builder, "")
    return code


def _build(command: list[str], parent: int) -> int:
    process = subprocess.Popen(command, preexec_fn=_end_with_parent)
    while True:
        try:
            code = process.wait(POLL_SECONDS)
            return code if code >= 0 else 128 - code  # as a shell reports a signal
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                end(os.getpid(), Path.cwd())
                return 1


def end(session: int, folder: Path) -> None:
    """Kill the processes of a session that work in `folder`, but for this one.

    The folder tells them from another program's: a session's number is used again when all of it is gone.
    """
    deadline = time.monotonic() + END_SECONDS
    while (found := list(_builders(session, folder))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 10)


def _builders(session: int, folder: Path) -> Iterator[int]:
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and os.getsid(process.pid) == session:
                if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder:
                    yield process.pid


def _lock(stream: IO, parent: int) -> bool:
    """Whether this process builds now; not when its parent is gone before. Where files cannot be locked: at once."""
    import fcntl

    while os.getppid() == parent:
        try:
            # a blocking call would not notice that the parent is gone
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(POLL_SECONDS)
        except OSError:
            return True
    return False


def _write(stream: IO, text: str) -> None:
    stream.seek(0)
    stream.truncate()
    stream.write(text)
    stream.flush()


def _end_with_parent() -> None:
    """In the child, before it is ninja, on Linux: SIGTERM when this process is killed, too. ninja ends its compilers
    then, each of which it has put into a process group of its own."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _runs(pid: int) -> bool:
    """A killed process that nobody has waited for yet does not run."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


if __name__ == "__main__":
    # not this folder, whose modules have names that packages may import
    sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1:]))
