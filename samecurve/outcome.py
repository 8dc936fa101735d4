"""How a run ends: its status file, one readable message, and an exit code that a job script can branch on."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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
        traceback.print_exc()
        return 1
    finally:
        _leave_process_group()
    return 0


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


def _leave_process_group() -> None:
    """A process that ends inside a process group can abort at exit, and its exit code is lost."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
