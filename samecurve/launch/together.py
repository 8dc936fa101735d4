"""Processes that stand or fall together: signals reach all of them, and one failure ends the others."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
GRACE_SECONDS = 30.0  # between the first failure and the end by force, as torchrun has it
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class StartedProcess:
    """A started process. send: delivers a signal to what it stands for, which may run on another host."""

    process: subprocess.Popen
    send: Callable[[signal.Signals], None]


def start(words: Sequence[str], environment: dict[str, str]) -> StartedProcess:
    """Start a process on this machine.

    It has a session of its own: a terminal would send Ctrl-C to it, too, and a second signal ends a run at once.
    """
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    return StartedProcess(process, process.send_signal)


def wait(starting: Iterable[StartedProcess], grace_seconds: float = GRACE_SECONDS) -> int:
    """Wait for all members. Signals to this process are sent on to them, and are no reason to end before they do.

    Args:
        starting: may be a generator, which starts them: no signal is lost on the way.
        grace_seconds: between the first failure and the end of the others by force.

    Returns:
        0, or the exit code of the first member that failed; 128 and the number of the signal that killed it.
    """
    members: list[StartedProcess] = []
    with _passed_on(members) as told:
        try:
            members.extend(starting)
        except BaseException:
            # those that have started would wait for one that could not be
            _end(members, grace_seconds)
            raise
        while not any(codes := [member.process.poll() for member in members]) and None in codes:
            time.sleep(_POLL_SECONDS)
        _end(members, grace_seconds, told)
    failed = next((code for code in codes if code), 0)
    return failed if failed >= 0 else 128 - failed


def _end(members: Sequence[StartedProcess], grace_seconds: float, told: Sequence[StartedProcess] = ()) -> None:
    """End the members that still run. told: those that end already, which a second signal would do at once."""
    deadline = time.monotonic() + grace_seconds
    for member in members:
        if member.process.poll() is None and member not in told:
            _send(member, signal.SIGTERM)
    for member in members:
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(max(0.0, deadline - time.monotonic()))
    for member in members:
        if member.process.poll() is None:
            member.process.kill()


def _send(member: StartedProcess, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # it has just ended
        member.send(number)


@contextlib.contextmanager
def _passed_on(members: Sequence[StartedProcess]) -> Iterator[list[StartedProcess]]:
    """Pass signals on to the members; yields those that were asked to end by one."""

    def pass_on(number: int, _: object) -> None:
        for member in members:
            _send(member, signal.Signals(number))
        if number != signal.SIGUSR2:  # the run shows its stacks and continues
            told.extend(members)

    handlers, told = {}, list[StartedProcess]()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup or in a background job: keep that
            handlers[number] = signal.signal(number, pass_on)
    try:
        yield told
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
