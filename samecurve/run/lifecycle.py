"""End of a run: its status file, one readable message, and an exit code that a job script can branch on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from samecurve.errors import (
    HangError,
    NothingToDo,
    PeerError,
    Preempted,
    SamecurveError,
    StorageError,
    without_credentials,
)
from samecurve.run.signals import StopRequest
from samecurve.run.status import refused_elsewhere
from samecurve.run.watchdog import LAST_RESORT_SECONDS, HangWatchdog, last_resort
from samecurve.storage import terminal
from samecurve.storage.atomic import known_cause
from samecurve.storage.ending import sign_off
from samecurve.storage.file_lock import release_all
from samecurve.storage.terminal import printable

if TYPE_CHECKING:
    from samecurve.run.run_directory import RunDirectory, State

PREEMPTED_SECONDS = 1
WAIT_SECONDS = 10  # for the rank that reports the error, before another rank exits
SIGNAL_CODES = 128  # the exit code of a process that signal N ended is 128 + N
# A killed process closes its connections before other processes can see that it is gone: seconds before, on a machine
# that has more to do than cores. An error that names no connection need not wait so long to be told.
DEATH_SECONDS, LOST_CONNECTION_SECONDS = 1.0, 5.0


def exit_code(main: Callable[[], None]) -> int:
    """Run `main`, print the error that stopped it, and return the exit code.

    Known errors are printed as their message, once per machine; unknown ones as a traceback.
    """
    try:
        main()
    except Preempted as error:  # the same on all ranks, and the scheduler may leave little time: wait only briefly
        if is_first_here():
            print_stderr(f"\npreempted (exit code {error.exit_code}): {error}")
        else:
            time.sleep(PREEMPTED_SECONDS)
        return error.exit_code
    except NothingToDo as error:
        if os.environ.get("RANK", "0") == "0":
            print_stderr(str(error))
        return error.exit_code
    except SamecurveError as error:
        report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if known := known_cause(error):
            report(known)
            return known.exit_code
        print_stderr(f"\nprocess {os.environ.get('RANK', '0')}: {traceback.format_exc()}")
        let_the_first_process_report()
        return 1
    return 0


def end_with(main: Callable[[], None]) -> NoReturn:
    """Run `main` and end the process with its exit code, ignoring later interrupts."""
    terminal.set_up()
    try:
        code = exit_code(main)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # came after `main`: the other ranks may still be working
        code = 130
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process without running destructors, where gloo's and DeepSpeed's threads can abort it.

    Seen in about one of fifty runs, after all work was done: "terminate called without an active exception", SIGABRT.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of the output is gone
            stream.flush()
    timer = last_resort(code)
    release_all()
    timer.cancel()
    if "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def supervised(
    run: RunDirectory, launcher: str = "python", timeout_seconds: float = 0, interval: float = 1.0
) -> Iterator[RunSupervisor]:
    """Supervise the body: watchdog, stop signals, and a `status.json` that is always up to date.

    Launchers replace every exit code by 1; status.json keeps the original.

    Args:
        timeout_seconds: watchdog.timeout_seconds.
        interval: seconds between two checks of the watchdog.
    """
    run.status("running")
    around = RunSupervisor(run, launcher, timeout_seconds, interval)
    with around.stop, around.watchdog:
        try:
            yield around
        except Exception as error:
            reported = around.failed(error)
            # here, where a launcher's signal cannot end the process before
            if isinstance(reported, SamecurveError) and not isinstance(reported, (Preempted, NothingToDo)):
                report(reported, at_once=True)
            if reported is error:
                raise
            raise reported from error
        except BaseException as error:
            around.failed(error)
            raise
        finally:  # after the report, which a dead network must not delay
            sign_off()
        around.done()


class RunSupervisor:
    """Interface of the training loop to stop requests and the watchdog.

    Attributes:
        conclusion: the reason in status.json of a run that is done before its last step.
        deferred: see StopRequest.
        phase, progress, local_progress: see HangWatchdog.
    """

    def __init__(self, run: RunDirectory, launcher: str, timeout_seconds: float, interval: float):
        self._run = run
        self._began, self.conclusion = time.time(), ""
        self._ending = threading.Lock()  # acquired once: of several reasons to end, only the first is reported
        self.watchdog = HangWatchdog(run.path, timeout_seconds, self._end, interval)
        tell = print_stderr_from_thread if self.watchdog.rank == 0 else lambda text: None
        self.stop = StopRequest(self._end_stopped, tell, self.watchdog.stacks.show, launcher)
        self.deferred = self.stop.deferred
        self.phase = self.watchdog.phase
        self.progress, self.local_progress = self.watchdog.progress, self.watchdog.local_progress

    @property
    def requested(self) -> str:
        """The source of the stop request to this process, "" if there is none. Other ranks may not have one (yet)."""
        return self.stop.requested

    def done(self) -> None:
        self._take_the_end()
        silent = StorageError(f"{self._run.path}: the storage does not answer, after the last step")
        with self._in_time(silent.exit_code, message(silent), once=True):
            self._run.status("done", self.conclusion, step=self._run.step, exit_code=0)
        with self._in_time(0):
            self.watchdog.heartbeats.write("finished")

    def failed(self, error: BaseException) -> BaseException:
        """Record the main thread's error. Returns the error to raise: that of another rank if it is the cause."""
        if not isinstance(error, SamecurveError):
            error = known_cause(error) or error
        known = isinstance(error, SamecurveError)
        text = message(error) if known else without_credentials("".join(traceback.format_exception(error)))
        with self._in_time(code_of(error), text, once=isinstance(error, (Preempted, NothingToDo))):
            if isinstance(error, (Preempted, NothingToDo)):
                self._take_the_end()
                if isinstance(error, Preempted):
                    self._write("preempted", str(error), error.exit_code)
                else:
                    with contextlib.suppress(SamecurveError):
                        self._run.accept()
                self.watchdog.heartbeats.write("finished")
                return error
            if isinstance(error, Exception) and not isinstance(error, SamecurveError):
                error = self._explained(error)
            self._take_the_end()
            reason, code = without_credentials(str(error)) or type(error).__name__, code_of(error)
            own, reports = f"rank {self.watchdog.rank}: {reason}", False
            if isinstance(error, PeerError):
                if not error.is_reporter:
                    self.watchdog.heartbeats.write("failed", reason, code)
                    error.is_reporter, error.is_reported = self.watchdog.wait_for_report()
                own, reports = reason, error.is_reporter
            self._write("failed", reason, code)
            self.watchdog.heartbeats.write("failed", own, code, reports)
        return error

    def _explained(self, error: Exception) -> Exception:
        self.watchdog.wait_if_ending()
        heartbeats = self.watchdog.heartbeats
        if not heartbeats.started:  # so far this session has no heartbeat files, as far as this rank knows
            return self._refused_elsewhere() or error
        heartbeats.look()
        lost = "onnection" in str(error) or type(error).__name__ == "DistBackendError"  # of Gloo; of NCCL
        deadline = time.monotonic() + (LOST_CONNECTION_SECONDS if lost else DEATH_SECONDS)
        while heartbeats.peers and not self.watchdog.cause() and time.monotonic() < deadline:
            time.sleep(0.1)
            heartbeats.look()
        cause = self.watchdog.cause()
        if cause is None or str(cause).endswith(f": {error}"):  # the same error on all ranks
            return error
        lines = str(error).splitlines() or [""]
        effect = f"(this rank then failed: {type(error).__name__}: {lines[0][:200]})"
        peer_error = PeerError(f"{cause}\n{effect}", cause.exit_code)
        peer_error.is_reporter = self.watchdog.liveness().is_reporter
        return peer_error

    def _refused_elsewhere(self) -> PeerError | None:
        """Return another host's refusal of the start, which can end rank 0 before all ranks have started."""
        if self.watchdog.rank or self.watchdog.heartbeats.started:
            return None
        return refused_elsewhere(self._run.path, self._began)

    def _take_the_end(self) -> None:
        """Claim the right to end the process. If another thread has it, wait for that thread to do so."""
        if not self._ending.acquire(blocking=False):
            time.sleep(LAST_RESORT_SECONDS)

    def _write(self, state: State, reason: str, code: int) -> None:
        with contextlib.suppress(SamecurveError):  # a full disk must not hide the original error
            force = self.watchdog.liveness().replaces_rank_0
            self._run.status(state, reason=reason, step=self._run.step, exit_code=code, force=force)

    @contextlib.contextmanager
    def _in_time(self, code: int, text: str = "", once: bool = False) -> Iterator[None]:
        """End the process with `code` if the storage hangs in the body, and print `text`, the message to be recorded.

        once: the text is the same on all ranks, so only the reporter prints it.
        """

        def say() -> None:
            if text and (not once or self.watchdog.liveness().is_reporter):
                print_stderr_from_thread(text)

        timer = last_resort(code, say)
        try:
            yield
        finally:
            timer.cancel()

    def _end_stopped(self, reason: str, code: int) -> None:
        """End the process after a signal or the launcher's end, either of which may follow another rank's failure."""
        reason = f"{reason} in {self.watchdog.where}"
        text = f"\n{reason} (exit code {code})"
        with self._in_time(code, text, once=True):
            self.watchdog.wait_if_ending()
            if self.watchdog.heartbeats.started:
                self.watchdog.heartbeats.look()
            cause = self.watchdog.cause() or self._refused_elsewhere()
        # a rank that a signal ended is no cause: launchers send it to all ranks
        if cause is not None and cause.exit_code < SIGNAL_CODES:
            self._end(cause)
        elif self._ending.acquire(blocking=False):
            last_resort(code)
            is_reporter = self.watchdog.liveness().is_reporter
            if is_reporter:
                print_stderr_from_thread(text)
            self._write("failed", reason, code)
            self.watchdog.heartbeats.write("failed", f"rank {self.watchdog.rank}: {reason}", code, is_reporter)
            sign_off()
            release_all()
            os._exit(code)

    def _end(self, error: SamecurveError) -> None:
        """End the process from the watchdog's thread: the main thread may never respond again."""
        if not self._ending.acquire(blocking=False):
            return
        last_resort(error.exit_code)
        is_reporter = self.watchdog.liveness().is_reporter
        if is_reporter:
            print_stderr_from_thread(message(error))
        self._write("failed", str(error), error.exit_code)
        if is_reporter or not isinstance(error, HangError):  # the reporter still collects a hanging rank's stacks
            self.watchdog.heartbeats.write("failed", str(error), error.exit_code, is_reporter)
        sign_off()
        # Wait as in let_the_first_process_report. The launcher's signal shows that the reporter has exited.
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_reporter and time.monotonic() < deadline and not self.requested:
            time.sleep(0.1)
        release_all()
        os._exit(error.exit_code)


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
