"""What a process takes back elsewhere when it ends, such as its sign of life in an object store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

MOST_SECONDS = 3.0
_calls: list[Callable[[], object]] = []


def at_end(call: Callable[[], object]) -> None:
    """Let `sign_off` make a call, in a thread of its own. An error of it is dropped: the end has its own reason."""
    _calls.append(call)


def sign_off() -> None:
    """Make the calls of `at_end`, once. Returns after MOST_SECONDS at the latest, as where a network is dead."""
    calls = [*_calls]
    _calls.clear()

    def work() -> None:
        for call in calls:
            with contextlib.suppress(Exception):
                call()

    if calls:
        thread = threading.Thread(target=work, name="sign off", daemon=True)
        with contextlib.suppress(RuntimeError, MemoryError):  # no thread can start: the end's own error says more
            thread.start()
            thread.join(MOST_SECONDS)
