"""Stop requests to a run: signals, and the end of its launcher.

Python runs signal handlers in the main thread, which may be blocked in a collective with a dead process. Therefore a
separate thread reads the bytes that the interpreter writes to a socket when a signal arrives (signal.set_wakeup_fd).
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

# Schedulers send SIGUSR1 some time before the job's end (sbatch --signal), a closing terminal sends SIGHUP.
SIGNALS, SHOW = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP), signal.SIGUSR2
LAUNCHER_ENDED = "the launcher ended"
POLL_SECONDS = 1.0
_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")
# A terminal sends Ctrl-C to all processes at once, and launchers forward it to their workers right after; DeepSpeed's
# launcher also sends SIGTERM. All signals within this time count as one request.
REPEATED_SECONDS = 1.0


class StopRequest:
    """Context manager that turns signals into stop requests: they no longer raise or kill. For the main thread.

    Args:
        end: called in this class's thread, with a reason and an exit code, if the process must end at once. Returns
            only if the process is already ending for another reason.
        tell: called with a line for the user.
        show: called in the same thread on SIGUSR2, which requests the stack traces of a run that then continues.
        launcher: see `strategy.launchers.Launch`. With plain python the parent is a shell, whose end is ignored.

    Attributes:
        requested: "" until a stop is requested inside `deferred`, then its source, for example "SIGTERM".
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
        self._first: float | None = None  # time of the first signal
        self._handlers: dict = {}

    def __enter__(self) -> StopRequest:
        reader, self._writer = socket.socketpair()
        reader.settimeout(POLL_SECONDS)
        self._writer.setblocking(False)  # as set_wakeup_fd demands
        threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True).start()
        # first, because a signal that meets only a handler, which does nothing, would be lost
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Handlers that do nothing, because for an ignored signal Python writes no byte, and child processes would
        # inherit SIG_IGN.
        for number in (*SIGNALS, SHOW):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup or in a background job: keep that
                self._handlers[number] = signal.signal(number, lambda *_: None)
        signal.siginterrupt(SHOW, False)  # SIGUSR2 must not interrupt a system call of the run
        os.register_at_fork(after_in_child=self._restore)  # otherwise a child's signals would reach this process
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
        self._writer.close()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer stop requests in the body: a request only sets `requested`. A second signal still ends the process."""
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
            self._tell(
                f"{number.name}: the run saves and stops after this step or the next; a second signal ends it at once"
            )

    def _check_launcher(self) -> None:
        if self._above is None or _above(self._launcher) == self._above:
            return
        self._above = None
        if self._deferred:
            self.requested = self.requested or LAUNCHER_ENDED
        else:
            self._end(LAUNCHER_ENDED, 128 + signal.SIGTERM)  # the signal that the launcher would have sent


def _adopted() -> bool:
    """Whether the launcher ended before this process could see it, which makes this process a child of init.

    In a container the launcher itself may be process 1.
    """
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        names = [os.path.basename(word) for word in parent.cmdline()[:3]]  # not the folders above
        is_launcher = any(name.startswith(_LAUNCHERS) for name in names)
        return parent.name() == "systemd" or (parent.pid == 1 and not is_launcher)
    return False


def _above(launcher: str) -> tuple[int, ...]:
    """Return the process ids of the launcher. They change if one of its processes ends and its children are adopted.

    The deepspeed command starts a second process, which starts the ranks and does not monitor the first one.
    """
    parent = os.getppid()
    if launcher != "deepspeed":
        return (parent,)
    try:
        first = psutil.Process(parent).parent()
        # On another machine, or by hand, a shell or sshd starts the second process; that parent may end.
        names = [os.path.basename(word) for word in first.cmdline()[:2]] if first else []
        return (parent, first.pid) if first and any(name.startswith("deepspeed") for name in names) else (parent,)
    except psutil.Error:
        return (parent,)
