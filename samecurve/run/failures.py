"""Restarts that no person asked for, and how often in a row a run failed at the same step."""

from __future__ import annotations

from collections.abc import Mapping

from samecurve.errors import RepeatedFailureError
from samecurve.run.status import REFUSED, counted
from samecurve.strategy.restarts import is_restart

MOST_FAILURES = 3


def count_failures(status: Mapping, last_step: int) -> dict:
    """COUNTED of this start, {} where the last one did not fail. status: what the last start left.

    A start that was refused failed at the step that it would have gone on with.
    """
    last = {**status, **status.get(REFUSED, {})}
    if REFUSED not in status and status.get("state") not in ("running", "failed"):
        return {}
    if (last.get("exit_code") or 0) > 128:  # 128 + a signal: somebody ended it, the step did not fail
        return counted(last)
    step = last_step + 1
    times = last.get("failures", 0) + 1 if last.get("failing_step") == step else 1
    return {"failing_step": step, "failures": min(times, MOST_FAILURES)}


def check_repeated_failures(failures: Mapping, status: Mapping, environ: Mapping[str, str]) -> None:
    """Raises RepeatedFailureError for a restart after MOST_FAILURES at one step. failures: see `count_failures`."""
    if failures.get("failures", 0) < MOST_FAILURES or not is_restart(environ):
        return
    start = f"step {failures['failing_step']} failed {MOST_FAILURES} times in a row, so it is not tried again"
    last = {**status, **status.get(REFUSED, {})}.get("reason") or "the processes ended without a word"
    # a launcher that does not give up is refused again
    raise RepeatedFailureError(last if last.startswith(start) else f"{start}; the last time: {last}")
