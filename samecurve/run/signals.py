"""What tells a run to stop: signals, and a launcher that is gone.

A Python handler would wait for the main thread, which may itself wait in a collective for a process that is gone; so
a thread reads what the interpreter writes into a channel when a signal arrives (signal.set_wakeup_fd).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import psutil

# SIGUSR1 is what schedulers send some time before the end (sbatch --signal), SIGHUP a terminal that closes.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP") if hasattr(signal, name))
SHOW = getattr(signal, "SIGUSR2", None)
LAUNCHER_ENDED = "the launcher ended"
POLL_SECONDS = 1.0
_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")
# A terminal sends Ctrl-C to all processes at once and launchers pass it on to their workers right after; DeepSpeed's
# sends SIGTERM behind it. All of that is one request.
REPEATED_SECONDS = 1.0


class StopRequest:
    """As a context manager, from the main thread: signals no longer raise or kill, they are requests to stop.

    end: called in a thread of this class with a reason and an exit code, when the process has to end at once. It
    returns only when the process already ends otherwise. tell: called with a line for the user. show: called in that
    thread too when SIGUSR2 asks where the process is; it goes on.
    launcher: see `strategy.launchers.Launch`. Started by plain python, a parent that ends is only a closed shell.
    requested: "" until a stop is requested inside `deferred`, then what asked for it, for example "SIGTERM".
    """

    def __init__(
        self,
        end: Callable[[str, int], None],
        tell: Callable[[str], None],
        show: Callable[[], None],
        launcher: str = "python",
    ):
        self.requested = ""
        self._end, self._tell, self._show = end, tell, show
        self._above = None if launcher == "python" else () if _adopted() else _above(launcher)
        self._launcher = launcher
        self._deferred = False
        self._first: float | None = None  # when the first signal came
        self._handlers: dict = {}

    def __enter__(self) -> StopRequest:
        reader, self._writer = socket.socketpair()
        reader.settimeout(POLL_SECONDS)
        self._writer.setblocking(False)
        threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True).start()
        for number in (*SIGNALS, SHOW) if SHOW else SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job: so be it
                self._handlers[number] = signal.signal(number, lambda *_: None)
        if SHOW:
            signal.siginterrupt(SHOW, False)  # nor does a system call of the run end early
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._restore)  # or a signal to the child would be one to this process
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
        self._writer.close()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a request only sets `requested`; a second signal ends the process at once, as outside."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _restore(self) -> None:
        if not self._handlers:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _listen(self, channel: socket.socket) -> None:
        with channel:
            while True:
                try:
                    received = channel.recv(64)
                except TimeoutError:
                    self._check_launcher()
                    continue
                if not received:  # the run is over
                    return
                for number in received:
                    if number == SHOW:
                        self._show()
                    elif number in SIGNALS:
                        self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first <= REPEATED_SECONDS:
            return
        first, self._first = self._first is None, now
        if not (self._deferred and first):
            self._end(f"ended by {number.name}", 128 + number)
        elif not self.requested:
            self.requested = number.name
            self._tell(f"{number.name}: the run stops and saves after this step; a second signal ends it at once")

    def _check_launcher(self) -> None:
        if self._above is None or _above(self._launcher) == self._above:
            return
        self._above = None
        if self._deferred:
            self.requested = self.requested or LAUNCHER_ENDED
        else:
            self._end(LAUNCHER_ENDED, 128 + signal.SIGTERM)  # what it would have sent


def _adopted() -> bool:
    """Whether the launcher was gone before this process could see it, which then is a child of the system's first one.

    In a container that first one may be the launcher itself.
    """
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        words = " ".join(parent.cmdline()[:3])
        return parent.name() == "systemd" or (parent.pid == 1 and not any(name in words for name in _LAUNCHERS))
    return False


def _above(launcher: str) -> tuple[int, ...]:
    """Ids of the launcher's processes; other ones when one of them is gone, because its children get another parent.

    The deepspeed command starts a second process, which starts the ranks and does not look after the first one.
    """
    parent = os.getppid()
    if launcher != "deepspeed":
        return (parent,)
    try:
        first = psutil.Process(parent).parent()
        # not a shell or sshd: what starts the second one on another machine, or by hand, may go
        return (parent, first.pid) if first and any("deepspeed" in word for word in first.cmdline()[:2]) else (parent,)
    except psutil.Error:
        return (parent,)
