"""A `ninja` for DeepSpeed's operators: it runs the real one, and ends it with the process that asked for the build.

torch runs the first `ninja` on PATH in the operator's build folder. When a rank is killed, its ninja becomes a child of
init: the compilers go on for minutes and write into the folder in which the next start builds (seen). Therefore ninja
and its compilers get a session of their own, and this small process ends the session when its parent is gone. Of two
builds in one folder the second waits for the first, and ends the processes that a killed build has left there.

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
# A file in the build folder: locked while a process builds there, and naming the session of that process.
BUILDER = ".builder"
RANK = "SAMECURVE_BUILDS_FOR"  # the variable with the process id of the rank that asks for builds
POLL_SECONDS = 0.1
END_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Build, and return ninja's exit code; 1 if the process that asked is gone, 127 if there is no ninja."""
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
    except PermissionError:  # this leads a process group: a shell has started it, whose session must not be ended
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
    """Kill the processes of a session that work in `folder`, except this one.

    The folder tells them from those of another program: the system reuses the number of a session that has ended.
    """
    deadline = time.monotonic() + END_SECONDS
    while (pids := list(_builders(session, folder))) and time.monotonic() < deadline:
        for pid in pids:
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
    """Wait for the lock, and return True; False if the parent ends first. Without file locks, return True at once."""
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
    """Make the kernel send SIGTERM to this process when its parent is killed. Runs in the child that becomes ninja.

    ninja then ends its compilers, each of which it has put into a process group of its own. Works on Linux only.
    """
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _runs(pid: int) -> bool:
    """Whether the process runs. A zombie (killed, but not yet waited for) does not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


if __name__ == "__main__":
    # not this folder, whose modules have names that packages may import
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    sys.exit(main(sys.argv[1:]))
