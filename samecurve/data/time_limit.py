"""A time limit for code that a stranger wrote: a chat template can loop for years."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

RENDER_SECONDS = 10.0
_INTERVAL_SECONDS = 0.25

_lock = threading.Lock()
_deadlines: dict[int, tuple[int, float]] = {}  # by thread: its clock of CPU time, and the time on it
_watcher: threading.Thread | None = None


class RenderTimeout(Exception):
    def __str__(self) -> str:
        return f"it was not done after {RENDER_SECONDS:g} s of computing, as if it had a loop without an end"


@contextmanager
def render_limit() -> Iterator[None]:
    """Raise RenderTimeout in the body after RENDER_SECONDS, in any thread and any process. Not to be nested.

    The seconds are the thread's CPU time, which stands still while a loaded machine or SIGSTOP keeps it from its core.
    Python raises it between two of its own instructions, so that a call into C has to return first. No signal, because
    only the main thread gets one; no timer, because a row would wait for a thread to start.
    """
    global _watcher
    thread = threading.get_ident()
    # macOS has a clock for the whole process only
    per_thread = getattr(time, "pthread_getcpuclockid", lambda _: time.CLOCK_PROCESS_CPUTIME_ID)
    clock = per_thread(thread)
    with _lock:
        _deadlines[thread] = clock, time.clock_gettime(clock) + RENDER_SECONDS
        if _watcher is None or not _watcher.is_alive():  # not in a fork of the process that started it
            _watcher = threading.Thread(target=_watch, name="render limit", daemon=True)
            _watcher.start()
    try:
        yield
    finally:
        with _lock:
            _deadlines.pop(thread, None)
            _raise_in(thread, None)  # one that was not delivered yet


def _watch() -> None:
    """Look at the deadlines until there is none, as when all rows are encoded."""
    global _watcher
    while True:
        time.sleep(_INTERVAL_SECONDS)
        with _lock:
            if not _deadlines:
                _watcher = None
                return
            for thread in [thread for thread, limit in _deadlines.items() if _is_over(*limit)]:
                del _deadlines[thread]
                _raise_in(thread, RenderTimeout)


def _is_over(clock: int, end: float) -> bool:
    try:
        return time.clock_gettime(clock) > end
    except OSError:  # the clock of a thread that a fork left behind
        return True


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))
