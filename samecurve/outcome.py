"""How a run ends: its status file, one readable message, and an exit code that a job script can branch on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from .errors import SamecurveError

if TYPE_CHECKING:
    from .rundir import RunDirectory

WAIT_SECONDS = 10


def exit_code(main: Callable[[], None]) -> int:
    """Run `main` and say what stopped it: known errors as their message, once per machine; others as a traceback."""
    try:
        main()
    except SamecurveError as error:
        _let_the_first_process_speak()
        print(f"\n{type(error).__name__} (exit code {error.exit_code})\n{error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        print(f"\nprocess {os.environ.get('RANK', '0')}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        _let_the_first_process_speak()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End the process without running destructors: gloo's and DeepSpeed's threads can abort it there.

    Seen in about one of fifty runs, after all work was done: "terminate called without an active exception", SIGABRT.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)


def _let_the_first_process_speak() -> None:
    """Launchers end the whole job at the first process that exits, so the others wait for the one that prints.

    One that is still alive after the wait has an error of its own, and tells it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(WAIT_SECONDS)


@contextlib.contextmanager
def recorded(run: RunDirectory) -> Iterator[None]:
    """Keep `status.json` true while the body runs: launchers turn every exit code into 1, the file does not."""
    run.status("running")
    try:
        with _watching_for_sigterm(run):
            yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        with contextlib.suppress(SamecurveError):  # a full disk must not hide what went wrong before
            run.status("failed", reason=reason, step=run.step, exit_code=code)
        raise
    run.status("done", step=run.step, exit_code=0)


@contextlib.contextmanager
def _watching_for_sigterm(run: RunDirectory) -> Iterator[None]:
    """A scheduler ends the job, or a launcher does because another process failed: write it down and go at once.

    A Python handler would wait for the main thread, which may itself wait in a collective for a process that is gone;
    so a thread reads what the interpreter writes into the channel when the signal arrives.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=_end_at_sigterm, args=(run, reader), name="sigterm", daemon=True).start()
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, handler)
        writer.close()


def _end_at_sigterm(run: RunDirectory, channel: socket.socket) -> None:
    code = 128 + signal.SIGTERM
    while signals := channel.recv(16):  # empty when the run is over
        if signal.SIGTERM in signals:
            with contextlib.suppress(SamecurveError):
                run.status("failed", reason="ended by SIGTERM", step=run.step, exit_code=code)
            os._exit(code)
    channel.close()
