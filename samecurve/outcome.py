"""How a run ends: its status file, one readable message, and an exit code that a job script can branch on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from .errors import SamecurveError

if TYPE_CHECKING:
    from .rundir import RunDirectory

WAIT_SECONDS = 10


class Stopped(BaseException):
    """SIGTERM, from a scheduler or from a launcher whose other process failed."""

    exit_code = 128 + signal.SIGTERM


def exit_code(main: Callable[[], None]) -> int:
    """Run `main` and say what stopped it: known errors as their message, once per machine; others as a traceback."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        main()
    except SamecurveError as error:
        _let_the_first_process_speak()
        print(f"\n{type(error).__name__} (exit code {error.exit_code})\n{error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Stopped as error:
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
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


def _stop(*_: object) -> NoReturn:
    raise Stopped("SIGTERM")


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
        yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        with contextlib.suppress(SamecurveError):  # a full disk must not hide what went wrong before
            run.status("failed", reason=reason, step=run.step, exit_code=code)
        raise
    run.status("done", step=run.step, exit_code=0)
