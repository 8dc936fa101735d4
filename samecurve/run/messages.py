"""Prints the errors that end a run: once on each machine, whoever prints it."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from samecurve.errors import PeerError, SamecurveError
from samecurve.storage.terminal import printable

WAIT_SECONDS = 10  # for the rank that reports the error, before another rank exits


def print_stderr(text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher or the terminal is gone
        print(printable(text), file=sys.stderr, flush=True)


def print_stderr_from_thread(text: str) -> None:
    """Write to file descriptor 2: the main thread may hold the locks of Python's streams forever."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress display hides it
    with contextlib.suppress(OSError):
        os.write(2, f"{show_cursor}{printable(text)}\n".encode(errors="backslashreplace"))


def code_of(error: BaseException) -> int:
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


def message(error: BaseException) -> str:
    return f"\n{type(error).__name__} (exit code {code_of(error)})\n{error}"


def is_first_here() -> bool:
    """Whether this is the first process of this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def let_the_first_process_report() -> None:
    """Wait on all local ranks but 0, because launchers end the whole job when the first process exits.

    A process that is still alive after the wait has an error of its own and prints it.
    """
    if not is_first_here():
        time.sleep(WAIT_SECONDS)


def report(error: SamecurveError, at_once: bool = False) -> None:
    """Print the message, unless that was done, here or by the rank that a PeerError leaves it to.

    Args:
        error: what ends this process.
        at_once: do nothing where another process of this machine comes first.
    """
    is_effect = isinstance(error, PeerError)
    waits = not is_first_here() and (not is_effect or error.is_reported)
    if error.is_printed or (at_once and waits):
        return
    if waits:
        let_the_first_process_report()
    if not (is_effect and waits):
        print_stderr(message(error))
    error.is_printed = True
